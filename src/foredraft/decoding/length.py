"""How many draft tokens the next block gets. Policies look at past blocks only, so that any of them is lossless."""

from collections import deque
from collections.abc import Callable
from typing import Protocol, final, runtime_checkable

from foredraft.core.speedup import best_length_marginal


@runtime_checkable
class LengthPolicy(Protocol):
    """Chooses draft lengths for one request; holds the state of that request."""

    def next_length(self) -> int:
        """Return the draft tokens of the next block, 0 for a plain step."""

    def observe(self, examined: int, accepted: int) -> None:
        """Learn what became of the block: draft tokens tested and accepted."""


@final
class FixedLength:
    """The same length always."""

    def __init__(self, k: int) -> None:
        self.k = k

    def next_length(self) -> int:
        return self.k

    def observe(self, examined: int, accepted: int) -> None: ...


@final
class WindowLength:
    """One more draft token where acceptance was high over the last blocks, one fewer where it was low.

    Args:
        start, longest: First and largest length; the smallest is 1.
        window: Blocks that are looked at; nothing changes before so many were seen.
        raise_at, lower_at: Accepted / examined from which on, and up to which, the length changes.
    """

    def __init__(
        self, start: int, longest: int, window: int = 8, raise_at: float = 0.85, lower_at: float = 0.6
    ) -> None:
        self._k, self._longest = start, longest
        self._raise_at, self._lower_at = raise_at, lower_at
        self._blocks: deque[tuple[int, int]] = deque(maxlen=window)

    def next_length(self) -> int:
        return self._k

    def observe(self, examined: int, accepted: int) -> None:
        if examined:
            self._blocks.append((examined, accepted))
        if len(self._blocks) < (self._blocks.maxlen or 0):
            return
        rate = sum(block[1] for block in self._blocks) / sum(block[0] for block in self._blocks)
        change = int(rate >= self._raise_at) - int(rate <= self._lower_at)
        if change:
            self._k = min(max(1, self._k + change), self._longest)
            self._blocks.clear()


@final
class MarginalLength:
    """The length at which one more draft token costs what it brings, from acceptance seen so far (MATHS 6).

    Args:
        longest: Largest length.
        cost_ratio: Time of one draft step / time of one target step.
        target_time: Time of a target step over n tokens / one over one token.
        prior: Acceptance expected before anything was seen; weighs as `prior_weight` tested tokens a position.
        memory: What a count is multiplied by at each block, in (0, 1]; 1 never forgets.
    """

    def __init__(
        self,
        longest: int,
        cost_ratio: float,
        target_time: Callable[[int], float],
        prior: float = 0.7,
        prior_weight: float = 4.0,
        memory: float = 0.98,
    ) -> None:
        self._cost_ratio, self._target_time, self._memory = cost_ratio, target_time, memory
        self._prior, self._weight = prior, prior_weight
        self._examined, self._accepted = [0.0] * longest, [0.0] * longest

    @property
    def acceptance_by_position(self) -> list[float]:
        """Estimates, each drawn towards that of the position before it."""
        estimates: list[float] = []
        for examined, accepted in zip(self._examined, self._accepted, strict=True):
            before = estimates[-1] if estimates else self._prior
            estimates.append((accepted + self._weight * before) / (examined + self._weight))
        return estimates

    def next_length(self) -> int:
        return max(1, best_length_marginal(self.acceptance_by_position, self._cost_ratio, self._target_time))

    def observe(self, examined: int, accepted: int) -> None:
        for position in range(len(self._examined)):
            self._examined[position] = self._memory * self._examined[position] + (position < examined)
            self._accepted[position] = self._memory * self._accepted[position] + (position < accepted)


@final
class Fallback:
    """Plain decoding for a while after blocks in a row of which no draft token was accepted.

    Args:
        policy: Chooses the length elsewhere.
        after: Failed blocks in a row.
        pause: Plain steps before drafting is tried again.
    """

    def __init__(self, policy: LengthPolicy, after: int = 4, pause: int = 16) -> None:
        self._policy, self._after, self._pause = policy, after, pause
        self._failed = self._plain = 0

    def next_length(self) -> int:
        return 0 if self._plain else self._policy.next_length()

    def observe(self, examined: int, accepted: int) -> None:
        if self._plain:
            self._plain -= 1
            return
        self._policy.observe(examined, accepted)
        self._failed = 0 if accepted else self._failed + bool(examined)
        if self._failed == self._after:
            self._failed, self._plain = 0, self._pause
