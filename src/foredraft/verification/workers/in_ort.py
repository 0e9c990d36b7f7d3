"""ONNX Runtime GenAI on the CPU, one request at a time; plainly from the folder target/ beside the composite one."""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import onnxruntime_genai


def version() -> str:
    return metadata.version("onnxruntime-genai")


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = onnxruntime_genai.Model(_folder(job))
    for prompt in job["prompts"]:
        ids = prompt["token_ids"]
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + prompt["max_new_tokens"], batch_size=1)
        if job["speculate"]:
            params.set_speculative_options(max_draft_tokens=job["k"])
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens([ids])
        while not generator.is_done():
            generator.generate_next_token()
        written = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
        stats = generator.get_speculative_stats() if job["speculate"] else {}
        import sys

        print("STATS", stats, file=sys.stderr)
        yield {"token_ids": written, "blocks": None, "drafted": None, "accepted": 0, "by_position": [0] * job["k"]}


def _folder(job: dict[str, Any]) -> str:
    return job["draft"] if job["speculate"] else job["target"]
