"""What a draft and a target step cost here, and the speedup that follows from it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.acceptance.overhead import measure_overhead
from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw, law_probs
from foredraft.core.progress import SILENT, Progress
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Branching, Drafter
from foredraft.core.speedup import break_even_acceptance
from foredraft.decoding.rules import verify_chain
from foredraft.decoding.speculative import TargetSession, uniforms

WARM_UP_ROUNDS = 2
_CHECK, _READ = "check", "read"
_TOKENS_READ = 128


@runtime_checkable
class TimedTarget(Protocol):
    """A target that can be timed: it opens sessions and knows its width."""

    @property
    def vocab_size(self) -> int: ...

    def session(self) -> TargetSession: ...


@dataclass(frozen=True, slots=True)
class Seconds:
    """A repeated timing: median and quartiles, in seconds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(timings: Sequence[float]) -> "Seconds":
        low, median, high = np.quantile(timings, [0.25, 0.5, 0.75]).tolist()
        return Seconds(median, low, high)


NOTHING = Seconds(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Timings at one batch size, all interleaved in one run on one machine.

    Attributes:
        target: Entry n - 1: one target step over n tokens. It includes processing n laws and drawing the next
            token, so that entry 0 is one step of plain decoding but for the engine's loop.
        blocks: For each drafter, the draft lengths timed and the time of a whole proposal of that length.
        checks: For drafters of trees, the depths timed and the time of a target step over a whole tree.
        reading: For each drafter, the time of reading one token of context that it has not read: what drafting for
            the first time in a text takes beyond a block, by its tokens.
        overhead: Of a block beyond drafting and verifying.
        plain_overhead: Of a plain step beyond the target's.
    """

    target: tuple[Seconds, ...]
    blocks: Mapping[str, Mapping[int, Seconds]]
    overhead: Seconds = NOTHING
    plain_overhead: Seconds = NOTHING
    checks: Mapping[str, Mapping[int, Seconds]] = field(default_factory=dict)
    reading: Mapping[str, Seconds] = field(default_factory=dict)

    @property
    def plain_seconds(self) -> float:
        """Time of one step of plain decoding."""
        return self.target[0].median + self.plain_overhead.median

    def block_seconds(self, name: str, k: int, guess_share: float = 1.0) -> float:
        """Return the time of a block of k draft tokens; see predicted_speedup."""
        check = _between(self.checks[name], k) if name in self.checks else self.target[k].median
        verify = guess_share * check + (1.0 - guess_share) * self.target[0].median
        return self.draft_seconds(name, k) + verify + self.overhead.median

    def draft_seconds(self, name: str, k: int) -> float:
        """Return the time of proposing k tokens, on the line through the lengths that were timed."""
        return _between(self.blocks[name], k)

    def reading_seconds(self, name: str) -> float:
        """Return the time of reading one token of context, 0 where it was not timed."""
        return self.reading[name].median if name in self.reading else 0.0

    def cost_ratio(self, name: str) -> float:
        """Return rho: time of one draft token, at the longest length timed / time of one target step of one token."""
        longest = max(self.blocks[name])
        return self.draft_seconds(name, longest) / longest / self.target[0].median

    def predicted_speedup(self, name: str, k: int, mean_tokens_per_call: float, guess_share: float = 1.0) -> float:
        """Return the predicted wall-clock speedup over plain decoding (docs/metrics.md).

        Args:
            guess_share: Share of the blocks that offer a draft token; the others verify nothing and cost the
                target one plain step.
        """
        return mean_tokens_per_call * self.plain_seconds / self.block_seconds(name, k, guess_share)

    def break_even(self, name: str, k: int) -> float:
        """Return the acceptance, the same for every token, from which on k draft tokens pay; 1 where none does."""
        return break_even_acceptance(k, self.block_seconds(name, k) / self.plain_seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": [list(astuple(step)) for step in self.target],
            "blocks": _plain(self.blocks),
            "checks": _plain(self.checks),
            "overhead": list(astuple(self.overhead)),
            "plain_overhead": list(astuple(self.plain_overhead)),
            "reading": {name: list(astuple(one)) for name, one in self.reading.items()},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Costs":
        return Costs(
            tuple(Seconds(*step) for step in data["target"]),
            _seconds(data["blocks"]),
            Seconds(*data["overhead"]),
            Seconds(*data["plain_overhead"]),
            _seconds(data["checks"]),
            {name: Seconds(*one) for name, one in data.get("reading", {}).items()},
        )


def measure_costs(
    target: TimedTarget,
    drafters: Mapping[str, Drafter],
    text: Int[Tensor, " tokens"],
    law: SamplingLaw,
    ks: Sequence[int],
    repeats: int,
    progress: Progress = SILENT,
) -> Costs:
    """Time target steps of 1 .. max(ks) + 1 tokens, blocks of the shortest and longest of `ks`, reading, the loop.

    Everything is timed once a round, in rounds, so that a slow moment of the machine meets all alike; the
    first rounds only warm up. Contexts grow by two tokens a round as they do while decoding.

    Args:
        text: Tokens that the target could meet; the second half is what contexts grow by.
        law: The target's law; drafters draw from their own.

    Raises:
        UserError: the text is too short for so many rounds.
    """
    rounds = repeats + WARM_UP_ROUNDS
    lengths = sorted({min(ks), max(ks)})
    trees = {
        (_CHECK, name, k): drafter.num_nodes(k) + 1
        for name, drafter in drafters.items()
        if isinstance(drafter, Branching)
        for k in lengths
    }
    widest = max(max(ks) + 1, *trees.values(), 0)
    start = len(text) - 2 * rounds - widest
    if start < 1:
        raise UserError(f"Timing {repeats} rounds needs a text of {2 * rounds + widest + 1} tokens, not {len(text)}.")
    widths = {width: width for width in range(1, max(ks) + 2)} | trees
    tokens_read = min(start, _TOKENS_READ)
    clocks = _target_clocks(target, law, widths) | _draft_clocks(drafters, lengths)
    clocks |= _read_clocks(drafters, lengths[0], tokens_read)
    runs = {name: partial(_in_round, run, text, start) for name, run in clocks.items()}
    measured = in_rounds(runs, repeats, f"timing {law}", progress)
    blocks = {name: {k: measured[name, k] for k in lengths} for name in drafters}
    checks = {name: {k: measured[_CHECK, name, k] for k in lengths} for _, name, _ in trees}
    reading = {name: _beyond(measured[_READ, name], blocks[name][lengths[0]], tokens_read) for name in drafters}
    plain, block = measure_overhead(target.vocab_size, law, repeats)
    steps = tuple(measured[width] for width in range(1, max(ks) + 2))
    return Costs(steps, blocks, Seconds.of(block), Seconds.of(plain), checks, reading)


def in_rounds(
    clocks: Mapping[Any, Callable[[int], None]], repeats: int, what: str, progress: Progress
) -> dict[Any, Seconds]:
    """Time each clock once a round, in turns; each is told the number of the round, and the first rounds warm up."""
    rounds = repeats + WARM_UP_ROUNDS
    timings: dict[Any, list[float]] = {key: [] for key in clocks}
    with progress.task(what, float(rounds), "rounds") as task:
        for number in range(rounds):
            for key, run in clocks.items():
                began = time.perf_counter()
                run(number)
                timings[key].append(time.perf_counter() - began)
            task.advance()
    return {key: Seconds.of(values[WARM_UP_ROUNDS:]) for key, values in timings.items()}


def _in_round(run: Callable[[Tensor, int], None], text: Int[Tensor, " tokens"], start: int, number: int) -> None:
    run(text, start + 2 * number)


def _target_clocks(
    target: TimedTarget, law: SamplingLaw, widths: Mapping[Any, int]
) -> dict[Any, Callable[[Tensor, int], None]]:
    """Return what times a target step of each width; the nodes of a tree are taken as a chain of as many."""
    session, uniform = target.session(), uniforms(torch.Generator().manual_seed(0))

    def step(width: int) -> Callable[[Tensor, int], None]:
        def run(text: Tensor, position: int) -> None:
            guess = Proposal.certain(text[position : position + width - 1], target.vocab_size)
            logits = session.logits(text[: position + width - 1], width)
            verify_chain(law_probs(logits, law), guess, uniform)

        return run

    return {name: step(width) for name, width in widths.items()}


def _draft_clocks(drafters: Mapping[str, Drafter], lengths: Sequence[int]) -> dict[Any, Callable[[Tensor, int], None]]:
    generator = torch.Generator().manual_seed(0)

    def block(drafter: Drafter, k: int) -> Callable[[Tensor, int], None]:
        # Each length has a cache of its own, which grows by two tokens a round.
        own = drafter.bind(drafter.law)
        return lambda text, position: _ignored(own.propose(text[:position], k, generator))

    return {(name, k): block(drafter, k) for name, drafter in drafters.items() for k in lengths}


def _read_clocks(drafters: Mapping[str, Drafter], k: int, tokens: int) -> dict[Any, Callable[[Tensor, int], None]]:
    """Return what times a first block, in a text of so many tokens."""
    generator = torch.Generator().manual_seed(0)

    def first(drafter: Drafter) -> Callable[[Tensor, int], None]:
        return lambda text, position: _ignored(
            drafter.bind(drafter.law).propose(text[position - tokens : position], k, generator)
        )

    return {(_READ, name): first(drafter) for name, drafter in drafters.items()}


def _beyond(first: Seconds, block: Seconds, tokens: int) -> Seconds:
    """Return the time by token that a first block takes beyond another."""
    low, median, high = (max(one - block.median, 0.0) / tokens for one in (first.low, first.median, first.high))
    return Seconds(median, low, high)


def _between(timed: Mapping[int, Seconds], k: int) -> float:
    lengths = sorted(timed)
    return float(np.interp(k, lengths, [timed[length].median for length in lengths]))


def _plain(timed: Mapping[str, Mapping[int, Seconds]]) -> dict[str, dict[str, list[float]]]:
    return {name: {str(k): list(astuple(one)) for k, one in by_k.items()} for name, by_k in timed.items()}


def _seconds(data: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[int, Seconds]]:
    return {name: {int(k): Seconds(*one) for k, one in by_k.items()} for name, by_k in data.items()}


def _ignored(proposal: Proposal) -> None: ...
