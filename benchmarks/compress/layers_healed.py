"""Layers cut and healed: by least squares, then by a short distillation; paired by prompt on held-out answers.

python benchmarks/compress/layers_healed.py DRAFT TARGET TRAIN_TRACE EVAL_TRACE --gone 13 17 --tokens 6000 > healed.md
"""

import time
from pathlib import Path

import torch
from paired import change, parser_for_target

from foredraft.compress.probe import Bench, measure
from foredraft.compress.quantize import round_to_nearest
from foredraft.distill.init.heal import heal_linear
from foredraft.healing import Finish, healed, measure_stored
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft, load_draft
from foredraft.models.layers import keep_layers, layer_stack
from foredraft.models.target import load_target
from foredraft.shrink_steps import HealSettings
from foredraft.trace.store import open_trace


def main() -> None:
    parser = parser_for_target(__doc__)
    parser.add_argument("--gone", type=int, nargs="+", required=True, help="Layers that are cut.")
    parser.add_argument("--calibration", type=int, default=24, help="Training answers for least squares; 0 leaves it.")
    parser.add_argument("--tokens", type=int, default=6000, help="Positions distilled on; 0 distils nothing.")
    parser.add_argument("--rate", type=float, default=4e-5)
    parser.add_argument("--loss", default="tvd_plus_plus")
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("healing-points"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft = load_draft(asked.draft, "float32")
    train, trace = open_trace(asked.train), open_trace(asked.evaluation)
    bench = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    kept = [layer for layer in range(len(layer_stack(draft.model))) if layer not in asked.gone]
    print(f"{asked.draft.name} for {trace.info.target}, {trace.info.law}, {len(bench.rows)} answers")
    print(f"| draft | expected_acceptance | paired change, 95 % | tokens per call, k={asked.k} | s |")
    print("|---|---|---|---|---|")
    whole = measure(draft, bench)

    def show(name: str, made: Draft, since: float) -> None:
        seconds, report = time.process_time() - since, measure_stored(made, bench)
        print(
            f"| {name} | {report.expected_acceptance:.4f} | {change(report, whole)} | "
            f"{report.mean_tokens_per_call(asked.k):.3f} | {seconds:.0f} |",
            flush=True,
        )

    print(f"| whole | {whole.expected_acceptance:.4f} | | {whole.mean_tokens_per_call(asked.k):.3f} | |", flush=True)
    cut = Draft(keep_layers(draft.model, kept), draft.head_token_ids)
    show(f"without {asked.gone}", cut, time.process_time())
    if asked.calibration:
        since = time.process_time()
        answers = [row.answer() for row in train.sample(asked.calibration)]
        heal_linear(cut.model, draft.model, kept, calibration_batches(answers), every_layer=False, channels=None)
        show(f"refitted by least squares on {len(answers)} answers", cut, since)
    if asked.tokens:
        since = time.process_time()
        heal = HealSettings(tokens=asked.tokens, learning_rate=asked.rate, loss={asked.loss: 1.0})
        job = Finish(asked.draft, load_target(asked.target, "float32"), [train], bench, asked.k, asked.work)
        better = healed(cut, {}, round_to_nearest, heal, job)
        show(f"distilled on {asked.tokens} positions, {asked.loss}", better, since)
    print(f"{whole.tokens} tokens held out. s: processor seconds.")


if __name__ == "__main__":
    main()
