"""Suffix arrays of reversed token text, sorted as deep as matches are looked for.

Reading backwards turns "the longest suffix of the context" into "the longest prefix", so that one descent finds it.
In the text 0 separates sequences and token t is t + 1. Suffixes are in order up to the depth, or to the first
separator; beyond, their order is arbitrary but the same on every run.

Source: induced sorting (Nong, Zhang and Chan 2009); the S* suffixes are sorted directly, a few tokens at a time,
instead of by recursion, since the depth is bounded.
"""

import numpy as np
from jaxtyping import Int32, Int64, Integer, UInt64

from foredraft.ngram.jit import jit, prefetch, signed

SEPARATOR = 0
NARROW_VOCAB = 65534  # largest vocabulary whose text takes two bytes a token
Text = Integer[np.ndarray, " text"]
Order = Int32[np.ndarray, " positions"]

_DIRECT, _INSERTION, _QUICK = 8, 20, 1024  # largest group that is sorted so; larger ones by radix
_AHEAD = 24  # suffixes by which text is fetched before it is read
_DIGIT = 11


def reversed_text(tokens: np.ndarray, bounds: np.ndarray, vocab_size: int, depth: int) -> Text:
    """Return the sequences back to front, each followed by a separator, and separators that pad `depth` reads."""
    dtype = np.uint16 if vocab_size <= NARROW_VOCAB else np.int32
    text = np.zeros(len(tokens) + len(bounds) - 1 + padding(depth), dtype=dtype)
    at = 0
    for begin, end in zip(bounds[-2::-1].tolist(), bounds[:0:-1].tolist(), strict=True):
        text[at : at + end - begin] = tokens[begin:end][::-1] + 1
        at += end - begin + 1
    return text


def padding(depth: int) -> int:
    return depth + 4


def suffix_array(text: Text, vocab_size: int, depth: int) -> tuple[Order, Int64[np.ndarray, " firsts"]]:
    """Return the sorted positions of a reversed text, and where the suffixes of each first token begin.

    The second has an entry for each value of the text, 0 .. vocab_size, and one for the end.
    """
    size = len(text) - padding(depth)
    bits = 16 if text.dtype == np.uint16 else 21
    first, first_star, star = _star_positions(text, size, vocab_size)
    _sort_stars(text, star, first_star, depth, bits)
    return _induced(text, size, first, first_star, star), first


