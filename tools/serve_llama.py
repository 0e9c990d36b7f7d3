"""Starts llama.cpp's server from the wheel xllamacpp and prints its address; ends when stdin does.

DIR/bin/python tools/serve_llama.py MODEL.gguf [--draft DRAFT.gguf --k 4] [--slots 2] [--context 2048]
"""

import argparse
import sys

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--draft", default="")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048, help="tokens of all slots together")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = chosen.model
    params.n_ctx = chosen.context
    params.n_parallel = chosen.slots
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = chosen.threads
    params.port = 0
    params.endpoint_metrics = True
    params.warmup = False
    if chosen.draft:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = chosen.draft
        params.speculative.draft.n_max = chosen.k
        params.speculative.draft.cpuparams.n_threads = chosen.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
