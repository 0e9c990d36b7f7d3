"""Intervals by cluster bootstrap: prompts are resampled, because tokens of one prompt are not independent."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.errors import UserError

RESAMPLES = 2000
LEVEL = 0.95
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of sums over prompts, such as tokens / calls. Entry i is about prompt i."""

    numerators: Float[np.ndarray, " prompts"]
    denominators: Float[np.ndarray, " prompts"]

    @property
    def value(self) -> float:
        return float(self.numerators.sum() / self.denominators.sum())

    def resampled(self, weights: Float[np.ndarray, "resamples prompts"]) -> Float[np.ndarray, " resamples"]:
        """Return the ratio of each resample; `weights` says how often it holds each prompt."""
        return (weights @ self.numerators) / (weights @ self.denominators)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the interval that covers it in about 95 of 100 samples of prompts."""

    value: float
    low: float
    high: float

    @property
    def bounds(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """A metric of one drafter minus that of another, on the same prompts.

    Attributes:
        prompts_needed: Prompts like these that would bring the interval clear of zero, at the difference
            found; infinite where there is none.
    """

    difference: Interval
    prompts_needed: float

    @property
    def is_inside_noise(self) -> bool:
        return self.difference.low <= 0.0 <= self.difference.high


def tokens_per_call(k: int) -> Callable[[AcceptanceReport], Ratio]:
    """Return the ratio behind mean_tokens_per_call(k)."""
    return lambda report: Ratio(_tokens(report), report.calls(k))


def expected_acceptance(report: AcceptanceReport) -> Ratio:
    """Return the ratio behind expected_acceptance."""
    return Ratio(np.array([prompt.accepted_sum for prompt in report.prompts]), _tokens(report))


def interval(ratio: Ratio, generator: np.random.Generator) -> Interval:
    """Return a ratio with its percentile interval; without width where there is one prompt."""
    return _interval(ratio.value, ratio.resampled(_weights(len(ratio.numerators), generator)))


def paired_difference(
    report: AcceptanceReport,
    other: AcceptanceReport,
    metric: Callable[[AcceptanceReport], Ratio],
    generator: np.random.Generator,
) -> PairedDifference:
    """Return metric(report) - metric(other), resampling the prompts of both together.

    Raises:
        UserError: the two were not scored on the same prompts in the same order.
    """
    here, there = ([prompt.prompt_id for prompt in part.prompts] for part in (report, other))
    if here != there:
        raise UserError(f"Drafters scored on {len(here)} and {len(there)} other prompts cannot be compared in pairs.")
    one, two = metric(report), metric(other)
    weights = _weights(len(here), generator)
    resampled = one.resampled(weights) - two.resampled(weights)
    difference = _interval(one.value - two.value, resampled)
    error, gap = float(resampled.std()), abs(difference.value)
    needed = math.inf if gap == 0.0 else math.ceil(len(here) * (_NORMAL_QUANTILE * error / gap) ** 2)
    return PairedDifference(difference, needed)


def _weights(num_prompts: int, generator: np.random.Generator) -> Any:
    return generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=RESAMPLES).astype(float)


def _interval(value: float, resampled: Float[np.ndarray, " resamples"]) -> Interval:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return Interval(value, low, high)


def _tokens(report: AcceptanceReport) -> Float[np.ndarray, " prompts"]:
    return np.array([float(prompt.tokens) for prompt in report.prompts])
