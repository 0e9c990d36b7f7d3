"""The controller: asks a policy, keeps the ledger, and pays for looking around from a budget.

It knows no drafter and no text: a drafter at work and a simulation over recorded text drive the same one.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foredraft.core.errors import UserError
from foredraft.select.arms import NOBODY, PLAIN, Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.ledger import EVERYWHERE, Ledger, Memory, Vigilance
from foredraft.select.policies import Policy, View
from foredraft.select.unread import Unread

_SLOW = 0.9  # fading of perplexity
_UNSEEN = 0.75  # entropy of a drafter of which nothing is known: neither long nor short blocks
_ANSWER = 64  # tokens of an answer, before any has ended


@dataclass(frozen=True, slots=True)
class Budget:
    """What looking around may take.

    Attributes:
        probe_after: Blocks after which a drafter that was not seen is tried again.
        probing: Largest share of all time that trying drafters again may lose.
        watching: Largest share of all time that asking drafters without a model, only to score them, may take where
            nothing is drafted.
    """

    probe_after: int = 24
    probing: float = 0.008
    watching: float = 0.006


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next block gets.

    Attributes:
        situation: In which it is counted.
        watch: Whether drafters without a model are asked too, to be scored.
        is_probe: Chosen to look, not by the policy.
        readers: Drafters that are asked, and read the text up to here.
    """

    arm: int
    drafter: int
    k: int
    situation: int
    watch: bool
    is_probe: bool = False
    readers: tuple[int, ...] = ()


