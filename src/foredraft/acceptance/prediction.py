"""Predicted speedup at each batch size: from times measured here, or from a profile of a machine that is not here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foredraft.acceptance.cost import Costs, Seconds
from foredraft.core.errors import UserError
from foredraft.core.roofline import PassFacts, block_seconds, free_positions, needed_bytes, pass_seconds
from foredraft.hardware.profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class Yield:
    """What a drafter's guesses are worth, by draft length; the same at every batch size.

    Attributes:
        tokens: mean_tokens_per_call.
        guess_share: Blocks that offer a draft token / all blocks.
    """

    tokens: Mapping[int, float]
    guess_share: Mapping[int, float]


def batch_figures(costs: Costs, name: str, worth: Yield, rows: int) -> dict[str, Any]:
    """Return the predicted speedup at one batch size, the best k, 0 where nothing beats plain decoding, and break-even.

    Args:
        costs: At this batch size.
        rows: Requests decoded together.
    """
    predicted = {
        k: costs.predicted_speedup(name, k, tokens, worth.guess_share[k]) for k, tokens in worth.tokens.items()
    }
    best = max(predicted, key=lambda k: predicted[k])
    best_speedup = max(predicted[best], 1.0)
    return {
        "predicted_speedup": {str(k): value for k, value in predicted.items()},
        "best_k": best if predicted[best] > 1.0 else 0,
        "draft_seconds": {str(k): block.median for k, block in costs.blocks[name].items()},
        "reading_seconds": costs.reading_seconds(name),
        "break_even_acceptance": {str(k): costs.break_even(name, k) for k in worth.tokens},
        "tokens_per_second": rows * best_speedup / costs.plain_seconds,
    }


def with_hardware(
    report: Mapping[str, Any],
    names: Sequence[str],
    profiles: Sequence[HardwareProfile],
    rows: Sequence[int],
    context: int,
) -> dict[str, Any]:
    """Return a report with predictions for other machines, from the acceptance that it holds.

    Every law's drafters get `hardware`: {name: {batch size: figures}}; the report says what the profiles are. What
    a drafter without a model takes is left as it was measured.

    Args:
        names: What the profiles are called in the report.
        rows: Batch sizes.
        context: Tokens of context of each request.

    Raises:
        UserError: the report is of a version that did not keep what passes move and compute.
    """
    target = _facts(report["target"].get("passes"))
    if target is None:
        raise UserError("The report does not say what the target's passes move and compute: evaluate again.")
    machines = dict(zip(names, profiles, strict=True))
    laws = [
        law
        | {
            "drafters": [
                entry
                | {
                    "hardware": {
                        name: {str(size): _predicted(entry, target, profile, size, context) for size in rows}
                        for name, profile in machines.items()
                    }
                }
                for entry in law["drafters"]
            ]
        }
        for law in report["laws"]
    ]
    described = {
        name: {
            "context": context,
            "target_positions_for_free": free_positions(target, profile.machine(), context),
            "profile": profile.model_dump(),
        }
        for name, profile in machines.items()
    }
    return {**report, "hardware": described, "laws": laws}


def roofline_costs(
    target: PassFacts,
    draft: PassFacts | None,
    entry: Mapping[str, Any],
    profile: HardwareProfile,
    rows: int,
    context: int,
) -> Costs:
    """Return the times of target and draft steps that a profile predicts.

    Args:
        draft: None for a drafter without a model.
        entry: Of the report, with draft lengths and, for a drafter without a model, the seconds measured.
    """
    machine, lengths = profile.machine(), sorted(map(int, entry["mean_tokens_per_call"]))
    if draft is None:
        measured = {int(k): rows * seconds for k, seconds in entry["draft_seconds"].items()}
        blocks = {k: _exactly(seconds) for k, seconds in measured.items()}
    else:
        blocks = {k: _exactly(block_seconds(draft, machine, rows, k, context)) for k in lengths}
    steps = tuple(_exactly(pass_seconds(target, machine, rows, width, context)) for width in range(1, max(lengths) + 2))
    return Costs(steps, {entry["name"]: blocks})


def _predicted(
    entry: Mapping[str, Any], target: PassFacts, profile: HardwareProfile, rows: int, context: int
) -> dict[str, Any]:
    draft = _facts(entry.get("passes"))
    costs = roofline_costs(target, draft, entry, profile, rows, context)
    figures = batch_figures(costs, entry["name"], _worth(entry), rows)
    longest = context + max(map(int, entry["mean_tokens_per_call"])) + 1
    needed = needed_bytes(target, rows, longest)
    needed += needed_bytes(draft, rows, longest) if draft else entry["bytes"]
    return figures | {
        "joules_per_token": profile.watts / figures["tokens_per_second"],
        "bytes": needed,
        "fits": needed <= profile.memory,
    }


def _worth(entry: Mapping[str, Any]) -> Yield:
    tokens, share = (
        {int(k): value for k, value in entry[name].items()} for name in ("mean_tokens_per_call", "guess_share")
    )
    return Yield(tokens, share)


def passes_json(facts: PassFacts | None) -> dict[str, Any] | None:
    """Return facts as plain values, null for a drafter without a model."""
    return asdict(facts) if facts else None


def _facts(passes: Mapping[str, Any] | None) -> PassFacts | None:
    return PassFacts(**passes) if passes else None


def _exactly(seconds: float) -> Seconds:
    return Seconds(seconds, seconds, seconds)
