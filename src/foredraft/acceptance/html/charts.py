"""Small chart parts as inline SVG: scales, axes, lines with direct labels, points, strips."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from foredraft.acceptance.html.markup import Number, element, extend
from foredraft.acceptance.wording import Figure, shortened

LETTER = 6.0  # mean width of a label's letter, in pixels
LABEL_GAP = 14.0
DROPS = tuple(sign * step * 13 for step in range(9) for sign in (-1, 1))  # where a name may sit, nearest first
MOST_DOTS = 16  # a line of more points shows none


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the data range [low, high] to the pixels [start, end]; values beyond it stay at the edge."""

    low: Number
    high: Number
    start: Number
    end: Number

    def __call__(self, value: Number) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Axis:
    """A title and the ticks of one direction, in data units."""

    title: str
    ticks: tuple[tuple[Number, str], ...]
    low: Number
    high: Number


@dataclass(frozen=True, slots=True)
class Line:
    """One drafter's line. `colour` is 0 for one of the many, else the number of its own colour."""

    name: str
    colour: int
    points: tuple[tuple[float, Figure], ...]
    mark: float = math.nan  # x of the point that is emphasised


@dataclass(frozen=True, slots=True)
class Frame:
    """An empty plot: the drawing and its two scales."""

    svg: Element
    x: Scale
    y: Scale
    width: Number


def ticks(low: Number, high: Number, wanted: int, text: Callable[[float], str]) -> tuple[tuple[float, str], ...]:
    """Return about `wanted` round values inside [low, high] with their labels."""
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple((index * step, text(index * step)) for index in range(first, last + 1))


def frame(x: Axis, y: Axis, width: Number, height: Number, right: Number, description: str) -> Frame:
    """Return an empty plot with hairlines at the ticks of y; `right` pixels stay free for labels."""
    left = 12 + LETTER * max(len(text) for _, text in y.ticks)
    x_scale = Scale(x.low, x.high, left + 8, width - right)
    y_scale = Scale(y.low, y.high, height - 44, 34)
    svg = element("svg", viewBox=f"0 0 {width:g} {height:g}", width=width, height=height, role="img")
    svg.set("aria-label", description)
    extend(svg, element("text", y.title, x=0, y=12, class_="axis-title"))
    for value, text in y.ticks:
        level = y_scale(value)
        extend(
            svg,
            element("line", x1=left, x2=width - right + 6, y1=level, y2=level, class_="grid"),
            element("text", text, x=left - 6, y=level + 4, class_="tick end"),
        )
    for value, text in x.ticks:
        extend(svg, element("text", text, x=x_scale(value), y=height - 26, class_="tick middle"))
    extend(svg, element("text", x.title, x=(left + width - right) / 2, y=height - 6, class_="axis-title middle"))
    return Frame(svg, x_scale, y_scale, width)


def draw_lines(plot: Frame, lines: Sequence[Line], text: Callable[[float], str]) -> None:
    """Draw the many in grey, then those with a colour: band, line, points, and a name at the end."""
    for line in lines:
        if line.points and not line.colour:
            extend(plot.svg, _line(plot, line, text))
    named = [line for line in lines if line.points and line.colour]
    for line in reversed(named):
        extend(plot.svg, _band(plot, line), _line(plot, line, text))
    _name_ends(plot, named)


def whisker(plot: Frame, x: float, figure: Figure, colour: int, title: str) -> Element:
    """Return a point at pixel x, with its interval unless it is one of the many."""
    level = plot.y(figure.value)
    group = element("g", element("title", title), class_=f"c{colour}")
    if figure.has_interval and colour:
        extend(group, element("line", x1=x, x2=x, y1=plot.y(figure.low), y2=plot.y(figure.high), class_="whisker"))
    extend(group, element("circle", cx=x, cy=level, r=3.2 if colour else 2.2, class_="dot"))
    return group


def strip(figure: Figure, scale: Scale, break_even: Number, title: str) -> Element:
    """Return one row of a dot plot: the figure and its interval on a line, with the break-even mark."""
    middle, zero = 9.0, scale(break_even)
    svg = element("svg", element("title", title), class_="strip", width=scale.end + 6, height=18)
    svg.set("viewBox", f"0 0 {scale.end + 6:g} 18")
    svg.set("aria-hidden", "true")
    extend(svg, element("line", x1=zero, x2=zero, y1=0, y2=18, class_="break-even"))
    if not figure.is_measured:
        return svg
    gains = "gain" if figure.value > break_even else "loss"
    extend(svg, element("line", x1=zero, x2=scale(figure.value), y1=middle, y2=middle, class_=f"stem {gains}"))
    if figure.has_interval:
        low, high = scale(figure.low), scale(figure.high)
        extend(svg, element("line", x1=low, x2=high, y1=middle, y2=middle, class_=f"span {gains}"))
    extend(svg, element("circle", cx=scale(figure.value), cy=middle, r=3.6, class_=f"dot {gains}"))
    return svg


