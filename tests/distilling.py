"""A tiny target that writes traces, and what a draft is worth on them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.models.draft import Draft
from foredraft.models.loading import LoadedModel
from foredraft.models.target import LocalTarget
from foredraft.trace.store import Trace
from tests.tiny import tiny_model, tiny_tokenizer
from tests.traces import build_trace, trace_info, trace_row

PROMPT, ANSWER = 6, 20


def tiny_target(model: PreTrainedModel | None = None) -> LocalTarget:
    """Return a target with the fingerprints of tests.traces."""
    info = trace_info()
    return LocalTarget(
        LoadedModel(
            model or tiny_model(), tiny_tokenizer(), info.target, info.target_fingerprint, info.tokenizer_fingerprint
        )
    )


def written_trace(
    path: Path,
    model: PreTrainedModel,
    num_answers: int,
    law: SamplingLaw = GREEDY,
    seed: int = 0,
    top: int = 16,
    prompt_seed: int = 0,
    **changes: object,
) -> Trace:
    """Let `model` answer random prompts, the same ones for each `prompt_seed`; `changes` are fields of TraceInfo."""
    prompts = torch.randint(3, 259, (num_answers, PROMPT), generator=torch.Generator().manual_seed(prompt_seed))
    token_ids, laws = prompts, []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(ANSWER):
        with torch.no_grad():
            laws.append(model(token_ids).logits[:, -1].softmax(-1))
        chosen = (
            laws[-1].argmax(-1, keepdim=True) if law.is_greedy else torch.multinomial(laws[-1], 1, generator=generator)
        )
        token_ids = torch.cat([token_ids, chosen], 1)
    probs = torch.stack(laws, 1)
    rows = [
        trace_row(
            f"{path.name}-{index}",
            ids[:PROMPT].tolist(),
            ids[PROMPT:].tolist(),
            probs[index],
            top,
            prompt_id=f"{prompt_seed}-{index}",
            greedy=law.is_greedy,
        )
        for index, ids in enumerate(token_ids)
    ]
    return build_trace(path, rows, law, top=top, **changes)


def held_out_acceptance(draft: Draft, target: PreTrainedModel, traces: Sequence[Trace]) -> float:
    """Return the mean of sum min(target, draft) over answer positions, both laws in full."""
    overlaps = []
    for answer in (answer for trace in traces for answer in trace.answers()):
        ids = answer.token_ids[None, :-1]
        with torch.no_grad():
            logits = draft.model(ids).logits[0, answer.start - 1 :]
            theirs = target(ids).logits[0, answer.start - 1 :].softmax(-1)
        if len(draft.head_token_ids):
            kept = torch.full_like(logits, float("-inf"))
            kept[:, draft.head_token_ids] = logits[:, draft.head_token_ids]
            logits = kept
        overlaps.append(torch.minimum(theirs, logits.softmax(-1)).sum(-1))
    return float(torch.cat(overlaps).mean())
