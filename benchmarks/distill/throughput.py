"""A training step of foredraft beside one of trl's GKD trainer: the same models, answers, loss and batch, on the CPU.

    python benchmarks/distill/throughput.py --target MODEL --trace TRACE --trl-python VENV/bin/python --out table.md

Both teach the first layers of the target, with its full head, KL(target || draft) on the same answers at temperature
1, AdamW, float32. trl runs the target in every step (lmbda 0: the answers as they are). foredraft does so with
`laws: live`; with `laws: cached`, its default, the step reads what the trace holds of the laws. Each run is a process
of its own, engines in turn; seconds are those between the ends of the first and the last step, memory is the largest
resident set above what the process held with both models loaded, before the first step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foredraft.distill.init import init_from_target
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import open_trace

SIDES = ("foredraft cached", "foredraft live", "trl")


def main() -> None:
    options = _arguments()
    if options.side:
        print(json.dumps(_measure(options)), flush=True)
        return
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(options.repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            runs[side].append(_child(options, side))
            print(side, runs[side][-1], file=sys.stderr, flush=True)
    table = _table(options, runs)
    print(table)
    if options.out:
        Path(options.out).write_text(table, encoding="utf-8")


def _measure(options: argparse.Namespace) -> dict[str, float]:
    measure = _train_with_trl if options.side == "trl" else _train_here
    positions, seconds, loaded = measure(options)
    return {"positions_per_second": positions / seconds, "step_bytes": _peak() - loaded, "loaded_bytes": loaded}


def _train_here(options: argparse.Namespace) -> tuple[int, float, int]:
    from foredraft.distill.train import distill
    from foredraft.models.target import load_target
    from foredraft.steps import DistillStep

    target = load_target(options.target, "float32")
    trace = open_trace(options.trace)
    draft = init_from_target(target.model, range(options.layers))
    answers = sum(len(row.answer_ids) for row in _rows(options)) / options.answers
    batch = round(answers * options.batch)
    settings = DistillStep.model_validate(
        {
            "loss": {"forward_kl": 1.0},
            "laws": options.side.split()[1],
            "tokens": batch * options.steps,
            "batch_tokens": batch,
            "checkpoint_every": 1e9,
            "validation": {"prompts": 0},
        }
    )
    loaded = _reset_peak()
    with TemporaryDirectory() as work:
        curve = distill(draft, [trace], settings, target, Path(work)).curve
    return curve[-1].positions - curve[0].positions, curve[-1].seconds - curve[0].seconds, loaded


def _train_with_trl(options: argparse.Namespace) -> tuple[int, float, int]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    draft = init_from_target(target, range(options.layers)).model.requires_grad_(True)
    for frozen in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        frozen.weight.requires_grad_(False)
    rows = _rows(options)
    counts: list[int] = []
    ends: list[float] = []

    def collate(batch: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        some = [rows[entry["row"]] for entry in batch]
        counts.append(sum(len(row.answer_ids) for row in some))
        return _padded(some)

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    with TemporaryDirectory() as work:
        trainer = GKDTrainer(
            model=draft,
            teacher_model=target,
            args=GKDConfig(
                output_dir=work,
                per_device_train_batch_size=options.batch,
                max_steps=options.steps,
                lmbda=0.0,
                beta=0.0,
                temperature=1.0,
                learning_rate=6e-4,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                optim="adamw_torch_fused",
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            data_collator=collate,
            train_dataset=Dataset.from_dict({"row": list(range(len(rows)))}),
            processing_class=AutoTokenizer.from_pretrained(options.target),
            callbacks=[Clock()],
        )
        loaded = _reset_peak()
        trainer.train()
    return sum(counts[1 : options.steps]), ends[options.steps - 1] - ends[0], loaded


def _padded(rows: list[TraceRow]) -> dict[str, torch.Tensor]:
    """Return a batch as trl's collator makes it: ids, mask, and -100 where a label is no answer token."""
    width = max(len(row.prompt_ids) + len(row.answer_ids) for row in rows)
    batch = {name: torch.zeros(len(rows), width, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(rows), width), -100)
    for index, row in enumerate(rows):
        start, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.answer_ids)
        batch["input_ids"][index, :end] = torch.cat([row.prompt_ids, row.answer_ids])
        batch["attention_mask"][index, :end] = 1
        batch["labels"][index, start:end] = row.answer_ids
    width = max(len(row.prompt_ids) for row in rows)
    return batch | {
        "prompts": batch["input_ids"][:, :width],
        "prompt_attention_mask": batch["attention_mask"][:, :width],
    }


def _rows(options: argparse.Namespace) -> list[TraceRow]:
    rows = [row for row in open_trace(options.trace).rows(tops=False) if len(row.answer_ids)]
    options.answers = len(rows)
    return rows


def _reset_peak() -> int:
    """Forget the largest resident set so far; return the present one, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _child(options: argparse.Namespace, side: str) -> dict[str, float]:
    python = options.trl_python if side == "trl" else sys.executable
    names = ("target", "trace", "layers", "batch", "steps")
    command = [python, __file__, "--side", side]
    command += [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} if side != "trl" else os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _table(options: argparse.Namespace, runs: dict[str, list[dict[str, float]]]) -> str:
    base = runs["trl"]
    lines = [
        f"{options.layers} layers of {Path(options.target).name}, full head; batches of {options.batch} answers of "
        f"{Path(options.trace).name}; {options.steps} steps, {options.repeats} rounds in turn; "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}",
        "",
        "| engine | answer positions/s, median (range) | of trl's, median (range) | memory of a step, MB | of trl's |",
        "|---|---|---|---|---|",
    ]
    for side in SIDES:
        rates = [run["positions_per_second"] for run in runs[side]]
        ratios = [
            run["positions_per_second"] / other["positions_per_second"]
            for run, other in zip(runs[side], base, strict=True)
        ]
        memory, other = (statistics.median(run["step_bytes"] for run in some) for some in (runs[side], base))
        figures = (side, _spread(rates, ".0f"), _spread(ratios, ".2f"), f"{memory / 1e6:.0f}", f"{memory / other:.2f}")
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--trace", required=True, help="answers of the target at temperature 1")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with trl")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="answers in a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="")
    parser.add_argument("--side", default="", choices=("", *SIDES), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
