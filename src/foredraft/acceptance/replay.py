"""Replay: what speculative decoding would have done on text that the target wrote, for every k at once.

Given the emitted text, draft token t is accepted with probability min(1, draft(x_t) / target(x_t)), independently,
so that the expected counts of blocks follow from a recursion over block starts (MATHS 4). No drafting, no
sampling, one teacher-forced pass of the draft.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numba import njit

from foredraft.core.protocols import EmittedProbs


@dataclass(frozen=True, slots=True)
class Counts:
    """Expected counts for one answer. Row r belongs to the r-th k; entries past its k are 0.

    Attributes:
        calls: Target calls.
        examined: Draft tokens tested, by position in the block; positions without a guess are not.
        accepted: Draft tokens accepted, by position in the block.
    """

    calls: Float[np.ndarray, " ks"]
    examined: Float[np.ndarray, "ks longest"]
    accepted: Float[np.ndarray, "ks longest"]


def acceptance_given_text(
    probs: Float[np.ndarray, "..."], target_probs: Float[np.ndarray, " answer"]
) -> Float[np.ndarray, "..."]:
    """Return min(1, draft(x) / target(x)) for emitted tokens x.

    Args:
        probs: draft(x), by position [answer] or by block start and offset [answer, k].
        target_probs: target(x) under its processed law, > 0; 1 for a greedy target.
    """
    if probs.ndim == 2:
        return np.minimum(1.0, probs / by_block_start(target_probs, probs.shape[1], fill=1.0))
    return np.minimum(1.0, probs / target_probs)


def replay_counts(acceptance: Float[np.ndarray, "..."], guessed: Bool[np.ndarray, "..."], ks: Sequence[int]) -> Counts:
    """Return the expected counts of speculative decoding over one answer, for every k.

    Args:
        acceptance: P(accepted | emitted) by position [answer], or by block start and offset [answer, k]; the
            proposals of a smaller k must then be prefixes of those of a larger one.
        guessed: False where there is no guess: the block ends there.
        ks: Draft lengths, each >= 1 and at most the width of the matrix form.

    Blocks that run past the end of the answer count what was emitted only.
    """
    longest = max(ks)
    if acceptance.ndim == 1:
        acceptance = by_block_start(acceptance, longest, fill=0.0)
        guessed = by_block_start(guessed, longest, fill=False)
    calls = np.zeros(len(ks))
    examined, accepted = np.zeros((len(ks), longest)), np.zeros((len(ks), longest))
    _count(acceptance, guessed, np.asarray(ks), calls, examined, accepted)
    return Counts(calls, examined, accepted)


def by_block_start(
    values: Float[np.ndarray, " answer"] | Bool[np.ndarray, " answer"], k: int, fill: float | bool
) -> Float[np.ndarray, "answer k"] | Bool[np.ndarray, "answer k"]:
    """Return a view whose entry (t, i) is entry t + i of `values`, `fill` past the end."""
    padded = np.concatenate([values, np.full(k - 1, fill, dtype=values.dtype)])
    return np.lib.stride_tricks.sliding_window_view(padded, k)


def as_arrays(emitted: EmittedProbs) -> tuple[Float[np.ndarray, "..."], Bool[np.ndarray, "..."]]:
    """Return draft(x) in double precision, and where there was a guess."""
    return emitted.probs.detach().cpu().double().numpy(), emitted.guessed.cpu().numpy()


def _recursion(
    acceptance: Float[np.ndarray, "answer k"],
    guessed: Bool[np.ndarray, "answer k"],
    ks: np.ndarray,
    calls: np.ndarray,
    examined: np.ndarray,
    accepted: np.ndarray,
) -> None:
    length = acceptance.shape[0]
    for row in range(ks.shape[0]):
        k = ks[row]
        starts = np.zeros(length + k + 2)  # probability that a block starts at t
        starts[0] = 1.0
        for t in range(length):
            reached = starts[t]
            if reached == 0.0:
                continue
            calls[row] += reached
            offset = 0
            while offset < k and t + offset < length and reached > 0.0 and guessed[t, offset]:
                kept = reached * acceptance[t, offset]
                examined[row, offset] += reached
                accepted[row, offset] += kept
                starts[t + offset + 1] += reached - kept
                reached = kept
                offset += 1
            starts[t + offset + 1] += reached


# The compiler needs the bare function, not one wrapped by checks of its annotations.
_count = njit(cache=True)(inspect.unwrap(_recursion))
