"""The plots of the report. Each is drawn twice, for a wide page and for a phone; the style sheet shows one."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from foredraft.acceptance.html.charts import Axis, Frame, Line, draw_lines, frame, label_points, ticks, whisker
from foredraft.acceptance.html.markup import Number, element, extend
from foredraft.acceptance.reading import CurvePoint, LawStandings, Standing
from foredraft.acceptance.wording import Figure, cost, number, percent, shortened

NUM_COLOURS = 8
ONE_TOKEN = 1.0  # what plain decoding emits a call


@dataclass(frozen=True, slots=True)
class Paper:
    """Room for one plot, in pixels; `right` of it is kept for names."""

    width: int
    height: int
    right: int
    letters: int


WIDE = Paper(560, 350, 158, 24)
NARROW = Paper(326, 290, 100, 18)


def colours_of(names: Iterable[str], taken: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the colour number of each name: its own for the first eight, 0 for all others.

    Names in `taken` keep theirs, so that a drafter has one colour on the whole page.
    """
    kept = taken or {}
    colours = {name: kept[name] for name in names if name in kept}
    free = [colour for colour in range(1, NUM_COLOURS + 1) if colour not in colours.values()]
    for name in names:
        if name not in colours:
            colours[name] = free.pop(0) if free else 0
    return colours


def both_sizes(draw: Callable[[Paper], Element]) -> tuple[Element, Element]:
    """Return the wide and the narrow drawing."""
    return (
        element("div", draw(WIDE), class_="wide"),
        element("div", draw(NARROW), class_="narrow"),
    )


def position_plot(law: LawStandings, colours: Mapping[str, int], k: int, paper: Paper) -> Element:
    """Return acceptance of draft tokens 1..k, and the mean over the text with its interval at the left."""
    lines = [
        Line(
            drafter.name, colours[drafter.name],
            tuple(_measured(enumerate(drafter.score.acceptance_by_position.get(k, ()), start=1))),
        )
        for drafter in law.drafters
    ]  # fmt: skip
    slot = 2.4
    x = Axis(
        "position in a block of " + str(k),
        ((0.7 - slot / 2, "all text"), *((float(i), str(i)) for i in range(1, k + 1))), 1 - slot, max(k, 2),
    )  # fmt: skip
    y = Axis("accepted, given all before it were", ticks(0, 1, 5, percent), 0, 1)
    plot = frame(x, y, paper.width, paper.height, paper.right, f"Acceptance by position, {law.label}")
    draw_lines(plot, lines, percent)
    step = (slot - 1.1) / NUM_COLOURS
    for drafter in law.drafters:
        colour, figure = colours[drafter.name], drafter.score.expected_acceptance
        if colour and figure.is_measured:
            place = plot.x(1 - slot + 0.25 + step * (colour - 0.5))
            title = f"{drafter.name}: {percent(figure.value)} of all text"
            extend(plot.svg, whisker(plot, place, figure, colour, title))
    return plot.svg


def tokens_plot(law: LawStandings, colours: Mapping[str, int], highest: float, paper: Paper) -> Element:
    """Return tokens per target call against k; the best k is marked."""
    lines = [
        Line(
            drafter.name, colours[drafter.name],
            tuple(_measured(sorted(drafter.score.mean_tokens_per_call.items()))), float(drafter.best_k),
        )
        for drafter in law.drafters
    ]  # fmt: skip
    lengths = sorted({x for line in lines for x, _ in line.points}) or [1.0]
    every = math.ceil(len(lengths) / 10)
    x_ticks = tuple((k, f"{k:g}") for k in lengths[::every])
    x = Axis("draft tokens in a block, k", x_ticks, lengths[0], max(lengths[-1], lengths[0] + 1))
    highest = max(highest, 1.5)
    y = Axis("tokens per target call", ticks(ONE_TOKEN, highest, 5, lambda v: f"{v:g}"), ONE_TOKEN, highest)
    plot = frame(x, y, paper.width, paper.height, paper.right, f"Tokens per target call against k, {law.label}")
    draw_lines(plot, lines, number)
    return plot.svg


