"""Several drafters for mixed traffic: the front of cost and acceptance, the best few, and how sure the choice is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from foredraft.acceptance.wording import Figure
from foredraft.core.errors import UserError
from foredraft.select.offline import NO_SPECULATION

_NORMAL_95 = 1.959964
_MOST_SUBSETS = 200_000


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Drafters of which the best one serves each domain.

    Attributes:
        drafters: Their names.
        speedup: Expected over the mix: times add up.
        serves: For each domain the drafter, or NO_SPECULATION.
        num_bytes: Memory of all together.
    """

    drafters: tuple[str, ...]
    speedup: float
    serves: Mapping[str, str]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """How far more prompts could change a choice.

    Attributes:
        chance: That the other one is faster than the chosen, by both intervals taken as normal and unpaired.
        prompts_needed: For their intervals to settle it, about; inf where they are equally fast.
    """

    other: str
    chance: float
    prompts_needed: float


def over_mix(speedups: Mapping[str, float], mix: Mapping[str, float]) -> float:
    """Return the speedup over traffic of which each domain has a share of the tokens: times add up."""
    return sum(mix.values()) / sum(share / speedups[domain] for domain, share in mix.items())


def best_portfolio(
    speedups: Mapping[str, Mapping[str, float]],
    mix: Mapping[str, float],
    count: int,
    num_bytes: Mapping[str, int],
    limit: float,
) -> Portfolio:
    """Return the fastest set of at most `count` drafters that fits; of equally fast ones the smallest.

    Args:
        speedups: By drafter and domain, each at its best length there.
        mix: Share of the tokens by domain.
        num_bytes: Memory of each drafter.
        limit: Of all together.

    Raises:
        UserError: there are too many sets to compare.
    """
    names = sorted(speedups)
    if sum(math.comb(len(names), size) for size in range(count + 1)) > _MOST_SUBSETS:
        raise UserError(
            f"{len(names)} candidates have too many portfolios of {count}: ask for fewer, or fewer drafters."
        )
    best = _served((), speedups, mix, num_bytes)
    for size in range(1, count + 1):
        for chosen in combinations(names, size):
            if sum(num_bytes[name] for name in chosen) > limit:
                continue
            found = _served(chosen, speedups, mix, num_bytes)
            smaller = found.speedup >= best.speedup and found.num_bytes < best.num_bytes
            if smaller or found.speedup > best.speedup * (1.0 + 1e-9):
                best = found
    return best


def doubts(chosen: str, figures: Mapping[str, Figure], prompts: int) -> list[Doubt]:
    """Return for every other candidate how likely more prompts would turn the choice, the likeliest first."""
    found = []
    for name, figure in figures.items():
        if name == chosen or not figure.has_interval or not figures[chosen].has_interval:
            continue
        spread = math.hypot(_deviation(figure), _deviation(figures[chosen]))
        ahead = figures[chosen].value - figure.value
        if spread == 0.0:
            continue
        chance = 0.5 * math.erfc(ahead / spread / math.sqrt(2.0))
        needed = prompts * (_NORMAL_95 * spread / ahead) ** 2 if ahead else math.inf
        found.append(Doubt(name, chance, needed))
    return sorted(found, key=lambda one: -one.chance)


def checked_mix(mix: Mapping[str, float], known: Sequence[str]) -> dict[str, float]:
    """Return shares that sum to 1.

    Raises:
        UserError: a domain was not scored, or a share is negative or absurd.
    """
    for domain, share in mix.items():
        if domain not in known:
            raise UserError(f"mix: {domain} was not scored. Known: {', '.join(known)}.")
        if not (math.isfinite(share) and share >= 0.0):
            raise UserError(f"mix: the share of {domain} is {share}, and must be 0 or more.")
    total = sum(mix.values())
    if not math.isfinite(total):
        raise UserError("mix: the shares are too large to be added up.")
    if total <= 0.0:
        raise UserError("mix: no domain has a share above 0.")
    return {domain: share / total for domain, share in mix.items() if share}


def _served(
    chosen: tuple[str, ...],
    speedups: Mapping[str, Mapping[str, float]],
    mix: Mapping[str, float],
    num_bytes: Mapping[str, int],
) -> Portfolio:
    serves, best = {}, {}
    for domain in mix:
        fastest = max(chosen, key=lambda name: speedups[name][domain], default=NO_SPECULATION)
        faster = fastest != NO_SPECULATION and speedups[fastest][domain] > 1.0
        serves[domain] = fastest if faster else NO_SPECULATION
        best[domain] = speedups[fastest][domain] if faster else 1.0
    return Portfolio(chosen, over_mix(best, mix), serves, sum(num_bytes[name] for name in chosen))


def _deviation(figure: Figure) -> float:
    return (figure.high - figure.low) / (2.0 * _NORMAL_95)
