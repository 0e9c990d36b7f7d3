"""A rounded draft healed with its rounding in place, paired by prompt on held-out answers with what it was.

python benchmarks/compress/healed.py DRAFT TARGET TRAIN_TRACE EVAL_TRACE --method gptq --eight "layers.0.*" > healed.md
"""

import time
from pathlib import Path

import torch
from paired import change, parser_for_target

from foredraft.compress.choice import step_facts
from foredraft.compress.gptq import GptqRounder
from foredraft.compress.plan import unit_formats
from foredraft.compress.probe import Bench, measure
from foredraft.compress.quantize import quantize, round_to_nearest
from foredraft.healing import Finish, healed, measure_stored
from foredraft.models.draft import load_draft
from foredraft.models.target import load_target
from foredraft.models.units import search_units
from foredraft.shrink_steps import HealSettings
from foredraft.trace.store import open_trace


def main() -> None:
    parser = parser_for_target(__doc__)
    parser.add_argument("--tokens", type=int, default=8000, help="Positions to heal on; 0 rounds only.")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--head", type=int, default=4)
    parser.add_argument("--eight", nargs="*", default=[], help="Patterns of units that get 8 bits all the same.")
    parser.add_argument("--loss", default="tvd_plus_plus")
    parser.add_argument("--method", choices=("nearest", "gptq"), default="nearest")
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--only-healed", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("healing-points"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft = load_draft(asked.draft, "float32")
    train, trace = open_trace(asked.train), open_trace(asked.evaluation)
    bench = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    bits = {**dict.fromkeys(asked.eight, 8), "layers.*": asked.bits, "head": asked.head}
    formats = unit_formats(draft.model, search_units(draft.model), bits, 32)
    answers = [row.answer() for row in train.sample(asked.calibration)]
    plain = measure(draft, bench)
    size = step_facts(draft, formats).weight_bytes / step_facts(draft, {}).weight_bytes
    print(f"{asked.draft.name} for {trace.info.target}, {trace.info.law}; {size:.3f} of the bytes of a bfloat16 step")
    print(f"| draft | expected_acceptance | paired change, 95 % | tokens per call, k={asked.k} | s |")
    print("|---|---|---|---|---|")
    print(f"| bf16 | {plain.expected_acceptance:.4f} | | {plain.mean_tokens_per_call(asked.k):.3f} | |", flush=True)

    def rounder() -> object:
        return GptqRounder(draft.model, answers) if asked.method == "gptq" else round_to_nearest

    def show(name: str, made: object, seconds: float) -> None:
        report = measure_stored(made, bench)
        print(
            f"| {name} | {report.expected_acceptance:.4f} | {change(report, plain)} | "
            f"{report.mean_tokens_per_call(asked.k):.3f} | {seconds:.0f} |",
            flush=True,
        )

    if not asked.only_healed:
        started = time.process_time()
        rounded = quantize(draft, formats, rounder())
        show(f"rounded, {asked.method}", rounded, time.process_time() - started)
    if asked.tokens:
        started = time.process_time()
        heal = HealSettings(tokens=asked.tokens, learning_rate=asked.rate, loss={asked.loss: 1.0})
        job = Finish(asked.draft, load_target(asked.target, "float32"), [train], bench, asked.k, asked.work)
        better = healed(draft, formats, rounder(), heal, job)
        show(f"healed on {asked.tokens} positions, {asked.loss}", better, time.process_time() - started)
    print(f"{plain.tokens} tokens held out. s: processor seconds.")


if __name__ == "__main__":
    main()
