"""The trace on disk: what is read is what was written, or an error."""

import os
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch

from foredraft.core.errors import OutputError, TraceError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import MANIFEST, Trace, TraceWriter, open_trace, require_same
from tests.traces import build_trace, folder, trace_info, trace_row


def random_rows(count: int, seed: int = 0, top: int = 4) -> list[TraceRow]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(1, 9, (1,), generator=generator))
        answer = torch.randint(0, 272, (length,), generator=generator).tolist()
        law = torch.rand(length, 272, generator=generator).softmax(1)
        prompt = torch.randint(0, 272, (1 + index % 5,), generator=generator).tolist()
        rows.append(trace_row(f"row-{index}", prompt, answer, law, top, greedy=False, domain="dé"))
    return rows


def same(left: TraceRow, right: TraceRow) -> bool:
    for name in TraceRow.__slots__:
        one, two = getattr(left, name), getattr(right, name)
        if not (torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, torch.Tensor) else one == two):
            return False
    return True


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    rows = random_rows(11)
    build_trace(tmp_path / "t", rows, SamplingLaw(0.7, 50, 0.9))
    trace = open_trace(tmp_path / "t")
    back = list(trace.rows())
    assert all(same(one, two) for one, two in zip(rows, back, strict=True))
    assert trace.info.complete
    assert [shard.rows for shard in trace.info.shards] == [4, 4, 3]
    assert trace.info.num_rows == 11
    assert trace.info.num_tokens == sum(len(row.answer_ids) for row in rows)
    assert trace.info.law == SamplingLaw(0.7, 50, 0.9)


def test_answers_and_rows_without_tops_hold_the_same_tokens(tmp_path: Path) -> None:
    rows = random_rows(6)
    trace = build_trace(tmp_path / "t", rows)
    for row, cheap, answer in zip(rows, trace.rows(tops=False), trace.answers(), strict=True):
        assert cheap.top_ids.shape == cheap.top_logprobs.shape == (len(row.answer_ids), 0)
        assert torch.equal(cheap.logprobs, row.logprobs)
        assert answer.start == len(row.prompt_ids)
        assert answer.token_ids.tolist() == [*row.prompt_ids.tolist(), *row.answer_ids.tolist()]


def test_a_sample_depends_on_ids_only(tmp_path: Path) -> None:
    rows = random_rows(11)
    one = build_trace(tmp_path / "a", rows).sample(4)
    two = build_trace(tmp_path / "b", rows[::-1], batch_size=2).sample(4)
    assert [row.id for row in one] == [row.id for row in two]
    assert len({row.id for row in one}) == 4
    assert {row.id for row in build_trace(tmp_path / "c", rows).sample(99)} == {row.id for row in rows}


def test_same_rows_same_bytes_same_digest(tmp_path: Path) -> None:
    one, two = (build_trace(tmp_path / name, random_rows(9)) for name in ("a", "b"))
    assert one.digest == two.digest
    assert folder(tmp_path / "a") == folder(tmp_path / "b")
    assert build_trace(tmp_path / "c", random_rows(9, seed=1)).digest != one.digest


def test_loads_with_datasets(tmp_path: Path) -> None:
    rows = random_rows(9)
    build_trace(tmp_path / "t", rows)
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "t" / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.num_rows == 9
    for row, found in zip(rows, loaded, strict=True):
        assert found["id"] == row.id
        assert found["answer_ids"] == row.answer_ids.tolist()
        assert found["top_ids"] == row.top_ids.tolist()
        assert torch.equal(torch.tensor(found["top_logprobs"]).half(), row.top_logprobs)


def test_top_costs_few_bytes_a_token(tmp_path: Path) -> None:
    top = 64
    rows = [
        trace_row(f"{i}", [1, 2], range(128), torch.rand(128, 272).pow(8).softmax(1), top, greedy=False)
        for i in range(4)
    ]
    trace = build_trace(tmp_path / "t", rows, top=top)
    bytes_on_disk = (tmp_path / "t" / trace.info.shards[0].file).stat().st_size
    assert bytes_on_disk / trace.info.num_tokens < 5 * top


