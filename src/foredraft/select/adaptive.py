"""The adaptive drafter: one of several drafters, at a length of its choice, or none, anew for every block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from foredraft.core.errors import CapabilityError, UserError, VocabMismatchError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.own_law import bound_for
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import CONTROLLED, Answer, BlockOutcome, Branching, Drafter, EmittedProbs, Observer
from foredraft.models.session import common_prefix
from foredraft.select.arms import PLAIN, Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.controller import Budget, Choice, Controller
from foredraft.select.domains import DOMAINS, domain_of_tokens
from foredraft.select.ledger import Memory, Vigilance
from foredraft.select.policies import Policy
from foredraft.select.situations import Reader, Situations, no_domain, situations_in
from foredraft.select.unread import Unread
from foredraft.select.walk import Recorded, choices_by_place, replayed, runs, shared_with_last, walk
from foredraft.select.watching import Watched, Watching

KIND = "adaptive"
_LIKELY = 0.5


@dataclass(frozen=True, slots=True)
class Portfolio:
    """What an adaptive drafter chooses among, and how.

    Attributes:
        drafters: By name, all of one vocabulary.
        lengths: Draft lengths of each.
        costs: Of the drafters in their order, by the number of requests decoded together; that of the largest number
            that is not above the one at hand counts.
        target_bytes: Memory of the target, for policies that weigh memory; 0 where it is not known.
        domain_of: Names the domain of tokens.
    """

    drafters: Mapping[str, Drafter]
    lengths: tuple[int, ...]
    costs: Mapping[int, BlockCosts]
    policy: Policy
    situations: Situations = field(default_factory=Situations)
    target_bytes: int = 0
    domain_of: Callable[[Sequence[int]], str] = no_domain
    memory: Memory = field(default_factory=Memory)
    vigilance: Vigilance = field(default_factory=Vigilance)
    budget: Budget = field(default_factory=Budget)
    seed: int = 0

    def __post_init__(self) -> None:
        if len(widths := {drafter.vocab_size for drafter in self.drafters.values()}) > 1:
            raise VocabMismatchError(f"The drafters speak {' and '.join(map(str, sorted(widths)))} tokens: one target.")
        if trees := [name for name, drafter in self.drafters.items() if isinstance(drafter, Branching)]:
            raise CapabilityError(f"An adaptive drafter chooses among chains: {trees[0]} grows trees, leave +tree out.")
        if not self.costs or min(self.costs) != 1:
            raise UserError("An adaptive drafter needs the costs of one request, and may have those of more.")

    @property
    def arms(self) -> Arms:
        return Arms.of(list(self.drafters), self.lengths)

    def controller(self) -> Controller:
        """Return a controller that has seen nothing."""
        shares = tuple(
            one.num_bytes / self.target_bytes if self.target_bytes else 0.0 for one in self.drafters.values()
        )
        free = tuple(is_certain(one) for one in self.drafters.values())
        return Controller(
            self.arms, self.costs[1], self.policy, free, shares, len(self.situations), self.memory, self.vigilance,
            self.budget,
            self.seed,
        )  # fmt: skip

    def costs_of(self, requests: int) -> BlockCosts:
        """Return the costs where so many requests are decoded together."""
        return self.costs[max(known for known in self.costs if known <= max(requests, 1))]

    def bound(self, law: SamplingLaw) -> "Portfolio":
        """Return the same with drafters that draw from `law`, each with caches of its own."""
        return replace(self, drafters={name: bound_for(one, law) for name, one in self.drafters.items()})

    def copied(self) -> "Portfolio":
        """Return the same with caches of its own for each drafter."""
        return replace(self, drafters={name: one.bind(one.law) for name, one in self.drafters.items()})


def is_certain(drafter: Drafter) -> bool:
    """Return whether a drafter's guesses cost no model pass and are right or wrong, whatever the target's law."""
    return drafter.num_parameters == 0 and drafter.law.is_greedy


@final
class AdaptiveDrafter:
    """Asks a controller before each block, and tells it what became of it.

    `k` is the most that a block may have: give at least the longest length. The controller's state goes on from text
    to text; `bind` starts anew.
    """

    kind = KIND
    validity = CONTROLLED

    def __init__(self, portfolio: Portfolio, law: SamplingLaw = GREEDY) -> None:
        self.portfolio = portfolio
        self.law = law
        self.controller = portfolio.controller()
        self._stream = _Stream(portfolio, self.controller)

    @property
    def vocab_size(self) -> int:
        return next(iter(self.portfolio.drafters.values())).vocab_size

    @property
    def num_parameters(self) -> int:
        return sum(drafter.num_parameters for drafter in self.portfolio.drafters.values())

    @property
    def num_bytes(self) -> int:
        return sum(drafter.num_bytes for drafter in self.portfolio.drafters.values())

    def bind(self, law: SamplingLaw) -> "AdaptiveDrafter":
        """Return the same drafters and policy for another law, having seen nothing."""
        bound = self.portfolio.bound(law)
        own = GREEDY if all(drafter.law.is_greedy for drafter in bound.drafters.values()) else law
        return AdaptiveDrafter(bound, own)

    def reading(self, decode: Callable[[Sequence[int]], str]) -> "AdaptiveDrafter":
        """Return the same drafter for text that can be read: it tells the domains of requests apart."""
        portfolio = replace(self.portfolio, situations=Situations(DOMAINS), domain_of=domain_of_tokens(decode))
        return AdaptiveDrafter(portfolio, self.law)

    def beside(self, target_bytes: int) -> "AdaptiveDrafter":
        """Return the same drafter, which weighs its drafters' memory against so many bytes of the target."""
        return AdaptiveDrafter(replace(self.portfolio, target_bytes=target_bytes), self.law)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        _price(self.controller, self.portfolio.costs[1])
        return self._stream.propose(context, k, generator)

    def observe(self, outcome: BlockOutcome) -> None:
        self._stream.observe(outcome)

    def open_batch(self, num_texts: int) -> "_Batch":
        """Return streams that share this drafter's controller: what one text teaches, all use."""
        return _Batch(self.portfolio, self.controller, num_texts)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        """Decode the answers again in their order, from a cold start, and return what the guesses gave.

        A controller of its own learns from one answer to the next: replay teaches this drafter nothing. Certain
        guesses follow the one path that decoding takes at this k. Drawn ones follow the path on which a token is
        accepted when its own law puts at least half of the mass on it, which is a simulation. Between the starts of
        blocks the last choice stands.
        """
        controller, longest = self.portfolio.controller(), min(k, self.portfolio.arms.longest)
        unread = Unread(len(self.portfolio.drafters))
        parts = zip(*(replayed(one, answers, longest) for one in self.portfolio.drafters.values()), strict=True)
        return [
            self._walked(answer, shared, given, k, controller, unread)
            for answer, shared, given in zip(answers, shared_with_last(answers), parts, strict=True)
        ]

    def _walked(
        self,
        answer: Answer,
        shared: int,
        given: Sequence[EmittedProbs],
        k: int,
        controller: Controller,
        unread: Unread,
    ) -> EmittedProbs:
        longest = min(k, self.portfolio.arms.longest)
        tables = [_by_start(one, longest) for one in given]
        blocks = [runs(probs.numpy() >= _LIKELY, guessed.numpy(), longest) for probs, guessed in tables]
        offered, matched = (np.stack(part) for part in zip(*blocks, strict=True))
        situations = self._situations(answer)
        recorded = Recorded(offered, matched, situations, context=answer.start, shared=shared)
        path = walk(recorded, controller, unread, k)
        probs, guessed = torch.zeros(answer.num_tokens, k), torch.zeros(answer.num_tokens, k, dtype=torch.bool)
        arms = controller.arms
        for place, arm in enumerate(choices_by_place(path, answer.num_tokens)):
            if arm != PLAIN:
                width = min(int(arms.k[arm]), k)
                probs[place, :width] = tables[arms.drafter[arm]][0][place, :width]
                guessed[place, :width] = tables[arms.drafter[arm]][1][place, :width]
        return EmittedProbs(probs, guessed)

    def _situations(self, answer: Answer) -> Int64[np.ndarray, " answer"]:
        if not self.controller.policy.by_situation:
            return np.zeros(answer.num_tokens, np.int64)
        reader = Reader(self.portfolio.situations, self.portfolio.domain_of)
        return situations_in(reader, answer)