def spread(wanted: Sequence[Number], gap: Number, low: Number, high: Number) -> list[float]:
    """Return places near the wanted ones, in the same order, at least `gap` apart, within [low, high].

    Where there is no room for all, the gap shrinks.
    """
    if not wanted:
        return []
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    places, floor = [0.0] * len(wanted), float(low)
    for index in order:
        places[index] = max(wanted[index], floor)
        floor = places[index] + gap
    ceiling = float(high)
    for index in reversed(order):
        places[index] = min(places[index], ceiling)
        ceiling = places[index] - gap
    return places


def label_points(plot: Frame, points: Iterable[tuple[float, float, str, int]], taken: list[tuple[Number, ...]]) -> None:
    """Write a name beside each point (x and y in pixels) where it covers no other name and no point of `taken`.

    `taken` holds boxes (left, top, right, bottom) and grows by the names written.
    """
    for x, y, text, colour in points:
        width = LETTER * len(text)
        sides = (x + 8, x - 8 - width)
        places = [(left, y + 4 + drop) for drop in DROPS for left in sides]
        boxes = [(left, base - 10, left + width, base + 3) for left, base in places]
        fits = [box for box in boxes if _inside(plot, box) and not any(_overlap(box, other) for other in taken)]
        box = fits[0] if fits else boxes[0]
        taken.append(box)
        left, base = box[0], box[3] - 3
        if abs(base - 4 - y) > 1:
            near = left - 2 if left > x else box[2] + 2
            extend(plot.svg, element("line", x1=x, y1=y, x2=near, y2=base - 4, class_=f"leader c{colour}"))
        edge, side = (left, "") if left > x else (box[2], " end")
        extend(plot.svg, element("text", text, x=edge, y=base, class_=f"label c{colour}{side}"))


def _line(plot: Frame, line: Line, text: Callable[[float], str]) -> Element:
    last_x, last = line.points[-1]
    group = element("g", class_=f"line c{line.colour}")
    path = " ".join(f"{plot.x(x):.1f},{plot.y(figure.value):.1f}" for x, figure in line.points)
    extend(group, element("title", f"{line.name}: {text(last.value)} at {last_x:g}"), element("polyline", points=path))
    if line.colour and len(line.points) <= MOST_DOTS:
        for x, figure in line.points:
            emphasised = x == line.mark
            dot = element("circle", cx=plot.x(x), cy=plot.y(figure.value), r=4.2 if emphasised else 2, class_="dot")
            extend(group, dot)
    return group


def _band(plot: Frame, line: Line) -> Element:
    known = [(plot.x(x), figure) for x, figure in line.points if figure.has_interval]
    upper = [f"{x:.1f},{plot.y(figure.high):.1f}" for x, figure in known]
    lower = [f"{x:.1f},{plot.y(figure.low):.1f}" for x, figure in reversed(known)]
    return element("polygon", points=" ".join(upper + lower), class_=f"band c{line.colour}")


def _name_ends(plot: Frame, lines: Sequence[Line]) -> None:
    ends = [(plot.x(line.points[-1][0]), plot.y(line.points[-1][1].value)) for line in lines]
    edge = plot.x.end
    places = spread([y for _, y in ends], LABEL_GAP, plot.y.end - 8, plot.y.start)
    room = int((plot.width - edge - 20) / LETTER)
    for line, (x, y), place in zip(lines, ends, places, strict=True):
        extend(
            plot.svg,
            element("line", x1=x + 4, x2=edge + 16, y1=y, y2=place, class_=f"leader c{line.colour}"),
            element("text", shortened(line.name, room), x=edge + 19, y=place + 4, class_=f"label c{line.colour}"),
        )


def _inside(plot: Frame, box: tuple[Number, ...]) -> bool:
    return box[0] >= plot.x.start - 6 and box[2] <= plot.width and box[1] >= 16 and box[3] <= plot.y.start + 2


def _overlap(a: tuple[Number, ...], b: tuple[Number, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
