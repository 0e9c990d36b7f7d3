"""Running policies over recorded answers, and what they are compared with: fixed arms and oracles.

Every policy meets the same text, the same draws of acceptance and the same costs, in order of arrival and cold.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jaxtyping import Float64, Int64
from numba import njit

from foredraft.acceptance.replay import acceptance_given_text, as_arrays
from foredraft.core.errors import TraceError
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.core.protocols import Drafter, EmittedProbs
from foredraft.select.adaptive import is_certain
from foredraft.select.arms import NOBODY, Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.controller import Controller
from foredraft.select.policies import Fixed, Policy
from foredraft.select.situations import Reader, Situations, situations_in
from foredraft.select.unread import Unread
from foredraft.select.walk import Recorded, replayed, runs, shared_with_last, walk
from foredraft.trace.rows import TraceRow

DECIDING_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class Traffic:
    """Recorded answers as every drafter would have met them.

    Attributes:
        names: Of the drafters.
        model_free: By drafter, whether its guesses are certain and cost no model pass.
        answers: In order of arrival.
        num_bytes: By drafter, its memory; empty where it is not known.
    """

    names: tuple[str, ...]
    model_free: tuple[bool, ...]
    answers: tuple[Recorded, ...]
    num_bytes: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy over the traffic, by answer and by block.

    Attributes:
        seconds: Of each answer, by measured costs; deciding is included.
        tokens, calls: Of each answer.
        arms: Of every block, in order.
        shifts: Changes that were noticed.
    """

    seconds: Float64[np.ndarray, " answers"]
    tokens: Int64[np.ndarray, " answers"]
    calls: Int64[np.ndarray, " answers"]
    arms: Sequence[Int64[np.ndarray, " _"]] = field(default_factory=list)
    shifts: int = 0

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def mean_tokens_per_call(self) -> float:
        return float(self.tokens.sum() / self.calls.sum())