@jit
def _star_positions(text: Text, size: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bucket starts of all suffixes and of S* suffixes (smaller than both neighbours), and the latter."""
    first = np.zeros(vocab_size + 2, np.int64)
    first_star = np.zeros(vocab_size + 2, np.int64)
    _scan_stars(text, size, first, first_star, np.empty(0, np.int32))
    for value in range(vocab_size + 1):
        first[value + 1] += first[value]
        first_star[value + 1] += first_star[value]
    star = np.empty(first_star[vocab_size + 1], np.int32)
    _scan_stars(text, size, np.zeros(vocab_size + 2, np.int64), first_star.copy(), star)
    return first, first_star, star


@jit
def _scan_stars(text: Text, size: int, first: np.ndarray, cursor: np.ndarray, star: np.ndarray) -> None:
    """Count suffixes and S* suffixes by first token into the entry behind it; or, given room, file the latter."""
    smaller, following = False, signed(text[size - 1])
    first[following + 1] += 1
    for position in range(size - 2, -1, -1):
        value = signed(text[position])
        first[value + 1] += 1
        if value < following:
            smaller = True
        elif value > following:
            if smaller and len(star) == 0:
                cursor[following + 1] += 1
            elif smaller:
                star[cursor[following]] = position + 1
                cursor[following] += 1
            smaller = False
        following = value


@jit
def _sort_stars(text: Text, star: np.ndarray, first_star: np.ndarray, depth: int, bits: int) -> None:
    """Sort each bucket by the tokens that follow the first, a machine word of them at a time."""
    per_key = 64 // bits
    largest = 0
    for value in range(len(first_star) - 1):
        largest = max(largest, first_star[value + 1] - first_star[value])
    keys, spare_keys = np.empty(largest, np.uint64), np.empty(largest, np.uint64)
    spare = np.empty(largest, np.int32)
    counts, stack = np.empty(1 << _DIGIT, np.int64), np.empty(128, np.int64)
    groups = np.empty((1024, 3), np.int64)
    for value in range(1, len(first_star) - 1):
        bucket = star[first_star[value] : first_star[value + 1]]
        top = 0
        groups[0] = np.array([0, len(bucket), 1])
        while top >= 0:
            low, high, read = groups[top, 0], groups[top, 1], groups[top, 2]
            top -= 1
            if high - low <= _DIRECT:
                _sort_directly(text, bucket, low, high, read, depth)
                continue
            varying = np.uint64(0)
            for index in range(low, high):
                prefetch(text, signed(bucket[min(index + _AHEAD, high - 1)]) + read)
                keys[index] = _key(text, bucket[index] + read, bits, per_key)
                varying |= keys[index] ^ keys[low]
            if varying != np.uint64(0):
                _sort_group(keys, bucket, low, high, varying, spare_keys, spare, counts, stack)
            if read + per_key >= depth:
                continue
            begin = low
            while begin < high:
                end = begin + 1
                while end < high and keys[end] == keys[begin]:
                    end += 1
                if end - begin > 1:
                    top += 1
                    if top == len(groups):
                        groups = np.concatenate((groups, np.empty_like(groups)))
                    groups[top, 0], groups[top, 1], groups[top, 2] = begin, end, read + per_key
                begin = end


@jit
def _key(text: Text, position: int, bits: int, per_key: int) -> np.uint64:
    key = np.uint64(0)
    for index in range(position, position + per_key):
        key = (key << np.uint64(bits)) | np.uint64(text[index])
    return key


@jit
def _sort_directly(text: Text, positions: np.ndarray, low: int, high: int, read: int, depth: int) -> None:
    """Sort a few positions by all of their tokens from `read` to the depth."""
    for index in range(low + 1, high):
        position, hole = signed(positions[index]), index
        while hole > low and _is_larger(text, signed(positions[hole - 1]), position, read, depth):
            positions[hole] = positions[hole - 1]
            hole -= 1
        positions[hole] = position


@jit
def _is_larger(text: Text, left: int, right: int, read: int, depth: int) -> bool:
    while read < depth and text[left + read] == text[right + read]:
        read += 1
    return read < depth and text[left + read] > text[right + read]


@jit
def _sort_group(
    keys: UInt64[np.ndarray, " keys"],
    values: np.ndarray,
    low: int,
    high: int,
    varying: np.uint64,
    spare_keys: UInt64[np.ndarray, " keys"],
    spare: np.ndarray,
    counts: np.ndarray,
    stack: np.ndarray,
) -> None:
    """Sort keys[low:high], which differ in the bits of `varying`, and the values beside them."""
    if high - low <= _INSERTION:
        _insertion_sort(keys, values, low, high)
    elif high - low <= _QUICK:
        _quick_sort(keys, values, low, high, stack)
    else:
        _radix_sort(keys, values, low, high, varying, spare_keys, spare, counts)


@jit
def _insertion_sort(keys: np.ndarray, values: np.ndarray, low: int, high: int) -> None:
    for index in range(low + 1, high):
        key, value = keys[index], values[index]
        hole = index
        while hole > low and keys[hole - 1] > key:
            keys[hole], values[hole] = keys[hole - 1], values[hole - 1]
            hole -= 1
        keys[hole], values[hole] = key, value


@jit
def _quick_sort(keys: np.ndarray, values: np.ndarray, low: int, high: int, stack: np.ndarray) -> None:
    top = 0
    stack[0], stack[1] = low, high
    while top >= 0:
        low, high = stack[2 * top], stack[2 * top + 1]
        top -= 1
        while high - low > _INSERTION:
            small, pivot, large = keys[low], keys[(low + high) >> 1], keys[high - 1]
            pivot = max(min(small, pivot), min(max(small, pivot), large))
            left, right = low, high - 1
            while left <= right:
                while keys[left] < pivot:
                    left += 1
                while keys[right] > pivot:
                    right -= 1
                if left <= right:
                    keys[left], keys[right] = keys[right], keys[left]
                    values[left], values[right] = values[right], values[left]
                    left += 1
                    right -= 1
            top += 1
            if right + 1 - low < high - left:
                stack[2 * top], stack[2 * top + 1] = left, high
                high = right + 1
            else:
                stack[2 * top], stack[2 * top + 1] = low, right + 1
                low = left
        _insertion_sort(keys, values, low, high)


@jit
def _radix_sort(
    keys: np.ndarray,
    values: np.ndarray,
    low: int,
    high: int,
    varying: np.uint64,
    spare_keys: np.ndarray,
    spare: np.ndarray,
    counts: np.ndarray,
) -> None:
    size = high - low
    from_keys, from_values = keys[low:high], values[low:high]
    to_keys, to_values = spare_keys[:size], spare[:size]
    swapped = False
    for bit in range(0, 64, _DIGIT):
        shift, mask = np.uint64(bit), np.uint64((1 << _DIGIT) - 1)
        if (varying >> shift) & mask == np.uint64(0):
            continue
        counts[:] = 0
        for index in range(size):
            counts[signed((from_keys[index] >> shift) & mask)] += 1
        total = 0
        for digit in range(len(counts)):
            count = counts[digit]
            counts[digit] = total
            total += count
        for index in range(size):
            digit = signed((from_keys[index] >> shift) & mask)
            to_keys[counts[digit]], to_values[counts[digit]] = from_keys[index], from_values[index]
            counts[digit] += 1
        from_keys, to_keys = to_keys, from_keys
        from_values, to_values = to_values, from_values
        swapped = not swapped
    if swapped:
        to_keys[:] = from_keys
        to_values[:] = from_values


@jit
def _induced(text: Text, size: int, first: np.ndarray, first_star: np.ndarray, star: np.ndarray) -> Order:
    """Return the whole order from that of the S* suffixes: larger-than-next ones left to right, the rest back."""
    order = np.full(size, -1, np.int32)
    for value in range(len(first) - 1):
        count = first_star[value + 1] - first_star[value]
        for index in range(count):
            order[first[value + 1] - count + index] = star[first_star[value] + index]
    head = first.copy()
    value = signed(text[size - 1])
    order[head[value]] = size - 1
    head[value] += 1
    for index in range(size):
        prefetch(text, signed(order[min(index + _AHEAD, size - 1)]) - 1)
        position = order[index] - 1
        if position >= 0:
            value = signed(text[position])
            if value >= text[position + 1]:
                order[head[value]] = position
                head[value] += 1
    tail = first[1:].copy()
    for index in range(size - 1, -1, -1):
        prefetch(text, signed(order[max(index - _AHEAD, 0)]) - 1)
        position = order[index] - 1
        if position >= 0:
            value, following = signed(text[position]), signed(text[position + 1])
            if value < following or (value == following and tail[following] <= index):
                tail[value] -= 1
                order[tail[value]] = position
    return order
