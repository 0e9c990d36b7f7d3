"""Files are whole or absent; the workspace never overwrites; checkpoints know their files."""

import errno
import json
import signal
import subprocess
import sys
from contextvars import Context
from pathlib import Path

import pytest
from safetensors import SafetensorError

from foredraft.checkpoint import DraftManifest, read_manifest, record_measurement, verify_draft, write_draft
from foredraft.core.errors import CheckpointError, OutputError
from foredraft.core.files import claimed, whole_file, whole_folder, write_json
from foredraft.workspace import Workspace

MANIFEST = DraftManifest("ngram", 100, "target", "t1", "k1", options={"order": 3})


def fill(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"abc")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(RuntimeError), whole_file(file) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert json.loads(file.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "out") as partial:
        fill(partial)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on the disk while writing"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on the disk while"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "No space left on the disk while writing"),
        (OSError(errno.EFBIG, "File too large"), "out cannot be written: File too large"),
        (Exception("No space left on device (os error 28)"), "No space left on the disk while writing"),  # tokenizers
        (OSError("100000 requested and 16384 written"), "No space left on the disk while writing"),  # numpy
    ],
)
def test_a_full_disk_is_named(tmp_path: Path, error: Exception, message: str) -> None:
    for writer in (whole_folder, whole_file):
        with pytest.raises(OutputError, match=message), writer(tmp_path / "out"):
            raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file/out", "file/out cannot be written: File exists. Name another folder"),
        ("o" * 300, "o cannot be written: File name too long. Name another folder"),
        ("link", "link exists already and is never overwritten"),
    ],
)
def test_a_path_that_can_be_no_folder_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(OutputError, match=message), whole_folder(tmp_path / name):
        pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "link"]


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OutputError, match=r"a.json cannot be written: Read-only"), whole_file(tmp_path / "a.json"):
        refuse()


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("foredraft.core.files.fcntl.flock", refuse)
    with whole_folder(tmp_path / "out") as partial:
        fill(partial)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_what_is_claimed_is_written_by_nobody_else(tmp_path: Path) -> None:
    """A fresh context is what another thread or process is: it holds no claim."""

    def write(path: Path) -> None:
        with whole_folder(path) as partial:
            fill(partial)

    with claimed(tmp_path / "out"):
        with pytest.raises(OutputError, match="is being written by another process"):
            Context().run(write, tmp_path / "out")
        write(tmp_path / "other")
        write(tmp_path / "out")
    with pytest.raises(OutputError, match="exists already"), claimed(tmp_path / "out"):
        pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "out"]


def test_the_claim_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from foredraft.core.files import claimed\n"
        "with claimed(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".out.lock").exists()
    with claimed(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match="exists already"), whole_folder(tmp_path / "out") as partial:
        fill(partial)
    with pytest.raises(OutputError, match="holds something"):
        Workspace.open(tmp_path / "out")
    with pytest.raises(OutputError, match="is a file"):
        Workspace.open(tmp_path / "out" / "thesis.txt")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_a_stage_runs_once_and_is_remembered(tmp_path: Path) -> None:
    workspace, calls = Workspace.open(tmp_path / "run"), []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_text("done")

    for _ in range(2):
        Workspace.open(tmp_path / "run").stage("step", "k1", workspace.root / "step", make)
    assert len(calls) == 1
    (record,) = workspace.records()
    assert (record.name, record.key) == ("step", "k1")
    assert record.peak_bytes > 1e6


def test_a_stage_that_fails_runs_again(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        workspace.stage("step", "k1", workspace.root / "step", lambda path: 1 / 0)
    assert workspace.records() == []
    workspace.stage("step", "k1", workspace.root / "step", lambda path: path.touch())
    assert len(workspace.records()) == 1


def test_a_draft_comes_back_as_written(tmp_path: Path) -> None:
    written = write_draft(tmp_path / "draft", MANIFEST, fill)
    assert read_manifest(tmp_path / "draft") == written
    assert set(written.files) == {"weights.bin"}
    record_measurement(tmp_path / "draft", {"T=0": {"expected_acceptance": 0.5}})
    assert verify_draft(tmp_path / "draft").digest == written.digest
    assert read_manifest(tmp_path / "draft").measured["T=0"] == {"expected_acceptance": 0.5}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "weights.bin").write_bytes(b"abd"), "was changed"),
        (lambda folder: (folder / "weights.bin").unlink(), "lacks weights.bin"),
        (lambda folder: (folder / "foredraft.json").unlink(), "is no foredraft checkpoint"),
        (lambda folder: (folder / "foredraft.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "foredraft.json").write_text('{"schema": 99}'), "has schema 99"),
        (lambda folder: (folder / "foredraft.json").write_text('{"schema": 1}'), "cannot be read"),
        (lambda folder: (folder / "foredraft.json").write_text("[]"), "cannot be read"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage, message: str) -> None:
    write_draft(tmp_path / "draft", MANIFEST, fill)
    damage(tmp_path / "draft")
    with pytest.raises(CheckpointError, match=message):
        verify_draft(tmp_path / "draft")
