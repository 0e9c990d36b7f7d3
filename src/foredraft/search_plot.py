"""The way of a search as a drawing: bytes of a draft step against predicted speedup, and what nothing beats in both."""

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from foredraft.acceptance.html.charts import Axis, frame, label_points, ticks
from foredraft.acceptance.html.markup import element, extend

_WIDTH, _HEIGHT, _RIGHT = 720, 420, 40
_STYLE = (
    "text{font:11px sans-serif;fill:#333}.end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#ddd}"
    ".way{fill:none;stroke:#bbb}.front{fill:none;stroke:#0b62a4;stroke-width:1.5}.leader{stroke:#999}"
    "circle{fill:#bbb}circle.front{fill:#0b62a4}circle.chosen{fill:#c4372b}"
)
_LONGEST_NAME = 28


def search_svg(found: Mapping[str, Any]) -> str:
    """Return an SVG file of what `foredraft compress` found: its points in order, the front, what was chosen."""
    points = found["points"]
    sizes = [point["bytes"] / 1e6 for point in points]
    worths = [point["predicted_speedup"] for point in points]
    x, y = _axis("MB read a draft step", sizes, "{:g}"), _axis("predicted speedup", worths, "{:.2f}x")
    plot = frame(x, y, _WIDTH, _HEIGHT, _RIGHT, f"The search for {found['draft']}")
    plot.svg.set("xmlns", "http://www.w3.org/2000/svg")
    extend(plot.svg, element("style", _STYLE))
    places = [(plot.x(size), plot.y(worth)) for size, worth in zip(sizes, worths, strict=True)]
    extend(plot.svg, _path(places, "way"), _path([places[number] for number in found["front"]], "front"))
    labelled = sorted({0, *found["front"], found["chosen"]})
    for number, (left, level) in enumerate(places):
        kind = "chosen" if number == found["chosen"] else "front" if number in found["front"] else "way"
        title = f"{points[number]['move']}: {sizes[number]:.1f} MB, {worths[number]:.3f}x at k={points[number]['k']}"
        extend(plot.svg, element("circle", element("title", title), cx=left, cy=level, r=3.5, class_=kind))
    names = [(*places[number], points[number]["move"][:_LONGEST_NAME], 1) for number in labelled]
    label_points(plot, names, [(left - 4, level - 4, left + 4, level + 4) for left, level in places])
    return ElementTree.tostring(plot.svg, encoding="unicode") + "\n"


def _axis(title: str, values: list[float], text: str) -> Axis:
    room = max((max(values) - min(values)) * 0.08, 0.02 * max(values), 1e-6)
    low, high = max(min(values) - room, 0.0), max(values) + room
    return Axis(title, ticks(low, high, 6, text.format), low, high)


def _path(places: list[tuple[float, float]], kind: str) -> ElementTree.Element:
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places), class_=kind)