class _Stream:
    """One text after another, decoded with one set of drafters."""

    def __init__(self, portfolio: Portfolio, controller: Controller) -> None:
        self.drafters = list(portfolio.drafters.values())
        self._controller = controller
        self._reader = Reader(portfolio.situations, portfolio.domain_of) if controller.policy.by_situation else None
        self._watching = Watching()
        self._context = torch.empty(0, dtype=torch.long)
        self._answer: list[int] = []
        self._length = -1
        self._last_token = -1
        self._unread, self._reading = Unread(len(self.drafters)), 0.0
        self._choice: Choice | None = None
        self._asked = 0
        self._vocab_size = self.drafters[0].vocab_size

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        self._follow(context)
        if k == 0:
            self._choice = None
            return Proposal.empty(self._vocab_size)
        situation = self._reader.at_end() if self._reader else 0
        choice = self._controller.decide(situation, self._unread)
        self._choice, self._asked = choice, min(choice.k, k)
        self._reading = self._unread.read(choice.readers, self._controller.costs.reading)
        watched = self._watch(choice, context, k, generator) if choice.watch else {}
        if choice.arm == PLAIN:
            return Proposal.empty(self._vocab_size)
        if choice.drafter in watched:
            return Proposal.certain(watched[choice.drafter][: self._asked], self._vocab_size)
        return self.drafters[choice.drafter].propose(context, self._asked, generator)

    def observe(self, outcome: BlockOutcome) -> None:
        """Tell the controller, and the drafters that were asked and learn themselves, what became of the block."""
        choice, emitted = self._choice, list(outcome.emitted)
        self._answer += emitted
        self._length += len(emitted)
        self._last_token = emitted[-1]
        if self._reader is not None:
            self._reader.grow(emitted)
        self._unread.grow(len(emitted), choice.readers if choice else ())
        if choice is None:
            return
        self._watching.settle(self._answer, self._controller)
        if choice.arm != PLAIN:
            self._learn(choice, outcome)
        for number in choice.readers:
            drafter = self.drafters[number]
            if isinstance(drafter, Observer):
                drafter.observe(outcome)
        self._controller.done(choice, len(outcome.proposal), len(emitted), self._reading)
        self._choice = None

    def end(self) -> None:
        """Count what is known of the text, which has ended."""
        self._watching.end(self._controller)
        if self._answer:
            self._controller.ended()
        self._answer = []

    def _learn(self, choice: Choice, outcome: BlockOutcome) -> None:
        offered, accepted = len(outcome.proposal), outcome.num_accepted
        if outcome.proposal.laws.dense.shape[0]:
            self._controller.laws(choice.drafter, *_figures(outcome))
        if not (choice.watch and self._controller.model_free[choice.drafter]):
            # A block that the answer's end cut shows nothing of the tokens behind it.
            asked = accepted if len(outcome.emitted) <= accepted else self._asked
            self._controller.seen(choice.situation, choice.drafter, asked, min(offered, asked), accepted)

    def _watch(
        self, choice: Choice, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator
    ) -> dict[int, Int[Tensor, " _"]]:
        """Ask every drafter whose guesses are certain for the longest block, and keep them to be scored."""
        guesses = {}
        for number, drafter in enumerate(self.drafters):
            if self._controller.model_free[number]:
                longest = min(self._controller.arms.longest, k)
                guesses[number] = drafter.propose(context, longest, generator).token_ids
                guess = tuple(guesses[number].tolist())
                self._watching.add(Watched(number, choice.situation, len(self._answer), longest, guess))
        return guesses

    def _follow(self, context: Int[Tensor, " tokens"]) -> None:
        """Begin another text where `context` is not the last one with what was emitted."""
        if len(context) == self._length and int(context[-1]) == self._last_token:
            return
        before = torch.cat((self._context, torch.tensor(self._answer, dtype=torch.long)))
        self.end()
        self._context, self._length, self._last_token = context, len(context), int(context[-1])
        self._unread.start(len(context), common_prefix(before, context))
        if self._reader is not None:
            self._reader.start(context.tolist())


