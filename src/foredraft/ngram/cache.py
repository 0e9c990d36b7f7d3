"""The cross-request tier: recent traffic in bounded memory, found by its last two tokens.

Text is kept in segments of equal size. When all are full, a policy names the one to give up:
`lru` the least recently useful, `frequency` the least often useful (its past counts half as much each time as many
segments as there are were written), `cluster` the least recently useful of the largest cluster of similar segments
(same minimum hash over three tokens, Broder 1997), so that one kind of traffic cannot drive out the others.
A segment is useful when later text repeats it. Looking up changes nothing; learning does.
"""

import threading
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from foredraft.core.errors import CheckpointError, UserError
from foredraft.ngram.container import open_container, write_container
from foredraft.ngram.corpus import checked
from foredraft.ngram.jit import jit, pair_hash, signed

KIND = "request-cache"
LRU, FREQUENCY, CLUSTER = "lru", "frequency", "cluster"
POLICIES = (LRU, FREQUENCY, CLUSTER)
_OVERLAP = 16  # tokens that a segment repeats from the one before it, so that matches do not end at its edge
_MAX_DEPTH = 32
_CANDIDATES = 48  # occurrences of the last two tokens that are compared
_CLUSTERS = 256
_NONE = -1
_SEEN, _HITS, _CLUSTER, _FILLED = range(4)  # columns of segments
_CLOCK, _WRITTEN = range(2)  # entries of counters
_ARRAYS = ("text", "older", "newer", "heads", "segments", "counters")


