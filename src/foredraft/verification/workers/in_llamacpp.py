"""llama.cpp's server inside this process (the wheel xllamacpp), one request at a time, caches in float32."""

import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import xllamacpp

_POSITION = re.compile(
    r'^llamacpp:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{.*?position="(\d+)".*?\}\s+(\S+)', re.MULTILINE
)
_COUNT = re.compile(
    r"^llamacpp:spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*?\})?\s+(\S+)", re.MULTILINE
)
_BATCH = 64


def version() -> str:
    return metadata.version("xllamacpp")


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    server = xllamacpp.Server(_params(job))
    before = _counts(server)
    for prompt in job["prompts"]:
        reply = server.handle_completions(
            {
                "prompt": prompt["token_ids"],
                "n_predict": prompt["max_new_tokens"],
                "temperature": 0.0,
                "top_k": 1,
                "samplers": ["top_k"],
                "repeat_penalty": 1.0,
                "ignore_eos": False,
                "cache_prompt": False,
                "return_tokens": True,
                "verbose": True,  # else the reply has text only
                "seed": 0,
            }
        )
        if "__verbose" not in reply:
            raise RuntimeError(f"the server refused a prompt: {reply}")
        after = _counts(server)
        timings = reply.get("timings", {})
        positions = [after.get(place, 0) - before.get(place, 0) for place in range(job["k"])]
        yield {
            "token_ids": reply["__verbose"]["tokens"],
            "blocks": after["drafts"] - before["drafts"],
            "drafted": int(timings.get("draft_n", 0)),
            "accepted": int(timings.get("draft_n_accepted", 0)),
            "by_position": positions,
        }
        before = after


def _params(job: dict[str, Any]) -> Any:
    params, exact = xllamacpp.CommonParams(), xllamacpp.ggml_type.GGML_TYPE_F32
    params.model.path = job["target"]
    params.n_ctx = job["max_context"] + _BATCH
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    if job["is_exact"]:
        params.cache_type_k = params.cache_type_v = exact
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.port = 0
    params.endpoint_metrics = True
    params.warmup = False
    kinds = xllamacpp.common_speculative_type
    if job["speculate"] and job["lookup"]:
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = job["lookup"]["max_match"]
        params.speculative.ngram_simple.size_m = job["k"]
    elif job["speculate"]:
        drafting = params.speculative.draft
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafting.mparams.path = job["draft"]
        drafting.n_max, drafting.n_min, drafting.p_min = job["k"], 0, 0.0
        drafting.cpuparams.n_threads = drafting.cpuparams_batch.n_threads = job["threads"]
        if job["is_exact"]:
            drafting.cache_type_k = drafting.cache_type_v = exact
    return params


def _counts(server: Any) -> dict[Any, int]:
    """Return the server's counts by name, and accepted tokens by position under the position's number."""
    text = server.handle_metrics()
    if isinstance(text, dict):
        text = text.get("metrics", "")
    counts: dict[Any, int] = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    counts |= {name: int(float(value)) for name, value in _COUNT.findall(text)}
    return counts | {int(place): int(float(value)) for place, value in _POSITION.findall(text)}
