"""The metadata of a GGUF file and the shapes of its tensors, without its weights.

The gguf package makes an array of each string: seconds for a vocabulary, where this takes a tenth of one.

Source: the GGUF specification, versions 2 and 3, little-endian (ggml repository, docs/gguf.md).
"""

import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, final

from foredraft.core.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the metadata by key, and the shape of each tensor as torch counts it, outermost first.

    Raises:
        ModelError: it is no GGUF file, or is cut short.
    """
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return _read(_Cursor(data))
    except (OSError, ValueError, KeyError, struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise ModelError(f"{path} is no GGUF file, or is cut short: {error}. Download it again.") from error


def _read(cursor: "_Cursor") -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not start with GGUF")
    if (version := cursor.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version} is not read")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    fields = {}
    for _ in range(num_fields):
        key = cursor.string()
        fields[key] = cursor.value(cursor.number("I"))
    shapes = {}
    for _ in range(num_tensors):
        name = cursor.string()
        sizes = cursor.numbers("Q", cursor.number("I"))
        cursor.take(12)  # type and offset
        shapes[name] = tuple(int(size) for size in reversed(sizes))
    return fields, shapes


@final
class _Cursor:
    """Reads on from where it stands."""

    def __init__(self, data: mmap) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError("it ends in the middle of its header")
        part = self._data[self._at : end]
        self._at = end
        return part

    def numbers(self, code: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            return self.numbers(_NUMBERS[inner], count)
        return [self.value(inner) for _ in range(count)]
