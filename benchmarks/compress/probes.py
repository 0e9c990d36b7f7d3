"""What a probe costs beside a full evaluation, in processor seconds, and that both give the same figures.

    python benchmarks/compress/probes.py DRAFT TRACE --answers 40 --share 0.2

A full evaluation replays every answer through the draft as `foredraft evaluate-acceptance` does; a whole pass runs the
draft anew over the bench; a probe runs the layers behind a change over the share of it that moves are tried on. With
--gradients, what else a map of sensitivity takes: its gradients, from which units, heads and channels are ranked.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from foredraft.acceptance.evaluate import score_rows
from foredraft.compress.probe import Bench, Probe, measure
from foredraft.compress.sensitivity import probe_rounded, sensitivities
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import load_draft
from foredraft.models.units import EMBEDDING, search_units
from foredraft.trace.store import open_trace

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("trace")
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--gradients", type=int, default=0, help="Answers that gradients of every unit are timed on.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft, trace = load_draft(asked.draft, "float32"), open_trace(asked.trace)
    bench = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    small = bench.part(asked.share)
    drafter = CausalLMDrafter(draft, bench.law, bench.vocab_size)
    replayed, full = _timed(lambda: list(score_rows("draft", drafter, bench.rows, bench.ks)))
    whole, one_pass = _timed(lambda: measure(draft, bench))
    probe, reading = _timed(lambda: Probe(draft, small))
    units = [unit for unit in search_units(draft.model) if unit.name != EMBEDDING]
    chosen = units[:: max(len(units) // asked.probes, 1)]
    costs = [_timed(lambda unit=unit: probe_rounded(draft, probe, unit, WeightFormat(4, 32)))[1] for unit in chosen]
    some = [row.answer() for row in bench.rows[: asked.gradients]]
    gradients = _timed(lambda: sensitivities(draft, some, WeightFormat(4, 32)))[1] if some else 0.0
    accepted = sum(one.accepted_sum for one in replayed) / sum(one.tokens for one in replayed)
    print(f"{asked.draft.name} for {trace.info.target}: {len(bench.rows)} answers, {len(small.rows)} of them tried on")
    print("| | processor s | of a full evaluation |\n|---|---|---|")
    mean = sum(costs) / len(costs)
    for name, seconds in (
        ("full evaluation", full),
        ("whole pass over the bench", one_pass),
        ("reading the states that probes start from, once a step", reading),
        (f"a probe, mean of {len(costs)} units", mean),
        ("the dearest of them", max(costs)),
        (f"gradients and Fisher errors of every unit, {len(some)} answers", gradients),
    ):
        print(f"| {name} | {seconds:.2f} | {seconds / full:.3f} |")
    print(f"expected_acceptance: {accepted:.6f} by full evaluation, {whole.expected_acceptance:.6f} by a pass")


def _timed(make: Callable[[], T]) -> tuple[T, float]:
    started = time.process_time()
    made = make()
    return made, time.process_time() - started


if __name__ == "__main__":
    main()
