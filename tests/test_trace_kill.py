"""Killed at any moment and resumed, a trace is byte for byte what an undisturbed run writes."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
import torch

from foredraft.trace.rows import TraceRow
from foredraft.trace.store import MANIFEST, Trace, open_trace
from tests.trace_worker import collect_all
from tests.traces import folder

KILLED = -signal.SIGKILL


class Collector:
    """Starts processes that collect the same trace again and again."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests, self._replies = requests, replies

    def start(self, out: Path, die_at: int = -1, pause: float = 0.0) -> int:
        """Return the id of a process that collects into `out`; see tests/trace_worker.py."""
        print(out, die_at, pause, sep="\t", file=self._requests, flush=True)
        return int(self._replies.readline())

    def exit_code(self) -> int:
        return int(self._replies.readline())

    def run(self, out: Path, die_at: int = -1) -> int:
        self.start(out, die_at)
        return self.exit_code()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.trace_worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin
        assert process.stdout
        yield Collector(process.stdin, process.stdout)
        process.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of a run that nothing disturbed."""
    return collect_all(tmp_path_factory.mktemp("whole") / "trace")


@pytest.mark.slow
def test_killed_in_any_file_operation_and_resumed(tmp_path: Path, collector: Collector, whole: Trace) -> None:
    reference, expected = list(whole.rows()), folder(whole.path)
    for die_at in range(1000):
        out = tmp_path / str(die_at)
        code = collector.run(out, die_at)
        if code == 0:
            break
        assert code == KILLED
        if (out / MANIFEST).exists():
            assert_begins(out, reference)
        assert collector.run(out) == 0
        assert folder(out) == expected
    # Every shard, and then the manifest, is written, flushed and moved.
    assert die_at >= 6 * len(whole.info.shards)


@pytest.mark.slow
def test_killed_at_random_moments_while_being_read(tmp_path: Path, collector: Collector, whole: Trace) -> None:
    reference, moments, out = list(whole.rows()), random.Random(0), tmp_path / "trace"
    kills = reads = 0
    code = KILLED
    while code == KILLED:
        process = collector.start(out, pause=0.01)
        patience = time.monotonic() + moments.uniform(0.02, 0.05) * (1 + kills)
        while time.monotonic() < patience:
            if (out / MANIFEST).exists():
                reads += assert_begins(out, reference) > 0
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        code = collector.exit_code()
        kills += code == KILLED
    assert code == 0
    assert kills >= 3
    assert reads >= 3
    assert folder(out) == folder(whole.path)


def assert_begins(out: Path, reference: list[TraceRow]) -> int:
    """Check that a growing trace holds the first rows of the finished one; return how many."""
    trace = open_trace(out)
    rows = list(trace.rows())
    assert len(rows) == trace.info.num_rows
    for row, expected in zip(rows, reference[: len(rows)], strict=True):
        assert row.id == expected.id
        assert torch.equal(row.answer_ids, expected.answer_ids)
        assert torch.equal(row.top_logprobs, expected.top_logprobs)
    return len(rows)
