"""Small traces for tests, written by hand or by a law that is known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace, TraceInfo, TraceWriter


def trace_info(law: SamplingLaw = GREEDY, **changes: object) -> TraceInfo:
    """Return an info with plausible values; `changes` are fields of TraceInfo."""
    info = TraceInfo(
        target="tiny",
        target_fingerprint="f" * 16,
        tokenizer_fingerprint="t" * 16,
        vocab_size=272,
        dtype="float32",
        law=law,
        stored_law=SamplingLaw() if law.is_greedy else law,
        top=4,
        max_new_tokens=16,
        seed=0,
        prompts_digest="p" * 16,
        batch_size=4,
    )
    return replace(info, **changes)


def trace_row(
    name: str,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    law_probs: torch.Tensor | None = None,
    top: int = 4,
    domain: str = "test",
    prompt_id: str = "",
    greedy: bool = True,
) -> TraceRow:
    """Return a row for tokens that are known.

    Args:
        law_probs: The stored law at each answer position, [answer, vocab]; left out, it puts .9 on each token.
        greedy: Whether the answer was drawn greedily: logprobs are 0 then, and read from law_probs otherwise.
    """
    answer = torch.tensor(answer_ids, dtype=torch.long)
    if law_probs is None:
        law_probs = torch.full((len(answer), 272), 0.1 / 271).scatter(1, answer[:, None], 0.9)
    probs, ids = law_probs.topk(min(top, law_probs.shape[1]), dim=1)
    emitted = law_probs.gather(1, answer[:, None]).squeeze(1).log()
    return TraceRow(
        id=name,
        prompt_id=prompt_id or name,
        domain=domain,
        prompt_ids=torch.tensor(prompt_ids, dtype=torch.long),
        answer_ids=answer,
        logprobs=torch.zeros(len(answer)) if greedy else emitted,
        top_ids=ids.int(),
        top_logprobs=probs.log().half(),
        tail_mass=(1.0 - probs.sum(1)).clamp(0.0, 1.0),
        finish_reason="length",
    )


def build_trace(path: Path, rows: Sequence[TraceRow], law: SamplingLaw = GREEDY, **changes: object) -> Trace:
    """Write rows as a complete trace, batch_size rows a shard; `changes` are fields of TraceInfo."""
    writer = TraceWriter.open(path, trace_info(law, **changes))
    size = writer.info.batch_size
    for start in range(0, len(rows), size):
        writer.append(rows[start : start + size])
    return writer.finish()


def folder(path: Path) -> dict[str, bytes]:
    """Return the content of every file, by name."""
    return {file.name: file.read_bytes() for file in path.iterdir()}
