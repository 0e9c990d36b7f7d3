"""The laws that a draft draws from, which need not be its target's: every law is lossless, some are accepted more."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import Drafter


@dataclass(frozen=True, slots=True)
class OwnLaws:
    """A draft's own law for each law of its target.

    Attributes:
        fitted: Pairs of the target's law and the draft's.
        temperature, top_k: Used under sampled laws without a fitted one; None leaves the target's.
    """

    fitted: tuple[tuple[SamplingLaw, SamplingLaw], ...] = ()
    temperature: float | None = None
    top_k: int | None = None

    def under(self, target: SamplingLaw) -> SamplingLaw:
        """Return what the draft draws from where the target's law is `target`: greedily where that is greedy."""
        if target.is_greedy:
            return target
        for law, own in self.fitted:
            if law == target:
                return own
        temperature = target.temperature if self.temperature is None else self.temperature
        return replace(target, temperature=temperature, top_k=target.top_k if self.top_k is None else self.top_k)

    def __str__(self) -> str:
        parts = [f"{own} for a target at {law}" for law, own in self.fitted]
        if self.temperature is not None:
            parts.append(f"T={self.temperature:g}")
        if self.top_k is not None:
            parts.append(f"top-k={self.top_k}")
        return ", ".join(parts) or "the target's"

    def to_json(self) -> dict[str, Any]:
        return {
            "fitted": [{"target": asdict(law), "draft": asdict(own)} for law, own in self.fitted],
            "temperature": self.temperature,
            "top_k": self.top_k,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "OwnLaws":
        """Return what to_json wrote; the target's laws where it wrote nothing."""
        pairs = ((SamplingLaw(**pair["target"]), SamplingLaw(**pair["draft"])) for pair in data.get("fitted", ()))
        return OwnLaws(tuple(pairs), data.get("temperature"), data.get("top_k"))


TARGETS_LAWS = OwnLaws()


@runtime_checkable
class HasOwnLaws(Protocol):
    """A drafter that knows which law of its own goes with a target's."""

    @property
    def own_laws(self) -> OwnLaws: ...


def bound_for(drafter: Drafter, target: SamplingLaw) -> Drafter:
    """Return a drafter as it serves a target: drawing from its own law for that, else from the target's."""
    return drafter.bind(drafter.own_laws.under(target) if isinstance(drafter, HasOwnLaws) else target)
