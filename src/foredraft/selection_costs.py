"""What blocks cost in a simulation: the times of a report, and a guess at what it did not time."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from foredraft.core.errors import UserError
from foredraft.core.protocols import Answer, Drafter, Observer
from foredraft.select.block_costs import BlockCosts, at_batch_size
from foredraft.settings import SimulateSettings

_TIMED = 24


def costs_by_requests(
    drafters: Mapping[str, Drafter],
    answer: Answer,
    longest: int,
    settings: SimulateSettings,
    report: Mapping[str, Any] | None,
    temperature: float = 0.0,
) -> dict[int, BlockCosts]:
    """Return what blocks cost where one request is decoded, and where so many are as the report or settings say.

    Drafters that the report does not hold are timed if they have no model, and priced by ratio otherwise.

    Raises:
        UserError: the report has no times, or none of the batch size that is asked for.
    """
    law = _law_of(report, temperature)
    if report and not law["target_seconds"]:
        raise UserError("The report has no cost: score the drafters with --target, so that steps are timed.")
    entries = {entry["name"] for entry in law["drafters"]}
    timed = {
        name: _timed(drafter, answer, longest)
        for name, drafter in drafters.items()
        if name not in entries and not drafter.num_parameters
    }
    wanted = {1, settings.batch_size, *(_timed_batches(law, drafters) if report else ())}
    return {requests: _costs(drafters, longest, settings, law, timed, requests) for requests in sorted(wanted)}


def _law_of(report: Mapping[str, Any] | None, temperature: float) -> Mapping[str, Any]:
    if not report:
        return {"target_seconds": {}, "drafters": [], "overhead_seconds": 0.0, "batch": {}}
    same = [one for one in report["laws"] if one["temperature"] == temperature]
    return (same or report["laws"])[0]


def _timed_batches(law: Mapping[str, Any], drafters: Mapping[str, Drafter]) -> list[int]:
    """Return the batch sizes at which a law of a report keeps the times of all of some drafters that it holds."""
    entries = [entry for entry in law["drafters"] if entry["name"] in drafters]
    return [int(n) for n in law["batch"] if all("draft_seconds" in entry["batch"].get(n, ()) for entry in entries)]


def _costs(
    drafters: Mapping[str, Drafter],
    longest: int,
    settings: SimulateSettings,
    law: Mapping[str, Any],
    timed: Mapping[str, Mapping[str, float]],
    requests: int,
) -> BlockCosts:
    if requests > 1 and law["target_seconds"]:
        if requests not in _timed_batches(law, drafters):
            known = ", ".join(map(str, sorted({1, *_timed_batches(law, drafters)})))
            raise UserError(
                f"The report did not time {requests} requests together, only {known}: evaluate with --set "
                f"batch_sizes=[1,{requests}]."
            )
        law = at_batch_size(law, str(requests))
    growth = settings.target_growth
    steps = law["target_seconds"] or {
        str(n): settings.target_seconds * (1 + growth * (requests * n - 1)) for n in range(1, longest + 2)
    }
    entries = {entry["name"]: entry for entry in law["drafters"]}
    for name in drafters:
        if name in timed:
            drafting = {k: requests * seconds for k, seconds in timed[name].items()}
            entries[name] = {"name": name, "draft_seconds": drafting}
        elif name not in entries:
            per_token = settings.cost_ratio * steps["1"]
            drafting = {"1": per_token, str(longest): longest * per_token}
            entries[name] = {"name": name, "draft_seconds": drafting, "reading_seconds": requests * growth * per_token}
    priced = {
        "target_seconds": steps,
        "overhead_seconds": law["overhead_seconds"],
        "plain_overhead_seconds": law.get("plain_overhead_seconds"),
        "drafters": list(entries.values()),
    }
    return BlockCosts.of_report(priced, list(drafters), longest)


def _timed(drafter: Drafter, answer: Answer, longest: int) -> dict[str, float]:
    """Return the median seconds of a whole proposal, for one token and for the longest block."""
    own = drafter.bind(drafter.law) if not isinstance(drafter, Observer) else drafter
    generator, found = torch.Generator(), {}
    for k in (1, longest):
        seconds = []
        for end in range(answer.start, min(answer.start + _TIMED, len(answer.token_ids))):
            began = time.perf_counter()
            own.propose(answer.token_ids[:end], k, generator)
            seconds.append(time.perf_counter() - began)
        found[str(k)] = float(np.median(seconds))
    return found