class _Batch:
    """Streams of one controller, known by their numbers from 0 on."""

    def __init__(self, portfolio: Portfolio, controller: Controller, num_texts: int) -> None:
        self._portfolio, self._controller = portfolio, controller
        self._streams = [_Stream(portfolio.copied(), controller) for _ in range(num_texts)]

    def propose(
        self,
        contexts: Mapping[int, Int[Tensor, " _"]],
        ks: Mapping[int, int],
        generators: Sequence[torch.Generator],
    ) -> dict[int, Proposal]:
        """Propose for every text; the costs are those of as many requests as there are left."""
        _price(self._controller, self._portfolio.costs_of(len(contexts)))
        return {
            number: self._streams[number].propose(context, ks[number], generators[number])
            for number, context in contexts.items()
        }

    def drop(self, number: int) -> None:
        self._streams[number].end()

    def learner(self, number: int) -> Observer:
        return self._streams[number]


def _price(controller: Controller, costs: BlockCosts) -> None:
    """Let a controller go by some costs, if it does not already."""
    if controller.costs is not costs:
        controller.price(costs)


def _by_start(emitted: EmittedProbs, k: int) -> tuple[Float[Tensor, "answer k"], Bool[Tensor, "answer k"]]:
    """Return probabilities and guesses by block start and offset."""
    if emitted.by_block_start:
        return emitted.probs, emitted.guessed
    padding = torch.zeros(k - 1).to(emitted.probs)
    probs = torch.cat([emitted.probs, padding]).unfold(0, k, 1)
    return probs, torch.cat([emitted.guessed, padding.bool()]).unfold(0, k, 1)


def _figures(outcome: BlockOutcome) -> tuple[float, float]:
    """Return the entropy of the last law, and the mean -log of what the laws gave to emitted tokens, both in nats."""
    laws: Laws = outcome.proposal.laws
    entropy = float(torch.special.entr(laws.dense[-1]).sum())
    examined = outcome.emitted[: len(laws.dense)]
    given = [float(laws.dense[index, token]) for index, token in enumerate(examined)]
    surprise = sum(-torch.log(torch.tensor(max(one, 1e-6))).item() for one in given) / max(len(given), 1)
    return entropy, surprise
