"""Token sequences as one checked array."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32, Int64

from foredraft.core.errors import CorpusError

Tokens = Int32[np.ndarray, " tokens"]
Bounds = Int64[np.ndarray, " bounds"]


def joined(sequences: Iterable[np.ndarray], vocab_size: int) -> tuple[Tokens, Bounds]:
    """Return all tokens in one array, and where each sequence begins and the last one ends.

    Raises:
        CorpusError: there is no token, or one is outside the vocabulary; says which and where.
    """
    parts = []
    for number, sequence in enumerate(sequences):
        parts.append(checked(sequence, vocab_size, f"sequence {number}"))
    bounds = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    if bounds[-1] == 0:
        raise CorpusError("The corpus holds no tokens: give it text, or a trace with answers.")
    return np.concatenate(parts), bounds


def checked(sequence: np.ndarray, vocab_size: int, name: str) -> Tokens:
    """Return token ids as int32 after comparing them with the vocabulary; `name` opens the error."""
    if sequence.ndim != 1 or sequence.dtype.kind not in "iu":
        raise CorpusError(f"{name} is no list of token ids: it has shape {sequence.shape} and type {sequence.dtype}.")
    if len(sequence) and (int(sequence.min()) < 0 or int(sequence.max()) >= vocab_size):
        where = int(np.flatnonzero((sequence < 0) | (sequence >= vocab_size))[0])
        raise CorpusError(
            f"{name} has token {int(sequence[where])} at position {where}, outside the vocabulary of {vocab_size}: "
            f"was it made with another tokenizer?"
        )
    return sequence.astype(np.int32)
