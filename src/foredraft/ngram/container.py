"""The file that n-gram structures live in: arrays behind a header, mapped read-only, with a checksum for each block.

Layout, little-endian: magic (8 bytes), version (u32), length of the header (u32), checksum of the header (u64); the
header, JSON; one u64 checksum for each block of 64 KiB of each array; the arrays, each at a multiple of 64 bytes.
The header names the vocabulary (size and tokenizer fingerprint), so that a file of another tokenizer is refused.
"""

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8, UInt64

from foredraft.core.errors import CheckpointError, VocabMismatchError
from foredraft.core.files import whole_file

MAGIC = b"FDNGRAM\n"
VERSION = 1
ANY_FILE = "*.ngram"
BLOCK_WORDS = 1 << 13
BLOCK_BYTES = 8 * BLOCK_WORDS
_PREFIX = struct.Struct("<8sIIQ")
_ALIGN = 64
_DTYPES = ("uint8", "uint16", "int32", "int64", "uint64", "float32")
UNCHECKED, SOUND, DAMAGED = 0, 1, 2

Words = UInt64[np.ndarray, " words"]


@dataclass(frozen=True, slots=True)
class Container:
    """An open file; its arrays are read-only views of the mapped file.

    Attributes:
        kind: What the arrays mean.
        vocab_size: Every token id in it is below this.
        tokenizer_fingerprint: Of the tokenizer whose ids it holds; may be empty.
        options: Small figures of that kind.
        names: The arrays, in the order of `arrays`.
        sums: Checksum of each block of each array, as written.
        state: For each block UNCHECKED, SOUND or DAMAGED; filled in as blocks are first touched.
    """

    path: Path
    kind: str
    vocab_size: int
    tokenizer_fingerprint: str
    options: Mapping[str, Any]
    names: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    words: tuple[UInt64[np.ndarray, "_"], ...]
    sums: tuple[UInt64[np.ndarray, "_"], ...]
    state: tuple[UInt8[np.ndarray, "_"], ...]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def array(self, name: str, dtype: str) -> np.ndarray:
        """Return the array of that name.

        Raises:
            CheckpointError: it is absent or of another type.
        """
        if name not in self.names or self.arrays[self.names.index(name)].dtype != dtype:
            raise CheckpointError(f"{self.path} has no array {name!r} of type {dtype}. Build it again.")
        return self.arrays[self.names.index(name)]

    def verify(self) -> "Container":
        """Compare every block with its checksum and return the container.

        Raises:
            CheckpointError: names the first damaged block.
        """
        for name, words, sums, state in zip(self.names, self.words, self.sums, self.state, strict=True):
            found = _block_sums(words)
            state[:] = np.where(found == sums, SOUND, DAMAGED)
            if (found != sums).any():
                raise damaged(self.path, name, int(np.flatnonzero(found != sums)[0]))
        return self

    def verify_block(self, name: str, block: int) -> None:
        """Compare one block with its checksum; see `verify`."""
        index = self.names.index(name)
        words = self.words[index][block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        sound = _block_sums(words)[0] == self.sums[index][block]
        self.state[index][block] = SOUND if sound else DAMAGED
        if not sound:
            raise damaged(self.path, name, block)

    def require_tokenizer(self, vocab_size: int, tokenizer_fingerprint: str) -> "Container":
        """Return the container if it speaks that vocabulary; an empty fingerprint compares sizes only."""
        if self.vocab_size != vocab_size:
            raise VocabMismatchError(
                f"{self.path} was built for {self.vocab_size} tokens, the target has {vocab_size}. "
                f"Build it again with the target's tokenizer."
            )
        if tokenizer_fingerprint and self.tokenizer_fingerprint not in ("", tokenizer_fingerprint):
            raise VocabMismatchError(
                f"{self.path} was built with tokenizer {self.tokenizer_fingerprint}, the target has "
                f"{tokenizer_fingerprint}. Build it again with the target's tokenizer."
            )
        return self


def damaged(path: Path, name: str, block: int) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: block {block} of {name!r} does not match its checksum. Build it again.")


def write_container(
    path: Path,
    kind: str,
    vocab_size: int,
    tokenizer_fingerprint: str,
    arrays: Sequence[tuple[str, np.ndarray]],
    options: Mapping[str, Any],
) -> None:
    """Write named one-dimensional arrays into one file, whole or not at all."""
    sums = [_block_sums(_as_words(array)) for _, array in arrays]
    joined = np.concatenate([*sums, np.empty(0, np.uint64)])
    header = json.dumps(
        {
            "kind": kind,
            "vocab_size": vocab_size,
            "tokenizer_fingerprint": tokenizer_fingerprint,
            "options": dict(options),
            "arrays": [[name, array.dtype.name, len(array)] for name, array in arrays],
            "sums": int(_block_sum_of(joined.tobytes())),
        }
    ).encode()
    with whole_file(path) as partial, partial.open("wb") as file:
        file.write(_PREFIX.pack(MAGIC, VERSION, len(header), _block_sum_of(header)))
        file.write(header)
        _pad(file, _ALIGN)
        file.write(joined.tobytes())
        for _, array in arrays:
            _pad(file, _ALIGN)
            file.write(np.ascontiguousarray(array).data)
        _pad(file, _ALIGN)


def open_container(path: Path, kind: str = "") -> Container:
    """Map a file, of any kind unless one is given; blocks are checked when first touched, or all by `.verify()`.

    Raises:
        CheckpointError: no such file, another kind, a newer version, truncated, or damaged in its header.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be opened as an n-gram file: {error}.") from error
    header, after = _read_header(path, data)
    try:
        container = _map_arrays(path, data, header, after)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a header that makes no sense ({error}). Build it again.") from error
    if kind not in ("", container.kind):
        raise CheckpointError(f"{path} holds a {container.kind!r}, not a {kind!r}.")
    return container


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{path} is no n-gram file of foredraft.")
    _, version, length, checksum = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version}; this foredraft reads {VERSION}. Build it again.")
    raw = data[_PREFIX.size : _PREFIX.size + length]
    if len(raw) != length or _block_sum_of(raw) != checksum:
        raise CheckpointError(f"{path} is damaged: its header does not match its checksum. Build it again.")
    try:
        return json.loads(raw), _PREFIX.size + length
    except ValueError as error:
        raise CheckpointError(f"{path} has a header that is no JSON ({error}). Build it again.") from error


def _map_arrays(path: Path, data: mmap.mmap, header: dict[str, Any], offset: int) -> Container:
    described = [(str(name), np.dtype(_known(dtype)), int(length)) for name, dtype, length in header["arrays"]]
    num_blocks = [-(-length * dtype.itemsize // BLOCK_BYTES) for _, dtype, length in described]
    offset = _aligned(offset)
    arrays, words = [], []
    at = offset + 8 * sum(num_blocks)
    for _, dtype, length in described:
        at = _aligned(at)
        end = at + length * dtype.itemsize
        if length < 0 or _aligned(end) > len(data):
            raise CheckpointError(f"{path} is truncated: {len(data)} bytes, its arrays need {_aligned(end)} or more.")
        arrays.append(np.frombuffer(data, dtype, length, at))
        words.append(np.frombuffer(data, np.uint64, -(-(end - at) // 8), at))
        at = end
    if _aligned(at) != len(data):
        raise CheckpointError(f"{path} has {len(data)} bytes, its arrays end at {_aligned(at)}: it was changed.")
    sums = np.frombuffer(data, np.uint64, sum(num_blocks), offset)
    if _block_sum_of(sums.tobytes()) != header["sums"]:
        raise CheckpointError(f"{path} is damaged: its checksums do not match their own. Build it again.")
    return Container(
        path,
        str(header["kind"]),
        int(header["vocab_size"]),
        str(header["tokenizer_fingerprint"]),
        dict(header["options"]),
        tuple(name for name, _, _ in described),
        tuple(arrays),
        tuple(words),
        tuple(np.split(sums, np.cumsum(num_blocks)[:-1])) if described else (),
        tuple(np.full(number, UNCHECKED, np.uint8) for number in num_blocks),
    )


_MULTIPLIERS = np.uint64(0xD1B54A32D192ED03) + np.arange(BLOCK_WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C16)


def _block_sums(words: Words) -> UInt64[np.ndarray, " blocks"]:
    """Return a checksum of each block: sum of mixed words, each times an odd number of its own, mod 2**64.

    A change inside one word always shows, any other with probability 1 - 2**-60 or so.
    """
    sums = np.empty(-(-len(words) // BLOCK_WORDS), dtype=np.uint64)
    for block in range(len(sums)):
        part = words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        sums[block] = ((part ^ (part >> np.uint64(32))) * _MULTIPLIERS[: len(part)]).sum()
    return sums


def _block_sum_of(data: bytes) -> int:
    """Return one checksum of any bytes, their length included; that of nothing is not 0."""
    words = np.frombuffer(data + bytes(-len(data) % 8) + (len(data) + 1).to_bytes(8, "little"), dtype=np.uint64)
    sums = _block_sums(words)
    return int(sums[0]) if len(sums) == 1 else _block_sum_of(sums.tobytes())


def _as_words(array: np.ndarray) -> Words:
    raw = np.ascontiguousarray(array).view(np.uint8)
    if len(raw) % 8:
        raw = np.concatenate([raw, np.zeros(-len(raw) % 8, dtype=np.uint8)])
    return raw.view(np.uint64)


def _known(dtype: Any) -> str:
    if dtype not in _DTYPES:
        raise ValueError(f"array type {dtype!r}")
    return dtype


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _pad(file: Any, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
