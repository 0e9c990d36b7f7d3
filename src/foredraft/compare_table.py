"""Comparisons for a terminal of 100 columns, returned and never printed."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foredraft.acceptance.wording import NOT_MEASURED, number
from foredraft.compare import Beside, Change, Comparison


def comparison_table(found: Sequence[Comparison] | Sequence[Beside]) -> RenderableType:
    """Return a table for each pair and law; one row a metric, second minus first."""
    return Group(*(_beside(one) if isinstance(one, Beside) else _comparison(one) for one in found))


def _comparison(one: Comparison) -> Table:
    same = one.first.drafter == one.second.drafter
    names = (one.first.report, one.second.report) if same else (one.first.drafter, one.second.drafter)
    prompts = len(one.first.counts.prompts)
    title = f"{one.first.law}, {prompts} prompts, {one.first.counts.tokens:,} tokens, k = {one.k}"
    table = _table(f"{one.first.drafter}: {title}" if same else title)
    table.caption = Text("Intervals are over prompts; predicted_speedup takes the costs as measured.", style="dim")
    table.caption_justify = "left"
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, overflow="fold")
    table.add_column("difference, 95 % interval", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("prompts\nneeded", justify="right", no_wrap=True)
    for change in one.changes.values():
        table.add_row(*_cells(change), style="" if change.paired.is_inside_noise else "bold")
    return table


def _cells(change: Change) -> list[str]:
    found, needed = change.difference, change.paired.prompts_needed
    verdict = "inside the noise" if change.paired.is_inside_noise else "better" if found.value > 0 else "worse"
    if f"{abs(found.value):.3f}" == "0.000":
        verdict, needed = "equal", math.inf
    return [
        change.metric,
        number(change.first, 3),
        number(change.second, 3),
        f"{found.value:+.3f}, {found.low:+.3f} to {found.high:+.3f}",
        verdict,
        f"{needed:,.0f}" if math.isfinite(needed) else "\N{EN DASH}",
    ]


def _beside(one: Beside) -> RenderableType:
    served = f"{one.published.runtime} {one.published.model}".strip()
    table = _table(f"{one.scored.drafter}, k = {one.k}, beside {served} ({one.published.requests} answers)")
    for heading in ("", f"replayed, {one.scored.law}", "published"):
        table.add_column(heading)
    table.add_row(
        "mean_tokens_per_call", number(one.mean_tokens_per_call, 3), number(one.published.mean_tokens_per_call, 3)
    )
    table.add_row(
        "accepted / drafted",
        number(one.accepted_of_drafted, 3),
        number(one.published.accepted_of_drafted, 3)
        if math.isfinite(one.published.accepted_of_drafted)
        else NOT_MEASURED,
    )
    note = Text(
        "Other prompts, another sampling law or another k explain a gap; a loader's fault does too.", style="dim"
    )
    return Group(table, note)


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
