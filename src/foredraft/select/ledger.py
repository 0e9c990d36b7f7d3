"""What was seen of each drafter, by situation, and what every arm is worth by it.

A block says of draft position i whether it was at risk (all before it were accepted, and so many tokens were asked)
and whether it was accepted; a drafter without a guess fails there. From these the mean tokens of a block follow for
every length at once (MATHS 6), also for lengths that were not used. Old counts fade, so that all this follows shifts.
"""

import inspect
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64
from numba import njit

from foredraft.select.arms import Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.unread import Unread

EVERYWHERE = 0
_AGEING = 0.998
_RISK, _KEPT, _ASKED, _OFFERED = range(4)


@dataclass(frozen=True, slots=True)
class Memory:
    """How fast old blocks fade, and what is believed before any was seen.

    Attributes:
        fade: What a count is multiplied by at each block, in (0, 1]; 1 never forgets.
        prior: Acceptance of a draft token believed at first.
        weight: Blocks that a belief weighs.
        in_situation: Blocks that what was seen everywhere weighs in one situation.
    """

    fade: float = 0.99
    prior: float = 0.6
    weight: float = 2.0
    in_situation: float = 3.0


@dataclass(frozen=True, slots=True)
class Vigilance:
    """When the counts of a drafter are doubted: its blocks are not what they were.

    Attributes:
        surprise: A run of blocks without an accepted token is noticed once its chance, as estimated, is below.
        drift: Mean departure of the last blocks from their estimate, in deviations, from which on it is noticed.
        keep: What is kept of the counts then.
    """

    surprise: float = 0.02
    drift: float = 1.2
    keep: float = 0.15


@dataclass(frozen=True, slots=True)
class Worth:
    """Estimates by arm.

    Attributes:
        tokens: Mean tokens of a block.
        deviation: Standard deviation of the tokens of a block.
        seconds: Mean time of a block, its share of what its drafter has to read first included.
        blocks: Faded number of blocks that its drafter was seen in; 0 for no speculation, which is known.
    """

    tokens: Float64[np.ndarray, " arms"]
    deviation: Float64[np.ndarray, " arms"]
    seconds: Float64[np.ndarray, " arms"]
    blocks: Float64[np.ndarray, " arms"]


class Ledger:
    """Faded counts [what, situation, drafter, position]; situation EVERYWHERE holds all blocks.

    Attributes:
        worth: Of every arm, as last estimated; `estimate` writes it over.
    """

    def __init__(self, arms: Arms, num_situations: int, memory: Memory, vigilance: Vigilance) -> None:
        drafters = len(arms.names)
        self._arms, self._memory = arms, memory
        self._counts = np.zeros((4, num_situations, drafters, arms.longest))
        self._beliefs = np.array((memory.prior, memory.weight, memory.in_situation, memory.fade))
        self._alarm = np.array((vigilance.surprise, vigilance.drift, vigilance.keep))
        self._watch = np.zeros((drafters, 2))
        self._measured_by = np.array([[_nearest(arms, d, k) for k in range(arms.longest + 1)] for d in range(drafters)])
        ones = np.ones(len(arms))
        self.worth = Worth(ones.copy(), ones.copy(), ones.copy(), np.zeros(len(arms)))

    def see(self, situation: int, drafter: int, asked: int, offered: int, accepted: int) -> bool:
        """Count one block of a drafter; return whether it was noticed to have changed, and doubted."""
        worth = self.worth
        return _see(
            self._counts, situation, drafter, asked, offered, accepted, self._beliefs, self._alarm, self._watch,
            worth.tokens, worth.deviation, self._measured_by[drafter, asked], self._arms.k,
        )  # fmt: skip

    def grow_old(self) -> None:
        """Let a block pass: what was not seen for long is believed less, so that it is tried again."""
        self._counts[:, EVERYWHERE] *= _AGEING

    def blocks_of(self, situation: int, drafter: int) -> float:
        """Return the faded number of blocks seen of a drafter in one situation."""
        return float(self._counts[_RISK, situation, drafter, 0])

    def acceptance(self, drafter: int) -> float:
        """Return the estimated chance that a drafter has a first token and that it is accepted."""
        risk, kept = (self._counts.item(what, EVERYWHERE, drafter, 0) for what in (_RISK, _KEPT))
        return (kept + self._memory.weight * self._memory.prior) / (risk + self._memory.weight)

    def estimate(self, situation: int, costs: BlockCosts, unread: Unread, remaining: float) -> None:
        """Estimate what every arm is worth in one situation.

        Args:
            unread: What each drafter has to read before its first block.
            remaining: Tokens of the text to come: a block is charged for reading by its share of them.
        """
        worth, arms = self.worth, self._arms
        _worth(
            self._counts, situation, self._beliefs, arms.drafter, arms.k,
            costs.target, costs.drafts, costs.overhead, costs.plain,
            costs.reading, unread.read_to, unread.size, remaining,
            worth.tokens, worth.deviation, worth.seconds, worth.blocks,
        )  # fmt: skip


