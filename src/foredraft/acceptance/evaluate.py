"""Scoring: every drafter replayed over the same text, at every draft length."""

from collections.abc import Iterator, Sequence

import numpy as np

from foredraft.acceptance.replay import acceptance_given_text, as_arrays, replay_counts
from foredraft.acceptance.report import AcceptanceReport, PromptCounts
from foredraft.core.errors import DrafterError, NonFiniteError, TraceError, VocabMismatchError
from foredraft.core.own_law import bound_for
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter, EmittedProbs, Observer
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace

_ANSWERS_AT_ONCE = 64
_ROUNDING = 1e-3


def score(
    name: str, drafter: Drafter, trace: Trace, ks: Sequence[int], progress: Progress = SILENT
) -> AcceptanceReport:
    """Return what the drafter's guesses would have been worth on a trace, under the trace's law.

    Args:
        name: What errors and the progress bar call the drafter.
        drafter: Bound here, to its own law for the trace's, or to the trace's.
        ks: Draft lengths, each >= 1.

    Raises:
        VocabMismatchError: the drafter's laws are of another width than the trace's.
        TraceError: the trace holds no answers, or a token that its own law calls impossible.
        NonFiniteError: the drafter gave NaN; names the prompt and the position.
        DrafterError: the drafter gave something else than a probability for each token.
    """
    return score_bound(name, bound_for(drafter, trace.info.law), trace, ks, progress)


def score_bound(
    name: str, drafter: Drafter, trace: Trace, ks: Sequence[int], progress: Progress = SILENT
) -> AcceptanceReport:
    """Return the same for a drafter under the law that it is bound to, which may differ from the trace's."""
    if drafter.vocab_size != trace.info.vocab_size:
        raise VocabMismatchError(
            f"{name} speaks {drafter.vocab_size} tokens, the trace {trace.path} {trace.info.vocab_size}."
            " Make the draft from the target that wrote the trace."
        )
    if trace.info.num_tokens == 0:
        raise TraceError(f"{trace.path} holds no answers: collect some before scoring.")
    with progress.task(f"scoring {name} {trace.info.law}", float(trace.info.num_tokens), "tokens") as task:
        answers = []
        # What learns from answers begins anew with each replay, so that it takes them all in one.
        for rows in _chunks(trace, trace.info.num_rows if isinstance(drafter, Observer) else _ANSWERS_AT_ONCE):
            answers += score_rows(name, drafter, rows, ks)
            task.advance(float(sum(len(row.answer_ids) for row in rows)))
    return AcceptanceReport.of(ks, answers)


def score_rows(name: str, drafter: Drafter, rows: Sequence[TraceRow], ks: Sequence[int]) -> list[PromptCounts]:
    """Return the counts of some answers, none of them empty; see score_bound."""
    emitted = drafter.replay([row.answer() for row in rows], max(ks))
    return [_counted(name, row, probs, ks) for row, probs in zip(rows, emitted, strict=True)]


def _counted(name: str, row: TraceRow, emitted: EmittedProbs, ks: Sequence[int]) -> PromptCounts:
    probs, guessed = as_arrays(emitted)
    if len(probs) != len(row.answer_ids) or probs.shape != guessed.shape:
        raise DrafterError(
            f"{name} gave figures of shape {probs.shape} and {guessed.shape} for the {len(row.answer_ids)} tokens of"
            f" the answer to prompt {row.prompt_id!r}."
        )
    if not np.isfinite(probs).all():
        position = int(np.argwhere(~np.isfinite(probs))[0][0])
        raise NonFiniteError(f"{name} gave NaN for token {position} of the answer to prompt {row.prompt_id!r}.")
    if (probs < 0.0).any() or (probs > 1.0 + _ROUNDING).any():
        worst = probs.flat[np.abs(probs - 0.5).argmax()]
        raise DrafterError(f"{name} gave {worst:.6g}, which is no probability, in the answer to {row.prompt_id!r}.")
    target_probs = row.logprobs.double().exp().numpy()
    if not (target_probs > 0).all():
        position = int(np.argwhere(~(target_probs > 0))[0][0])
        raise TraceError(
            f"Token {position} of the answer to {row.prompt_id!r} is impossible under the trace's own law."
        )
    acceptance = np.where(guessed, acceptance_given_text(probs, target_probs), 0.0)
    first = acceptance if acceptance.ndim == 1 else acceptance[:, 0]
    counts = replay_counts(acceptance, guessed, ks)
    return PromptCounts(row.prompt_id, row.domain, len(row.answer_ids), float(first.sum()), counts)


def _chunks(trace: Trace, size: int) -> Iterator[list[TraceRow]]:
    rows: list[TraceRow] = []
    for row in trace.rows(tops=False):
        if len(row.answer_ids):
            rows.append(row)
        if len(rows) == size:
            yield rows
            rows = []
    if rows:
        yield rows
