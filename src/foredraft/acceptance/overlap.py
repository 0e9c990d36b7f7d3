"""The exact overlap of the target's and the draft's laws, as far as a trace holds the target's."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.errors import TraceError
from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import Drafter
from foredraft.trace.rows import TraceRow


@dataclass(frozen=True, slots=True)
class Overlap:
    """Sums over positions of bounds on sum min(target, draft); parts add up.

    Attributes:
        tokens: Positions.
        low, high: Sums of the bounds; equal where the trace holds all of the target's law.
    """

    tokens: int
    low: float
    high: float

    def __add__(self, other: "Overlap") -> "Overlap":
        return Overlap(self.tokens + other.tokens, self.low + other.low, self.high + other.high)

    @property
    def expected_acceptance(self) -> tuple[float, float]:
        """Lower and upper bound of expected_acceptance on this text."""
        return self.low / self.tokens, self.high / self.tokens


def measure_overlap(drafter: Drafter, rows: Iterable[TraceRow], stored_law: SamplingLaw, law: SamplingLaw) -> Overlap:
    """Compare the draft's law with the stored top tokens at every position; costs a draft step each.

    Less noisy than the mean of min(1, draft(x) / target(x)), of which it is the expectation at each position.

    Args:
        drafter: Bound to the law it draws from.
        rows: With their top tokens.
        stored_law, law: Of the trace; the top tokens must be those of the law under test.

    Raises:
        TraceError: the trace stores another law than the one under test.
    """
    if stored_law != law:
        raise TraceError(
            f"The trace stores the law {stored_law}, the text was written under {law}: only replay scores it."
        )
    total, generator = Overlap(0, 0.0, 0.0), torch.Generator()
    for row in rows:
        text = row.answer().token_ids
        for position in range(len(row.answer_ids)):
            step = drafter.propose(text[: len(row.prompt_ids) + position], 1, generator)
            if len(step) == 0:
                total += Overlap(1, 0.0, 0.0)
                continue
            draft = step.laws.probs(0, int(step.token_ids[0]))
            low, high = overlap_bounds(
                row.top_ids[position], row.top_logprobs[position].float().exp(), float(row.tail_mass[position]), draft
            )
            total += Overlap(1, low, high)
    return total


def overlap_bounds(
    top_ids: Tensor, top_probs: Float[Tensor, " top"], tail_mass: float, draft: Float[Tensor, " vocab"]
) -> tuple[float, float]:
    """Return bounds of sum min(target, draft) from the target's top tokens (MATHS 4).

    The tokens in the tail share at most the smaller of the two tail masses.
    """
    given = draft[top_ids.long()].to(top_probs)
    low = float(torch.minimum(given, top_probs).sum())
    return low, low + min(tail_mass, max(0.0, 1.0 - float(given.sum())))
