"""report.json: every drafter with its figures, in the form that other programs rely on."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from foredraft.acceptance.audit import Audit
from foredraft.acceptance.cost import Costs
from foredraft.acceptance.intervals import (
    PairedDifference,
    expected_acceptance,
    interval,
    paired_difference,
    scaled_tokens_per_call,
    tokens_per_call,
)
from foredraft.acceptance.prediction import Yield, batch_figures, passes_json
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import CONTROLLED, EXACT, IN_ORDER, TOKENS_EXACT
from foredraft.core.roofline import PassFacts

SCHEMA = 1
_SEED = 0
_WIDE = 0.1  # an interval whose half width is more than this share of its figure is called wide


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What is known of a drafter without scoring it.

    Attributes:
        head_rows: Rows of a trimmed head; 0 for a full head or none.
        has_int8_body: Whether it multiplies with 8-bit weights.
        twin: Name of the candidate that differs only in computing the whole head; empty if there is none.
        parent: Name of the candidate that it was made from; empty if there is none.
        validity: What of its replay is exact, see StatesValidity.
        passes: What a draft step moves and computes; None without a model.
    """

    kind: str
    parameters: int
    num_bytes: int
    head_rows: int = 0
    has_int8_body: bool = False
    twin: str = ""
    parent: str = ""
    passes: PassFacts | None = None
    validity: str = EXACT


@dataclass(frozen=True, slots=True)
class LawScores:
    """All that was measured under one law, by drafter. Without a target there are neither costs nor audits.

    Attributes:
        batches: Costs by batch size, 1 left out.
        criteria: Of the drafters that have laws.
        draft_laws: What each drafter draws from; certain guesses count as greedy.
    """

    law: SamplingLaw
    reports: Mapping[str, AcceptanceReport]
    costs: Costs | None
    audits: Mapping[str, Audit]
    batches: Mapping[int, Costs] = field(default_factory=dict)
    criteria: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    draft_laws: Mapping[str, SamplingLaw] = field(default_factory=dict)


def build_report(
    target: Mapping[str, Any], laws: Sequence[LawScores], facts: Mapping[str, DrafterFacts]
) -> dict[str, Any]:
    """Return report.json as plain values, schema 1.

    Args:
        target: name, fingerprint, dtype, parameters and bytes of the target.
    """
    paired = [pair for scores in laws for pair in _pairs(scores, facts)]
    return {
        "schema": SCHEMA,
        "target": dict(target),
        "machine": describe_machine(),
        "laws": [_law(scores, facts, target) for scores in laws],
        "paired": paired,
        "notes": [
            *noise_warnings(paired),
            *_validity_notes(facts),
            *(note for scores in laws for note in _notes(scores)),
        ],
    }


def noise_warnings(paired: Sequence[Mapping[str, Any]], drafter: str = "") -> list[str]:
    """Return a sentence for each ranking by predicted speedup that these prompts do not settle.

    Args:
        paired: Of the report.
        drafter: Only rankings that it is part of; empty takes all.
    """
    doubtful = [pair for pair in paired if pair["metric"] == "predicted_speedup" and pair["inside_noise"]]
    return [_warning(pair) for pair in doubtful if drafter in ("", pair["better"], pair["worse"])]


def _warning(pair: Mapping[str, Any]) -> str:
    needed = pair["prompts_needed"]
    told = (
        f"about {needed} prompts like these would tell them apart"
        if needed
        else "more prompts will not tell them apart"
    )
    return (
        f"{pair['law']}: {pair['better']} is predicted {pair['difference']:.2f}x faster than {pair['worse']}, which is "
        f"inside the noise of {pair['prompts']} prompts; {told}."
    )


def describe_machine() -> dict[str, Any]:
    """Return what timings depend on."""
    return {
        "processor": _processor(),
        "cores": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
    }


def _law(scores: LawScores, facts: Mapping[str, DrafterFacts], target: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "label": str(scores.law),
        **asdict(scores.law),
        "target_seconds": {
            str(n + 1): step.median for n, step in enumerate(scores.costs.target if scores.costs else ())
        },
        "overhead_seconds": scores.costs.overhead.median if scores.costs else None,
        "plain_overhead_seconds": scores.costs.plain_overhead.median if scores.costs else None,
        "batch": {
            str(rows): {
                "target_seconds": {str(n + 1): step.median for n, step in enumerate(costs.target)},
                "overhead_seconds": costs.overhead.median,
                "plain_overhead_seconds": costs.plain_overhead.median,
            }
            for rows, costs in _by_batch(scores).items()
        },
        "drafters": [
            _drafter(name, report, scores, facts[name]) | _explained(name, report, scores, facts[name], target)
            for name, report in scores.reports.items()
        ],
    }


