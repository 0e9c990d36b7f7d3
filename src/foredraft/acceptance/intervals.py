"""Intervals by cluster bootstrap: prompts are resampled, because tokens of one prompt are not independent.

Plain percentiles are too narrow where prompts are few; the expanded ones of Hesterberg 2015 (arXiv 1411.5279,
section 4.1.1) are as much wider as Student's t is than the normal law.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float

from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.errors import UserError

RESAMPLES = 2000
LEVEL = 0.95
POWER = 0.8


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
        prompts_needed: Prompts like these that show the difference found in 80 of 100 comparisons; infinite
            where there is none.
        spread: Standard deviation of one prompt's effect on the difference.
    """

    difference: Interval
    prompts_needed: float
    spread: float

    @property
    def is_inside_noise(self) -> bool:
        return self.difference.low <= 0.0 <= self.difference.high

    def prompts_to_resolve(self, difference: float) -> float:
        """Return how many prompts like these show a difference of that size in 80 of 100 comparisons.

        Normal approximation, n = ((z of the level + z of the power) * spread / difference)^2.
        """
        return _prompts_to_resolve(self.spread, difference)


def tokens_per_call(k: int) -> Callable[[AcceptanceReport], Ratio]:
    """Return the ratio behind mean_tokens_per_call(k)."""
    return lambda report: Ratio(_tokens(report), report.calls(k))


def expected_acceptance(report: AcceptanceReport) -> Ratio:
    """Return the ratio behind expected_acceptance."""
    return Ratio(np.array([prompt.accepted_sum for prompt in report.prompts]), _tokens(report))


def scaled_tokens_per_call(k: int, factor: float) -> Callable[[AcceptanceReport], Ratio]:
    """Return the ratio behind mean_tokens_per_call(k) * factor: a speedup, with the costs as they were measured."""
    return lambda report: Ratio(factor * _tokens(report), report.calls(k))


def interval(ratio: Ratio, generator: np.random.Generator) -> Interval:
    """Return a ratio with its percentile interval; without width where there is one prompt."""
    count = len(ratio.numerators)
    return _interval(ratio.value, ratio.resampled(_weights(count, generator)), count)


def paired_difference(
    report: AcceptanceReport,
    other: AcceptanceReport,
    metric: Callable[[AcceptanceReport], Ratio],
    generator: np.random.Generator,
    other_metric: Callable[[AcceptanceReport], Ratio] | None = None,
) -> PairedDifference:
    """Return metric(report) - metric(other), resampling the prompts of both together.

    Args:
        other_metric: Of `other` where it differs, as predicted speedups do by their costs.

    Raises:
        UserError: the two were not scored on the same prompts in the same order.
    """
    here, there = ([prompt.prompt_id for prompt in part.prompts] for part in (report, other))
    if here != there:
        raise UserError(f"Drafters scored on {len(here)} and {len(there)} other prompts cannot be compared in pairs.")
    one, two = metric(report), (other_metric or metric)(other)
    weights = _weights(len(here), generator)
    resampled = one.resampled(weights) - two.resampled(weights)
    difference = _interval(one.value - two.value, resampled, len(here))
    spread = float(resampled.std()) * math.sqrt(len(here))
    return PairedDifference(difference, _prompts_to_resolve(spread, difference.value), spread)


def _weights(num_prompts: int, generator: np.random.Generator) -> Any:
    return generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=RESAMPLES).astype(float)


def student_quantile(probability: float, degrees: int) -> float:
    """Return Student's t quantile: exact for 1 and 2 degrees of freedom, else within 2 % up to the 99.5 % point.

    Source: Abramowitz and Stegun 1964, 26.7.5.
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def _interval(value: float, resampled: Float[np.ndarray, " resamples"], num_prompts: int) -> Interval:
    if num_prompts == 1:
        return Interval(value, value, value)
    t = student_quantile((1 + LEVEL) / 2, num_prompts - 1)
    tail = NormalDist().cdf(-t * math.sqrt(num_prompts / (num_prompts - 1)))
    low, high = np.quantile(resampled, [tail, 1 - tail]).tolist()
    return Interval(value, low, high)


def _prompts_to_resolve(spread: float, difference: float) -> float:
    z = NormalDist().inv_cdf((1 + LEVEL) / 2) + NormalDist().inv_cdf(POWER)
    return math.inf if difference == 0.0 else float(math.ceil((z * spread / difference) ** 2))


def _tokens(report: AcceptanceReport) -> Float[np.ndarray, " prompts"]:
    return np.array([float(prompt.tokens) for prompt in report.prompts])
