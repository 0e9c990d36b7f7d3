"""Figures in words: what was measured carries a unit, what was not says so."""

import math
from dataclasses import dataclass

NOT_MEASURED = "not measured"
RANGE = "\N{EN DASH}"
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number with its interval; NaN stands for a part that was not measured."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def is_measured(self) -> bool:
        return math.isfinite(self.value)

    @property
    def has_interval(self) -> bool:
        return self.is_measured and math.isfinite(self.low) and math.isfinite(self.high)

    def scaled(self, factor: float) -> "Figure":
        """Return the figure in another unit: value and interval times `factor`."""
        return Figure(self.value * factor, self.low * factor, self.high * factor)


def number(value: float, decimals: int = 2) -> str:
    """Return `2.35`, or the words for a figure that was not measured."""
    return f"{value:.{decimals}f}" if math.isfinite(value) else NOT_MEASURED


def cost(ratio: float) -> str:
    """Return a cost ratio with the digits that a cheap drafter needs, such as `0.212` or `0.0004`."""
    return number(ratio, 3) if not 0 < ratio < 0.01 else f"{ratio:.1g}"


def times(value: float) -> str:
    """Return a ratio to plain decoding, such as `1.62x`."""
    return f"{value:.2f}x" if math.isfinite(value) else NOT_MEASURED


def percent(share: float) -> str:
    """Return a share of 1 in whole percent, such as `62 %`."""
    return f"{100 * share:.0f}{NO_BREAK}%" if math.isfinite(share) else NOT_MEASURED


def interval(figure: Figure, decimals: int = 2) -> str:
    """Return the interval alone, such as `1.55–1.70`; empty where there is none."""
    return f"{figure.low:.{decimals}f}{RANGE}{figure.high:.{decimals}f}" if figure.has_interval else ""


def percent_interval(figure: Figure) -> str:
    """Return the interval of a share in whole percent, such as `58–66`; empty where there is none."""
    return interval(figure.scaled(100.0), decimals=0)


def quantity(amount: int | float) -> str:
    """Return a count with three digits, such as `34.1 M` or `812`."""
    return _with_prefix(amount, ("", " k", " M", " G", " T"))


def size(num_bytes: float) -> str:
    """Return bytes in decimal units, such as `70.3 MB`."""
    return _with_prefix(num_bytes, (" B", " kB", " MB", " GB", " TB"))


def duration(seconds: float) -> str:
    """Return `48 s`, `3 min 05 s` or `2 h 10 min`."""
    if not math.isfinite(seconds):
        return NOT_MEASURED
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def shortened(text: str, length: int) -> str:
    """Return `text` in at most `length` characters; the middle goes, since names differ at their ends."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def _with_prefix(amount: int | float, units: tuple[str, ...]) -> str:
    if not math.isfinite(amount):
        return NOT_MEASURED
    scaled, unit = amount, units[0]
    for larger in units[1:]:
        if abs(scaled) < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    digits = 0 if unit == units[0] or abs(scaled) >= 99.95 else 1
    return f"{scaled:.{digits}f}{unit}"
