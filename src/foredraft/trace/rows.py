"""The rows of a trace, and their form in Parquet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.protocols import Answer, Continuation, Reading

_COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("tail_mass", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("top_ids", pa.list_(pa.list_(pa.int32()))),
        ("top_logprobs", pa.list_(pa.list_(pa.float16()))),
    ]
)
_TOPS = ("top_ids", "top_logprobs")
# Bytes of equal weight lie together, so that zstd finds the zeros of small ids and the repeats of exponents.
_ENCODINGS = {f"{name}.list.element.list.element": "BYTE_STREAM_SPLIT" for name in _TOPS}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One answer of the target.

    Attributes:
        id: Unique in the trace.
        prompt_id: The prompt it answers; turns of one conversation share it, and a bootstrap resamples it.
        prompt_ids, answer_ids: int64; the answer includes the stop token if there was one.
        logprobs: float32, log target(token) under the trace's law (0 for greedy).
        top_ids, top_logprobs: int32 and float16, as stored; the most probable tokens of the stored law.
        tail_mass: float32, the stored law's mass outside top_ids, in [0, 1].
        finish_reason: "stop" or "length".
    """

    id: str
    prompt_id: str
    domain: str
    prompt_ids: Int[Tensor, " prompt"]
    answer_ids: Int[Tensor, " answer"]
    logprobs: Float[Tensor, " answer"]
    top_ids: Int[Tensor, "answer top"]
    top_logprobs: Float[Tensor, "answer top"]
    tail_mass: Float[Tensor, " answer"]
    finish_reason: str

    @staticmethod
    def of(
        said: Continuation | Reading,
        *,
        id: str,
        prompt_id: str,
        domain: str,
        prompt_ids: Int[Tensor, " prompt"],
        answer_ids: Int[Tensor, " answer"],
        finish_reason: str,
    ) -> "TraceRow":
        """Return a row with what a target said of each answer token, in the types that are stored."""
        return TraceRow(
            id=id,
            prompt_id=prompt_id,
            domain=domain,
            prompt_ids=prompt_ids,
            answer_ids=answer_ids,
            logprobs=said.logprobs.float(),
            top_ids=said.top_ids.int(),
            top_logprobs=said.top_logprobs.half(),
            tail_mass=said.tail_mass.float(),
            finish_reason=finish_reason,
        )

    def answer(self) -> Answer:
        """Return prompt and answer as one sequence."""
        return Answer(torch.cat((self.prompt_ids, self.answer_ids)), len(self.prompt_ids))


def unread(token_ids: Int[Tensor, " tokens"]) -> Continuation:
    """Return text of which no target has said anything yet: all mass is in the tail of a law without tops."""
    count = len(token_ids)
    nothing = torch.empty(count, 0)
    return Continuation(token_ids, torch.zeros(count), nothing.long(), nothing, torch.ones(count), "length")


def encode(rows: Sequence[TraceRow], **more: Sequence[Int[Tensor, " _"]]) -> bytes:
    """Return one Parquet file; the same rows give the same bytes.

    Args:
        more: Further columns, a list of integers for each row; `decode` leaves them alone.
    """
    table, sink = _table(rows), pa.BufferOutputStream()
    for name, lists in more.items():
        column = _list_array([len(one) for one in lists], lists, pa.list_(pa.int32()))
        table = table.append_column(name, column)
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, column_encoding=_ENCODINGS)
    return sink.getvalue().to_pybytes()


def decode_more(data: bytes, name: str) -> list[Int[Tensor, " _"]]:
    """Return a further column that `encode` wrote; no lists where the file has no such column."""
    file = pq.ParquetFile(pa.BufferReader(data))
    if name not in file.schema_arrow.names:
        return []
    return [one.long() for one in _pieces(file.read(columns=[name]).column(name).combine_chunks())]


def decode(data: bytes, tops: bool = True) -> list[TraceRow]:
    """Return the rows of one Parquet file. Without `tops` top_ids and top_logprobs are [answer, 0], and cheap."""
    columns = [name for name in _COLUMNS.names if tops or name not in _TOPS]
    return _rows(pq.read_table(pa.BufferReader(data), columns=columns))


def _table(rows: Sequence[TraceRow]) -> pa.Table:
    def texts(name: str) -> pa.Array:
        return pa.array([getattr(row, name) for row in rows], pa.string())

    def lists(name: str) -> pa.Array:
        arrays = [getattr(row, name) for row in rows]
        kind = _COLUMNS.field(name).type
        if pa.types.is_list(kind.value_type):
            widths = np.concatenate([np.full(array.shape[0], array.shape[1]) for array in arrays])
            values = _list_array(widths, [array.flatten() for array in arrays], kind.value_type)
            return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), values)
        return _list_array([len(array) for array in arrays], arrays, kind)

    columns = [(lists if pa.types.is_list(field.type) else texts)(field.name) for field in _COLUMNS]
    return pa.Table.from_arrays(columns, schema=_COLUMNS)


def _list_array(lengths: Any, arrays: Sequence[Tensor], kind: pa.ListType) -> pa.ListArray:
    flat = torch.cat([array.cpu() for array in arrays]).numpy().astype(kind.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(flat, kind.value_type))


def _offsets(lengths: Any) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())


def _rows(table: pa.Table) -> list[TraceRow]:
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    tokens = _pieces(columns["answer_ids"])

    def tops(name: str, empty: torch.dtype) -> list[Tensor]:
        if name not in columns:
            return [torch.empty(len(ids), 0, dtype=empty) for ids in tokens]
        return _matrices(columns[name])

    return [
        TraceRow(*values)
        for values in zip(
            columns["id"].to_pylist(),
            columns["prompt_id"].to_pylist(),
            columns["domain"].to_pylist(),
            [ids.long() for ids in _pieces(columns["prompt_ids"])],
            [ids.long() for ids in tokens],
            _pieces(columns["logprobs"]),
            tops("top_ids", torch.int32),
            tops("top_logprobs", torch.float16),
            _pieces(columns["tail_mass"]),
            columns["finish_reason"].to_pylist(),
            strict=True,
        )
    ]


def _pieces(column: pa.ListArray) -> list[Tensor]:
    offsets = column.offsets.to_numpy()
    flat = torch.from_numpy(column.values.to_numpy(zero_copy_only=False).copy())
    return [flat[start:end] for start, end in pairwise(offsets)]


def _matrices(column: pa.ListArray) -> list[Tensor]:
    rows, positions = column.offsets.to_numpy(), column.values.offsets.to_numpy()
    flat = torch.from_numpy(column.values.values.to_numpy(zero_copy_only=False).copy())
    return [
        flat[positions[start] : positions[end]].reshape(end - start, -1) if end > start else flat[:0].reshape(0, 0)
        for start, end in pairwise(rows)
    ]
