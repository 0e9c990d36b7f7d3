"""A verification: what a runtime did with a draft, beside what foredraft did with the same weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.verification.counting import Counted

NEAR_TIE = 1e-3
_ROUNDED_TIE = 0.25  # Kernels of rounded drafts take no float32: vLLM's run in bfloat16, which tells 20.0 from 20.125.
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two answers differ.

    Attributes:
        position: Of the token in the answer.
        gap: Logit of the target's likeliest token there - that of the next, in float32 here.
    """

    position: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap < NEAR_TIE


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """One prompt.

    Attributes:
        counted, expected: By the runtime, and by foredraft's literal decoding.
        own_difference: Of the runtime's drafted text from its plain text; None where they are equal.
        other_difference: Of the runtime's plain text from foredraft's; None where they are equal.
        draft_gap: Smallest lead of a guess over the next one, in logits, along the answer; infinite for copies.
    """

    name: str
    counted: Counted
    expected: Counted
    own_difference: Difference | None
    other_difference: Difference | None
    draft_gap: float

    @property
    def counts_agree(self) -> bool:
        return self.counted.agrees_with(self.expected)

    @property
    def is_excused(self) -> bool:
        """Whether all that differs here hangs on a tie that rounding decides."""
        differences = [one for one in (self.own_difference, self.other_difference) if one is not None]
        if not all(one.is_near_tie for one in differences):
            return False
        return self.counts_agree or bool(differences) or self.draft_gap < NEAR_TIE

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.name,
            "counted": self.counted.to_json(),
            "expected": self.expected.to_json(),
            "counts_agree": self.counts_agree,
            "differs_from_plain": _json(self.own_difference),
            "differs_from_foredraft": _json(self.other_difference),
            "draft_gap": self.draft_gap if np.isfinite(self.draft_gap) else None,
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of a draft in a runtime.

    Attributes:
        exact: Whether counts must be equal; a draft whose weights the runtime rounds on must only lie in the interval.
        warnings: What the user should know beside, such as a version that was not tested.
    """

    runtime: str
    version: str
    draft: str
    k: int
    exact: bool
    prompts: tuple[CheckedPrompt, ...]
    warnings: tuple[str, ...] = ()

    @property
    def counted(self) -> Counted:
        return Counted.total([prompt.counted for prompt in self.prompts])

    @property
    def expected(self) -> Counted:
        return Counted.total([prompt.expected for prompt in self.prompts])

    @property
    def same_text(self) -> int:
        """Prompts whose text with the draft is that of the runtime's plain decoding."""
        return sum(prompt.own_difference is None for prompt in self.prompts)

    @property
    def same_counts(self) -> int:
        return sum(prompt.counts_agree for prompt in self.prompts)

    @property
    def is_off(self) -> bool:
        """Whether nothing was drafted at all: the runtime took the draft and never used it."""
        return self._nothing_counts(self.counted)

    def _nothing_counts(self, counts: Counted) -> bool:
        """Return whether nothing is drafted, or accepted where the runtime does not say what it drafts."""
        return (counts.accepted if self.counted.drafted is None else counts.drafted) == 0

    @property
    def faults(self) -> list[str]:
        """What is wrong; empty for a draft that does in the runtime what it does here."""
        if self.is_off and self._nothing_counts(self.expected):
            return [
                f"On these prompts {self.runtime} has nothing to accept, by foredraft's own count: they prove nothing. "
                "Give prompts whose answers repeat text, or longer answers."
            ]
        if self.is_off:
            return [
                f"{self.runtime} drafted no token: speculation is silently off. Compare the command in the draft's "
                "README.md with how it was started."
            ]
        return [*self._text_faults(), *self._count_faults()]

    def _text_faults(self) -> list[str]:
        drafted = _told((prompt.name, prompt.own_difference) for prompt in self.prompts)
        plain = _told(
            ((prompt.name, prompt.other_difference) for prompt in self.prompts),
            NEAR_TIE if self.exact else _ROUNDED_TIE,
        )
        leads = "where the target's best token leads by"
        return [
            f"{name}: text with the draft leaves plain decoding at token {one.position}, {leads} {one.gap:.4f} logits."
            for name, one in drafted
        ] + [
            f"{name}: plain text of {self.runtime} leaves the target's at token {one.position}, {leads} {one.gap:.4f} "
            "logits: it runs another model, or not in float32."
            for name, one in plain
        ]

    def _count_faults(self) -> list[str]:
        if not self.exact:
            low, high = self.interval
            if low <= 0.0 <= high:
                return []
            return [f"Accepted tokens per block differ by {low:+.3f} to {high:+.3f} from foredraft's (95 %)."]
        return [
            f"{prompt.name}: {_said(prompt.counted)} counted, {_said(prompt.expected)} expected"
            f"; the draft's closest choice leads by {prompt.draft_gap:.4f} logits."
            for prompt in self.prompts
            if not (prompt.counts_agree or prompt.is_excused or _told([(prompt.name, prompt.other_difference)]))
        ]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % bootstrap over prompts of accepted tokens per block, the runtime's - foredraft's."""
        pairs = np.array([[*_per_block(prompt.counted, prompt.expected)] for prompt in self.prompts])
        drawn = np.random.default_rng(0).integers(len(pairs), size=(_RESAMPLES, len(pairs)))
        sums = pairs[drawn].sum(1)
        ratios = sums[:, 0] / np.maximum(sums[:, 1], 1) - sums[:, 2] / np.maximum(sums[:, 3], 1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "version": self.version,
            "draft": self.draft,
            "num_draft_tokens": self.k,
            "passed": not self.faults,
            "exact": self.exact,
            "counted": {**self.counted.to_json(), **_ratios(self.counted)},
            "expected": {**self.expected.to_json(), **_ratios(self.expected)},
            "prompts": len(self.prompts),
            "same_text": self.same_text,
            "same_counts": self.same_counts,
            "faults": self.faults,
            "warnings": list(self.warnings),
            "by_prompt": [prompt.to_json() for prompt in self.prompts],
        }


def _ratios(counted: Counted) -> dict[str, float | None]:
    """Return the three figures that runtimes call acceptance, by one definition each.

    accepted_of_drafted counts tokens behind a rejection too and falls as blocks get longer; acceptance_rate is accepted
    / examined, the rejected one included; mean_tokens_per_guess counts what a target call with a guess emits.
    """
    blocks, drafted, accepted = counted.blocks, counted.drafted, counted.accepted
    examined = blocks + sum(counted.by_position[:-1]) if blocks and counted.by_position else 0
    return {
        "accepted_of_drafted": accepted / drafted if drafted else None,
        "acceptance_rate": accepted / examined if examined else None,
        "mean_tokens_per_guess": 1.0 + accepted / blocks if blocks else None,
    }


def _told(differences: Iterable[tuple[str, Difference | None]], tie: float = NEAR_TIE) -> list[tuple[str, Difference]]:
    """Return those that no tie explains."""
    return [(name, one) for name, one in differences if one is not None and one.gap >= tie]


def _per_block(one: Counted, other: Counted) -> tuple[int, int, int, int]:
    blocks = one.blocks if one.blocks is not None else other.blocks or 0
    return one.accepted, blocks, other.accepted, other.blocks or 0


def _said(counted: Counted) -> str:
    positions = "" if counted.by_position is None else f" {list(counted.by_position)}"
    return f"{counted.accepted} of {'?' if counted.drafted is None else counted.drafted}{positions}"


def _json(difference: Difference | None) -> dict[str, int | float] | None:
    return None if difference is None else {"position": difference.position, "gap": difference.gap}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the position of the first token that differs, or at which one ends; None where they are equal."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))
