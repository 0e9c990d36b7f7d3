"""Token sequences: read piece by piece, and as one checked array."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64

from foredraft.core.errors import CorpusError
from foredraft.core.progress import Progress, Task

Tokens = Int32[np.ndarray, " tokens"]
Bounds = Int64[np.ndarray, " bounds"]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token sequences that are read once.

    Attributes:
        name: What it is called in messages.
        weight: What an occurrence in it counts.
        tokens: How many there will be, about; 0 where that is not known.
    """

    name: str
    weight: float
    tokens: int
    sequences: Iterator[np.ndarray]


class Meter:
    """Shows tokens a second beside a bar."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._begun = time.monotonic()
        self._tokens = 0

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        self._task.advance(tokens)
        self._task.note(f"{self._tokens / max(time.monotonic() - self._begun, 1e-9):,.0f} tokens/s")


def gathered(
    sequences: Iterator[np.ndarray], most: int, expected: int, what: str, progress: Progress
) -> list[np.ndarray]:
    """Return the next sequences: until there are `most` tokens together, the last one whole; all of them for 0.

    Args:
        expected: Tokens that there are, about; for the bar.
    """
    found: list[np.ndarray] = []
    size = 0
    with progress.task(what, float(min(expected, most or expected)), "tokens") as task:
        meter = Meter(task)
        for sequence in sequences:
            found.append(sequence)
            size += len(sequence)
            meter.advance(len(sequence))
            if most and size >= most:
                break
    return found


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
