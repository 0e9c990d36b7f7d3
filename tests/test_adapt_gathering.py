"""Gathering while decoding: what is kept is what the target wrote and said, bounded in bytes, whole after a kill."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.core.errors import OutputError, TraceError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import Answer
from foredraft.drafters import load_drafter
from foredraft.generation import Asked, answer
from foredraft.models.target import LocalTarget, load_target
from foredraft.settings import DecodeSettings
from foredraft.trace.buffer import UNTESTED, BufferFolder, Gathered, MemoryBuffer, buffer_info, read_gathered
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import MANIFEST, open_trace
from tests.traces import folder, trace_row

TOP = 5


@pytest.fixture(scope="module")
def target(shallow_target_folder: Path) -> LocalTarget:
    return load_target(str(shallow_target_folder), "float32")


def served(target: LocalTarget, spec: str, law: SamplingLaw, **settings: object) -> list[Gathered]:
    buffer = MemoryBuffer(buffer_info(target, law, TOP), 1 << 30)
    prompts = [Prompt(text, f"of {text}", ({"role": "user", "content": text},)) for text in ("one", "two", "three")]
    drafter = load_drafter(spec, target) if spec else None
    texts = list(answer(target, drafter, prompts, Asked(law, 11), DecodeSettings(**settings), buffer))
    found = list(buffer.gathered())
    assert [target.tokenizer.decode(one.row.answer_ids, skip_special_tokens=True) for one in found] == [
        text.text for text in texts
    ]
    assert [one.row.domain for one in found] == ["of one", "of two", "of three"]
    return found


@pytest.mark.parametrize(
    "law", [GREEDY, SamplingLaw(), pytest.param(SamplingLaw(0.7, top_k=20), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    ("wrap", "settings"),
    [("", {}), ("", {"batch_size": 3}), ("", {"rule": "block"}), ("+tree:max_nodes=6,width=2", {"k": 3})],
    ids=["chain", "batch", "block", "tree"],
)
def test_gathered_laws_are_those_of_a_teacher_forced_reading(
    wrap: str, settings: dict[str, object], law: SamplingLaw, target: LocalTarget, tiny_draft_folder: Path
) -> None:
    if law.top_k and settings:
        pytest.skip("one way of drafting under a cut law is enough")
    found = served(target, f"{tiny_draft_folder}{wrap}", law, **settings)
    texts = [Answer(torch.cat([one.row.prompt_ids, one.row.answer_ids]), len(one.row.prompt_ids)) for one in found]
    for one, reading in zip(found, target.read(texts, law, TOP, lambda tokens: None), strict=True):
        torch.testing.assert_close(one.row.logprobs, reading.logprobs.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.row.tail_mass, reading.tail_mass.float(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.row.top_logprobs.float(), reading.top_logprobs.float(), rtol=2e-3, atol=2e-3)
        same = (one.row.top_ids == reading.top_ids).float().mean()
        assert same > 0.95  # equal but for ties


def test_accepted_guesses_are_the_answer_and_rejected_ones_are_not(
    target: LocalTarget, tiny_draft_folder: Path
) -> None:
    found = served(target, str(tiny_draft_folder), SamplingLaw(), k=2)
    examined, accepted = sum(one.examined for one in found), sum(one.accepted for one in found)
    assert 0 < accepted < examined
    for one in served(target, "", GREEDY):
        assert bool((one.guess_ids == UNTESTED).all())
    (_, _, perfect) = served(target, str(target.path), GREEDY, k=2)
    bonus = perfect.guess_ids == UNTESTED
    assert torch.equal(perfect.guess_ids[~bonus], perfect.row.answer_ids[~bonus])
    assert bonus.nonzero().flatten().tolist() == [2, 5, 8]


def some(count: int, start: int = 0) -> list[Gathered]:
    rows = [trace_row(f"p{index}", [index % 200 + 3], [7, 8, index % 200 + 3]) for index in range(start, start + count)]
    return [Gathered(row, torch.tensor([UNTESTED, 8, 9])) for row in rows]


def numbers(answers: Iterator[Gathered]) -> list[int]:
    return [int(one.row.id.rpartition("#")[2]) for one in answers]


def test_a_buffer_on_disk_is_a_trace_and_keeps_the_drafts_tokens(target: LocalTarget, tmp_path: Path) -> None:
    info = buffer_info(target, GREEDY, 4)
    BufferFolder.open(tmp_path / "b", info, 1 << 20).add(some(20))
    BufferFolder.open(tmp_path / "b", info, 1 << 20).add(some(30, 20))
    trace = open_trace(tmp_path / "b")
    assert [row.prompt_id for row in trace.rows()] == [f"p{index}" for index in range(50)]
    assert [shard.rows for shard in trace.info.shards] == [32, 18]
    for written, found in zip(some(50), read_gathered(trace), strict=True):
        assert torch.equal(found.guess_ids, written.guess_ids)
        assert torch.equal(found.row.top_ids, written.row.top_ids)
    assert numbers(read_gathered(trace)) == list(range(50))


@pytest.mark.parametrize("max_bytes", [20_000, 500_000])
def test_a_full_buffer_forgets_the_oldest_and_stays_within_its_bytes(
    max_bytes: int, target: LocalTarget, tmp_path: Path
) -> None:
    buffer = BufferFolder.open(tmp_path / "b", buffer_info(target, GREEDY, 4), max_bytes)
    for start in range(0, 150, 25):
        buffer.add(some(25, start))
        held = {name: len(data) for name, data in folder(tmp_path / "b").items() if name != MANIFEST}
        assert sum(held.values()) <= max_bytes
        kept = numbers(buffer.gathered())
        assert kept == list(range(start + 25 - len(kept), start + 25))
        assert set(held) == {shard.file for shard in buffer.info.shards}
    assert len(kept) >= 25
    assert (len(kept) == 150) == (max_bytes == 500_000)


def test_a_buffer_in_memory_forgets_the_oldest(target: LocalTarget) -> None:
    size = some(1)[0].num_bytes
    buffer = MemoryBuffer(buffer_info(target, GREEDY, 4), 5 * size)
    buffer.add(some(4))
    buffer.add(some(4, 4))
    assert numbers(buffer.gathered()) == [3, 4, 5, 6, 7]


def test_an_answer_that_is_larger_than_the_buffer_is_not_kept(
    target: LocalTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = BufferFolder.open(tmp_path / "b", buffer_info(target, GREEDY, 4), 100)
    buffer.add(some(1))
    assert list(buffer.gathered()) == []
    assert "it is not kept" in caplog.text


def test_what_a_kill_left_behind_is_cleared_and_other_folders_are_refused(target: LocalTarget, tmp_path: Path) -> None:
    info = buffer_info(target, GREEDY, 4)
    BufferFolder.open(tmp_path / "b", info, 1 << 20).add(some(3))
    orphan = tmp_path / "b" / "shard-00099.parquet"
    orphan.write_bytes(b"half")
    assert numbers(BufferFolder.open(tmp_path / "b", info, 1 << 20).gathered()) == [0, 1, 2]
    assert not orphan.exists()
    with pytest.raises(TraceError, match="with law T=0, asked for is T=1"):
        BufferFolder.open(tmp_path / "b", buffer_info(target, SamplingLaw(), 4), 1 << 20)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(OutputError, match="no trace"):
        BufferFolder.open(tmp_path / "notes", info, 1 << 20)


def test_the_command_gathers_and_goes_on_gathering(
    target: LocalTarget, tiny_draft_folder: Path, tmp_path: Path
) -> None:
    command = ["generate", "--target", str(target.path), "--drafter", str(tiny_draft_folder), "--dtype", "float32",
               "--max-new-tokens", "6", "--gather", str(tmp_path / "b")]  # fmt: skip
    for said in ("one", "two", "one"):
        result = CliRunner().invoke(app, [*command, said])
        assert result.exit_code == 0, result.output
    found = list(read_gathered(open_trace(tmp_path / "b")))
    assert len(found) == 3
    assert found[0].row.prompt_id == found[2].row.prompt_id != found[1].row.prompt_id
    assert all(len(one.row.answer_ids) == 6 and one.examined for one in found)
