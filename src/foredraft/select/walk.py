"""Decoding again what was recorded: which tokens each drafter would have got right, and the path a controller takes.

Given the text, a certain guess is right or wrong, and a drawn one is accepted with a known chance (MATHS 4): after
one draw for each token of each drafter, every path through the text is known, and so is the best one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from foredraft.acceptance.replay import by_block_start
from foredraft.core.protocols import Answer, Drafter, EmittedProbs, Observer
from foredraft.models.session import common_prefix
from foredraft.select.arms import NOBODY, PLAIN
from foredraft.select.controller import Controller
from foredraft.select.unread import Unread


@dataclass(frozen=True, slots=True)
class Recorded:
    """What every drafter would have given at every place of one answer, had a block started there.

    Attributes:
        offered: Draft tokens, at most the longest length, none behind the end of the answer.
        matched: How many of them, from the first on, would have been accepted.
        situations: Of the text before each place.
        domain: Of the request.
        context: Tokens before the answer.
        shared: How many of them the text before this one begins with too.
    """

    offered: Int64[np.ndarray, "drafters answer"]
    matched: Int64[np.ndarray, "drafters answer"]
    situations: Int64[np.ndarray, " answer"]
    domain: str = ""
    context: int = 0
    shared: int = 0

    def __len__(self) -> int:
        return self.offered.shape[1]


@dataclass(frozen=True, slots=True)
class Path:
    """The blocks of one answer, in order.

    Attributes:
        start: Answer tokens before each block.
        arm: Of each block.
        tokens: That it emitted.
        seconds: That it took, as measured.
    """

    start: Int64[np.ndarray, " blocks"]
    arm: Int64[np.ndarray, " blocks"]
    tokens: Int64[np.ndarray, " blocks"]
    seconds: Float64[np.ndarray, " blocks"]


def replayed(drafter: Drafter, answers: Sequence[Answer], k: int) -> Iterable[EmittedProbs]:
    """Return what a drafter gave to each answer in turn: all at once where each teaches it something for the next."""
    if isinstance(drafter, Observer):
        return drafter.replay(answers, k)
    return (drafter.replay([answer], k)[0] for answer in answers)


def runs(
    accepted: Bool[np.ndarray, "..."], guessed: Bool[np.ndarray, "..."], longest: int
) -> tuple[Int64[np.ndarray, " answer"], Int64[np.ndarray, " answer"]]:
    """Return the tokens offered and the tokens accepted of a block at every place.

    Args:
        accepted, guessed: By position [answer], or by block start and offset [answer, k].
    """
    if accepted.ndim == 1:
        accepted = by_block_start(accepted, longest, fill=False)
        guessed = by_block_start(guessed, longest, fill=False)
    offered = np.logical_and.accumulate(guessed[:, :longest], axis=1).sum(1)
    return offered, np.logical_and.accumulate((accepted & guessed)[:, :longest], axis=1).sum(1)


def walk(recorded: Recorded, controller: Controller, unread: Unread, cap: int = 1 << 30) -> Path:
    """Decode one answer as the controller says, which goes on learning.

    Args:
        unread: What drafters have not read of the text before.
        cap: Most draft tokens of a block.
    """
    size, longest = len(recorded), min(controller.arms.longest, cap)
    offered_at, matched_at = recorded.offered.T.tolist(), recorded.matched.T.tolist()
    situations, foreseen = recorded.situations.tolist(), _Foreseen()
    unread.start(recorded.context, recorded.shared)
    blocks: list[tuple[int, int, int, float]] = []
    free = [number for number, is_free in enumerate(controller.model_free) if is_free]
    at = 0
    while at < size:
        room, situation = size - at, situations[at]
        choice = controller.decide(situation, unread)
        reading = unread.read(choice.readers, controller.costs.reading)
        asked = min(choice.k, cap, room)
        if choice.watch:
            for number in free:
                most = min(longest, room)
                offered, matched = min(offered_at[at][number], most), min(matched_at[at][number], most)
                foreseen.add(at, number, choice.situation, most, offered, matched)
        offered = accepted = 0
        if choice.drafter != NOBODY:
            offered = min(offered_at[at][choice.drafter], asked)
            accepted = min(matched_at[at][choice.drafter], asked)
        tokens = min(accepted + 1, room)
        foreseen.settle(at + tokens, controller)
        if choice.arm != PLAIN and not (choice.watch and controller.model_free[choice.drafter]):
            shown = accepted if tokens <= accepted else asked
            controller.seen(choice.situation, choice.drafter, shown, min(offered, shown), accepted)
        blocks.append((at, choice.arm, tokens, controller.done(choice, offered, tokens, reading)))
        unread.grow(tokens, choice.readers)
        at += tokens
    foreseen.end(size, controller)
    controller.ended()
    start, arm, emitted, seconds = zip(*blocks, strict=True) if blocks else ((), (), (), ())
    return Path(
        np.array(start, np.int64), np.array(arm, np.int64), np.array(emitted, np.int64), np.array(seconds, float)
    )


class _Foreseen:
    """What `Watching` does, where it is known beforehand how each guess will end."""

    def __init__(self) -> None:
        self._open: list[tuple[int, int, int, int, int, int, int]] = []

    def add(self, start: int, drafter: int, situation: int, asked: int, offered: int, matched: int) -> None:
        due = start + matched + (matched < offered)
        self._open.append((due, start, drafter, situation, asked, offered, matched))

    def settle(self, size: int, controller: Controller) -> None:
        still = []
        for one in self._open:
            if one[0] <= size:
                controller.seen(one[3], one[2], one[4], one[5], one[6])
            else:
                still.append(one)
        self._open = still

    def end(self, size: int, controller: Controller) -> None:
        for _, start, drafter, situation, _, _, matched in self._open:
            if shown := min(matched, size - start):
                controller.seen(situation, drafter, shown, shown, shown)


def shared_with_last(answers: Sequence[Answer]) -> list[int]:
    """Return of every answer how many tokens of its context the text of the one before it begins with."""
    before = [answer.token_ids[:0] for answer in answers[:1]] + [answer.token_ids for answer in answers[:-1]]
    return [common_prefix(text, answer.token_ids[: answer.start]) for text, answer in zip(before, answers, strict=True)]


def choices_by_place(path: Path, size: int) -> Sequence[int]:
    """Return the arm at every place of an answer; between the starts of blocks the last choice stands."""
    return np.repeat(path.arm, np.diff([*path.start.tolist(), size])).tolist()
