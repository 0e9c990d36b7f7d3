"""Bits by unit at equal bytes: by measured acceptance, by log-likelihood, by Fisher's ranking, or the same for all.

    python benchmarks/compress/bits.py DRAFT TRAIN_TRACE EVAL_TRACE --train 8 --answers 50 > bits.md

Every unit is rounded alone to the smallest format; one probe gives both what acceptance and what log-likelihood it
costs. In the other formats it loses as much less as its squared rounding error is smaller: a loss of some thousandths,
which few answers cannot tell from none, is read off a large one. What seems to gain by rounding is luck, and counts as
no loss. Losses are added, and formats chosen within the bytes that --uniform takes everywhere. The drafts are compared
on held-out answers, paired by prompt.

Greedy answers count, while formats are chosen, by the probability that the draft gives to their tokens: whether a token
is its first guess says too little of small changes. Formats but 4 and 8 bits are simulated: no folder is written here
that holds them, llama.cpp has types of these sizes.
"""

import argparse
import json
import time
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import torch
from paired import change

from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.assign import Option, assign
from foredraft.compress.choice import simulated
from foredraft.compress.probe import Bench, Probe, measure
from foredraft.compress.quantize import round_to_nearest
from foredraft.compress.rounding import product
from foredraft.compress.sensitivity import probe_rounded
from foredraft.core.law import SamplingLaw
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft
from foredraft.models.units import EMBEDDING, Unit, search_units, unit_weights
from foredraft.trace.store import open_trace

MEASURES = ("acceptance", "log-likelihood")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("train")
    parser.add_argument("evaluation")
    parser.add_argument("--train", dest="train_answers", type=int, default=16)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--formats", nargs="+", default=["3/32", "4/32", "5/32", "6/32", "8"], help="Smallest first.")
    parser.add_argument("--uniform", default="4/32", help="What all units have in the plan to beat.")
    parser.add_argument("--fisher", type=Path, help="What `foredraft sensitivity DRAFT ... --json` printed.")
    parser.add_argument("--notes", type=Path, default=Path("bits-probes.json"), help="Probes that were made already.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft, formats = load_draft(asked.draft, "float32"), [_format(text) for text in asked.formats]
    train, trace = open_trace(asked.train), open_trace(asked.evaluation)
    law = SamplingLaw() if train.info.law.is_greedy else train.info.law
    bench = Bench.of(train.sample(asked.train_answers), law, train.info.vocab_size)
    held_out = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    units = {unit.name: unit for unit in search_units(draft.model) if unit.name != EMBEDDING}
    started = time.process_time()
    losses = _losses(draft, bench, units, formats[0], asked.notes)
    seconds = time.process_time() - started
    errors = {name: [_error(draft, unit, chosen) for chosen in formats] for name, unit in units.items()}
    uniform = _format(asked.uniform)
    budget = sum(_bytes(draft, unit, uniform) for unit in units.values())
    plans = {f"uniform, {uniform.name}": dict.fromkeys(units, uniform)}
    per_error = {  # what a unit loses for each unit of its squared rounding error
        name: {unit: max(0.0, losses[unit][at]) / errors[unit][0] for unit in units} for at, name in enumerate(MEASURES)
    }
    if asked.fisher:
        per_error["Fisher"] = _fisher_per_error(draft, units, asked.fisher)
    for by, lost in per_error.items():
        options = {
            unit: tuple(
                Option(chosen, _bytes(draft, units[unit], chosen), lost[unit] * error)
                for chosen, error in zip(formats, errors[unit], strict=True)
            )
            for unit in units
        }
        plans[f"by {by}"] = {unit: one.weight_format for unit, one in assign(options, budget).items()}
    reports = {name: measure(simulated(draft, plan), held_out) for name, plan in plans.items()}
    print(f"{asked.draft.name} for {trace.info.target}, {trace.info.law}, {len(held_out.rows)} held-out answers")
    print(f"| bits | MB a step | expected_acceptance | tokens per call, k={asked.k} | units by format |")
    print("|---|---|---|---|---|")
    for name, plan in plans.items():
        held = sum(_bytes(draft, units[unit], chosen) for unit, chosen in plan.items())
        counts = ", ".join(
            f"{sum(chosen == one for chosen in plan.values())} in {one.name}" for one in formats if one in plan.values()
        )
        report = reports[name]
        print(
            f"| {name} | {held / 1e6:.2f} | {report.expected_acceptance:.4f} | "
            f"{report.mean_tokens_per_call(asked.k):.3f} | {counts} |"
        )
    _compare(reports)
    print(f"{reports['by acceptance'].tokens} tokens held out; {seconds:.0f} processor s of probes.")


def _compare(reports: Mapping[str, AcceptanceReport]) -> None:
    for one, other in combinations(reversed(reports), 2):
        print(f"{one} against {other}: {change(reports[one], reports[other])}")


def _fisher_per_error(draft: Draft, units: Mapping[str, Unit], sensitivity: Path) -> dict[str, float]:
    """Return Fisher's error of each unit / its squared rounding error, both in the format of a map of sensitivity."""
    found = json.loads(sensitivity.read_text())
    bits, _, group = found["format"].removeprefix("int").partition("-g")
    chosen = _format(f"{bits}/{group}")
    fisher = {one["unit"]: one["fisher"] for one in found["units"]}
    return {name: fisher[name] / _error(draft, unit, chosen) for name, unit in units.items()}


def _losses(
    draft: Draft, bench: Bench, units: Mapping[str, Unit], chosen: WeightFormat, notes: Path
) -> dict[str, list[float]]:
    """Return what each unit costs in a format, by MEASURES; a probe that is noted is not made again."""
    known = json.loads(notes.read_text()) if notes.is_file() else {}
    missing = [unit for name, unit in units.items() if name not in known]
    if not missing:
        return known
    probe = Probe(draft, bench)
    before = [probe.baseline.expected_acceptance, probe.log_likelihood]
    for unit in missing:
        report = probe_rounded(draft, probe, unit, chosen)
        after = [report.expected_acceptance, probe.log_likelihood]
        known[unit.name] = [old - new for old, new in zip(before, after, strict=True)]
        notes.write_text(json.dumps(known))
    return known


@torch.no_grad()
def _error(draft: Draft, unit: Unit, chosen: WeightFormat) -> float:
    """Return the squared rounding error of a unit."""
    return sum(
        float((product(*round_to_nearest("", weight, chosen)) - weight).square().sum())
        for weight in unit_weights(draft.model, unit)
    )


def _format(text: str) -> WeightFormat:
    bits, _, group = text.partition("/")
    return WeightFormat(int(bits), int(group or 0))


def _bytes(draft: Draft, unit: Unit, chosen: WeightFormat) -> float:
    weights = unit_weights(draft.model, unit)
    return sum(one.numel() * (chosen.bits / 8 + 2 / (chosen.group or one.shape[1])) for one in weights)


if __name__ == "__main__":
    main()
