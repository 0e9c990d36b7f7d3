"""Tables of what compression did, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
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
        return Group(heat, *_smaller_parts(found))
    agreement = ", ".join(f"{name} {value:.2f}" for name, value in found["rank_correlation"].items())
    cost = f"A probe took {found['passes_per_probe']:.2f} passes on the mean."
    note = f"{cost} Rank correlation with what was measured: {agreement}."
    return Group(heat, table, note, *_smaller_parts(found))


def _smaller_parts(found: Mapping[str, Any]) -> list[RenderableType]:
    """Return what heads, channels and masks cost, as far as it was measured."""
    shown: list[RenderableType] = []
    if cut := [part for part in found["parts"] if part["measured"] is not None]:
        table = Table(title="Cut alone", title_justify="left")
        for column in ("part", "fisher", "tokens per call lost"):
            table.add_column(column, justify="left" if column == "part" else "right")
        for part in sorted(cut, key=lambda part: -part["measured"]):
            table.add_row(part["part"], f"{part['fisher']:.3g}", f"{part['measured']:+.4f}")
        shown += [table, f"Rank correlation of fisher with it: {found['parts_rank_correlation']:.2f}."]
    for mask, tokens in found["masks"].items():
        change = tokens - found["mean_tokens_per_call"]
        shown.append(
            f"Mask {mask}: {tokens:.3f} tokens per call, {change:+.3f}. For analysis: zeros make no step faster."
        )
    return shown


def rank_table(cuts: Sequence[Mapping[str, Any]], title: str, form: str) -> Group:
    """Return ranks, what outputs lost and what factors take, by kind of matrix; see compress.low_rank.Cut."""
    table = Table(title=title, title_justify="left")
    for column in ("matrix", "rank", "weights", "of its factors", "squared error of outputs"):
        table.add_column(column, justify="left" if column == "matrix" else "right")
    kinds = list(dict.fromkeys(cut["module"].rpartition(".")[2] for cut in cuts))
    for kind in kinds:
        found = [cut for cut in cuts if cut["module"].endswith(f".{kind}")]
        error = sum(cut["error"] for cut in found) / len(found)
        ranks = sorted({cut["rank"] for cut in found})
        dense, thin = (sum(cut[what] for cut in found) for what in ("dense", "parameters"))
        table.add_row(kind, ", ".join(map(str, ranks)), f"{dense:,}", f"{thin:,}", f"{error:.4f}")
    dense, thin = (sum(cut[what] for cut in cuts) for what in ("dense", "parameters"))
    notes = {
        "dense": f"Written as plain matrices, {dense:,} weights that every runtime loads: no smaller and no faster "
        f"than before. As factors (form=factored) they would be {thin:,}, {thin / dense:.0%}.",
        "factored": f"Written as factors, {thin:,} weights, {thin / dense:.0%} of the {dense:,} before, for foredraft "
        "alone. export writes plain matrices, no smaller and no faster than before the cut.",
    }
    return Group(table, notes[form])


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
    tries = sum(point["tries"] for point in found["points"])
    passes = sum(point["passes"] for point in found["points"])
    cost = f"{tries} tries, each {passes / max(tries, 1):.2f} passes over the bench on the mean."
    return Group(table, _stage_table(found), f"{cost} Best draft length: {found['k']}. {found['draft']}")


def _stage_table(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"What was written, on {found['scored']}", title_justify="left")
    for column in ("", "MB a step", "acceptance", "change, 95 %", f"tokens per call, k={found['k']}"):
        table.add_column(column, justify="right" if column else "left")
    for stage in found["stages"]:
        value, low, high = stage["acceptance_change"]
        table.add_row(
            stage["stage"],
            f"{stage['bytes'] / _MEGA:,.2f}",
            f"{stage['expected_acceptance']:.4f}",
            f"{value:+.4f} [{low:+.4f}, {high:+.4f}]",
            f"{stage['mean_tokens_per_call']:.3f}",
        )
    return table


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
