"""How long work says how far it is. The command line draws it; libraries only report."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar, runtime_checkable

Item = TypeVar("Item")


@runtime_checkable
class Task(Protocol):
    """One piece of work with a known amount."""

    def advance(self, amount: int | float = 1) -> None: ...

    def note(self, text: str) -> None:
        """Show a few figures beside the bar, such as `loss 2.31, 412 positions/s`."""


@runtime_checkable
class Progress(Protocol):
    """Opens bars: `with progress.task("collecting T=0", 12000, "tokens") as task: ...`."""

    def task(self, what: str, total: int | float, unit: str, done: int | float = 0) -> AbstractContextManager[Task]: ...


class Prefixed:
    """Bars of another progress whose names begin with `prefix`, such as `[3/14] six-layers:`."""

    def __init__(self, progress: Progress, prefix: str) -> None:
        self._progress = progress
        self._prefix = prefix

    def task(self, what: str, total: int | float, unit: str, done: int | float = 0) -> AbstractContextManager[Task]:
        return self._progress.task(f"{self._prefix} {what}", total, unit, done)


def tracked(progress: Progress, what: str, items: Sequence[Item], unit: str) -> Iterator[Item]:
    """Yield the items under a bar that counts them."""
    with progress.task(what, len(items), unit) as task:
        for item in items:
            yield item
            task.advance()


class _SilentTask:
    def advance(self, amount: int | float = 1) -> None: ...

    def note(self, text: str) -> None: ...


class _Silent:
    @contextmanager
    def task(self, what: str, total: int | float, unit: str, done: int | float = 0) -> Iterator[Task]:
        yield _SilentTask()


SILENT: Progress = _Silent()
