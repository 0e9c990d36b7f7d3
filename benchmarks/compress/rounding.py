"""Rounding a draft in several formats, judged by replayed acceptance on held-out answers, paired by prompt.

    python benchmarks/compress/rounding.py DRAFT TRAIN_TRACE EVAL_TRACE --answers 24 --calibration 16 > table.md

Bytes are those of the folder's weights with plain weights in bfloat16, and what a draft step reads: the table of
embeddings is left out of the latter, of which a step reads one row, and a head that is tied to it counts.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from paired import change

from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.gptq import GptqRounder
from foredraft.compress.plan import unit_formats
from foredraft.compress.probe import Bench, measure
from foredraft.compress.quantize import Rounded, quantize, round_to_nearest
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft
from foredraft.models.passes import pass_facts
from foredraft.models.units import search_units
from foredraft.trace.store import open_trace

VARIANTS = {
    "bf16": (None, "nearest"),
    "INT8 body": (8, "nearest"),
    "INT8 body, INT4 g32 head": ({"layers.*": 8, "head": 4}, "nearest"),
    "INT8 body, INT4 g32 head by GPTQ": ({"layers.*": 8, "head": 4}, "gptq head"),
    "INT8 body, INT4 g32 head, GPTQ": ({"layers.*": 8, "head": 4}, "gptq"),
    "chapter's rule": ("chapter", "nearest"),
    "INT4 g32 body": (4, "nearest"),
    "INT4 g32 body, GPTQ": (4, "gptq"),
    "INT4 g32 body and head": ({"layers.*": 4, "head": 4}, "nearest"),
    "INT4 g32 body and head, GPTQ": ({"layers.*": 4, "head": 4}, "gptq"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("train")
    parser.add_argument("evaluation")
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--calibration", type=int, default=16)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="Rows to make; bf16 is always made.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft = load_draft(asked.draft, "float32")
    trace = open_trace(asked.evaluation)
    bench = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    calibration = [row.answer() for row in open_trace(asked.train).sample(asked.calibration)]
    print(f"{asked.draft.name} for {trace.info.target}, {trace.info.law}, {len(bench.rows)} answers")
    print(f"| draft | expected_acceptance | paired change, 95 % | tokens per call, k={asked.k} | MB | MB a step | s |")
    print("|---|---|---|---|---|---|---|")
    plain: AcceptanceReport | None = None
    for name in ["bf16", *(one for one in VARIANTS if one in asked.only and one != "bf16")]:
        bits, method = VARIANTS[name]
        started = time.process_time()
        rounded = draft if bits is None else _rounded(draft, bits, method, calibration)
        seconds = time.process_time() - started
        report = measure(rounded, bench)
        plain = plain or report
        held, read = _bytes(rounded)
        print(
            f"| {name} | {report.expected_acceptance:.4f} | {change(report, plain)}"
            f" | {report.mean_tokens_per_call(asked.k):.3f} | {held / 1e6:.1f} | {read / 1e6:.1f} | {seconds:.0f} |",
            flush=True,
        )
    print(f"{plain.tokens if plain else 0} tokens. s: processor seconds of rounding.", file=sys.stdout)


def _rounded(draft: Draft, bits: object, method: str, calibration: list) -> Draft:
    formats = unit_formats(draft.model, search_units(draft.model), bits, 32)
    if method == "nearest":
        return quantize(draft, formats, round_to_nearest)
    by_inputs = GptqRounder(draft.model, calibration)

    def round_head(name: str, weight: torch.Tensor, chosen: WeightFormat) -> Rounded:
        """Round the body, which loses next to nothing in 8 bits, to the nearest: its factors take most of the time."""
        return (by_inputs if chosen.bits == 4 else round_to_nearest)(name, weight, chosen)

    return quantize(draft, formats, by_inputs if method == "gptq" else round_head)


def _bytes(draft: Draft) -> tuple[float, float]:
    """Return bytes held and bytes read a step, with plain weights counted in bfloat16."""
    facts = pass_facts(draft.model, len(draft.head_token_ids))
    table = draft.model.get_input_embeddings().weight
    plain = [weight for weight in draft.model.parameters() if weight.dtype == torch.float32]
    spared = sum(weight.numel() for weight in plain) * 2
    tied = draft.model.get_output_embeddings().parameters().__next__() is table
    return facts.resident_bytes - spared, facts.weight_bytes - spared + (0 if tied else table.numel() * 2)


if __name__ == "__main__":
    main()
