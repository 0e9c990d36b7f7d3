"""Bits by unit at equal bytes: chosen by measured acceptance, by measured log-likelihood, or the same for all.

    python benchmarks/compress/bits.py DRAFT TRAIN_TRACE EVAL_TRACE --train 16 --share 0.5 --answers 24 > bits.md

Every unit is rounded alone in 4 bits by groups of 128 or 64, of 32, and in 8 bits; one probe gives both what acceptance
and what log-likelihood it costs. Losses are added, and formats chosen within the bytes that 4 bits by groups of 32 take
everywhere. The drafts are compared on held-out answers, paired by prompt.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from foredraft.acceptance.intervals import expected_acceptance, paired_difference
from foredraft.compress.assign import Option, assign
from foredraft.compress.choice import simulated
from foredraft.compress.probe import Bench, Probe, measure
from foredraft.compress.sensitivity import probe_rounded
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft
from foredraft.models.units import EMBEDDING, Unit, search_units
from foredraft.trace.store import open_trace

UNIFORM = WeightFormat(4, 32)
MEASURES = ("acceptance", "log-likelihood")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("train")
    parser.add_argument("evaluation")
    parser.add_argument("--train", dest="train_answers", type=int, default=16)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--notes", type=Path, default=Path("bits-probes.json"), help="Probes that were made already.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft = load_draft(asked.draft, "float32")
    train, trace = open_trace(asked.train), open_trace(asked.evaluation)
    bench = Bench.of(train.sample(asked.train_answers), train.info.law, train.info.vocab_size)
    held_out = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    started = time.process_time()
    options = _options(draft, bench, asked.notes)
    seconds = time.process_time() - started
    units = {unit.name: unit for unit in search_units(draft.model) if unit.name != EMBEDDING}
    budget = sum(_bytes(draft, unit, UNIFORM) for unit in units.values())
    plans = {"uniform, 4 bits by 32": dict.fromkeys(units, UNIFORM)}
    for measure_name in MEASURES:
        found = assign(options[measure_name], budget)
        plans[f"by {measure_name}"] = {unit: one.weight_format for unit, one in found.items()}
    reports = {name: measure(simulated(draft, plan), held_out) for name, plan in plans.items()}
    print(f"{asked.draft.name} for {trace.info.target}, {trace.info.law}, {len(held_out.rows)} held-out answers")
    print(f"| bits | MB a step | expected_acceptance | tokens per call, k={asked.k} | units in 8 bits, by 64, by 128 |")
    print("|---|---|---|---|---|")
    for name, plan in plans.items():
        held = sum(_bytes(draft, units[unit], chosen) for unit, chosen in plan.items())
        counts = [
            sum(chosen == other for chosen in plan.values()) for other in _formats(draft)[::-1] if other != UNIFORM
        ]
        report = reports[name]
        print(
            f"| {name} | {held / 1e6:.2f} | {report.expected_acceptance:.4f} | "
            f"{report.mean_tokens_per_call(asked.k):.3f} | {counts} |"
        )
    best = reports["by acceptance"]
    for name, report in reports.items():
        if report is not best:
            change = paired_difference(best, report, expected_acceptance, np.random.default_rng(0)).difference
            print(f"by acceptance against {name}: {change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]")
    print(f"{best.tokens} tokens held out; {seconds:.0f} processor seconds of probes.")


def _options(draft: Draft, bench: Bench, notes: Path) -> dict[str, dict[str, tuple[Option, ...]]]:
    """Return the options of each unit by what is kept; a probe that is noted is not made again."""
    known = json.loads(notes.read_text()) if notes.is_file() else {}
    probe = Probe(draft, bench)
    before = _figures(probe.baseline, probe)
    for unit in search_units(draft.model):
        for chosen in _formats(draft) if unit.name != EMBEDDING else ():
            key = f"{unit.name} {chosen.name}"
            if key not in known:
                report = probe_rounded(draft, probe, unit, chosen)
                known[key] = [old - new for old, new in zip(before, _figures(report, probe), strict=True)]
                notes.write_text(json.dumps(known))
    return {
        name: {
            unit.name: tuple(
                Option(chosen, _bytes(draft, unit, chosen), known[f"{unit.name} {chosen.name}"][number])
                for chosen in _formats(draft)
            )
            for unit in search_units(draft.model)
            if unit.name != EMBEDDING
        }
        for number, name in enumerate(MEASURES)
    }


def _figures(report: object, probe: Probe) -> list[float]:
    return [report.expected_acceptance, probe.log_likelihood]


def _formats(draft: Draft) -> list[WeightFormat]:
    """Return the formats, the smallest first; groups of 128 where they divide every matrix."""
    widths = {module.in_features for module in draft.model.modules() if isinstance(module, torch.nn.Linear)}
    wide = [group for group in (128, 64) if all(width % group == 0 for width in widths)]
    return [*(WeightFormat(4, group) for group in wide), UNIFORM, WeightFormat(8, 0)]


def _bytes(draft: Draft, unit: Unit, chosen: WeightFormat) -> float:
    weights = [draft.model.get_submodule(module).weight for module in unit.modules]
    return sum(one.numel() * (chosen.bits / 8 + 2 / (chosen.group or one.shape[1])) for one in weights)


if __name__ == "__main__":
    main()
