"""Which texts nearly repeat each other."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import ceil

import numpy as np
from numpy.typing import NDArray

NEAR = 0.7

_GRAM = 5
_TEMPLATE_SHARE, _TEMPLATE_COUNT = 0.1, 20
# Scripts without spaces count each character as a word.
_SPACELESS = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")
_FACTOR = 0x9E3779B97F4A7C15
_ROUNDING = 1e-9

Grams = NDArray[np.uint64]


def near_duplicates(texts: Sequence[str], threshold: float = NEAR) -> list[int]:
    """Return the group of each text; a text is in the group of every text that it nearly repeats.

    Two texts are near where the Jaccard index of their sets of five-word sequences reaches `threshold`. Case,
    punctuation and spacing do not count. Sequences found in more than a tenth of the different texts (and in more
    than 20) belong to a template that prompts were put into, and do not count either. Exact: nothing is sampled.

    Source: the prefix filter of Bayardo et al. 2007 (Scaling Up All Pairs Similarity Search): ordered by
    rarity, two sets of n and m elements with Jaccard index >= t share one of the first n - ceil(t n) + 1
    elements of the one and the first m - ceil(t m) + 1 of the other.
    """
    every = [word_sequences(text, _GRAM) for text in texts]
    first_with: dict[bytes, int] = {}
    same_as = [first_with.setdefault(grams.tobytes(), len(first_with)) for grams in every]
    distinct = [np.frombuffer(data, np.uint64) for data in first_with]
    groups = _groups(_without_templates(distinct), threshold)
    return [groups[index] for index in same_as]


def _groups(sets: Sequence[Grams], threshold: float) -> list[int]:
    parents = list(range(len(sets)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    holders: defaultdict[int, list[int]] = defaultdict(list)
    for index, grams in enumerate(_rarest_first(sets)):
        prefix = grams[: len(grams) - _at_least(threshold * len(grams)) + 1].tolist()
        for other in {holder for gram in prefix for holder in holders[gram]}:
            if root(other) != root(index) and _are_near(sets[index], sets[other], threshold):
                parents[root(index)] = root(other)
        for gram in prefix:
            holders[gram].append(index)
    return [root(index) for index in range(len(sets))]


def _are_near(one: Grams, other: Grams, threshold: float) -> bool:
    small, large = sorted((len(one), len(other)))
    if small < threshold * large - _ROUNDING:
        return False
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared >= threshold * (small + large - shared) - _ROUNDING


def _at_least(amount: float) -> int:
    return ceil(amount - _ROUNDING)


def word_sequences(text: str, length: int) -> Grams:
    """Return the hashes of a text's sequences of `length` words, sorted, each once. Never empty.

    Case, punctuation and spacing do not count; a shorter text is one sequence.
    """
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [text.strip()]
    hashes = np.array([_word_hash(word) for word in words], dtype=np.uint64)
    hashes = np.pad(hashes, (0, max(0, length - len(hashes))))
    factors = np.cumprod(np.full(length, _FACTOR, dtype=np.uint64))
    # One product a place, not a matrix of all windows: a document may be long.
    last = len(hashes) - length + 1
    sums = np.zeros(last, dtype=np.uint64)
    for place, factor in enumerate(factors):
        sums += hashes[place : place + last] * factor
    return np.unique(sums)


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _without_templates(sets: Sequence[Grams]) -> list[Grams]:
    """Take out what very many texts share; a text that is nothing else keeps it."""
    counts = _counts(sets)
    limit = max(_TEMPLATE_COUNT, _TEMPLATE_SHARE * len(sets))
    stripped = [grams[count <= limit] for grams, count in zip(sets, counts, strict=True)]
    return [own if len(own) else grams for own, grams in zip(stripped, sets, strict=True)]


def _rarest_first(sets: Sequence[Grams]) -> list[Grams]:
    return [grams[np.lexsort((grams, count))] for grams, count in zip(sets, _counts(sets), strict=True)]


def _counts(sets: Sequence[Grams]) -> list[NDArray[np.int64]]:
    """Return for each element of each set in how many sets it is."""
    if not sets:
        return []
    values, counts = np.unique(np.concatenate(sets), return_counts=True)
    return [counts[np.searchsorted(values, grams)] for grams in sets]
