"""Limits that a figure, or the change of one, must not fall under: what `--fail-under` asks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.acceptance.reading import Standing
from foredraft.acceptance.reading import read_report as read_figures
from foredraft.acceptance.wording import Figure
from foredraft.catalog import unknown_name_message
from foredraft.compare import Beside, Comparison
from foredraft.core.errors import UnknownNameError, UserError

METRICS = ("expected_acceptance", "mean_tokens_per_call", "predicted_speedup")


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure, or the change of one, must not fall under.

    Attributes:
        value: In units of the metric, or a share of the first drafter's figure.
        spares_noise: Whether only a figure whose whole interval lies under it fails.
    """

    metric: str
    value: float
    is_relative: bool = False
    spares_noise: bool = False

    @staticmethod
    def read(text: str, metric: str, spares_noise: bool = False) -> "Limit":
        """Return the limit of `0.5` or, as a share, `-2%`.

        Raises:
            UserError: it is no number.
            UnknownNameError: no such metric.
        """
        if metric not in METRICS:
            raise UnknownNameError(unknown_name_message("metric", metric, METRICS))
        number, is_relative = text.strip().removesuffix("%"), text.strip().endswith("%")
        try:
            value = float(number) / (100.0 if is_relative else 1.0)
        except ValueError:
            raise UserError(f"--fail-under takes a number or a percentage such as -2%, not {text!r}.") from None
        if not math.isfinite(value):
            raise UserError(f"--fail-under takes a finite number, not {text!r}.")
        return Limit(metric, value, is_relative, spares_noise)

    def __str__(self) -> str:
        return f"{self.value:+.1%}" if self.is_relative else f"{self.value:g}"


def shortfalls(comparisons: Sequence[Comparison] | Sequence[Beside], limit: Limit) -> list[str]:
    """Return a sentence for each comparison whose change is under the limit.

    Raises:
        UserError: what was compared are published figures, or no speedup was predicted.
    """
    found = []
    for one in comparisons:
        if isinstance(one, Beside) or limit.metric not in one.changes:
            raise UserError(f"--fail-under needs {limit.metric} of two replayed drafters, which is not there.")
        change = one.changes[limit.metric]
        moved = change.relative if limit.is_relative else change.difference
        figure = Figure(moved.value, moved.low, moved.high)
        who = f"{one.second.drafter} against {one.first.drafter}, {one.first.law}: {limit.metric}"
        found += _shortfall(f"{who} {change.first:.4g} -> {change.second:.4g}, change", figure, limit)
    return found


def report_shortfalls(report: Mapping[str, Any], limit: Limit) -> list[str]:
    """Return a sentence for each drafter and law of a report whose figure, at its best k, is under the limit.

    Raises:
        UserError: the limit is a share, of which there is nothing to be one.
    """
    if limit.is_relative:
        raise UserError("--fail-under takes a percentage only where two drafters are compared: foredraft compare.")
    found = []
    for law in read_figures(report).laws:
        for drafter in law.drafters:
            found += _shortfall(f"{drafter.name}, {law.label}: {limit.metric}", _figure(drafter, limit.metric), limit)
    return found


def _figure(drafter: Standing, metric: str) -> Figure:
    return {
        "expected_acceptance": drafter.score.expected_acceptance,
        "mean_tokens_per_call": drafter.tokens_at_best,
        "predicted_speedup": drafter.predicted_at_best,
    }[metric]


def _shortfall(what: str, figure: Figure, limit: Limit) -> list[str]:
    inside = figure.has_interval and figure.high >= limit.value
    if not figure.value < limit.value or (inside and limit.spares_noise):
        return []
    shown = f"{figure.value:+.1%}" if limit.is_relative else f"{figure.value:.4g}"
    missing = f"{limit.value - figure.value:.1%}" if limit.is_relative else f"{limit.value - figure.value:.4g}"
    where = "inside the noise" if inside else "beyond the noise"
    bounds = [f"{bound:+.1%}" if limit.is_relative else f"{bound:.4g}" for bound in (figure.low, figure.high)]
    noise = f"{where}, 95 % interval {bounds[0]} to {bounds[1]}" if figure.has_interval else "no interval"
    return [f"{what} {shown} is {missing} under {limit} ({noise})."]
