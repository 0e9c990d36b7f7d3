"""N-gram counts as a trie of contexts read backwards: one descent finds the longest known context.

Node 0 is the empty context. The children of a node are the contexts one token older; siblings are
consecutive and sorted by that token, so that a level needs no keys.
"""

from dataclasses import dataclass

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


def _continuations(node: np.ndarray, following: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (node, token, count) of each pair seen, sorted by node, then the most frequent first."""
    keys, counts = np.unique((node << 32) | following, return_counts=True)
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
