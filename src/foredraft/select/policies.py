"""Policies: which arm the next block gets, from what is known so far.

A policy is a frozen value and keeps nothing; what was seen lies in the ledger. It looks at past blocks and at
draft-side figures only, so that any of them is lossless (MATHS 2.5).
"""

import inspect
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64
from numba import njit

from foredraft.catalog import resolve
from foredraft.core.errors import UserError
from foredraft.core.options import read_options
from foredraft.select.arms import PLAIN, Arms
from foredraft.select.ledger import Worth

_LARGEST = 1e6  # of an option or a weight; what lies above was not meant


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at.

    Attributes:
        worth: Estimates by arm.
        entropy: By drafter, in nats: of its latest law; of certain guesses, -log of how often they were right lately.
        perplexity: By drafter: of the latest emitted tokens under its laws; of certain guesses 1 / how often right.
        memory: By drafter: its bytes / the target's.
        chance: For policies that draw.
    """

    arms: Arms
    worth: Worth
    entropy: Float64[np.ndarray, " drafters"]
    perplexity: Float64[np.ndarray, " drafters"]
    memory: Float64[np.ndarray, " drafters"]
    chance: np.random.Generator

    @property
    def rates(self) -> Float64[np.ndarray, " arms"]:
        """Estimated tokens per second of every arm."""
        return self.worth.tokens / self.worth.seconds


@runtime_checkable
class Policy(Protocol):
    """Chooses an arm.

    Attributes:
        watches: Whether drafters without a model are scored on every block, used or not.
        probes: Whether drafters that were not seen for long are tried now and then, within a budget.
        by_situation: Whether estimates are those of the domain and match length at hand.
        by_laws: Whether it looks at entropy and perplexity.
    """

    watches: bool
    probes: bool
    by_situation: bool
    by_laws: bool

    def choose(self, view: View) -> int:
        """Return the number of an arm."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same arm always."""

    arm: float = PLAIN
    watches: bool = False
    probes: bool = False
    by_situation: bool = False
    by_laws: bool = False

    def choose(self, view: View) -> int:
        if self.arm not in range(len(view.arms)):
            raise UserError(f"fixed:arm={self.arm:g}: there are arms 0 to {len(view.arms) - 1}.")
        return int(self.arm)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The chapter's rules: the stronger drafter where the weaker is perplexed, the length by entropy.

    The weaker drafter is the cheaper one, the stronger the dearest. It knows no arm without speculation.

    Attributes:
        limit: Perplexity under the weaker drafter above which the stronger one drafts.
        long_below, medium_below: Entropy in nats under which blocks are the longest, and the middle one; else one.
    """

    limit: float = 10.0
    long_below: float = 0.5
    medium_below: float = 1.0
    watches: bool = True
    probes: bool = False
    by_situation: bool = False
    by_laws: bool = True

    def __post_init__(self) -> None:
        _require_sane("thresholds", limit=self.limit, long_below=self.long_below, medium_below=self.medium_below)

    def choose(self, view: View) -> int:
        cost, own = view.worth.seconds.tolist(), view.arms.own
        dearest = [cost[arms[-1]] for arms in own]
        weak, strong = dearest.index(min(dearest)), dearest.index(max(dearest))
        drafter = strong if view.perplexity.item(weak) > self.limit else weak
        entropy, arms = view.entropy.item(drafter), own[drafter]
        if entropy < self.long_below:
            return arms[-1]
        return arms[len(arms) // 2] if entropy < self.medium_below else arms[0]


@dataclass(frozen=True, slots=True)
class Marginal:
    """The largest estimated rate: for one drafter the length of the marginal rule (MATHS 6)."""

    watches: bool = True
    probes: bool = True
    by_situation: bool = False
    by_laws: bool = False

    def choose(self, view: View) -> int:
        return int(view.rates.argmax())


@dataclass(frozen=True, slots=True)
class Ucb:
    """The largest rate that is still plausible.

    Source: Auer et al. 2002, UCB1; the width here is that of the tokens of a block, and old blocks fade (Garivier and
    Moulines 2011). Only drafters that were used teach it something.
    """

    width: float = 0.7
    watches: bool = False
    probes: bool = False
    by_situation: bool = False
    by_laws: bool = False

    def __post_init__(self) -> None:
        _require_sane("ucb", width=self.width)

    def choose(self, view: View) -> int:
        worth = view.worth
        return _plausible(worth.tokens, worth.deviation, worth.seconds, worth.blocks, self.width)


@dataclass(frozen=True, slots=True)
class Thompson:
    """The largest rate in a draw from what is believed of each arm (Thompson 1933); only used drafters teach it."""

    watches: bool = False
    probes: bool = False
    by_situation: bool = False
    by_laws: bool = False

    def choose(self, view: View) -> int:
        worth = view.worth
        normals = view.chance.standard_normal(len(worth.tokens))
        return _drawn(worth.tokens, worth.deviation, worth.seconds, worth.blocks, normals)


@dataclass(frozen=True, slots=True)
class Hedge:
    """Exponential weights over the time that each arm would have saved at the going rate.

    Tokens / going rate - seconds has its maximum at the arm of the largest rate (Dinkelbach 1967). Drafters without a
    model are all scored on every block, which is the full information that hedging needs (Freund and Schapire 1997).

    Attributes:
        eta: Weight of a saved target step.
    """

    eta: float = 1.5
    watches: bool = True
    probes: bool = True
    by_situation: bool = False
    by_laws: bool = False

    def __post_init__(self) -> None:
        _require_sane("hedge", eta=self.eta)

    def choose(self, view: View) -> int:
        worth = view.worth
        return _hedged(worth.tokens, worth.seconds, worth.blocks, self.eta, view.chance.random())


@dataclass(frozen=True, slots=True)
class Contextual:
    """The largest estimated rate in the situation at hand: the domain of the request and the length of the match."""

    watches: bool = True
    probes: bool = True
    by_situation: bool = True
    by_laws: bool = False

    def choose(self, view: View) -> int:
        return int(view.rates.argmax())


@dataclass(frozen=True, slots=True)
class Score:
    """The chapter's score: speed * its weight + quality * its weight + resource * its weight.

    Speed is the estimated rate / that of plain decoding, quality the accepted share of the draft tokens asked, and
    resource the memory of the drafter / the target's, which counts against it.
    """

    speed: float = 1.0
    quality: float = 0.0
    resource: float = 0.0
    watches: bool = True
    probes: bool = True
    by_situation: bool = False
    by_laws: bool = False

    def __post_init__(self) -> None:
        weights = (self.speed, self.quality, self.resource)
        if not all(0.0 <= weight <= _LARGEST for weight in weights) or not any(weights):
            raise UserError(f"Weights of a score lie in 0 .. {_LARGEST:,.0f}, one of them above 0, not {weights}.")

    def choose(self, view: View) -> int:
        worth, arms = view.worth, view.arms
        return _scored(
            worth.tokens, worth.seconds, arms.drafter, arms.k, view.memory, self.speed, self.quality, self.resource
        )


def read_policy(text: str) -> Policy:
    """Return the policy that `name` or `name:option=number,...` stands for.

    Options may stand apart by semicolons too, for a policy inside a spec, whose own options have the commas.

    Raises:
        UnknownNameError: no such policy.
        UserError: it takes no such option, or its value is none that makes sense.
    """
    text = text.replace(";", ",")
    factory = resolve("policies", text.partition(":")[0])
    options = inspect.signature(factory).parameters.values()
    takes = {one.name: float for one in options if one.annotation in (float, "float")}
    return factory(**read_options(text, takes))


def _require_sane(policy: str, **options: float) -> None:
    for option, value in options.items():
        if not 0.0 <= value <= _LARGEST:
            raise UserError(f"{policy}:{option}={value:g}: {option} lies in 0 .. {_LARGEST:,.0f}.")


def _plausible_rate(
    tokens: np.ndarray, deviation: np.ndarray, seconds: np.ndarray, blocks: np.ndarray, width: float
) -> int:
    log_blocks = math.log(blocks.sum() + 2.0)
    best, arm = 0.0, 0
    for index in range(len(tokens)):
        unsure = math.sqrt(log_blocks / (blocks[index] + 1.0))
        rate = (tokens[index] + width * deviation[index] * unsure) / seconds[index]
        if rate > best:
            best, arm = rate, index
    return arm


def _drawn_rate(
    tokens: np.ndarray, deviation: np.ndarray, seconds: np.ndarray, blocks: np.ndarray, normals: np.ndarray
) -> int:
    best, arm = 0.0, 0
    for index in range(len(tokens)):
        drawn = tokens[index] + deviation[index] * normals[index] / math.sqrt(blocks[index] + 1.0)
        rate = max(drawn, 1.0) / seconds[index]
        if rate > best:
            best, arm = rate, index
    return arm


def _hedged_draw(tokens: np.ndarray, seconds: np.ndarray, blocks: np.ndarray, eta: float, uniform: float) -> int:
    saved = tokens / (tokens / seconds).max() - seconds
    weights = np.exp(eta * (blocks.max() + 1.0) / seconds[0] * (saved - saved.max()))
    left = uniform * weights.sum()
    for index in range(len(weights)):
        left -= weights[index]
        if left < 0.0:
            return index
    return int(weights.argmax())


def _highest_score(
    tokens: np.ndarray,
    seconds: np.ndarray,
    arm_drafter: np.ndarray,
    arm_k: np.ndarray,
    memory: np.ndarray,
    speed: float,
    quality: float,
    resource: float,
) -> int:
    best, arm = -np.inf, 0
    for index in range(len(tokens)):
        score = speed * tokens[index] / seconds[index] * seconds[0] / tokens[0]
        if index:
            score += quality * (tokens[index] - 1.0) / arm_k[index] - resource * memory[arm_drafter[index]]
        if score > best:
            best, arm = score, index
    return arm


# The compiler needs the bare functions, not those wrapped by checks of their annotations.
_plausible = njit(cache=True)(inspect.unwrap(_plausible_rate))
_drawn = njit(cache=True)(inspect.unwrap(_drawn_rate))
_scored = njit(cache=True)(inspect.unwrap(_highest_score))
_hedged = njit(cache=True)(inspect.unwrap(_hedged_draw))
