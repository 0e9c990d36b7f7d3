"""The static tier: a suffix index over a corpus, mapped read-only and shared between processes.

A shard is one file; shards built by independent processes are opened together and merged at query time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from foredraft.core.errors import CheckpointError, CorpusError
from foredraft.ngram.container import BLOCK_BYTES, SOUND, Container, open_container, write_container
from foredraft.ngram.corpus import joined
from foredraft.ngram.jit import jit, prefetch, signed
from foredraft.ngram.suffix_array import Order, Text, padding, reversed_text, suffix_array

KIND = "suffix-index"
MAX_DEPTH = 64
_MAX_TOKENS = 2**31 - 1 - MAX_DEPTH
_NAMES = ("text", "order", "first")


@dataclass(frozen=True, slots=True)
class SuffixIndex:
    """One open shard.

    Attributes:
        depth: Longest match, in tokens.
        num_tokens: Tokens of the corpus, separators left out.
        weight: What an occurrence in it counts, beside other shards.
    """

    container: Container
    depth: int
    num_tokens: int
    weight: float
    text: Text
    order: Order
    first: Int64[np.ndarray, " firsts"]
    text_state: UInt8[np.ndarray, " text_blocks"]
    order_state: UInt8[np.ndarray, " order_blocks"]

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
        """Write the occurrences that share most with the end of `context` into rows `row` .. `end_row`.

        For each the length of the match and the tokens that followed, -1 behind the end of its sequence.
        Returns the first row left free.

        Raises:
            CheckpointError: a block that is read for the first time does not match its checksum.
        """
        while True:
            found = _nearest(
                self.text, self.order, self.first, self.text_state, self.order_state,
                self.depth, context, lengths, tokens, row, end_row,
            )  # fmt: skip
            if found >= 0:
                return found
            self._verify(-1 - found)

    def _verify(self, unchecked: int) -> None:
        block, which = divmod(unchecked, 2)
        self.container.verify_block(_NAMES[which], block)


def build_suffix_index(
    sequences: Iterable[np.ndarray],
    vocab_size: int,
    tokenizer_fingerprint: str,
    depth: int,
    path: Path,
    weight: float = 1.0,
) -> int:
    """Index token sequences into one file, written whole or not at all; return the number of tokens.

    Needs about 12 bytes a token of memory while it runs, beside the corpus.

    Raises:
        CorpusError: the corpus is empty, speaks another vocabulary, or is too large for one shard.
    """
    tokens, bounds = joined(sequences, vocab_size)
    if len(tokens) + len(bounds) > _MAX_TOKENS:
        raise CorpusError(f"{len(tokens)} tokens are too many for one shard ({_MAX_TOKENS}): build several.")
    text = reversed_text(tokens, bounds, vocab_size, depth)
    order, first = suffix_array(text, vocab_size, depth)
    arrays = [("text", text), ("order", order), ("first", first)]
    options = {"depth": depth, "num_tokens": len(tokens), "weight": weight}
    write_container(path, KIND, vocab_size, tokenizer_fingerprint, arrays, options)
    return len(tokens)


def open_suffix_index(path: Path, verify: bool = False) -> SuffixIndex:
    """Map one shard, in milliseconds; blocks are checked when first read, or all now if `verify`.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or no suffix index.
    """
    container = open_container(path, KIND)
    if verify:
        container.verify()
    for block in range(len(container.state[_NAMES.index("first")]) if container.names == _NAMES else 0):
        container.verify_block("first", block)
    text = container.arrays[0] if container.names == _NAMES else np.empty(0, np.uint8)
    order, first = container.array("order", "int32"), container.array("first", "int64")
    depth, num_tokens = int(container.options.get("depth", 0)), int(container.options.get("num_tokens", 0))
    weight = float(container.options.get("weight", 1.0))
    fits = (
        text.dtype in (np.uint16, np.int32)
        and 0 < depth <= MAX_DEPTH
        and 0.0 < weight < math.inf
        and 0 < num_tokens <= len(order) == len(text) - padding(depth)
        and len(first) == container.vocab_size + 2
        and int(first[0]) == 0
        and int(first[-1]) == len(order)
        and bool((np.diff(first) >= 0).all())
    )
    if not fits:
        raise CheckpointError(f"{path} holds an index whose parts do not fit together. Build it again.")
    return SuffixIndex(container, depth, num_tokens, weight, text, order, first, container.state[0], container.state[1])


@jit
def _unchecked(state: np.ndarray, begin: int, end: int, itemsize: int, which: int) -> int:
    """Return 0 if entries begin .. end of an array lie in sound blocks, else the code of the first that does not."""
    for block in range(begin * itemsize // BLOCK_BYTES, end * itemsize // BLOCK_BYTES + 1):
        if state[block] != SOUND:
            return -1 - (2 * block + which)
    return 0


@jit
def _locate(
    order: np.ndarray, text_state: np.ndarray, order_state: np.ndarray, itemsize: int, index: int, depth: int, k: int
) -> tuple[int, int]:
    """Return the position at `index` of the order, and 0; or what must be checked before it can be read."""
    code = _unchecked(order_state, index, index, 4, 1)
    if code != 0:
        return 0, code
    position = signed(order[index])
    position = min(max(position, 0), len(order) - 1)
    return position, _unchecked(text_state, max(position - k, 0), position + depth, itemsize, 0)


@jit
def _match(text: np.ndarray, position: int, context: np.ndarray, length: int, longest: int) -> int:
    """Return how many tokens before `position` agree with the end of the context, given that `length` do."""
    end = len(context)
    while length < longest and text[position + length] == context[end - 1 - length] + 1:
        length += 1
    return length


@jit
def _nearest(
    text: np.ndarray,
    order: np.ndarray,
    first: np.ndarray,
    text_state: np.ndarray,
    order_state: np.ndarray,
    depth: int,
    context: np.ndarray,
    lengths: np.ndarray,
    tokens: np.ndarray,
    row: int,
    end_row: int,
) -> int:
    """Descend to where the context would stand in the order, then walk outward, the longer match first."""
    end, k, itemsize = len(context), tokens.shape[1], text.itemsize
    if end == 0 or not 0 <= context[end - 1] < len(first) - 2:
        return row
    longest = min(depth, end)
    low, high = first[context[end - 1] + 1], first[context[end - 1] + 2]
    bucket_low, bucket_high = low, high
    low_match = high_match = 1
    while low < high:
        middle = (low + high) >> 1
        position, code = _locate(order, text_state, order_state, itemsize, middle, depth, k)
        if code != 0:
            return code
        length = _match(text, position, context, min(low_match, high_match), longest)
        if length == longest or text[position + length] > context[end - 1 - length] + 1:
            high, high_match = middle, length
        else:
            low, low_match = middle + 1, length
    for step in range(end_row - row):
        prefetch(text, order[max(low - 1 - step, 0)])
        prefetch(text, order[min(low + step, len(order) - 1)])
    left, right = low - 1, low
    left_match = right_match = depth + 1
    left_position = right_position = 0
    while row < end_row:
        if left_match == depth + 1:
            left_match = 0
            if left >= bucket_low:
                left_position, code = _locate(order, text_state, order_state, itemsize, left, depth, k)
                if code != 0:
                    return code
                left_match = _match(text, left_position, context, 0, longest)
        if right_match == depth + 1:
            right_match = 0
            if right < bucket_high:
                right_position, code = _locate(order, text_state, order_state, itemsize, right, depth, k)
                if code != 0:
                    return code
                right_match = _match(text, right_position, context, 0, longest)
        if max(left_match, right_match) == 0:
            break
        if left_match >= right_match:
            position, lengths[row], left_match = left_position, left_match, depth + 1
            left -= 1
        else:
            position, lengths[row], right_match = right_position, right_match, depth + 1
            right += 1
        for offset in range(k):
            position -= 1
            tokens[row, offset] = signed(text[position]) - 1 if position >= 0 else -1
            if tokens[row, offset] < 0:
                tokens[row, offset:] = -1
                break
        row += 1
    return row