def _drafter(name: str, report: AcceptanceReport, scores: LawScores, facts: DrafterFacts) -> dict[str, Any]:
    return {
        "name": name,
        "kind": facts.kind,
        **_score(report),
        "domains": {domain: _score(part) for domain, part in report.by_domain().items()},
        **_timed(name, report, scores.costs),
        **_literal(scores.audits.get(name)),
        "parameters": facts.parameters,
        "bytes": facts.num_bytes,
        "head_rows": facts.head_rows,
        "has_int8_body": facts.has_int8_body,
        "twin": facts.twin,
        "validity": facts.validity,
    }


def _timed(name: str, report: AcceptanceReport, costs: Costs | None) -> dict[str, Any]:
    if costs is None:
        return {"cost_ratio": None, "predicted_speedup": None, "best_k": None}
    predicted = {
        k: costs.predicted_speedup(name, k, report.mean_tokens_per_call(k), report.guess_share(k)) for k in report.ks
    }
    return {
        "cost_ratio": costs.cost_ratio(name),
        "predicted_speedup": {str(k): value for k, value in predicted.items()},
        "best_k": max(predicted, key=lambda k: predicted[k]),
    }


def _explained(
    name: str, report: AcceptanceReport, scores: LawScores, facts: DrafterFacts, target: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what other batch sizes and other machines are predicted from, and what explains the acceptance."""
    blocks = scores.costs.blocks[name] if scores.costs else {}
    return {
        "draft_seconds": {str(k): block.median for k, block in blocks.items()},
        "reading_seconds": scores.costs.reading_seconds(name) if scores.costs else None,
        "passes": passes_json(facts.passes),
        "batch": _batches(name, report, scores),
        "draft_law": asdict(scores.draft_laws[name]) if name in scores.draft_laws else None,
        "criteria": _criteria(name, scores, facts, target),
    }


def _by_batch(scores: LawScores) -> dict[int, Costs]:
    return {1: scores.costs, **scores.batches} if scores.costs else {}


def _batches(name: str, report: AcceptanceReport, scores: LawScores) -> dict[str, Any]:
    tokens, share = ({k: figure(k) for k in report.ks} for figure in (report.mean_tokens_per_call, report.guess_share))
    worth = Yield(tokens, share)
    return {str(rows): batch_figures(costs, name, worth, rows) for rows, costs in _by_batch(scores).items()}


def _criteria(name: str, scores: LawScores, facts: DrafterFacts, target: Mapping[str, Any]) -> dict[str, Any] | None:
    if name not in scores.criteria:
        return None
    memory = facts.num_bytes / target["bytes"] if target.get("bytes") else None
    ratio = scores.costs.cost_ratio(name) if scores.costs else None
    return {**scores.criteria[name], "memory_fraction": memory, "cost_ratio": ratio}


def _score(report: AcceptanceReport) -> dict[str, Any]:
    generator = np.random.default_rng(_SEED)
    return {
        "expected_acceptance": report.expected_acceptance,
        "acceptance_by_position": {str(k): report.acceptance_by_position(k) for k in report.ks},
        "acceptance_rate": {str(k): report.acceptance_rate(k) for k in report.ks},
        "mean_tokens_per_call": {str(k): report.mean_tokens_per_call(k) for k in report.ks},
        "guess_share": {str(k): report.guess_share(k) for k in report.ks},
        "interval": {
            "expected_acceptance": interval(expected_acceptance(report), generator).bounds,
            "mean_tokens_per_call": {str(k): interval(tokens_per_call(k)(report), generator).bounds for k in report.ks},
        },
        "prompts": len(report.prompts),
        "tokens": report.tokens,
    }


def _literal(audit: Audit | None) -> dict[str, Any]:
    if audit is None:
        return {"measured_speedup": None, "audit": None}
    bounds = [audit.speedup_low, audit.speedup_high]
    return {
        "measured_speedup": {"k": audit.k, "value": audit.speedup, "interval": bounds},
        "audit": {
            "prompts": audit.prompts,
            "tokens": audit.tokens,
            "mean_tokens_per_call": {str(audit.k): audit.mean_tokens_per_call},
            "replayed_mean_tokens_per_call": {str(audit.k): audit.replayed_tokens_per_call},
            "same_text": audit.same_text,
            "agrees": audit.agrees,
        },
    }


def _pairs(scores: LawScores, facts: Mapping[str, DrafterFacts]) -> list[dict[str, Any]]:
    """Compare every candidate with the one that it was made from."""
    pairs = []
    for name in scores.reports:
        parent = facts[name].parent
        if parent not in scores.reports:
            continue
        one, other = sorted((name, parent), key=lambda who: -scores.reports[who].expected_acceptance)
        generator = np.random.default_rng(_SEED)
        found = paired_difference(scores.reports[one], scores.reports[other], expected_acceptance, generator)
        pairs.append(_pair(scores, one, other, "expected_acceptance", found))
    return [*pairs, *_fastest_two(scores)]


def _fastest_two(scores: LawScores) -> list[dict[str, Any]]:
    """Compare the fastest drafter with the next: what a choice between them rests on."""
    best = {name: _timed(name, report, scores.costs) for name, report in scores.reports.items() if scores.costs}
    speedups = {name: timed["predicted_speedup"][str(timed["best_k"])] for name, timed in best.items()}
    ranked = sorted(speedups, key=lambda name: -speedups[name])[:2]
    if len(ranked) < 2:
        return []
    metrics = []
    for name in ranked:
        k = best[name]["best_k"]
        metrics.append(scaled_tokens_per_call(k, speedups[name] / scores.reports[name].mean_tokens_per_call(k)))
    one, other = (scores.reports[name] for name in ranked)
    found = paired_difference(one, other, metrics[0], np.random.default_rng(_SEED), metrics[1])
    return [_pair(scores, ranked[0], ranked[1], "predicted_speedup", found)]


def _pair(scores: LawScores, one: str, other: str, metric: str, found: PairedDifference) -> dict[str, Any]:
    needed = found.prompts_needed
    return {
        "law": str(scores.law),
        "better": one,
        "worse": other,
        "metric": metric,
        "difference": found.difference.value,
        "interval": found.difference.bounds,
        "inside_noise": found.is_inside_noise,
        "prompts": len(scores.reports[one].prompts),
        "prompts_needed": int(needed) if math.isfinite(needed) else None,
    }


def _validity_notes(facts: Mapping[str, DrafterFacts]) -> list[str]:
    partly = [name for name, one in facts.items() if one.validity == TOKENS_EXACT]
    in_order = [name for name, one in facts.items() if one.validity == IN_ORDER]
    controlled = [name for name, one in facts.items() if one.validity == CONTROLLED]
    notes = []
    if partly:
        notes.append(
            f"{', '.join(partly)}: replay's tokens are exact, its draft steps are not, since drafting goes on over "
            "tokens that are never emitted. Trust the measured speedup before the predicted one."
        )
    if in_order:
        notes.append(
            f"{', '.join(in_order)}: learns from each prompt for the next ones. Figures hold for the prompts in this "
            "order; intervals take prompts to be independent, which they are not here, and an audit of a few prompts "
            "learns less."
        )
    if controlled:
        notes.append(
            f"{', '.join(controlled)}: chooses anew for each block from what it saw before, in other prompts too. "
            "Figures hold for the longest draft length and this order; drawn drafts are simulated by one draw, and an "
            "audit of a few prompts need not agree."
        )
    return notes


def _notes(scores: LawScores) -> list[str]:
    generator, wide = np.random.default_rng(_SEED), []
    for name, report in scores.reports.items():
        found = interval(expected_acceptance(report), generator)
        if found.high - found.low > 2 * _WIDE * found.value:
            wide.append(name)
    if not wide:
        return []
    some = next(iter(scores.reports.values()))
    text = f"{scores.law}: {len(some.prompts)} prompts and {some.tokens} tokens leave an interval wider than "
    ranks = "Score more prompts before you rank by small differences."
    return [f"{text}+-{_WIDE:.0%} of the acceptance of {', '.join(wide)}. {ranks}"]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
