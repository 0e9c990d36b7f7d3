"""report.json: every drafter with its figures, in the form that other programs rely on."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from foredraft.acceptance.audit import Audit
from foredraft.acceptance.cost import Costs
from foredraft.acceptance.intervals import expected_acceptance, interval, paired_difference, tokens_per_call
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.law import SamplingLaw

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
    """

    kind: str
    parameters: int
    num_bytes: int
    head_rows: int = 0
    has_int8_body: bool = False
    twin: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class LawScores:
    """All that was measured under one law, by drafter. Without a target there are neither costs nor audits."""

    law: SamplingLaw
    reports: Mapping[str, AcceptanceReport]
    costs: Costs | None
    audits: Mapping[str, Audit]


def build_report(
    target: Mapping[str, Any], laws: Sequence[LawScores], facts: Mapping[str, DrafterFacts]
) -> dict[str, Any]:
    """Return report.json as plain values, schema 1.

    Args:
        target: name, fingerprint, dtype, parameters and bytes of the target.
    """
    return {
        "schema": SCHEMA,
        "target": dict(target),
        "machine": describe_machine(),
        "laws": [_law(scores, facts) for scores in laws],
        "paired": [pair for scores in laws for pair in _pairs(scores, facts)],
        "notes": [note for scores in laws for note in _notes(scores)],
    }


def describe_machine() -> dict[str, Any]:
    """Return what timings depend on."""
    return {
        "processor": _processor(),
        "cores": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
    }


def _law(scores: LawScores, facts: Mapping[str, DrafterFacts]) -> dict[str, Any]:
    return {
        "label": str(scores.law),
        **asdict(scores.law),
        "target_seconds": {
            str(n + 1): step.median for n, step in enumerate(scores.costs.target if scores.costs else ())
        },
        "drafters": [_drafter(name, report, scores, facts[name]) for name, report in scores.reports.items()],
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
        pairs.append(
            {
                "law": str(scores.law),
                "better": one,
                "worse": other,
                "metric": "expected_acceptance",
                "difference": found.difference.value,
                "interval": found.difference.bounds,
                "inside_noise": found.is_inside_noise,
            }
        )
    return pairs


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
