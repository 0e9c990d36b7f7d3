"""Lookup tables: what usually follows the last few tokens of frequent prompts and templates; one probe a draft.

An entry is a key (the last tokens, stored and compared, so that a collision is never mistaken for a hit), the most
usual continuation, the share of the occurrences that followed it so far, and when the key was last seen.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32, Int64

from foredraft.checkpoint import DraftManifest, read_manifest, write_draft
from foredraft.core.errors import CheckpointError, CorpusError
from foredraft.core.law import GREEDY
from foredraft.core.progress import Progress
from foredraft.ngram.container import Container, open_container, write_container
from foredraft.ngram.corpus import Bounds, Meter, Tokens, joined
from foredraft.ngram.jit import jit, pair_hash, signed
from foredraft.ngram.suffix import SuffixDrafter
from foredraft.steps import NgramStep

KIND = "lookup-table"
FILE = "table.ngram"
_NAMES = ("slots", "keys", "following", "shares", "last_seen")
_DTYPES = ("int32", "int32", "int32", "float32", "int64")
_NONE = -1


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A Tier of at most one occurrence.

    Attributes:
        slots: Entry by hash of the key, or -1.
        keys: Key of each entry, oldest token first.
        following: Its continuation, ended by -1.
        shares: P(continuation so far | key) among the occurrences, in [0, 1].
        last_seen: Index in the corpus, in sequences, of the key's last occurrence.
    """

    container: Container
    slots: Int32[np.ndarray, " slots"]
    keys: Int32[np.ndarray, "entries key"]
    following: Int32[np.ndarray, "entries length"]
    shares: Float32[np.ndarray, "entries length"]
    last_seen: Int64[np.ndarray, " entries"]

    @property
    def num_bytes(self) -> int:
        return self.container.num_bytes

    def rows(
        self,
        context: Int64[np.ndarray, " context"],
        lengths: Int64[np.ndarray, " rows"],
        tokens: Int64[np.ndarray, "rows k"],
        row: int,
        end_row: int,
    ) -> int:
        """Write the entry of the context's last tokens, if there is one; see Tier."""
        entry = _entry(self.slots, self.keys, context)
        if entry == _NONE or row == end_row:
            return row
        size = min(tokens.shape[1], self.following.shape[1])
        lengths[row] = self.keys.shape[1]
        tokens[row] = _NONE
        tokens[row, :size] = self.following[entry, :size]
        return row + 1


def build_lookup_table(
    sequences: Iterable[np.ndarray],
    vocab_size: int,
    settings: NgramStep,
    manifest: DraftManifest,
    out: Path,
    progress: Progress,
) -> DraftManifest:
    """Tabulate token sequences, in the order in which they were seen, as a draft checkpoint.

    Raises:
        CorpusError: the corpus is empty, speaks another vocabulary, or repeats no key often enough.
        OutputError: `out` holds something else, or the disk is full.
    """
    tokens, bounds = joined(sequences, vocab_size)
    with progress.task("tabulating continuations", float(len(tokens)), "tokens") as task:
        meter = Meter(task)
        arrays = _tabulated(tokens, bounds, settings.key, settings.continuation, settings.min_count)
        meter.advance(len(tokens))
    manifest = replace(manifest, kind=KIND, vocab_size=vocab_size, law=GREEDY, training_tokens=len(tokens))
    options = {"key": settings.key, "continuation": settings.continuation}

    def fill(folder: Path) -> None:
        named = [(name, array.reshape(-1)) for name, array in zip(_NAMES, arrays, strict=True)]
        write_container(folder / FILE, KIND, vocab_size, manifest.tokenizer_fingerprint, named, options)

    return write_draft(out, manifest, fill)


