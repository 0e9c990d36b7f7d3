"""The leaderboard for a terminal of 100 columns, returned and never printed."""

import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foredraft.acceptance.reading import BatchFigures, Choice, LawStandings, Standing, read_report
from foredraft.acceptance.wording import (
    NOT_MEASURED,
    cost,
    interval,
    number,
    percent,
    percent_interval,
    quantity,
    shortened,
    size,
    times,
)

KIND_LETTERS = 13
CHOSEN = "*"
NO_FIGURE = "\N{EN DASH}"


def leaderboard_table(report: Mapping[str, Any]) -> RenderableType:
    """Return a table for each law, best predicted speedup first, and what was selected and why.

    Args:
        report: report.json by its contract, schema 1; optional parts may be absent.

    Raises:
        UserError: the report has another schema.
    """
    reading = read_report(report)
    parts: list[RenderableType] = [_law_table(law, reading.choice) for law in reading.laws]
    parts += [table for law in reading.laws for table in _batch_tables(law)]
    if any(not _is_complete(drafter) for law in reading.laws for drafter in law.drafters):
        parts.append(Text(f"{NO_FIGURE}  {NOT_MEASURED}", style="dim"))
    parts.append(Text(_sentence(reading.choice), style="bold"))
    parts += [Text(note, style="dim") for note in reading.notes]
    return Group(*parts)


def _law_table(law: LawStandings, choice: Choice) -> Table:
    timed = any(drafter.best_k for drafter in law.drafters)
    order = "predicted speedup at the best k" if timed else "tokens per call at the longest k"
    table = Table(
        title=Text(f"{law.label}, by {order}", style="bold"),
        title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    table.add_column("drafter", overflow="fold", min_width=14)
    table.add_column("kind", overflow="ellipsis", style="dim")
    for heading in ("accepted", "k", "tokens\n/call", "cost\nratio", "predicted\nspeedup", "measured\nspeedup", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for drafter in law.drafters:
        chosen = drafter.name == choice.drafter
        table.add_row(*map(Text, _cells(drafter, chosen)), style="bold green" if chosen else "")
    return table


def _batch_tables(law: LawStandings) -> list[Table]:
    """Return what batches change, for each machine: nothing where there is one batch size, and none elsewhere."""
    tables = []
    for machine in dict.fromkeys(figures.machine for drafter in law.drafters for figures in drafter.batches):
        found = {drafter.name: _on(machine, drafter) for drafter in law.drafters}
        sizes = sorted({rows for batches in found.values() for rows in batches})
        if not machine and len(sizes) < 2:
            continue
        table = Table(
            title=Text(f"{law.label}, predicted {f'on {machine} ' if machine else ''}by batch size", style="bold"),
            title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False,
        )  # fmt: skip
        table.add_column("drafter", overflow="fold", min_width=14)
        for rows in sizes:
            table.add_column(f"{rows} request{'s' if rows > 1 else ''}", justify="right")
        for name, batches in found.items():
            table.add_row(name, *(batch_words(batches[rows]) if rows in batches else NO_FIGURE for rows in sizes))
        tables.append(table)
    return tables


def _on(machine: str, drafter: Standing) -> dict[int, BatchFigures]:
    return {figures.rows: figures for figures in drafter.batches if figures.machine == machine}


def batch_words(figures: BatchFigures) -> str:
    """Return a prediction in a few words, such as `1.62x k=4, 88 tok/s`."""
    gain = f"{times(figures.speedup)} k={figures.best_k}" if figures.best_k else "no gain"
    room = "" if figures.fits else ", too large"
    return f"{gain}, {quantity(figures.tokens_per_second)} tok/s{room}"


def _cells(drafter: Standing, chosen: bool) -> list[str]:
    accepted, predicted = drafter.score.expected_acceptance, drafter.predicted_at_best
    return [
        CHOSEN if chosen else "",
        drafter.name,
        shortened(drafter.kind, KIND_LETTERS),
        _figure(f"{percent(accepted.value)} {percent_interval(accepted):>6}".rstrip()),
        str(drafter.shown_k or NO_FIGURE),
        _figure(number(drafter.tokens_at(drafter.shown_k).value)),
        _figure(cost(drafter.cost_ratio)),
        _figure(f"{times(predicted.value)} {interval(predicted)}".rstrip()),
        _figure(times(drafter.measured_speedup.value)),
        _figure(size(drafter.num_bytes)),
    ]


def _figure(text: str) -> str:
    return NO_FIGURE if text.startswith(NOT_MEASURED) else text


def _is_complete(drafter: Standing) -> bool:
    return NO_FIGURE not in _cells(drafter, chosen=False)


def _sentence(choice: Choice) -> str:
    if choice.sentence:
        return choice.sentence
    if not choice.drafter:
        return "No drafter has been chosen."
    gain = f": {times(choice.predicted_speedup.value)}" if math.isfinite(choice.predicted_speedup.value) else ""
    return f"Chosen: {choice.drafter}, k = {choice.k}{gain}."
