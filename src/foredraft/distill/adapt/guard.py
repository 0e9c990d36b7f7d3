"""The guard: old and new draft replayed on the same held-out answers, and which of them stays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.acceptance.evaluate import score_rows
from foredraft.acceptance.intervals import PairedDifference, expected_acceptance, paired_difference, tokens_per_call
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.own_law import bound_for
from foredraft.core.protocols import Drafter
from foredraft.distill.adapt.text import Text

_ROWS = 64


@dataclass(frozen=True, slots=True)
class Shift:
    """What a change of drafts did to some held-out answers.

    Attributes:
        k: Draft length.
        before, after: Of the old draft and of the new one.
    """

    k: int
    before: AcceptanceReport
    after: AcceptanceReport

    @property
    def tokens_per_call(self) -> PairedDifference:
        """mean_tokens_per_call of new minus old, prompts resampled together."""
        return paired_difference(self.after, self.before, tokens_per_call(self.k), np.random.default_rng(0))

    @property
    def acceptance(self) -> PairedDifference:
        """expected_acceptance of new minus old, likewise."""
        return paired_difference(self.after, self.before, expected_acceptance, np.random.default_rng(0))

    def to_json(self) -> dict[str, Any]:
        gain, acceptance = self.tokens_per_call.difference, self.acceptance.difference
        return {
            "prompts": len(self.before.prompts),
            "tokens": self.before.tokens,
            "num_draft_tokens": self.k,
            "mean_tokens_per_call": {
                "before": self.before.mean_tokens_per_call(self.k),
                "after": self.after.mean_tokens_per_call(self.k),
                "difference": gain.value,
                "interval": gain.bounds,
            },
            "expected_acceptance": {
                "before": self.before.expected_acceptance,
                "after": self.after.expected_acceptance,
                "difference": acceptance.value,
                "interval": acceptance.bounds,
            },
        }


def replay_both(before: Drafter, after: Drafter, texts: Sequence[Text], k: int) -> Shift:
    """Replay two drafters over the same texts, each as it serves the texts' laws."""
    return Shift(k, _report("the old draft", before, texts, k), _report("the new draft", after, texts, k))


def why_old_stays(new: Shift, old: Shift | None, max_old_loss: float) -> str:
    """Return why the old draft is kept; empty where the new one is better.

    Args:
        new: On held-out answers of the buffer: mean_tokens_per_call must rise.
        old: On those of the old domains, None where there are none: it may fall by `max_old_loss`.
    """
    gain = new.tokens_per_call.difference.value
    if gain <= 0.0:
        return f"on held-out answers of the buffer tokens per call at k={new.k} changed by {gain:+.3f}"
    lost = -old.tokens_per_call.difference.value if old is not None else 0.0
    if lost > max_old_loss:
        return f"on held-out answers of the old domains tokens per call at k={new.k} changed by {-lost:+.3f}"
    return ""


def _report(name: str, drafter: Drafter, texts: Sequence[Text], k: int) -> AcceptanceReport:
    counts = []
    for text in texts:
        bound = bound_for(drafter, text.law)
        for start in range(0, len(text.rows), _ROWS):
            counts += score_rows(name, bound, text.rows[start : start + _ROWS], [k])
    return AcceptanceReport.of([k], counts)
