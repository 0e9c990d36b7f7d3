"""Tables of what compression did, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

_MEGA = 1e6


def size_table(units: Sequence[Mapping[str, Any]], title: str) -> Group:
    """Return bits and bytes by part and format, with the layers that have it; see compress.quantize.UnitSize."""
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for unit in units:
        rows.setdefault((unit["unit"].rpartition(".")[2], unit["format"]), []).append(unit)
    table = Table(title=title, title_justify="left")
    for name in ("unit", "format", "layers"):
        table.add_column(name)
    table.add_column("MB", justify="right")
    for (part, weight_format), found in rows.items():
        numbers = [int(unit["unit"].split(".")[1]) for unit in found if "." in unit["unit"]]
        megabytes = sum(unit["bytes"] for unit in found) / _MEGA
        shown = f"{megabytes:,.2f}" if megabytes else "tied"
        table.add_row(part, weight_format, _ranges(numbers), shown)
    total = sum(unit["bytes"] for unit in units) / _MEGA
    return Group(table, f"{total:,.2f} MB in all.")


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-3, 5 for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
