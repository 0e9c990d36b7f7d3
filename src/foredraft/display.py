"""Progress on stderr: a bar with time left on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as RichTask
from rich.text import Text

from foredraft.core.progress import Task

_SECONDS_BETWEEN_LINES = 10.0


class TerminalProgress:
    """Bars on a terminal. One at a time; finished ones stay as a line with what they took."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def task(self, what: str, total: int | float, unit: str, done: int | float = 0) -> Iterator[Task]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Amount(),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as bars:
            yield _Bar(bars, bars.add_task(what, total=total, completed=int(done), unit=unit, note=""))


class LineProgress:
    """Lines, for logs: what, how far, how long still."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def task(self, what: str, total: int | float, unit: str, done: int | float = 0) -> Iterator[Task]:
        task = _Lines(self._console, what, total, unit, done)
        task.show()
        yield task
        task.show()


def progress_for(console: Console) -> TerminalProgress | LineProgress:
    """Return bars on a terminal, lines elsewhere."""
    return TerminalProgress(console) if console.is_terminal else LineProgress(console)


class _Bar:
    def __init__(self, bars: Progress, task_id: TaskID) -> None:
        self._bars, self._id = bars, task_id

    def advance(self, amount: int | float = 1) -> None:
        self._bars.advance(self._id, amount)

    def note(self, text: str) -> None:
        self._bars.update(self._id, note=text)


class _Lines:
    def __init__(self, console: Console, what: str, total: int | float, unit: str, done: int | float) -> None:
        self._console, self._what, self._total, self._unit = console, what, total, unit
        self._first = self._done = done
        self._note = ""
        self._started = time.monotonic()
        self._next = self._started + _SECONDS_BETWEEN_LINES

    def advance(self, amount: int | float = 1) -> None:
        self._done += amount
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            self.show()

    def note(self, text: str) -> None:
        self._note = text

    def show(self) -> None:
        elapsed = time.monotonic() - self._started
        moved = self._done - self._first
        left = "" if moved <= 0 else f", {_clock(elapsed * max(self._total - self._done, 0) / moved)} left"
        note = f" ({self._note})" if self._note else ""
        self._console.print(
            f"{self._what}: {self._done:,.0f}/{self._total:,.0f} {self._unit}, {_clock(elapsed)}{left}{note}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


class _Amount(ProgressColumn):
    def render(self, task: RichTask) -> Text:
        return Text(f"{task.completed:,.0f}/{task.total or 0:,.0f} {task.fields['unit']}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