@pytest.mark.parametrize("damage", ["cut", "flipped", "grown", "missing", "swapped"])
def test_a_damaged_shard_is_an_error_for_reader_and_writer(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t"
    trace = build_trace(path, random_rows(8))
    file = path / trace.info.shards[1].file
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "swapped":
        file.write_bytes((path / trace.info.shards[0].file).read_bytes())
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        file.write_bytes({"cut": data[:-1], "flipped": flipped, "grown": data + b"\0"}[damage])
    message = "shard-00001.parquet is (missing|not what was written)"
    with pytest.raises(TraceError, match=message):
        list(open_trace(path).rows())
    with pytest.raises(TraceError, match=message):
        open_trace(path).answers()
    with pytest.raises(TraceError, match=message):
        TraceWriter.open(path, trace.info)


def test_manifest_faults_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"is no trace: it has no manifest\.json"):
        open_trace(tmp_path)
    build_trace(tmp_path / "t", random_rows(2))
    manifest = tmp_path / "t" / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace('"schema": 1', '"schema": 2'))
    with pytest.raises(TraceError, match="has schema 2; this version reads 1"):
        open_trace(tmp_path / "t")
    for broken in (text[:-20], text.replace('"law"', '"lore"'), "[]", text.replace('"top": 4', '"tip": 4')):
        manifest.write_text(broken)
        with pytest.raises(TraceError, match="cannot be read"):
            open_trace(tmp_path / "t")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds something that is no trace"):
        TraceWriter.open(tmp_path, trace_info())
    assert folder(tmp_path) == {"notes.txt": b"mine"}


def test_going_on_appends_behind_what_is_there(tmp_path: Path) -> None:
    rows = random_rows(8)
    TraceWriter.open(tmp_path / "a", trace_info()).append(rows[:4])
    assert not open_trace(tmp_path / "a").info.complete
    again = TraceWriter.open(tmp_path / "a", trace_info())
    assert len(again.info.shards) == 1
    again.append(rows[4:])
    again.finish()
    build_trace(tmp_path / "b", rows)
    assert folder(tmp_path / "a") == folder(tmp_path / "b")
    with pytest.raises(TraceError, match="is complete"):
        again.append(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"law": SamplingLaw()}, "law T=0, asked for is T=1"),
        ({"seed": 3}, "seed 0, asked for is 3"),
        ({"top": 9}, "top 4, asked for is 9"),
        ({"max_new_tokens": 9}, "max new tokens 16, asked for is 9"),
        ({"prompts_digest": "q"}, "prompts digest p+, asked for is q"),
        ({"target_fingerprint": "g"}, "target fingerprint f+, asked for is g"),
        ({"batch_size": 5}, "batch size 4, asked for is 5"),
    ],
)
def test_going_on_with_another_trace_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    TraceWriter.open(tmp_path / "t", trace_info()).append(random_rows(4))
    before = folder(tmp_path / "t")
    with pytest.raises(TraceError, match=message):
        TraceWriter.open(tmp_path / "t", replace(trace_info(), **change))
    assert folder(tmp_path / "t") == before


def test_require_same_names_both_values(tmp_path: Path) -> None:
    trace = build_trace(tmp_path / "t", random_rows(2))
    require_same(trace, "the draft d")
    require_same(trace, "d", target_fingerprint="f" * 16, tokenizer_fingerprint="t" * 16, law=GREEDY)
    with pytest.raises(TraceError, match=r"written under T=0, the draft d asks for T=0.5"):
        require_same(trace, "the draft d", law=SamplingLaw(0.5))
    with pytest.raises(TraceError, match=r"written by tiny \(f{16}\), the draft d belongs to abc"):
        require_same(trace, "the draft d", target_fingerprint="abc")
    with pytest.raises(TraceError, match=r"tokenizer t{16}, the draft d has abc"):
        require_same(trace, "the draft d", tokenizer_fingerprint="abc")


def test_a_trace_opened_early_stays_as_it_was(tmp_path: Path) -> None:
    rows = random_rows(8)
    writer = TraceWriter.open(tmp_path / "t", trace_info())
    writer.append(rows[:4])
    early = open_trace(tmp_path / "t")
    writer.append(rows[4:])
    assert len(list(early.rows())) == 4
    assert len(list(open_trace(tmp_path / "t").rows())) == 8


def test_an_empty_folder_and_leftovers_of_a_kill_are_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / f".{MANIFEST}.partial").write_text("half")
    TraceWriter.open(tmp_path, trace_info()).finish()
    assert os.listdir(tmp_path) == [MANIFEST]
    assert isinstance(open_trace(tmp_path), Trace)
