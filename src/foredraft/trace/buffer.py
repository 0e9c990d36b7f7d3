"""What was served lately, bounded in bytes: the newest answers, with the target's law and the draft's tokens.

On disk a buffer is a trace: whatever reads traces reads it. A further column holds the draft's tokens.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import Speaker
from foredraft.trace.rows import TraceRow, encode
from foredraft.trace.store import GATHERED, Shard, Trace, TraceInfo, TraceWriter

UNTESTED = -1
_COLUMN = "guess_ids"
_ROWS = 32
_SHARDS = 8
_SMALL = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gathered:
    """One answer as it was served.

    Attributes:
        row: Context, answer, and the target's law at each of its tokens.
        guess_ids: The draft's token tested at each answer token, UNTESTED where there was none.
    """

    row: TraceRow
    guess_ids: Int[Tensor, " answer"]

    @property
    def examined(self) -> int:
        """Draft tokens tested."""
        return int((self.guess_ids != UNTESTED).sum())

    @property
    def accepted(self) -> int:
        """Draft tokens that the answer took over."""
        return int((self.guess_ids == self.row.answer_ids).sum())

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        row = self.row
        held = (row.prompt_ids, row.answer_ids, row.logprobs, row.top_ids, row.top_logprobs, row.tail_mass)
        return sum(tensor.numel() * tensor.element_size() for tensor in (*held, self.guess_ids))


@runtime_checkable
class Buffer(Protocol):
    """Keeps the newest answers and forgets the oldest."""

    @property
    def info(self) -> TraceInfo:
        """Who speaks, under which law, and how many tokens of it are kept."""

    def add(self, answers: Sequence[Gathered]) -> None:
        """Keep more answers, numbered on in the ids of their rows."""

    def gathered(self) -> Iterator[Gathered]:
        """Yield what is kept, oldest first."""


def buffer_info(target: Speaker, law: SamplingLaw, top: int) -> TraceInfo:
    """Return what a buffer of a target's answers under `law` says of itself."""
    return TraceInfo.of(target, law, top, _ROWS, provenance=GATHERED)


@final
class MemoryBuffer:
    """A buffer that is gone with the process: nothing of what it holds is written anywhere."""

    def __init__(self, info: TraceInfo, max_bytes: int) -> None:
        """Hold at most `max_bytes` of tensors."""
        self._info = info
        self._max_bytes = max_bytes
        self._kept: deque[Gathered] = deque()
        self._bytes = self._next = 0

    @property
    def info(self) -> TraceInfo:
        return self._info

    def add(self, answers: Sequence[Gathered]) -> None:
        for answer in _numbered(answers, self._next):
            self._kept.append(answer)
            self._bytes += answer.num_bytes
        self._next += len(answers)
        while self._bytes > self._max_bytes:
            self._bytes -= self._kept.popleft().num_bytes

    def gathered(self) -> Iterator[Gathered]:
        yield from self._kept


@final
class BufferFolder:
    """A buffer on disk. One process writes it at a time; what was added is there after a kill."""

    def __init__(self, path: Path, writer: TraceWriter, max_bytes: int) -> None:
        """See `open`."""
        self._path = path
        self._writer = writer
        self._max_bytes = max_bytes

    @staticmethod
    def open(path: Path, info: TraceInfo, max_bytes: int) -> "BufferFolder":
        """Start a buffer in a new or empty folder, or go on with the one that is there.

        Args:
            max_bytes: Most bytes of its shards together, but for the moment in which one takes the place of another;
                the manifest comes on top, 200 bytes a shard.

        Raises:
            OutputError: the folder holds something else.
            TraceError: it holds a trace, or a buffer of another target or law.
            UserError: the bound is not above 0.
        """
        if max_bytes < 1:
            raise UserError(f"A buffer needs room: {max_bytes} bytes are none.")
        folder = BufferFolder(path, TraceWriter.open(path, info), max_bytes)
        named = {shard.file for shard in folder.info.shards}
        for file in path.glob("shard-*.parquet"):
            if file.name not in named:  # a kill came between forgetting it and deleting it
                file.unlink()
        folder._make_room(0)
        return folder

    @property
    def info(self) -> TraceInfo:
        return self._writer.info

    def add(self, answers: Sequence[Gathered]) -> None:
        """Write answers down; the oldest ones go where there is no room, a shard at a time.

        The last shard is written again with the new answers until it is full.
        """
        tail = self.info.shards[-1:]
        if tail and (tail[0].rows >= _ROWS or self._size(tail[0]) > self._max_bytes // (2 * _SHARDS)):
            tail = ()
        last = _of_shard(self._trace, len(self.info.shards) - 1) if self.info.shards else []
        first = int(last[-1].row.id.rpartition("#")[2]) + 1 if last else 0
        waiting = [*(last if tail else ()), *_numbered(answers, first)]
        parts = [
            part for start in range(0, len(waiting), _ROWS) for part in self._parts(waiting[start : start + _ROWS])
        ]
        for number, (data, part) in enumerate(parts):
            replaced = tail if number == 0 else ()
            self._make_room(len(data), replaced)
            self._writer.put(data, [answer.row for answer in part], replaced)

    def gathered(self) -> Iterator[Gathered]:
        return read_gathered(self._trace)

    @property
    def _trace(self) -> Trace:
        return Trace(self._path, self.info)

    def _parts(self, answers: Sequence[Gathered]) -> list[tuple[bytes, Sequence[Gathered]]]:
        """Return shards that are small beside the whole, so that forgetting one forgets little."""
        data = encode([answer.row for answer in answers], **{_COLUMN: [answer.guess_ids for answer in answers]})
        if len(answers) > 1 and len(data) > min(self._max_bytes, max(_SMALL, self._max_bytes // _SHARDS)):
            half = len(answers) // 2
            return [*self._parts(answers[:half]), *self._parts(answers[half:])]
        if len(data) > self._max_bytes:
            _log.warning("An answer takes %d bytes, the buffer %d: it is not kept.", len(data), self._max_bytes)
            return []
        return [(data, answers)]

    def _make_room(self, num_bytes: int, replaced: Sequence[Shard] = ()) -> None:
        shards = [shard for shard in self.info.shards if shard not in replaced]
        total = num_bytes + sum(map(self._size, shards))
        forgotten = []
        while total > self._max_bytes:
            forgotten.append(shards.pop(0))
            total -= self._size(forgotten[-1])
        if forgotten:
            self._writer.drop(forgotten)

    def _size(self, shard: Shard) -> int:
        return (self._path / shard.file).stat().st_size


def read_gathered(trace: Trace) -> Iterator[Gathered]:
    """Yield the answers of a buffer's trace, or of any other: its draft tokens are untested then."""
    for index in range(len(trace.info.shards)):
        yield from _of_shard(trace, index)


def _numbered(answers: Sequence[Gathered], first: int) -> list[Gathered]:
    return [
        replace(answer, row=replace(answer.row, id=f"{answer.row.prompt_id}#{number}"))
        for number, answer in enumerate(answers, first)
    ]


def _of_shard(trace: Trace, index: int) -> list[Gathered]:
    rows, guesses = trace.shard(index), trace.more(index, _COLUMN)
    if not guesses:
        guesses = [row.answer_ids.new_full(row.answer_ids.shape, UNTESTED) for row in rows]
    return [Gathered(*pair) for pair in zip(rows, guesses, strict=True)]
