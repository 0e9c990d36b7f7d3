"""Layers cut by measured acceptance, by block influence and from the end, paired by prompt on held-out answers.

    python benchmarks/compress/layers.py DRAFT TRAIN_TRACE EVAL_TRACE --count 2 --train 16 --answers 24 > layers.md

Greedy answers count, while layers are chosen, by the probability that the draft gives to their tokens: whether a token
is its first guess says too little where answers are few.
"""

import argparse
import time
from pathlib import Path

import torch
from paired import change

from foredraft.compress.probe import Bench, measure
from foredraft.compress.prune import layers_to_keep
from foredraft.core.law import SamplingLaw
from foredraft.models.draft import Draft, load_draft
from foredraft.models.layers import keep_layers, layer_stack
from foredraft.trace.store import open_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("train")
    parser.add_argument("evaluation")
    parser.add_argument("--count", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--train", dest="train_answers", type=int, default=16)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--k", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft = load_draft(asked.draft, "float32")
    train, trace = open_trace(asked.train), open_trace(asked.evaluation)
    rows = train.sample(asked.train_answers)
    law = SamplingLaw() if train.info.law.is_greedy else train.info.law
    bench = Bench.of(rows, law, train.info.vocab_size)
    held_out = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    whole = measure(draft, held_out)
    layers = len(layer_stack(draft.model))
    print(
        f"{asked.draft.name}, {layers} layers, for {trace.info.target}, {trace.info.law}, {len(held_out.rows)} answers"
    )
    print(
        f"| cut | by | layers gone | expected_acceptance | paired change, 95 % | tokens per call, k={asked.k} "
        "| by acceptance gains | s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print(f"| 0 | | | {whole.expected_acceptance:.4f} | | {whole.mean_tokens_per_call(asked.k):.3f} | | |", flush=True)
    for count in asked.count:
        reports = {}
        for by in ("acceptance", "block-influence", "last"):
            started = time.process_time()
            kept = layers_to_keep(draft, count, by, [row.answer() for row in rows], bench, asked.k)
            seconds = time.process_time() - started
            cut = Draft(keep_layers(draft.model, kept, shared=list(draft.model.parameters())), draft.head_token_ids)
            report = reports[by] = measure(cut, held_out)
            gain = "" if by == "acceptance" else change(reports["acceptance"], report)
            gone = [layer for layer in range(layers) if layer not in kept]
            print(
                f"| {count} | {by} | {gone} | {report.expected_acceptance:.4f} | {change(report, whole)} | "
                f"{report.mean_tokens_per_call(asked.k):.3f} | {gain} | {seconds:.0f} |",
                flush=True,
            )
    print(f"{whole.tokens} tokens held out. s: processor seconds of choosing.")


if __name__ == "__main__":
    main()
