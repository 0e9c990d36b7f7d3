"""The front of points that are cheap and good: what no other beats in both."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Any)


def pareto_front(points: Mapping[Name, tuple[float, float]]) -> list[Name]:
    """Return the names that no other beats in both cost and worth, cheapest first; of equal points the first name.

    Args:
        points: Cost, less is better, and worth, more is better.
    """
    front: list[Name] = []
    best = -math.inf
    for name in sorted(points, key=lambda one: (points[one][0], -points[one][1], one)):
        if points[name][1] > best:
            front.append(name)
            best = points[name][1]
    return front
