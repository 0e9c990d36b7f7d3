"""N-gram counts as a trie of contexts read backwards: one descent finds the longest known context.

Node 0 is the empty context. The children of a node are the contexts one token older; siblings are
consecutive and sorted by that token, so that a level needs no keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int32, Int64

from foredraft.core.errors import CheckpointError
from foredraft.ngram.container import Container
from foredraft.ngram.corpus import Bounds, Tokens
from foredraft.ngram.jit import jit

ROOT_NODE = 0
_ABSENT = -1


@dataclass(frozen=True, slots=True)
class NgramCounts:
    """Contexts of up to `order` tokens, and how often each token followed them.

    Attributes:
        order: Longest context, in tokens.
        older: The token that makes a node one older than its parent; 0 for the root.
        first_child: Node n's children are first_child[n] .. first_child[n + 1].
        first_next: Node n's continuations are next_token[first_next[n] : first_next[n + 1]], the most
            frequent first, smaller ids first among equals.
        next_count: How often each continuation was seen.
    """

    order: int
    older: Int32[np.ndarray, " nodes"]
    first_child: Int64[np.ndarray, " nodes+1"]
    first_next: Int64[np.ndarray, " nodes+1"]
    next_token: Int32[np.ndarray, " continuations"]
    next_count: Int32[np.ndarray, " continuations"]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.older, self.first_child, self.first_next, self.next_token, self.next_count

    def levels(self) -> list[tuple[int, int]]:
        """Return the range of nodes of each context length, 0 .. order."""
        ranges = [(0, 1)]
        for _ in range(self.order):
            _, end = ranges[-1]
            ranges.append((end, int(self.first_child[end])))
        return ranges

    def contexts(self, length: int) -> Int32[np.ndarray, "level length"]:
        """Return the contexts of one length, oldest token first, in the order of their nodes."""
        levels = self.levels()
        rows = np.zeros((1, 0), np.int32)
        for shorter, level in pairwise(levels[: length + 1]):
            parents = self.parents(*level) - shorter[0]
            rows = np.concatenate([self.older[slice(*level), None], rows[parents]], axis=1)
        return rows

    def parents(self, begin: int, end: int) -> Int64[np.ndarray, " range"]:
        """Return the parent of each node of a range that a level fills."""
        return np.searchsorted(self.first_child, np.arange(begin, end), side="right") - 1


NAMES = ("older", "first_child", "first_next", "next_token", "next_count")
DTYPES = ("int32", "int64", "int64", "int32", "int32")


def count_ngrams(tokens: Tokens, bounds: Bounds, order: int, min_count: int) -> NgramCounts:
    """Return the counts of every context seen `min_count` times or more; contexts do not cross sequences."""
    position = np.arange(len(tokens), dtype=np.int64)
    into_sequence = position - np.repeat(bounds[:-1], np.diff(bounds))
    node = np.zeros(len(tokens), dtype=np.int64)
    older, num_children = [np.zeros(1, np.int32)], [np.zeros(1, np.int64)]
    counted = [_continuations(node, tokens)]
    num_nodes = 1
    for length in range(1, order + 1):
        position = position[into_sequence[position] >= length]
        keys, inverse, counts = np.unique(
            (node[position] << 32) | tokens[position - length], return_inverse=True, return_counts=True
        )
        kept = counts >= min_count
        number = np.where(kept, np.cumsum(kept) - 1 + num_nodes, _ABSENT)
        node[position] = number[inverse]
        position = position[node[position] != _ABSENT]
        older.append((keys[kept] & 0xFFFFFFFF).astype(np.int32))
        parents = np.concatenate(num_children)
        np.add.at(parents, keys[kept] >> 32, 1)
        num_children = [parents, np.zeros(int(kept.sum()), np.int64)]
        counted.append(_continuations(node[position], tokens[position]))
        num_nodes += int(kept.sum())
    return _assembled(order, np.concatenate(older), np.concatenate(num_children), counted)


def merged(parts: Sequence[NgramCounts]) -> NgramCounts:
    """Return the summed counts of several corpora, of one order: shards built apart, or an update.

    Equal to counting all at once where nothing was dropped for being rare.
    """
    order = parts[0].order
    numbers = [np.zeros(len(part.older), np.int64) for part in parts]
    levels = [part.levels() for part in parts]
    older, num_children = [np.zeros(1, np.int32)], [np.zeros(1, np.int64)]
    num_nodes = 1
    for length in range(1, order + 1):
        keys = [
            (number[part.parents(*level[length])] << 32) | part.older[slice(*level[length])]
            for part, number, level in zip(parts, numbers, levels, strict=True)
        ]
        kept = np.unique(np.concatenate(keys))
        for number, level, own in zip(numbers, levels, keys, strict=True):
            number[slice(*level[length])] = num_nodes + np.searchsorted(kept, own)
        older.append((kept & 0xFFFFFFFF).astype(np.int32))
        parents = np.concatenate(num_children)
        np.add.at(parents, kept >> 32, 1)
        num_children = [parents, np.zeros(len(kept), np.int64)]
        num_nodes += len(kept)
    owners = [np.repeat(number, np.diff(part.first_next)) for part, number in zip(parts, numbers, strict=True)]
    counted = _continuations(
        np.concatenate(owners),
        np.concatenate([part.next_token for part in parts]),
        np.concatenate([part.next_count for part in parts]),
    )
    return _assembled(order, np.concatenate(older), np.concatenate(num_children), [counted])


def counts_from_contexts(contexts: Sequence[np.ndarray], continuations: Sequence[np.ndarray]) -> NgramCounts:
    """Return counts given by context: for each its tokens, and rows of (token, count).

    A context that is not given, but that a longer one ends with, gets the summed counts of those.
    """
    given = {tuple(context.tolist()): pairs for context, pairs in zip(contexts, continuations, strict=True)}
    order = max(len(context) for context in given)
    level = {context: [pairs] for context, pairs in given.items() if len(context) == order}
    levels = [level]
    for length in range(order - 1, -1, -1):
        shorter: dict[tuple[int, ...], list[np.ndarray]] = {}
        for context, parts in level.items():
            shorter.setdefault(context[1:], []).extend(parts)
        level = {**shorter, **{context: [pairs] for context, pairs in given.items() if len(context) == length}}
        levels.append(level)
    numbers, older, num_children, counted = {(): ROOT_NODE}, [0], [0], []
    for level in reversed(levels):
        ordered = sorted(level, key=lambda context: context[::-1])
        for context in ordered if ordered != [()] else []:
            numbers[context] = len(older)
            older.append(context[0])
            num_children.append(0)
            num_children[numbers[context[1:]]] += 1
        pairs = [(numbers[context], np.concatenate(level[context])) for context in ordered]
        nodes = np.concatenate([np.full(len(part), node, np.int64) for node, part in pairs])
        joined = np.concatenate([part for _, part in pairs])
        counted.append(_continuations(nodes, joined[:, 0], joined[:, 1]))
    return _assembled(order, np.array(older, np.int32), np.array(num_children, np.int64), counted)


def read_counts(container: Container) -> NgramCounts:
    """Return counts from a verified file, after checking that every index stays inside.

    Raises:
        CheckpointError: the arrays do not fit together.
    """
    arrays = [container.array(name, dtype) for name, dtype in zip(NAMES, DTYPES, strict=True)]
    older, first_child, first_next, next_token, next_count = arrays
    nodes, order = len(older), int(container.options.get("order", 0))
    fits = (
        0 < order <= 64
        and nodes > 0
        and len(first_child) == len(first_next) == nodes + 1
        and len(next_token) == len(next_count)
        and _is_partition(first_child, 1, nodes)
        and bool((first_child[:-1] > np.arange(nodes)).all())
        and _is_partition(first_next, 0, len(next_token))
        and bool((np.diff(first_next) > 0).all())
        and bool(((next_token >= 0) & (next_token < container.vocab_size)).all())
        and bool((next_count > 0).all())
    )
    if not fits:
        raise CheckpointError(f"{container.path} holds counts that do not fit together. Build it again.")
    return NgramCounts(order, *arrays)


@jit
def child_of(older: np.ndarray, first_child: np.ndarray, node: int, token: int) -> int:
    """Return the child of `node` whose context is one older by `token`, or -1."""
    low, high = first_child[node], first_child[node + 1]
    while low < high:
        middle = (low + high) >> 1
        if older[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low < first_child[node + 1] and older[low] == token:
        return low
    return _ABSENT


@jit
def longest_context(order: int, older: np.ndarray, first_child: np.ndarray, tokens: np.ndarray, end: int) -> int:
    """Return the node of the longest known context of tokens[:end]; the root where its last token is unknown."""
    node = ROOT_NODE
    for length in range(1, min(order, end) + 1):
        child = child_of(older, first_child, node, tokens[end - length])
        if child == _ABSENT:
            break
        node = child
    return node


def _continuations(
    node: np.ndarray, following: np.ndarray, seen: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (node, token, count) of each pair, sorted by node, then the most frequent first; `seen` times each."""
    keys, inverse = np.unique((node << 32) | following, return_inverse=True)
    counts = np.bincount(inverse, seen, minlength=len(keys)).astype(np.int64)
    nodes, token = keys >> 32, (keys & 0xFFFFFFFF).astype(np.int32)
    order = np.lexsort((token, -counts, nodes))
    return nodes[order], token[order], counts[order].astype(np.int32)


def _assembled(
    order: int,
    older: np.ndarray,
    num_children: np.ndarray,
    counted: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> NgramCounts:
    nodes, token, count = (np.concatenate(parts) for parts in zip(*counted, strict=True))
    first_child = np.concatenate([[1], 1 + np.cumsum(num_children)])
    first_next = np.concatenate([[0], np.cumsum(np.bincount(nodes, minlength=len(older)))])
    return NgramCounts(order, older, first_child.astype(np.int64), first_next.astype(np.int64), token, count)


def _is_partition(first: np.ndarray, begin: int, end: int) -> bool:
    return int(first[0]) == begin and int(first[-1]) == end and bool((np.diff(first) >= 0).all())