def record(
    drafters: Mapping[str, Drafter],
    rows: Sequence[TraceRow],
    longest: int,
    situations: Situations | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> Traffic:
    """Replay drafters over answers, in their order; drafters with a model run it, the target does not.

    The domain of a request is the label that the trace gives it.

    Args:
        drafters: Bound to the law of the answers.
        seed: Of the draws that decide whether a drawn token is accepted.

    Raises:
        TraceError: there are no answers.
    """
    rows = [row for row in rows if len(row.answer_ids)]
    if not rows:
        raise TraceError("There is nothing to simulate: the trace holds no answers.")
    known = situations or Situations(tuple(sorted({row.domain for row in rows})))
    chance = np.random.default_rng(seed)
    texts = [row.answer() for row in rows]
    parts = zip(*(replayed(drafter, texts, longest) for drafter in drafters.values()), strict=True)
    shown = tracked(progress, "replaying drafters", rows, "answers")
    answers = []
    for row, answer, shared, given in zip(shown, texts, shared_with_last(texts), parts, strict=True):
        target = row.logprobs.double().exp().numpy()
        offered, matched = zip(*(_accepted(one, target, longest, chance) for one in given), strict=True)
        places = situations_in(Reader(known, partial(_labelled, row.domain)), answer)
        offers, matches = np.stack(offered), np.stack(matched)
        answers.append(Recorded(offers, matches, places, row.domain, answer.start, shared))
    free, held = zip(*((is_certain(one), one.num_bytes) for one in drafters.values()), strict=True)
    return Traffic(tuple(drafters), free, tuple(answers), held)


def simulate(
    traffic: Traffic,
    policy: Policy,
    costs: BlockCosts,
    lengths: Sequence[int],
    seed: int = 0,
    deciding: float = DECIDING_SECONDS,
    num_situations: int = 0,
    target_bytes: int = 0,
) -> Run:
    """Return what a policy makes of the traffic, starting cold.

    Args:
        deciding: Seconds that choosing takes a block; not counted for fixed policies.
        num_situations: As traffic was recorded with; found out if 0.
        target_bytes: Memory of the target, for policies that weigh memory; 0 where it is not known.
    """
    arms = Arms.of(traffic.names, lengths)
    most = num_situations or 1 + max(int(answer.situations.max()) for answer in traffic.answers)
    shares = tuple(held / target_bytes for held in traffic.num_bytes) if target_bytes else ()
    controller = Controller(arms, costs, policy, traffic.model_free, shares, most, seed=seed)
    extra = 0.0 if isinstance(policy, Fixed) else deciding
    unread = Unread(len(traffic.names))
    paths = [walk(answer, controller, unread) for answer in traffic.answers]
    return Run(
        np.array([path.seconds.sum() + extra * len(path.arm) for path in paths]),
        np.array([len(answer) for answer in traffic.answers]),
        np.array([len(path.arm) for path in paths]),
        [path.arm for path in paths],
        controller.shifts,
    )


def fixed_runs(traffic: Traffic, costs: BlockCosts, lengths: Sequence[int]) -> list[Run]:
    """Return what each arm alone makes of the traffic, by its number; nothing is decided or watched.

    Its drafter first reads what is new in the context of every answer, as it does under a policy.
    """
    arms, found = Arms.of(traffic.names, lengths), []
    tokens = np.array([len(answer) for answer in traffic.answers])
    new = np.array([answer.context - answer.shared for answer in traffic.answers])
    for arm in range(len(arms)):
        drafter, k = int(arms.drafter[arm]), int(arms.k[arm])
        if drafter == NOBODY:
            found.append(Run(tokens * costs.plain, tokens, tokens))
            continue
        prices = costs.drafts[drafter, k] + costs.target + costs.overhead
        paths = [_one_arm(one.offered[drafter], one.matched[drafter], k, prices) for one in traffic.answers]
        seconds, calls = (np.array(part) for part in zip(*paths, strict=True))
        found.append(Run(seconds + costs.reading[drafter] * new, tokens, calls.astype(np.int64)))
    return found


def request_oracle(fixed: Sequence[Run]) -> Run:
    """Return the best arm of each answer, known beforehand."""
    best = np.stack([run.seconds for run in fixed]).argmin(0)
    picked = np.arange(len(best))
    return Run(
        np.stack([run.seconds for run in fixed])[best, picked], fixed[0].tokens,
        np.stack([run.calls for run in fixed])[best, picked], [np.array([arm]) for arm in best],
    )  # fmt: skip


def position_oracle(traffic: Traffic, costs: BlockCosts, lengths: Sequence[int]) -> Run:
    """Return the fastest path through each answer: the best arm of every block is known, every context is read."""
    arms = Arms.of(traffic.names, lengths)
    prices = np.array([costs.drafts[d, k] + costs.overhead if k else costs.plain - costs.target[0]
                       for d, k in zip(arms.drafter, arms.k, strict=True)])  # fmt: skip
    found = [_fastest(one.offered, one.matched, arms.drafter, arms.k, prices, costs.target) for one in traffic.answers]
    seconds, calls = (np.array(part) for part in zip(*found, strict=True))
    return Run(seconds, np.array([len(one) for one in traffic.answers]), calls.astype(np.int64))


def _labelled(domain: str, token_ids: Sequence[int]) -> str:
    return domain


def _accepted(
    emitted: EmittedProbs, target: Float64[np.ndarray, " answer"], longest: int, chance: np.random.Generator
) -> tuple[Int64[np.ndarray, " answer"], Int64[np.ndarray, " answer"]]:
    probs, guessed = as_arrays(emitted)
    drawn = chance.random(len(target))
    if emitted.by_block_start:
        padded = np.concatenate([drawn, np.ones(longest)])
        drawn = np.lib.stride_tricks.sliding_window_view(padded, probs.shape[1])[: len(target)]
    return runs(drawn < acceptance_given_text(probs, target), guessed, longest)


def _follow_one_arm(offered: np.ndarray, matched: np.ndarray, k: int, prices: np.ndarray) -> tuple[float, int]:
    at, seconds, calls = 0, 0.0, 0
    while at < len(offered):
        asked = min(k, len(offered) - at)
        seconds += prices[min(offered[at], asked)]
        calls += 1
        at += min(matched[at], asked) + 1
    return seconds, calls


def _find_fastest(
    offered: np.ndarray,
    matched: np.ndarray,
    arm_drafter: np.ndarray,
    arm_k: np.ndarray,
    prices: np.ndarray,
    target: np.ndarray,
) -> tuple[float, int]:
    size = offered.shape[1]
    least, calls = np.zeros(size + 1), np.zeros(size + 1, np.int64)
    for at in range(size - 1, -1, -1):
        least[at] = np.inf
        for arm in range(len(arm_k)):
            room = min(arm_k[arm], size - at)
            drafter = arm_drafter[arm]
            shown = min(offered[drafter, at], room) if room and drafter >= 0 else 0
            kept = min(matched[drafter, at], room) if room and drafter >= 0 else 0
            after = min(at + kept + 1, size)
            seconds = prices[arm] + target[shown] + least[after]
            if seconds < least[at]:
                least[at], calls[at] = seconds, calls[after] + 1
    return least[0], calls[0]


# The compiler needs the bare functions, not those wrapped by checks of their annotations.
_one_arm = njit(cache=True)(inspect.unwrap(_follow_one_arm))
_fastest = njit(cache=True)(inspect.unwrap(_find_fastest))
