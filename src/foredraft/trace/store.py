"""What a target said, on disk: Parquet shards and a manifest that names them.

A shard is written whole before the manifest names it, and never changes afterwards. A reader therefore sees
a consistent trace at any moment, and a run that was killed goes on behind the last shard that was named.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from heapq import nsmallest
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from foredraft.core.digest import digest_of, file_digest
from foredraft.core.errors import OutputError, TraceError
from foredraft.core.files import whole_file, write_json
from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import Answer, Speaker
from foredraft.trace.rows import TraceRow, decode, decode_more, encode

MANIFEST = "manifest.json"
SCHEMA = 1
DECODED, LOGGED, TEXT, GATHERED = "decoded", "logged", "text", "gathered"


@dataclass(frozen=True, slots=True)
class Shard:
    """One Parquet file of a trace: its name, rows, answer tokens, and the SHA-256 of its bytes."""

    file: str
    rows: int
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What the manifest says of a trace.

    Attributes:
        target, target_fingerprint, tokenizer_fingerprint, vocab_size: Who spoke.
        dtype: What the target computed in, such as float32.
        law: The law that the answers were drawn from.
        stored_law: The law of top_ids, top_logprobs and tail_mass: `law`, or the plain law where `law` is greedy.
        top: Tokens kept for each position.
        max_new_tokens: Longest answer, in tokens.
        seed: What every row's own seed is derived from.
        prompts_digest: Identity of the prompts, their order included.
        batch_size: Prompts of one shard.
        shards: The finished shards, in order.
        complete: Whether all prompts were answered.
        provenance: "decoded" where the target wrote the answers for this trace, "logged" where it read again what
            it was said to have written before, "gathered" where they are the newest of what it served (trace.buffer),
            "text" where it read what others wrote: such a trace teaches, and scores nothing.
    """

    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    dtype: str
    law: SamplingLaw
    stored_law: SamplingLaw
    top: int
    max_new_tokens: int
    seed: int
    prompts_digest: str
    batch_size: int
    shards: tuple[Shard, ...] = ()
    complete: bool = False
    schema: int = SCHEMA
    provenance: str = DECODED

    @staticmethod
    def of(
        speaker: Speaker,
        law: SamplingLaw,
        top: int,
        batch_size: int,
        *,
        max_new_tokens: int = 0,
        seed: int = 0,
        prompts_digest: str = "",
        provenance: str = DECODED,
    ) -> "TraceInfo":
        """Return what the manifest of a new trace of a speaker's text under `law` says."""
        return TraceInfo(
            target=speaker.name,
            target_fingerprint=speaker.fingerprint,
            tokenizer_fingerprint=speaker.tokenizer_fingerprint,
            vocab_size=speaker.vocab_size,
            dtype=speaker.dtype,
            law=law,
            stored_law=law.stored,
            top=top,
            max_new_tokens=max_new_tokens,
            seed=seed,
            prompts_digest=prompts_digest,
            batch_size=batch_size,
            provenance=provenance,
        )

    @property
    def num_rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Number of answer tokens."""
        return sum(shard.tokens for shard in self.shards)


class Trace:
    """A trace as it was when it was opened; shards are read, and compared with their digests, when asked for."""

    def __init__(self, path: Path, info: TraceInfo) -> None:
        self.path = path
        self.info = info

    @property
    def digest(self) -> str:
        """Identity of the trace: everything its manifest says, the digests of its shards included."""
        return digest_of(asdict(self.info))

    def rows(self, tops: bool = True) -> Iterator[TraceRow]:
        """Yield the rows in order, one shard in memory at a time; see `shard`."""
        for index in range(len(self.info.shards)):
            yield from self.shard(index, tops)

    def shard(self, index: int, tops: bool = True) -> list[TraceRow]:
        """Return the rows of one shard. Without `tops` their top_ids and top_logprobs are [answer, 0], and cheap.

        Raises:
            TraceError: the file is missing, or is not what was written.
        """
        shard = self.info.shards[index]
        data = _bytes_of(self.path / shard.file, shard)
        return decode(data, tops)

    def more(self, index: int, name: str) -> list[Int[Tensor, " _"]]:
        """Return a further column of one shard, a list for each row; no lists where the trace has none.

        Raises:
            TraceError: as `shard`.
        """
        shard = self.info.shards[index]
        return decode_more(_bytes_of(self.path / shard.file, shard), name)

    def sample(self, count: int) -> list[TraceRow]:
        """Return up to `count` rows without tops, drawn by the hash of their ids: the same for every law."""
        return nsmallest(count, self.rows(tops=False), key=lambda row: digest_of(row.id))

    def answers(self) -> list[Answer]:
        """Return every answer with its prompt, tokens only."""
        return [row.answer() for row in self.rows(tops=False)]


class TraceWriter:
    """Appends whole shards to a trace; opened again after a kill, it goes on behind the last one."""

    def __init__(self, path: Path, info: TraceInfo) -> None:
        self._path = path
        self._info = info

    @staticmethod
    def open(path: Path, info: TraceInfo) -> "TraceWriter":
        """Start a trace in a new or empty folder, or go on with the one that is there.

        Args:
            path: Folder of the trace.
            info: What the trace is about; its shards and `complete` are those found on disk.

        Raises:
            OutputError: the folder holds something else.
            TraceError: the folder holds another trace, or a shard of it was changed.
        """
        if not (path / MANIFEST).exists():
            # A run that was killed before its first manifest leaves nothing but hidden partial files.
            if path.exists() and not (path.is_dir() and all(file.name.startswith(".") for file in path.iterdir())):
                raise OutputError(f"{path} holds something that is no trace, and is never overwritten: name another.")
            info = replace(info, shards=(), complete=False)
            _write_manifest(path, info)
            return TraceWriter(path, info)
        found = _read_manifest(path)
        if not found.shards and not found.complete:
            # A run that was refused before its first answer holds nothing that could be lost.
            info = replace(info, shards=(), complete=False)
            _write_manifest(path, info)
            return TraceWriter(path, info)
        _require_same_run(path, found, info)
        for shard in found.shards:
            _require_intact(path / shard.file, shard)
        return TraceWriter(path, found)

    @property
    def info(self) -> TraceInfo:
        """The manifest as it is on disk."""
        return self._info

    def append(self, rows: Sequence[TraceRow]) -> None:
        """Write one more shard; on return it is on disk and named."""
        self.put(encode(rows), rows)

    def put(self, data: bytes, rows: Sequence[TraceRow], instead_of: Sequence[Shard] = ()) -> None:
        """Write one more shard of these rows, encoded before; the shards that it stands for go."""
        if self._info.complete:
            raise TraceError(f"{self._path} is complete; collect more into another folder.")
        shards = self._info.shards
        name = f"shard-{int(shards[-1].file[6:-8]) + 1 if shards else 0:05d}.parquet"
        with whole_file(self._path / name) as partial:
            partial.write_bytes(data)
        tokens = sum(len(row.answer_ids) for row in rows)
        shard = Shard(name, len(rows), tokens, hashlib.sha256(data).hexdigest())
        kept = tuple(shard for shard in shards if shard not in instead_of)
        self._replace(replace(self._info, shards=(*kept, shard)))
        self._delete(instead_of)

    def drop(self, shards: Sequence[Shard]) -> None:
        """Name some shards no longer, and delete them."""
        self._replace(replace(self._info, shards=tuple(shard for shard in self._info.shards if shard not in shards)))
        self._delete(shards)

    def _delete(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            (self._path / shard.file).unlink(missing_ok=True)

    def finish(self) -> Trace:
        """Mark the trace complete and return it. Again on a complete one: changes nothing."""
        if not self._info.complete:
            self._replace(replace(self._info, complete=True))
        return Trace(self._path, self._info)

    def _replace(self, info: TraceInfo) -> None:
        _write_manifest(self._path, info)
        self._info = info


@dataclass(frozen=True, slots=True)
class Absent:
    """The target of a trace that is not here: what the manifest says of it. Implements core.protocols.Speaker."""

    name: str
    fingerprint: str
    dtype: str
    vocab_size: int
    tokenizer_fingerprint: str


def absent_target(traces: Sequence[Trace]) -> Absent:
    """Return who wrote the traces, which must be one target.

    Raises:
        TraceError: there is no trace, or two were written by different targets.
    """
    if not traces:
        raise TraceError("Name the target (--target), or a trace that says who wrote it (--trace).")
    first = traces[0].info
    for trace in traces[1:]:
        require_same(
            trace,
            f"the trace {traces[0].path}",
            target_fingerprint=first.target_fingerprint,
            tokenizer_fingerprint=first.tokenizer_fingerprint,
        )
    return Absent(first.target, first.target_fingerprint, first.dtype, first.vocab_size, first.tokenizer_fingerprint)


def open_trace(path: Path | str) -> Trace:
    """Return the trace in a folder, finished or still growing; growth after this call is not seen.

    Raises:
        TraceError: no trace is there, or of a newer schema.
    """
    return Trace(Path(path), _read_manifest(Path(path)))


def require_same(
    trace: Trace,
    other: str,
    *,
    target_fingerprint: str = "",
    tokenizer_fingerprint: str = "",
    law: SamplingLaw | None = None,
) -> None:
    """Raise unless the trace agrees with `other`, such as "the draft out/prefix-6"; what is left out is not compared.

    Raises:
        TraceError: names both values.
    """
    info = trace.info
    if law is not None and law != info.law:
        raise TraceError(
            f"{trace.path} was written under {info.law}, {other} asks for {law}: collect a trace under it."
        )
    if tokenizer_fingerprint not in ("", info.tokenizer_fingerprint):
        raise TraceError(
            f"{trace.path} was written with tokenizer {info.tokenizer_fingerprint}, {other} has "
            f"{tokenizer_fingerprint}: token ids mean other texts. Collect a trace from the target that it belongs to."
        )
    if target_fingerprint not in ("", info.target_fingerprint):
        raise TraceError(
            f"{trace.path} was written by {info.target} ({info.target_fingerprint}), {other} belongs to "
            f"{target_fingerprint}: collect a trace from that target."
        )


def require_written_by(trace: Trace, target: Speaker) -> None:
    """Raise unless that very target wrote the trace.

    Raises:
        TraceError: names both values.
    """
    require_same(
        trace, target.name, target_fingerprint=target.fingerprint, tokenizer_fingerprint=target.tokenizer_fingerprint
    )


def drawn_answers(traces: Sequence[Trace], count: int) -> list[Answer]:
    """Return as many answers as asked for, of every trace alike, drawn as `Trace.sample` draws, without empty ones.

    A trace begins with its shortest prompts, of few domains.
    """
    each = -(-count // max(len(traces), 1))
    return [row.answer() for trace in traces for row in trace.sample(each) if len(row.answer_ids)]


def _read_manifest(path: Path) -> TraceInfo:
    file = path / MANIFEST
    if not file.is_file():
        raise TraceError(f"{path} is no trace: it has no {MANIFEST}.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise TraceError(f"{file} has schema {data['schema']}; this version reads {SCHEMA}. Update foredraft.")
        data["law"], data["stored_law"] = SamplingLaw(**data["law"]), SamplingLaw(**data["stored_law"])
        data["shards"] = tuple(Shard(**shard) for shard in data["shards"])
        return TraceInfo(**data)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{file} cannot be read ({error}). Collect the trace again.") from error


def _write_manifest(path: Path, info: TraceInfo) -> None:
    data = asdict(info)
    write_json(path / MANIFEST, {"schema": data.pop("schema"), **data})


def _require_same_run(path: Path, found: TraceInfo, asked: TraceInfo) -> None:
    for field in fields(TraceInfo):
        there, here = getattr(found, field.name), getattr(asked, field.name)
        if field.name not in ("shards", "complete") and there != here:
            raise TraceError(
                f"{path} holds a trace with {field.name.replace('_', ' ')} {there}, asked for is {here}: "
                "name another folder, or delete this one."
            )


def _require_intact(file: Path, shard: Shard) -> None:
    if not file.is_file():
        raise TraceError(f"{file} is missing: the trace is incomplete. Delete its folder and collect it again.")
    if file_digest(file) != shard.sha256:
        raise _changed(file)


def _bytes_of(file: Path, shard: Shard) -> bytes:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise TraceError(f"{file} is missing: the trace is incomplete. Collect it again.") from None
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise _changed(file)
    return data


def _changed(file: Path) -> TraceError:
    return TraceError(f"{file} is not what was written: it was cut short or changed. Collect the trace again.")
