"""Acceptance of one drafter under one law: counts by prompt. Ratios are properties, so that shards add up."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from foredraft.core.errors import UserError
from foredraft.core.files import write_json

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Expected counts over the answers to one prompt (all turns of a conversation).

    Attributes:
        id, domain: Of the prompt; the id is the unit that intervals resample.
        tokens: Answer tokens.
        expected_sum: Sum over positions of the estimate of sum min(target, draft).
        calls: Target calls, by k.
        examined, accepted: Draft tokens tested and accepted, by k and position in the block.
    """

    id: str
    domain: str
    tokens: int
    expected_sum: float
    calls: tuple[float, ...]
    examined: tuple[tuple[float, ...], ...]
    accepted: tuple[tuple[float, ...], ...]

    def __add__(self, other: "PromptCounts") -> "PromptCounts":
        return PromptCounts(
            self.id,
            self.domain,
            self.tokens + other.tokens,
            self.expected_sum + other.expected_sum,
            _added(self.calls, other.calls),
            tuple(map(_added, self.examined, other.examined)),
            tuple(map(_added, self.accepted, other.accepted)),
        )


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """What replay (or literal decoding) counted, by prompt in the order of their ids.

    Attributes:
        ks: Draft lengths, ascending; every per-k figure follows this order.
        prompts: One entry a prompt.
    """

    ks: tuple[int, ...]
    prompts: tuple[PromptCounts, ...]

    def __add__(self, other: "AcceptanceReport") -> "AcceptanceReport":
        """Return the report of both sets of answers; prompts that occur in both are summed."""
        if self.ks != other.ks:
            raise UserError(f"Reports at draft lengths {list(self.ks)} and {list(other.ks)} do not add up.")
        merged = {counts.id: counts for counts in self.prompts}
        for counts in other.prompts:
            merged[counts.id] = merged[counts.id] + counts if counts.id in merged else counts
        return AcceptanceReport(self.ks, tuple(merged[key] for key in sorted(merged)))

    def by_domain(self) -> dict[str, "AcceptanceReport"]:
        """Return one report a domain, by name."""
        names = sorted({counts.domain for counts in self.prompts})
        return {name: self.where(lambda counts: counts.domain == name) for name in names}  # noqa: B023

    def where(self, keep: Callable[[PromptCounts], bool]) -> "AcceptanceReport":
        """Return the report over some prompts only."""
        return AcceptanceReport(self.ks, tuple(counts for counts in self.prompts if keep(counts)))

    @property
    def num_tokens(self) -> int:
        return sum(counts.tokens for counts in self.prompts)

    @property
    def expected_acceptance(self) -> float:
        """Mean over positions of target-written text of sum min(target, draft). In [0, 1]."""
        return _ratio(sum(counts.expected_sum for counts in self.prompts), self.num_tokens)

    def acceptance_by_position(self, k: int) -> tuple[float, ...]:
        """Return P(draft token i accepted | all before it in the block were), i = 0 .. k-1; 0 if never examined."""
        examined, accepted = self._sums(k, "examined"), self._sums(k, "accepted")
        return tuple(_ratio(float(a), float(e)) for a, e in zip(accepted, examined, strict=True))

    def acceptance_rate(self, k: int) -> float:
        """Return accepted / examined; positions without a guess are not examined."""
        return _ratio(float(self._sums(k, "accepted").sum()), float(self._sums(k, "examined").sum()))

    def mean_tokens_per_call(self, k: int) -> float:
        """Return tokens emitted / target calls, bonus tokens included; a ratio of sums."""
        return _ratio(self.num_tokens, float(self.calls(k).sum()))

    def guess_share(self, k: int) -> float:
        """Return blocks that offered at least one draft token / all blocks."""
        return _ratio(float(self._sums(k, "examined")[0]), float(self.calls(k).sum()))

    def tokens(self) -> Float[np.ndarray, " prompts"]:
        """Return answer tokens by prompt."""
        return np.array([counts.tokens for counts in self.prompts], dtype=np.float64)

    def expected_sums(self) -> Float[np.ndarray, " prompts"]:
        """Return the numerators of expected_acceptance by prompt."""
        return np.array([counts.expected_sum for counts in self.prompts], dtype=np.float64)

    def calls(self, k: int) -> Float[np.ndarray, " prompts"]:
        """Return target calls by prompt."""
        row = self._row(k)
        return np.array([counts.calls[row] for counts in self.prompts], dtype=np.float64)

    def totals(self, k: int, what: str) -> Float[np.ndarray, " prompts"]:
        """Return draft tokens `examined` or `accepted` by prompt, all positions together."""
        row = self._row(k)
        return np.array([sum(getattr(counts, what)[row]) for counts in self.prompts], dtype=np.float64)

    def _sums(self, k: int, what: str) -> Float[np.ndarray, " k"]:
        row = self._row(k)
        by_prompt = [getattr(counts, what)[row] for counts in self.prompts]
        return np.array(by_prompt, dtype=np.float64).reshape(-1, k).sum(0)

    def _row(self, k: int) -> int:
        if k not in self.ks:
            raise UserError(f"Draft length {k} was not scored; scored are {list(self.ks)}.")
        return self.ks.index(k)


def save_report(path: Path, report: AcceptanceReport) -> None:
    """Write a report as JSON, whole or not at all."""
    write_json(path, {"schema": SCHEMA, **asdict(report)})


def load_report(path: Path) -> AcceptanceReport:
    """Read what save_report wrote.

    Raises:
        UserError: the file is missing or no report.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {data['schema']}; this version reads {SCHEMA}.")
        return AcceptanceReport(tuple(data["ks"]), tuple(_prompt(row) for row in data["prompts"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as an acceptance report ({error}). Score again.") from error


def _prompt(row: Mapping[str, object]) -> PromptCounts:
    fields = {name: _tuples(value) for name, value in row.items()}
    return PromptCounts(**fields)  # type: ignore[arg-type]


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _added(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _ratio(numerator: float | int, denominator: float | int) -> float:
    return numerator / denominator if denominator > 0.0 else 0.0
