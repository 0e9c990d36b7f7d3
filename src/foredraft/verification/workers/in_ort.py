"""ONNX Runtime GenAI on the CPU, one request at a time; plainly from the target's own folder inside the export."""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import onnxruntime_genai


def version() -> str:
    return metadata.version("onnxruntime-genai")


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = onnxruntime_genai.Model((job["speculate"] and job["draft"]) or job["target"])
    drafting = {"max_draft_tokens": job["k"]}
    if job["lookup"]:
        drafting["ngram_size"] = job["lookup"]["max_match"] + 1  # the last of which is the first token drafted
    for prompt in job["prompts"]:
        ids = prompt["token_ids"]
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + prompt["max_new_tokens"], batch_size=1)
        if job["speculate"]:
            params.set_speculative_options(**drafting)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens([ids])
        rounds: list[dict[str, Any]] = []
        while not generator.is_done():
            generator.generate_next_token()
            rounds.append(generator.get_speculative_stats())
        written = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
        yield {"token_ids": written, **_counts(rounds, job["k"])}


def _counts(after_each_token: list[dict[str, Any]], k: int) -> dict[str, Any]:
    """Return the runtime's own counts. Its acceptance_length_histogram stays empty here: rounds are told apart by time.

    A round shows in the cumulative counts with its first token, and one without a guess not at all.
    """
    accepted: list[int] = []
    drafted = 0
    for stats in after_each_token:
        if int(stats["draft_tokens_proposed"]) > drafted:
            drafted = int(stats["draft_tokens_proposed"])
            accepted.append(int(stats["draft_tokens_accepted"]) - sum(accepted))
    return {
        "blocks": len(accepted),
        "drafted": drafted,
        "accepted": sum(accepted),
        "by_position": [sum(one > place for one in accepted) for place in range(k)],
    }