def cost_plot(law: LawStandings, colours: Mapping[str, int], costliest: float, paper: Paper) -> Element:
    """Return expected acceptance against cost ratio; below the break-even line no k can pay."""
    reach = min(max(costliest * 1.05, 0.5), 1.25)
    x = Axis("cost ratio: one draft step / one target step", ticks(0, reach, 5, lambda v: f"{v:g}"), 0, reach)
    y = Axis("expected acceptance", ticks(0, 1, 5, percent), 0, 1)
    plot = frame(x, y, paper.width, paper.height, 14, f"Expected acceptance against cost ratio, {law.label}")
    _draw_break_even(plot, reach)
    spots = []
    for drafter in reversed(law.drafters):
        figure, colour = drafter.score.expected_acceptance, colours[drafter.name]
        if figure.is_measured and math.isfinite(drafter.cost_ratio):
            title = f"{drafter.name}: {percent(figure.value)} accepted at {cost(drafter.cost_ratio)} of a target step"
            extend(plot.svg, whisker(plot, plot.x(drafter.cost_ratio), figure, colour, title))
            spots.append((plot.x(drafter.cost_ratio), plot.y(figure.value), drafter.name, colour))
    taken: list[tuple[Number, ...]] = [(x - 5, y - 8, x + 5, y + 8) for x, y, _, colour in spots if colour]
    taken.append((plot.x.end - 104, plot.y.start - 36, plot.x.end, plot.y.start))
    named = [(x, y, shortened(name, paper.letters), colour) for x, y, name, colour in reversed(spots) if colour]
    label_points(plot, named, taken)
    return plot.svg


# What is drawn of a training, and what its axis says.
TRAINING_METRICS = {
    "mean_tokens_per_call": "tokens per call on held-out training prompts",
    "acceptance": "mean acceptance estimate",
    "loss": "training loss",
}


def training_plot(
    curves: Mapping[str, Sequence[CurvePoint]], metric: str, colours: Mapping[str, int], paper: Paper
) -> Element:
    """Return one metric of TRAINING_METRICS against the positions trained on."""
    label, is_share = TRAINING_METRICS[metric], metric == "acceptance"
    lines = [Line(name, colours[name], tuple(_measured(_samples(curve, metric)))) for name, curve in curves.items()]
    points = [point for line in lines for point in line.points]
    furthest = max((x for x, _ in points), default=1.0)
    values = [figure.value for _, figure in points] or [0.0, 1.0]
    room = 0.06 * ((max(values) - min(values)) or 1.0)
    low, high = min(values) - room, max(values) + room
    if is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    text = percent if is_share else (lambda value: f"{value:g}")
    thousands = ticks(0, furthest, 4, lambda value: f"{value / 1000:g}")
    x = Axis("thousand positions trained on", thousands, 0, furthest)
    y = Axis(label, ticks(low, high, 4, text), low, high)
    plot = frame(x, y, paper.width, paper.height, paper.right, f"Training: {metric.replace('_', ' ')}")
    draw_lines(plot, lines, percent if is_share else number)
    return plot.svg


def _draw_break_even(plot: Frame, reach: float) -> None:
    start, end = (plot.x(0), plot.y(0)), (plot.x(reach), plot.y(min(reach, 1)))
    top = plot.x(min(reach, 1.0))
    corners = (start, (top, end[1]), end, (end[0], start[1]))
    extend(
        plot.svg,
        element("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in corners), class_="cannot-pay"),
        element("line", x1=start[0], y1=start[1], x2=top, y2=end[1], class_="break-even"),
        element("text", "below break-even", x=end[0] - 6, y=start[1] - 22, class_="aside end"),
        element("text", "no k can pay", x=end[0] - 6, y=start[1] - 8, class_="aside end"),
    )


def _samples(curve: Sequence[CurvePoint], metric: str) -> Iterable[tuple[float, Figure]]:
    return ((point.positions, Figure(getattr(point, metric))) for point in curve)


def _measured(points: Iterable[tuple[Number, Figure]]) -> Iterable[tuple[float, Figure]]:
    return ((float(x), figure) for x, figure in points if figure.is_measured and math.isfinite(x))


def longest_draft(drafters: Iterable[Standing]) -> int:
    """Return the largest k at which acceptance by position is known; 0 where none is."""
    return max((k for drafter in drafters for k in drafter.score.acceptance_by_position), default=0)
