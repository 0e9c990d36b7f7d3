"""How a draft's law compares with its target's at every position: figures that explain acceptance, and rank no drafts.

MATHS section 8 says why: a draft that misses half the tail can have a larger divergence and a larger acceptance than
one that is too flat.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.acceptance.overlap import Overlap
from foredraft.core.protocols import LawGiver
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace

TEXT_SHARE = 0.8  # of the text that "frequent" tokens make
COVERED = 10
_ROUNDING = 1e-3  # mass that float16 log-probabilities may lose


@dataclass(frozen=True, slots=True)
class Criteria:
    """Sums over positions of text that the target wrote; parts add up.

    What the target's law is outside its stored tokens is not known: it counts as one token, `the rest`, which makes
    divergences lower bounds and entropies comparable only with each other.

    Attributes:
        tokens: Positions; `guessed` those at which the draft has a law.
        overlap_low, overlap_high: Bounds of sum min(target, draft); 0 where there is no guess.
        kl_low, kl_high: Bounds of KL(target || draft) in nats where the lower one is finite: kl_finite positions;
            the upper one is infinite where the draft rules a token out.
        covered: Positions whose token is among the 10 most probable of the draft.
        frequent, frequent_agreed: Positions of frequent tokens, and those at which the draft's most probable token is
            the target's.
        draft_entropy, target_entropy: In nats.
    """

    tokens: float = 0.0
    guessed: float = 0.0
    overlap_low: float = 0.0
    overlap_high: float = 0.0
    kl_low: float = 0.0
    kl_high: float = 0.0
    kl_finite: float = 0.0
    covered: float = 0.0
    frequent: float = 0.0
    frequent_agreed: float = 0.0
    draft_entropy: float = 0.0
    target_entropy: float = 0.0

    def __add__(self, other: "Criteria") -> "Criteria":
        return Criteria(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Criteria)))

    @property
    def overlap(self) -> Overlap:
        return Overlap(int(self.tokens), self.overlap_low, self.overlap_high)

    def to_json(self, is_law_under_test: bool) -> dict[str, Any]:
        """Return the ratios; null where there is nothing to divide by, or where a figure is infinite.

        Args:
            is_law_under_test: Whether the stored law is the one the text was written under; only then does the
                overlap bound its expected_acceptance.
        """
        bounds = [_finite(self.kl_low, self.kl_finite), _finite(self.kl_high, self.kl_finite)]
        return {
            "tokens": int(self.tokens),
            "expected_acceptance_bounds": list(self.overlap.expected_acceptance) if is_law_under_test else None,
            "kl_divergence": bounds,
            "kl_infinite_share": _finite(self.guessed - self.kl_finite, self.guessed),
            "top10_coverage": _finite(self.covered, self.guessed),
            "frequent_token_accuracy": _finite(self.frequent_agreed, self.frequent),
            "entropy_ratio": _finite(self.draft_entropy, self.target_entropy),
        }


def measure_criteria(drafter: LawGiver, rows: Sequence[TraceRow]) -> Criteria:
    """Compare a draft's law with the stored top tokens at every position of some answers, in one teacher-forced pass.

    Args:
        drafter: Bound to the law to compare.
        rows: With their top tokens.
    """
    told = _told(rows)
    total = Criteria(tokens=float(len(told.token_ids)))
    for positions, draft in drafter.laws([row.answer() for row in rows]):
        total += _compared(told.at(positions), draft.double())
    return total


def sampled_rows(trace: Trace, answers: int) -> list[TraceRow]:
    """Return up to `answers` answers with their top tokens, drawn by the hash of their ids; none if none are stored."""
    wanted = {row.id for row in trace.sample(answers)}
    return [row for row in trace.rows() if row.id in wanted and len(row.answer_ids) and row.top_ids.shape[1]]


@dataclass(frozen=True, slots=True)
class _Told:
    """What the target said at each position; laws include the rest as their last entry and sum to 1."""

    token_ids: Int[Tensor, " positions"]
    is_frequent: Bool[Tensor, " positions"]
    top_ids: Int[Tensor, "positions top"]
    probs: Float[Tensor, "positions cells"]

    def at(self, positions: Int[Tensor, " some"]) -> "_Told":
        return _Told(*(getattr(self, field.name)[positions] for field in fields(_Told)))


def _told(rows: Sequence[TraceRow]) -> _Told:
    token_ids = torch.cat([row.answer_ids for row in rows])
    top = torch.cat([row.top_logprobs for row in rows]).double().exp()
    tail = torch.cat([row.tail_mass for row in rows]).double()
    tail = torch.where(tail > _ROUNDING, tail, 0.0)
    probs = torch.cat([top, tail[:, None]], dim=1)
    is_frequent = torch.isin(token_ids, torch.tensor(frequent_tokens(token_ids.tolist())))
    top_ids = torch.cat([row.top_ids for row in rows]).long()
    return _Told(token_ids, is_frequent, top_ids, probs / probs.sum(1, keepdim=True))


def frequent_tokens(token_ids: Sequence[int]) -> list[int]:
    """Return the most frequent tokens that together make 80 % of a text."""
    return list(_until(Counter(token_ids).most_common(), TEXT_SHARE * len(token_ids)))


def _until(counted: Sequence[tuple[int, int]], enough: float) -> Iterator[int]:
    seen = 0
    for token_id, count in counted:
        if seen >= enough:
            return
        yield token_id
        seen += count


def _compared(told: _Told, draft: Float[Tensor, "positions vocab"]) -> Criteria:
    given = draft.gather(1, told.top_ids)
    rest = (1.0 - given.sum(1, keepdim=True)).clamp(min=0.0)
    cells, target = torch.cat([given, rest], dim=1), told.probs
    low = torch.minimum(given, target[:, :-1]).sum()
    high = low + torch.minimum(rest, target[:, -1:]).sum()
    divergence = _relative_entropy(target, cells)
    finite = divergence.isfinite()
    chance = draft.gather(1, told.token_ids[:, None])
    rank = (draft > chance).sum(1)
    agreed = draft.argmax(1) == told.top_ids[:, 0]
    return Criteria(
        guessed=float(len(draft)),
        overlap_low=float(low),
        overlap_high=float(high),
        kl_low=float(divergence[finite].sum()),
        kl_high=float(_largest_divergence(told, draft, cells)[finite].sum()),
        kl_finite=float(finite.sum()),
        covered=float(((rank < COVERED) & (chance[:, 0] > 0)).sum()),
        frequent=float(told.is_frequent.sum()),
        frequent_agreed=float((agreed & told.is_frequent).sum()),
        draft_entropy=float(torch.special.entr(cells).sum()),
        target_entropy=float(torch.special.entr(target).sum()),
    )


def _relative_entropy(
    target: Float[Tensor, "positions cells"], draft: Float[Tensor, "positions cells"]
) -> Float[Tensor, " positions"]:
    """Return KL(target || draft) over cells; by the log-sum inequality no larger than over their tokens."""
    return torch.where(target > 0, target * (target / draft).log(), 0.0).sum(1)


def _largest_divergence(
    told: _Told, draft: Float[Tensor, "positions vocab"], cells: Float[Tensor, "positions cells"]
) -> Float[Tensor, " positions"]:
    """Return the upper bound: no token of the rest is likelier than the last stored one, nor rarer in the draft."""
    target = told.probs
    known = _relative_entropy(target[:, :-1], cells[:, :-1])
    rarest = draft.scatter(1, told.top_ids, math.inf).amin(1)
    ratio = (target[:, -2] / rarest).log()
    spread = torch.where(target[:, -1] > 0, target[:, -1] * ratio, 0.0)
    return torch.maximum(known + spread, _relative_entropy(target, cells))


def _finite(numerator: float, denominator: float) -> float | None:
    value = numerator / denominator if denominator else math.nan
    return value if math.isfinite(value) else None
