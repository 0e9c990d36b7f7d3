"""What a drafter's guesses were worth on some prompts. Counts and sums only, so that parts add up."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from foredraft.acceptance.replay import Counts
from foredraft.core.errors import UserError


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Replayed counts of one prompt, all its answers together.

    Attributes:
        prompt_id: What a bootstrap resamples.
        tokens: Answer tokens.
        accepted_sum: Sum over answer tokens x of min(1, draft(x) / target(x)), as the first token of a block.
        counts: By draft length, see replay.Counts.
    """

    prompt_id: str
    domain: str
    tokens: int
    accepted_sum: float
    counts: Counts

    def __add__(self, other: "PromptCounts") -> "PromptCounts":
        counts = Counts(
            self.counts.calls + other.counts.calls,
            self.counts.examined + other.counts.examined,
            self.counts.accepted + other.counts.accepted,
        )
        tokens, accepted_sum = self.tokens + other.tokens, self.accepted_sum + other.accepted_sum
        return PromptCounts(self.prompt_id, self.domain, tokens, accepted_sum, counts)


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Replayed counts of one drafter under one law.

    Attributes:
        ks: Draft lengths, the rows of every prompt's counts.
        prompts: One entry a prompt.
    """

    ks: tuple[int, ...]
    prompts: tuple[PromptCounts, ...]

    @staticmethod
    def of(ks: Iterable[int], answers: Iterable[PromptCounts]) -> "AcceptanceReport":
        """Add the answers of each prompt up."""
        by_prompt: dict[str, PromptCounts] = {}
        for answer in answers:
            known = by_prompt.get(answer.prompt_id)
            by_prompt[answer.prompt_id] = answer if known is None else known + answer
        return AcceptanceReport(tuple(ks), tuple(by_prompt.values()))

    def __add__(self, other: "AcceptanceReport") -> "AcceptanceReport":
        """Return the report of both parts; a prompt that stands in both counts with all its answers.

        Raises:
            UserError: the parts were scored at different draft lengths.
        """
        if self.ks != other.ks:
            raise UserError(f"Reports at draft lengths {self.ks} and {other.ks} do not add up.")
        return AcceptanceReport.of(self.ks, (*self.prompts, *other.prompts))

    def by_domain(self) -> dict[str, "AcceptanceReport"]:
        """Return one report for each domain, in the order of their names."""
        domains = sorted({prompt.domain for prompt in self.prompts})
        return {
            domain: AcceptanceReport(self.ks, tuple(prompt for prompt in self.prompts if prompt.domain == domain))
            for domain in domains
        }

    @property
    def tokens(self) -> int:
        """Answer tokens scored."""
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def expected_acceptance(self) -> float:
        """Mean of min(1, draft(x) / target(x)) over emitted tokens x; a token without a guess counts 0."""
        return sum(prompt.accepted_sum for prompt in self.prompts) / self.tokens

    def mean_tokens_per_call(self, k: int) -> float:
        """Tokens emitted / target calls, bonus included; ratio of sums."""
        return self.tokens / float(self.calls(k).sum())

    def calls(self, k: int) -> Float[np.ndarray, " prompts"]:
        """Return the target calls of each prompt."""
        return np.array([prompt.counts.calls[self.ks.index(k)] for prompt in self.prompts])

    def acceptance_by_position(self, k: int) -> list[float]:
        """P(draft token i accepted | all before it in the block were), i = 0 .. k-1; 0 where none was examined."""
        row = self.ks.index(k)
        examined = sum(prompt.counts.examined[row, :k] for prompt in self.prompts)
        accepted = sum(prompt.counts.accepted[row, :k] for prompt in self.prompts)
        return np.divide(accepted, examined, out=np.zeros(k), where=examined > 0).tolist()

    def acceptance_rate(self, k: int) -> float:
        """Accepted / examined draft tokens; 0 where none was examined."""
        row = self.ks.index(k)
        examined = sum(float(prompt.counts.examined[row].sum()) for prompt in self.prompts)
        accepted = sum(float(prompt.counts.accepted[row].sum()) for prompt in self.prompts)
        return accepted / examined if examined else 0.0

    def guess_share(self, k: int) -> float:
        """Return blocks that offer at least one draft token / all blocks."""
        row = self.ks.index(k)
        return sum(float(prompt.counts.examined[row, 0]) for prompt in self.prompts) / float(self.calls(k).sum())

    def to_json(self) -> dict[str, Any]:
        return {
            "ks": list(self.ks),
            "prompts": [
                {
                    "prompt_id": prompt.prompt_id,
                    "domain": prompt.domain,
                    "tokens": prompt.tokens,
                    "accepted_sum": prompt.accepted_sum,
                    "calls": prompt.counts.calls.tolist(),
                    "examined": prompt.counts.examined.tolist(),
                    "accepted": prompt.counts.accepted.tolist(),
                }
                for prompt in self.prompts
            ],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "AcceptanceReport":
        prompts = (
            PromptCounts(
                entry["prompt_id"],
                entry["domain"],
                entry["tokens"],
                entry["accepted_sum"],
                Counts(*(np.array(entry[name], dtype=float) for name in ("calls", "examined", "accepted"))),
            )
            for entry in data["prompts"]
        )
        return AcceptanceReport(tuple(data["ks"]), tuple(prompts))
