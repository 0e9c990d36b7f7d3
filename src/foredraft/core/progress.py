"""How long work says how far it is. The command line draws it; libraries only report."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable


@runtime_checkable
class Task(Protocol):
    """One piece of work with a known amount."""

    def advance(self, amount: float = 1.0) -> None: ...

    def note(self, text: str) -> None:
        """Show a few figures beside the bar, such as `loss 2.31, 412 positions/s`."""


@runtime_checkable
class Progress(Protocol):
    """Opens bars: `with progress.task("collecting T=0", 12000, "tokens") as task: ...`."""

    def task(self, what: str, total: float, unit: str, done: float = 0.0) -> AbstractContextManager[Task]: ...


class _SilentTask:
    def advance(self, amount: float = 1.0) -> None: ...

    def note(self, text: str) -> None: ...


class _Silent:
    @contextmanager
    def task(self, what: str, total: float, unit: str, done: float = 0.0) -> Iterator[Task]:
        yield _SilentTask()


SILENT: Progress = _Silent()
