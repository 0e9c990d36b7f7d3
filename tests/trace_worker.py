"""Collects one trace in processes that can be killed: `python -m tests.trace_worker`.

Reads `FOLDER DIE_AT PAUSE` lines and answers each with the id of a process, and with its exit code when it has
ended. The process collects into FOLDER; in the middle of its file operation DIE_AT, counted from 0, it kills
itself with SIGKILL (-1: never). Every file operation waits PAUSE seconds first.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foredraft.core.law import SamplingLaw
from foredraft.settings import PromptSource, TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace
from tests.markov import MarkovTarget

SETTINGS = TraceSettings(prompts=[PromptSource(file="-")], max_new_tokens=5, top=4, batch_size=2)
TARGET = MarkovTarget()
TURNS = [("a",), ("bb",), ("one", "two")]
PROMPTS = [Prompt(f"p{i}", "d", ({"role": "user", "content": turns[0]},), turns[1:]) for i, turns in enumerate(TURNS)]


def collect_all(folder: Path) -> Trace:
    return collect(TARGET, PROMPTS, SETTINGS, SamplingLaw(), folder)


def _make_deadly(die_at: int, pause: float) -> None:
    calls = -1

    def deadly(operation: Callable[..., Any], begin: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            time.sleep(pause)
            if calls == die_at:
                begin(*arguments, **keywords)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **keywords)

        return counted

    def half(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, data, **keywords: operation(path, data[: len(data) // 2], **keywords)

    Path.write_bytes = deadly(Path.write_bytes, half(Path.write_bytes))  # type: ignore[method-assign]
    Path.write_text = deadly(Path.write_text, half(Path.write_text))  # type: ignore[method-assign]
    os.fsync, os.replace = deadly(os.fsync, lambda _: None), deadly(os.replace, lambda *_: None)


def _main() -> None:
    torch.set_num_threads(1)
    # Once in here, so that no process waits for what is imported on first use.
    with TemporaryDirectory() as folder:
        collect_all(Path(folder))
    for line in sys.stdin:
        folder, die_at, pause = line.split("\t")
        child = os.fork()
        if child == 0:
            _make_deadly(int(die_at), float(pause))
            collect_all(Path(folder))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _main()