def open_lookup_table(path: Path) -> LookupTable:
    """Map a table.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    container = open_container(path, KIND).verify()
    slots, keys, following, shares, last_seen = (
        container.array(name, dtype) for name, dtype in zip(_NAMES, _DTYPES, strict=True)
    )
    key, length, entries = int(container.options["key"]), int(container.options["continuation"]), len(last_seen)
    fits = (
        min(key, length, entries) > 0
        and len(keys) == entries * key
        and len(following) == len(shares) == entries * length
        and len(slots) > entries
        and len(slots) & (len(slots) - 1) == 0
        and bool(((slots >= _NONE) & (slots < entries)).all())
        and bool((following < container.vocab_size).all())
        and bool((slots == _NONE).any())
    )
    if not fits:
        raise CheckpointError(f"{path} holds a table whose parts do not fit together. Build it again.")
    matrix = (entries, length)
    return LookupTable(
        container, slots, keys.reshape(entries, key), following.reshape(matrix), shares.reshape(matrix), last_seen
    )


def load_lookup_table(path: Path, dtype: str = "auto") -> SuffixDrafter:
    """Return the drafter of a checkpoint: the table and the request itself. Token ids have no dtype: it is ignored.

    Raises:
        CheckpointError: a file is missing, truncated or damaged.
    """
    manifest = read_manifest(path)
    table = open_lookup_table(path / FILE)
    table.container.require_tokenizer(manifest.vocab_size, manifest.tokenizer_fingerprint)
    return SuffixDrafter(manifest.vocab_size, [(table, 1.0)], kind=KIND)


def _tabulated(tokens: Tokens, bounds: Bounds, key: int, length: int, min_count: int) -> tuple[np.ndarray, ...]:
    """Return the arrays of a table; see LookupTable."""
    left = np.repeat(bounds[1:], np.diff(bounds)) - np.arange(len(tokens))
    starts = np.flatnonzero(left > key)
    if len(starts) == 0:
        raise CorpusError(f"No sequence of the corpus is longer than a key of {key} tokens.")
    windows = tokens[starts[:, None] + np.arange(key)]
    keys, inverse, counts = np.unique(windows, axis=0, return_inverse=True, return_counts=True)
    by_key = np.split(starts[np.argsort(inverse, kind="stable")], np.cumsum(counts)[:-1])
    frequent = np.flatnonzero(counts >= min_count)
    if len(frequent) == 0:
        raise CorpusError(f"No {key} tokens in a row occur {min_count} times in the corpus: lower min_count.")
    following = np.full((len(frequent), length), _NONE, np.int32)
    shares = np.zeros((len(frequent), length), np.float32)
    for entry, group in enumerate(frequent):
        _fill_usual(tokens, left, by_key[group] + key, following[entry], shares[entry])
    last_seen = np.array([by_key[group][-1] for group in frequent])
    sequence = np.searchsorted(bounds, last_seen, side="right") - 1
    kept = np.ascontiguousarray(keys[frequent], np.int32)
    return _slots(kept), kept, following, shares, sequence.astype(np.int64)


def _fill_usual(tokens: Tokens, left: np.ndarray, at: np.ndarray, following: np.ndarray, shares: np.ndarray) -> None:
    """Follow the majority of the occurrences that agree so far; ties go to the smaller id."""
    total = len(at)
    agree = at
    for offset in range(len(following)):
        agree = agree[left[agree - 1] > 1]
        if len(agree) == 0:
            return
        values, counts = np.unique(tokens[agree], return_counts=True)
        following[offset], shares[offset] = values[counts.argmax()], counts.max() / total
        agree = agree[tokens[agree] == following[offset]] + 1


@jit
def _hash(tokens: np.ndarray, begin: int, end: int) -> int:
    value = 0
    for index in range(begin, end):
        value = pair_hash(value & 0x3FFFFFFF, tokens[index])
    return value


@jit
def _slots(keys: np.ndarray) -> Int32[np.ndarray, " slots"]:
    size = 4
    while size < 2 * len(keys):
        size *= 2
    slots = np.full(size, _NONE, np.int32)
    for entry in range(len(keys)):
        slot = _hash(keys[entry], 0, keys.shape[1]) & (size - 1)
        while slots[slot] != _NONE:
            slot = (slot + 1) & (size - 1)
        slots[slot] = entry
    return slots


@jit
def _entry(slots: np.ndarray, keys: np.ndarray, context: np.ndarray) -> int:
    """Return the entry whose key the context ends with, or -1."""
    size, end = keys.shape[1], len(context)
    if end < size:
        return _NONE
    slot = _hash(context, end - size, end) & (len(slots) - 1)
    while slots[slot] != _NONE:
        entry = signed(slots[slot])
        same = True
        for index in range(size):
            same &= keys[entry, index] == context[end - size + index]
        if same:
            return entry
        slot = (slot + 1) & (len(slots) - 1)
    return _NONE
