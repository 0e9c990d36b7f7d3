"""What a block costs under each choice, in seconds that were measured before: no clock is read while choosing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64

from foredraft.acceptance.cost import Costs
from foredraft.core.errors import UserError


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Seconds of target and draft steps at one batch size.

    Attributes:
        target: Entry n - 1: one target step over n tokens of each request.
        drafts: Entry (d, k): drafter d proposing k tokens; 0 for k = 0.
        overhead: Of a block beyond drafting and verifying.
        plain_overhead: Of a plain step beyond the target's.
        reading: By drafter: of one token of context that it has not read when it is asked; free if empty.
    """

    target: Float64[np.ndarray, " widths"]
    drafts: Float64[np.ndarray, "drafters lengths"]
    overhead: float = 0.0
    plain_overhead: float = 0.0
    reading: Float64[np.ndarray, " drafters"] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.reading):
            object.__setattr__(self, "reading", np.zeros(len(self.drafts)))
        never_negative = np.append(self.drafts, self.reading)
        if not (self.target > 0.0).all() or not np.isfinite(never_negative).all() or (never_negative < 0.0).any():
            raise UserError("Costs must be measured seconds: positive target steps, draft steps of 0 or more.")
        if self.drafts.ndim != 2 or self.reading.shape != self.drafts.shape[:1] or self.target.ndim != 1:
            raise UserError("Costs hold draft steps by drafter and length, and seconds of reading by drafter.")

    @property
    def plain(self) -> float:
        """Time of one step of plain decoding."""
        return float(self.target[0]) + self.plain_overhead

    @staticmethod
    def of(costs: Costs, names: Sequence[str], longest: int) -> "BlockCosts":
        """Return what was measured of some drafters; target steps wider than those timed go on along the last slope.

        Raises:
            UserError: a drafter was not timed.
        """
        if missing := [name for name in names if name not in costs.blocks]:
            raise UserError(f"The costs do not hold {missing[0]}: it was not timed. Known: {', '.join(costs.blocks)}.")
        steps = [step.median for step in costs.target]
        drafts = [[0.0, *(costs.draft_seconds(name, k) for k in range(1, longest + 1))] for name in names]
        target = _extended(steps, longest + 1)
        reading = np.array([costs.reading_seconds(name) for name in names])
        return BlockCosts(target, np.array(drafts), costs.overhead.median, costs.plain_overhead.median, reading)

    @staticmethod
    def of_report(law: Mapping[str, Any], names: Sequence[str], longest: int) -> "BlockCosts":
        """Return the times that a report keeps of one of its laws, or of one batch size of it (see at_batch_size).

        Raises:
            UserError: it keeps none, or none of a drafter.
        """
        if not law["target_seconds"]:
            raise UserError("The report has no cost: score the drafters with --target, so that steps are timed.")
        timed = {entry["name"]: entry for entry in law["drafters"]}
        if missing := [name for name in names if not timed.get(name, {}).get("draft_seconds")]:
            raise UserError(f"The report has no cost of {missing[0]}. It timed: {', '.join(sorted(timed))}.")
        steps = [law["target_seconds"][str(n)] for n in range(1, len(law["target_seconds"]) + 1)]
        drafts = np.array([_line(timed[name]["draft_seconds"], longest) for name in names])
        reading = np.array([timed[name].get("reading_seconds") or 0.0 for name in names])
        overhead, plain = law["overhead_seconds"] or 0.0, law.get("plain_overhead_seconds") or 0.0
        return BlockCosts(_extended(steps, longest + 1), drafts, overhead, plain, reading)

    @staticmethod
    def by_ratio(ratios: Sequence[float], longest: int, target_growth: float = 0.0, requests: int = 1) -> "BlockCosts":
        """Return costs in units of a target step of one token, from ratios alone.

        Args:
            ratios: Time of a draft step / of a target step, for each drafter.
            target_growth: What one more token adds to a step of the target or of a draft, as a share of it; reading a
                token of context takes as much.
            requests: Decoded together: a step over n tokens of each has n times as many tokens.
        """
        tokens = requests * np.arange(1.0, longest + 2.0)
        step = 1.0 + target_growth * (requests - 1.0)
        drafts = step * np.array(ratios, float)[:, None] * np.arange(longest + 1.0)
        reading = requests * target_growth * np.array(ratios, float)
        return BlockCosts(1.0 + target_growth * (tokens - 1.0), drafts, reading=reading)

    def to_json(self) -> dict[str, Any]:
        return {
            "target_seconds": self.target.tolist(),
            "draft_seconds": self.drafts.tolist(),
            "overhead": self.overhead,
            "plain_overhead": self.plain_overhead,
            "reading_seconds": self.reading.tolist(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "BlockCosts":
        target, drafts, reading = (
            np.array(data[name], float) for name in ("target_seconds", "draft_seconds", "reading_seconds")
        )
        return BlockCosts(target, drafts, float(data["overhead"]), float(data["plain_overhead"]), reading)


def at_batch_size(law: Mapping[str, Any], rows: str) -> dict[str, Any]:
    """Return a law of a report with the times of one batch size in place of those of one request."""
    return {
        **law,
        **law["batch"][rows],
        "drafters": [
            {**entry, **{name: entry["batch"][rows].get(name) for name in ("draft_seconds", "reading_seconds")}}
            for entry in law["drafters"]
        ],
    }


def _extended(steps: Sequence[float], widths: int) -> Float64[np.ndarray, " widths"]:
    slope = max(0.0, (steps[-1] - steps[0]) / (len(steps) - 1)) if len(steps) > 1 else 0.0
    more = [steps[-1] + slope * n for n in range(1, widths - len(steps) + 1)]
    return np.array([*steps, *more][:widths])


def _line(timed: Mapping[str, float], longest: int) -> list[float]:
    """Return the time of 0 .. longest draft tokens, on the line through the lengths that were timed."""
    known = sorted((int(k), seconds) for k, seconds in timed.items())
    lengths, seconds = zip(*known, strict=True)
    within = np.interp(np.arange(1, longest + 1), lengths, seconds)
    per_token = seconds[-1] / lengths[-1]
    beyond = np.maximum(np.arange(1, longest + 1) - lengths[-1], 0) * per_token
    return [0.0, *(within + beyond).tolist()]