class RequestCache:
    """A Tier that learns. Safe to share between threads.

    Args:
        capacity: Tokens kept, about; a multiple of the segment size.
        segment: Tokens of a segment.
    """

    def __init__(self, vocab_size: int, capacity: int = 1 << 20, segment: int = 256, policy: str = LRU) -> None:
        if policy not in POLICIES:
            raise UserError(f"Unknown eviction policy {policy!r}. Known: {', '.join(POLICIES)}.")
        if segment <= 2 * _OVERLAP or capacity < 2 * segment:
            raise UserError(f"A cache needs segments of more than {2 * _OVERLAP} tokens and room for two of them.")
        self.vocab_size = vocab_size
        self.segment = segment
        self.policy = policy
        self._lock = threading.Lock()
        num_segments = capacity // segment
        slots = 16
        while slots < 2 * num_segments * segment:
            slots *= 2
        self._text = np.zeros(num_segments * segment, np.int32)
        self._older = np.full(len(self._text), _NONE, np.int32)
        self._newer = np.full(len(self._text), _NONE, np.int32)
        self._heads = np.full(slots, _NONE, np.int32)
        self._segments = np.zeros((num_segments, 4), np.int64)
        self._counters = np.zeros(2, np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def learn(self, tokens: np.ndarray) -> None:
        """Add the text of one request, its prompt included.

        Raises:
            CorpusError: a token lies outside the vocabulary; nothing was learned.
        """
        tokens = checked(tokens, self.vocab_size, "the request")
        policy = POLICIES.index(self.policy)
        with self._lock:
            text, older, newer, heads, segments, counters = self._arrays()
            _learn(text, older, newer, heads, segments, counters, self.segment, policy, tokens)

    def rows(
        self,
        context: Int64[np.ndarray, " context"],
        lengths: Int64[np.ndarray, " rows"],
        tokens: Int64[np.ndarray, "rows k"],
        row: int,
        end_row: int,
    ) -> int:
        """Write the longest matches among the latest occurrences; see Tier."""
        with self._lock:
            return _rows(
                self._text,
                self._older,
                self._heads,
                self._segments,
                self.segment,
                context,
                lengths,
                tokens,
                row,
                end_row,
            )

    def copy(self) -> "RequestCache":
        """Return a cache that holds the same and learns apart from this one."""
        capacity = len(self._text)
        twin = RequestCache(self.vocab_size, capacity, self.segment, self.policy)
        with self._lock:
            for own, array in zip(twin._arrays(), self._arrays(), strict=True):
                own[...] = array
        return twin

    def save(self, path: Path, tokenizer_fingerprint: str) -> None:
        """Write the cache into one file, whole or not at all."""
        with self._lock:
            arrays = [(name, array.reshape(-1)) for name, array in zip(_ARRAYS, self._arrays(), strict=True)]
            options = {"segment": self.segment, "policy": self.policy}
            write_container(path, KIND, self.vocab_size, tokenizer_fingerprint, arrays, options)

    @staticmethod
    def load(path: Path, vocab_size: int, tokenizer_fingerprint: str) -> "RequestCache":
        """Return a saved cache, to go on with.

        Raises:
            CheckpointError: the file is missing, truncated or damaged.
            VocabMismatchError: it holds the traffic of another tokenizer.
        """
        container = open_container(path, KIND).verify().require_tokenizer(vocab_size, tokenizer_fingerprint)
        text = container.array("text", "int32")
        cache = RequestCache(vocab_size, len(text), int(container.options["segment"]), container.options["policy"])
        for name, empty in zip(_ARRAYS, cache._arrays(), strict=True):
            saved = container.array(name, empty.dtype.name)
            if saved.size != empty.size:
                raise CheckpointError(f"{path} holds a cache whose parts do not fit together. Start a new one.")
            empty[...] = saved.reshape(empty.shape)
        return cache

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self._text, self._older, self._newer, self._heads, self._segments, self._counters


@jit
def _bucket(heads: np.ndarray, first: int, second: int) -> int:
    return pair_hash(first, second) & (len(heads) - 1)


@jit
def _learn(
    text: np.ndarray,
    older: np.ndarray,
    newer: np.ndarray,
    heads: np.ndarray,
    segments: np.ndarray,
    counters: np.ndarray,
    segment: int,
    policy: int,
    tokens: np.ndarray,
) -> None:
    start = 0
    while start < len(tokens):
        begin = max(start - _OVERLAP, 0)
        end = min(begin + segment, len(tokens))
        counters[_CLOCK] += 1
        _credit(text, older, heads, segments, counters, segment, tokens, start, end)
        victim = _victim(segments, policy)
        _forget(text, older, newer, heads, segments, segment, victim)
        _write(text, older, newer, heads, segments, counters, segment, victim, tokens[begin:end])
        start = end


@jit
def _credit(
    text: np.ndarray,
    older: np.ndarray,
    heads: np.ndarray,
    segments: np.ndarray,
    counters: np.ndarray,
    segment: int,
    tokens: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Call a segment useful for each new token that it foretold: the latest occurrence of the two before it."""
    for at in range(max(begin, 2), end):
        position = heads[_bucket(heads, tokens[at - 2], tokens[at - 1])]
        if position != _NONE and text[position] == tokens[at]:
            segments[position // segment, _SEEN] = counters[_CLOCK]
            segments[position // segment, _HITS] += 1


@jit
def _victim(segments: np.ndarray, policy: int) -> int:
    sizes = np.zeros(_CLUSTERS, np.int64)
    for index in range(len(segments)):
        if segments[index, _FILLED] == 0:
            return index
        sizes[segments[index, _CLUSTER]] += 1
    crowded = np.argmax(sizes)
    victim = _NONE
    for index in range(len(segments)):
        if policy == 2 and segments[index, _CLUSTER] != crowded:
            continue
        if victim == _NONE:
            victim = index
            continue
        fewer = segments[index, _HITS] < segments[victim, _HITS]
        equal = segments[index, _HITS] == segments[victim, _HITS] or policy != 1
        if (policy == 1 and fewer) or (equal and segments[index, _SEEN] < segments[victim, _SEEN]):
            victim = index
    return victim


@jit
def _forget(
    text: np.ndarray,
    older: np.ndarray,
    newer: np.ndarray,
    heads: np.ndarray,
    segments: np.ndarray,
    segment: int,
    victim: int,
) -> None:
    """Take every position of a segment out of its chain."""
    base = victim * segment
    for position in range(base + 2, base + segments[victim, _FILLED]):
        if newer[position] == _NONE:
            heads[_bucket(heads, text[position - 2], text[position - 1])] = older[position]
        else:
            older[newer[position]] = older[position]
        if older[position] != _NONE:
            newer[older[position]] = newer[position]
    segments[victim, _FILLED] = 0


@jit
def _write(
    text: np.ndarray,
    older: np.ndarray,
    newer: np.ndarray,
    heads: np.ndarray,
    segments: np.ndarray,
    counters: np.ndarray,
    segment: int,
    victim: int,
    tokens: np.ndarray,
) -> None:
    base, smallest = victim * segment, signed(1 << 62)
    for index in range(len(tokens)):
        position = base + index
        text[position] = tokens[index]
        if index < 2:
            continue
        bucket = _bucket(heads, tokens[index - 2], tokens[index - 1])
        older[position], newer[position] = heads[bucket], _NONE
        if heads[bucket] != _NONE:
            newer[heads[bucket]] = position
        heads[bucket] = position
        smallest = min(smallest, pair_hash(bucket, tokens[index]))
    segments[victim, _SEEN], segments[victim, _HITS] = counters[_CLOCK], 1
    segments[victim, _CLUSTER], segments[victim, _FILLED] = smallest % _CLUSTERS, len(tokens)
    counters[_WRITTEN] += 1
    if counters[_WRITTEN] % len(segments) == 0:
        for index in range(len(segments)):
            segments[index, _HITS] //= 2


@jit
def _rows(
    text: np.ndarray,
    older: np.ndarray,
    heads: np.ndarray,
    segments: np.ndarray,
    segment: int,
    context: np.ndarray,
    lengths: np.ndarray,
    tokens: np.ndarray,
    row: int,
    end_row: int,
) -> int:
    end, first_row = len(context), row
    if end < 2:
        return row
    position = signed(heads[_bucket(heads, context[end - 2], context[end - 1])])
    for _ in range(_CANDIDATES):
        if position == _NONE:
            break
        length, inside = 0, position % segment
        while length < min(inside, end, _MAX_DEPTH) and text[position - 1 - length] == context[end - 1 - length]:
            length += 1
        if length >= 2:
            row = _insert(text, segments, segment, position, length, lengths, tokens, first_row, row, end_row)
        position = signed(older[position])
    return row


@jit
def _insert(
    text: np.ndarray,
    segments: np.ndarray,
    segment: int,
    position: int,
    length: int,
    lengths: np.ndarray,
    tokens: np.ndarray,
    first_row: int,
    row: int,
    end_row: int,
) -> int:
    """Put an occurrence behind those that match as long or longer; return the first row left free."""
    place = row
    while place > first_row and lengths[place - 1] < length:
        place -= 1
    if place == end_row:
        return row
    last = min(row, end_row - 1)
    for index in range(last, place, -1):
        lengths[index] = lengths[index - 1]
        tokens[index] = tokens[index - 1]
    stop = (position // segment) * segment + segments[position // segment, _FILLED]
    lengths[place] = length
    for offset in range(tokens.shape[1]):
        tokens[place, offset] = text[position + offset] if position + offset < stop else -1
    return last + 1