def _nearest(arms: Arms, drafter: int, asked: int) -> int:
    """Return the longest arm of a drafter that blocks of so many tokens tell about, else its shortest."""
    own = arms.own[drafter]
    return max((arm for arm in own if arms.k[arm] <= asked), default=own[0])


def _see_block(
    counts: Float64[np.ndarray, "4 situations drafters positions"],
    situation: int,
    drafter: int,
    asked: int,
    offered: int,
    accepted: int,
    beliefs: Float64[np.ndarray, "4"],
    alarm: Float64[np.ndarray, "3"],
    watch: Float64[np.ndarray, "drafters 2"],
    tokens: Float64[np.ndarray, " arms"],
    deviation: Float64[np.ndarray, " arms"],
    arm: int,
    arm_k: Int64[np.ndarray, " arms"],
) -> bool:
    prior, weight, fade = beliefs[0], beliefs[1], beliefs[3]
    departure = (min(accepted, arm_k[arm]) - tokens[arm] + 1.0) / max(deviation[arm], 0.1)
    watch[drafter, 0] += 0.2 * (min(max(departure, -3.0), 3.0) - watch[drafter, 0])
    watch[drafter, 1] = 0.0 if accepted > 0 else watch[drafter, 1] + 1.0
    right = (counts[1, 0, drafter, 0] + weight * prior) / (counts[0, 0, drafter, 0] + weight)
    unlikely = watch[drafter, 1] > 1.0 and (1.0 - min(right, 0.99)) ** watch[drafter, 1] < alarm[0]
    noticed = unlikely or abs(watch[drafter, 0]) > alarm[1]
    if noticed:
        watch[drafter, :] = 0.0
    scale = fade * (alarm[2] if noticed else 1.0)
    for place in (0, situation):
        here = counts[:, place, drafter]
        here *= scale
        for position in range(asked):
            if position <= accepted:
                here[0, position] += 1.0
                here[1, position] += position < accepted
            here[2, position] += 1.0
            here[3, position] += position < offered
        if situation == 0:
            break
    return noticed


def _estimate(
    counts: Float64[np.ndarray, "4 situations drafters positions"],
    situation: int,
    beliefs: Float64[np.ndarray, "4"],
    arm_drafter: Int64[np.ndarray, " arms"],
    arm_k: Int64[np.ndarray, " arms"],
    target: Float64[np.ndarray, " widths"],
    drafts: Float64[np.ndarray, "drafters lengths"],
    overhead: float,
    plain: float,
    reading: Float64[np.ndarray, " drafters"],
    read_to: Float64[np.ndarray, " drafters"],
    size: int,
    remaining: float,
    tokens: Float64[np.ndarray, " arms"],
    deviation: Float64[np.ndarray, " arms"],
    seconds: Float64[np.ndarray, " arms"],
    blocks: Float64[np.ndarray, " arms"],
) -> None:
    prior, weight, in_situation = beliefs[0], beliefs[1], beliefs[2]
    tokens[0], deviation[0], seconds[0], blocks[0] = 1.0, 0.0, plain, 0.0
    for arm in range(1, len(arm_k)):
        drafter = arm_drafter[arm]
        seen = counts[:, 0, drafter]
        pooled = (seen[1].sum() + weight * prior) / (seen[0].sum() + weight)
        reached, mean, square, offers = 1.0, 0.0, 0.0, 0.0
        verify = target[0]
        for position in range(arm_k[arm]):
            kept = (seen[1, position] + weight * pooled) / (seen[0, position] + weight)
            offered = (seen[3, position] + weight) / (seen[2, position] + weight)
            if situation != 0:
                here = counts[:, situation, drafter]
                kept = (here[1, position] + in_situation * kept) / (here[0, position] + in_situation)
                offered = (here[3, position] + in_situation * offered) / (here[2, position] + in_situation)
            offers = offered if position == 0 else min(offers, offered)
            reached *= kept
            mean += reached
            square += (2 * position + 1) * reached
            verify += offers * (target[position + 1] - target[position])
        tokens[arm] = 1.0 + mean
        deviation[arm] = max(square - mean * mean, 0.0) ** 0.5
        share = reading[drafter] * (size - read_to[drafter]) / remaining
        seconds[arm] = drafts[drafter, arm_k[arm]] + verify + overhead + share * tokens[arm]
        blocks[arm] = counts[0, situation, drafter, 0]


# The compiler needs the bare functions, not those wrapped by checks of their annotations.
_see = njit(cache=True)(inspect.unwrap(_see_block))
_worth = njit(cache=True)(inspect.unwrap(_estimate))
