"""Tables of what compression did, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

_MEGA = 1e6
_SHADES = " .░▒▓█"


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


def sensitivity_table(found: Mapping[str, Any], by: str) -> Group:
    """Return a heat map of the units by layer and part, and the figures of those that were probed."""
    units = {unit["unit"]: unit for unit in found["units"]}
    ranks = {name: rank for rank, name in enumerate(sorted(units, key=lambda name: units[name][by]))}
    parts = list(dict.fromkeys(name.rpartition(".")[2] for name in units if "." in name))
    layers = sorted({int(name.split(".")[1]) for name in units if "." in name})
    heat = Table(title=f"{found['draft']}: {by} at {found['format']}, the darker the more", title_justify="left")
    heat.add_column("layer", justify="right")
    for part in parts:
        heat.add_column(part)
    for layer in layers:
        names = [f"layers.{layer}.{part}" for part in parts]
        heat.add_row(str(layer), *(_shade(ranks[name], len(units)) * 4 if name in ranks else "" for name in names))
    table = Table(title="Rounded alone", title_justify="left")
    for column in ("unit", by, "tokens per call lost"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    measured = [unit for unit in units.values() if unit["measured"] is not None]
    for unit in sorted(measured, key=lambda unit: -unit["measured"]):
        table.add_row(unit["unit"], f"{unit[by]:.3g}", f"{unit['measured']:+.4f}")
    if not measured:
        return Group(heat)
    agreement = ", ".join(f"{name} {value:.2f}" for name, value in found["rank_correlation"].items())
    cost = f"A probe took {found['passes_per_probe']:.2f} passes on the mean."
    return Group(heat, table, f"{cost} Rank correlation with what was measured: {agreement}.")


def front_table(found: Mapping[str, Any]) -> Group:
    """Return the steps of a search: what each bought, which lie on the front, and which was chosen."""
    table = Table(title="What each step bought", title_justify="left")
    for column in ("step", "MB a step", "acceptance", "k", "tokens per call", "predicted speedup", "front"):
        table.add_column(column, justify="left" if column in ("step", "front") else "right")
    for number, point in enumerate(found["points"]):
        mark = ("*" if number in found["front"] else "") + (" chosen" if number == found["chosen"] else "")
        table.add_row(
            point["move"],
            f"{point['bytes'] / _MEGA:,.2f}",
            f"{point['acceptance']:.4f}",
            str(point["k"]),
            f"{point['mean_tokens_per_call']:.3f}",
            f"{point['predicted_speedup']:.3f}x",
            mark,
        )
    passes = sum(point["passes"] for point in found["points"])
    return Group(table, f"{passes:.0f} passes over the bench. Best draft length: {found['k']}. {found['draft']}")


def _shade(rank: int, count: int) -> str:
    return _SHADES[min(rank * len(_SHADES) // count, len(_SHADES) - 1)]


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-3, 5 for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