class Controller:
    """State of one stream of decisions; deterministic given its seed and what it is told.

    Args:
        model_free: By drafter, whether it can be scored without a model pass.
        memory_share: By drafter, its bytes / the target's.
        num_situations: Situations that are told apart, EVERYWHERE included.
    """

    def __init__(
        self,
        arms: Arms,
        costs: BlockCosts,
        policy: Policy,
        model_free: tuple[bool, ...],
        memory_share: tuple[float, ...] = (),
        num_situations: int = 1,
        memory: Memory | None = None,
        vigilance: Vigilance | None = None,
        budget: Budget | None = None,
        seed: int = 0,
    ) -> None:
        drafters = len(arms.names)
        self.arms, self.policy, self.model_free = arms, policy, model_free
        self.budget = budget or Budget()
        self.ledger = Ledger(arms, num_situations, memory or Memory(), vigilance or Vigilance())
        self.seconds, self.tokens, self.blocks, self.texts, self.shifts = 0.0, 0, 0, 0, 0
        self._all_read = Unread(drafters)
        self._probed, self._watched = 0.0, 0.0
        self._last_seen = [0] * drafters
        self._entropy, self._surprise = np.full(drafters, _UNSEEN), [0.0] * drafters
        self._perplexity, self._has_laws = np.ones(drafters), [False] * drafters
        shares, chance = np.array(memory_share or [0.0] * drafters), np.random.default_rng(seed)
        self._view = View(arms, self.ledger.worth, self._entropy, self._perplexity, shares, chance)
        self._choice = lru_cache(maxsize=None)(self._made)
        self.price(costs)

    def price(self, costs: BlockCosts) -> None:
        """Take other costs from here on, such as those of another number of requests.

        Raises:
            UserError: they are of other drafters, or of shorter blocks than there are to choose.
        """
        drafters, longest = len(self.arms.names), self.arms.longest
        priced, lengths = costs.drafts.shape
        if priced != drafters or min(lengths, len(costs.target)) <= longest:
            raise UserError(
                f"The costs hold {priced} drafters of up to {lengths - 1} tokens and target steps of up to "
                f"{len(costs.target)}; needed are {drafters} of up to {longest}, and steps of up to {longest + 1}."
            )
        self.costs = costs
        asking = [float(costs.drafts[d, longest]) * free for d, free in enumerate(self.model_free)]
        # By the drafter that is used anyway, NOBODY last: the time of asking the others that have no model.
        self._watching = [sum(asking) - own for own in (*asking, 0.0)]
        self._plain, self._target, self._drafts = costs.plain, costs.target.tolist(), costs.drafts.tolist()

    def decide(self, situation: int = EVERYWHERE, unread: Unread | None = None) -> Choice:
        """Return what the next block gets.

        What a drafter has to read first is charged to its blocks up to the end of the text, which is taken to be as
        far away as texts were long until now; to a probe all of it is charged.
        """
        policy, unread = self.policy, unread or self._all_read
        place = situation if policy.by_situation else EVERYWHERE
        self.ledger.estimate(place, self.costs, unread, (self.tokens + _ANSWER) / (self.texts + 1))
        arm = policy.choose(self._view)
        probe = self._probe(arm, unread) if policy.probes else arm
        watch = policy.watches and ((arm != PLAIN and probe == arm) or self._may_watch())
        return self._choice(probe, place, watch, probe != arm)

    def seen(self, situation: int, drafter: int, asked: int, offered: int, accepted: int) -> None:
        """Learn what a block of a drafter was worth, or would have been."""
        if self.ledger.see(situation, drafter, asked, offered, accepted):
            self.shifts += 1
        self._last_seen[drafter] = self.blocks
        if self.policy.by_laws and offered and not self._has_laws[drafter]:
            self._take_certain(drafter)

    def done(self, choice: Choice, offered: int, tokens: int, reading: float = 0.0) -> float:
        """Count a block that was decoded, whatever it was worth; return the seconds it took, as measured.

        Args:
            reading: Seconds of it that its readers took to read what they had not read.
        """
        seconds = self._seconds(choice, offered) + reading
        self.seconds += seconds
        self.tokens += tokens
        self.blocks += 1
        if not self.policy.probes:
            self.ledger.grow_old()
        if choice.is_probe:
            self._probed += max(0.0, seconds - tokens * self._plain)
        elif choice.watch and choice.arm == PLAIN:
            self._watched += self._watching[choice.drafter]
        return seconds

    def ended(self) -> None:
        """Count a text that has ended."""
        self.texts += 1

    def laws(self, drafter: int, entropy: float, surprise: float) -> None:
        """Take note of a drafter's latest law: its entropy, and -log of what it gave to emitted tokens, in nats."""
        self._has_laws[drafter] = True
        self._note(drafter, entropy, surprise)

    def _note(self, drafter: int, entropy: float, surprise: float) -> None:
        self._entropy[drafter] = entropy
        self._surprise[drafter] += (1.0 - _SLOW) * (surprise - self._surprise[drafter])
        self._perplexity[drafter] = math.exp(self._surprise[drafter])

    def _take_certain(self, drafter: int) -> None:
        """Note the same of certain guesses: right with chance p is as unsure as a law over 1 / p equal tokens."""
        unsure = -math.log(max(self.ledger.acceptance(drafter), 0.01))
        self._note(drafter, unsure, unsure)

    def _made(self, arm: int, place: int, watch: bool, is_probe: bool) -> Choice:
        drafter = int(self.arms.drafter[arm])
        readers = {drafter, *(d for d, free in enumerate(self.model_free) if free and watch)} - {NOBODY}
        return Choice(arm, drafter, int(self.arms.k[arm]), place, watch, is_probe, tuple(readers))

    def _probe(self, arm: int, unread: Unread) -> int:
        """Return the best arm of the drafter that was not seen for longest, if it is time and the budget allows it."""
        since = min(self._last_seen)
        if self.blocks - since < self.budget.probe_after:
            return arm
        oldest, worth = self._last_seen.index(since), self.ledger.worth
        if oldest == self.arms.drafter[arm]:
            return arm
        best = max(self.arms.own[oldest], key=lambda one: worth.tokens[one] / worth.seconds[one])
        reading = unread.tokens(oldest) * self.costs.reading.item(oldest)
        loses = float(worth.seconds[best]) - self._plain + reading
        return best if self._probed + loses <= self.budget.probing * self.seconds else arm

    def _may_watch(self) -> bool:
        return self._watched + self._watching[NOBODY] <= self.budget.watching * self.seconds

    def _seconds(self, choice: Choice, offered: int) -> float:
        watching = self._watching[choice.drafter] if choice.watch else 0.0
        if choice.arm == PLAIN:
            return self._plain + watching
        return self._drafts[choice.drafter][choice.k] + watching + self._target[offered] + self.costs.overhead
