"""Matrices of a draft as products of two thin ones, judged by replayed acceptance and by the time of a draft step.

    python benchmarks/compress/low_rank.py DRAFT TARGET TRAIN_TRACE EVAL_TRACE --answers 20 --tokens 2000 > low_rank.md

Changes are paired by prompt. MB count plain weights in bfloat16: what a step reads, and what the draft needs beside its
target where it reads the target's embeddings and head. Steps of the factored draft and of the dense one are timed in
turns, in processor time of one thread. One row takes the target's own singular vectors as one of the factors; --layers
says which of the target's layers those of the draft were.
"""

import copy
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
from paired import change, parser_for_target

from foredraft.compress.low_rank import cut_ranks
from foredraft.compress.probe import Bench, measure
from foredraft.core.law import SamplingLaw
from foredraft.distill.train import distill
from foredraft.factoring import rank_within
from foredraft.models.calibration import Batch, calibration_batches
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft, load_draft
from foredraft.models.factored import FactoredLinear, multiply_out
from foredraft.models.layers import layer_stack
from foredraft.models.linear import linear_of
from foredraft.models.passes import pass_facts
from foredraft.models.target import LocalTarget, load_target
from foredraft.models.units import search_units
from foredraft.steps import DistillStep, ValidationSettings
from foredraft.trace.store import open_trace

VARIANTS = {
    "layers.*, .50, by inputs": ("layers.*", 0.5, "inputs"),
    "layers.*, .75, by inputs": ("layers.*", 0.75, "inputs"),
    "layers.*, .50, plain SVD": ("layers.*", 0.5, "weights"),
    "layers.*, .50, one factor the target's": ("layers.*", 0.5, "target"),
    "layers.*, .25, by inputs": ("layers.*", 0.25, "inputs"),
    "gate_up and down, .50, by inputs": ("layers.*.[gd]*", 0.5, "inputs"),
    "layers.*, .75, plain SVD": ("layers.*", 0.75, "weights"),
    "layers.*, .25, plain SVD": ("layers.*", 0.25, "weights"),
}
HEALED = "layers.*, .50, by inputs"
CONTEXT, STEPS = 128, 40


def main() -> None:
    parser = parser_for_target(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 2, 3, 28, 29], help="Of the target.")
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=0, help="Positions to heal on; 0: none.")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="Rows to make.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draft, target = load_draft(asked.draft, "float32"), cache(partial(load_target, asked.target, "float32"))
    train, trace = open_trace(asked.train), open_trace(asked.evaluation)
    bench = Bench.of(trace.sample(asked.answers), trace.info.law, trace.info.vocab_size)
    batches = calibration_batches([row.answer() for row in train.sample(asked.calibration)])
    whole = measure(draft, bench)
    print(
        f"{asked.draft.name} for {trace.info.target}, {trace.info.law}, {asked.answers} answers, {whole.tokens} tokens"
    )
    print(
        f"| draft | expected_acceptance | paired change, 95 % | tokens per call, k={asked.k} | MB a step | MB beside "
        "the target | ms a step | the dense draft's, in turns |"
    )
    print("|---|---|---|---|---|---|---|---|")

    def show(name: str, made: Draft, timed: bool = True) -> None:
        report, (read, beside) = whole if made is draft else measure(made, bench), _megabytes(made)
        milliseconds = "{:.1f} | {:.1f}".format(*_step_ms(made, draft)) if timed else " | "
        print(
            f"| {name} | {report.expected_acceptance:.4f} | {change(report, whole)} | "
            f"{report.mean_tokens_per_call(asked.k):.3f} | {read:.1f} | {beside:.1f} | {milliseconds} |",
            flush=True,
        )

    show("dense", draft, timed=False)
    for name in asked.only:
        pattern, share, by = VARIANTS[name]
        cut = _cut(draft, target, asked.layers, pattern, share, by, batches)
        show(name, cut)
        if name == HEALED and asked.tokens:
            settings = DistillStep(
                loss={"tvd_plus_plus": 1.0},
                tokens=asked.tokens,
                learning_rate=asked.rate,
                validation=ValidationSettings(prompts=0),
            )
            for form, start in (("factors", cut), ("the same, dense", _dense(cut))):
                with tempfile.TemporaryDirectory() as work:
                    healed = distill(start, [train], settings, target(), Path(work) / "points").draft
                show(f"{form}, healed on {asked.tokens} positions", healed, timed=False)


def _cut(
    draft: Draft,
    target: Callable[[], LocalTarget],
    layers: list[int],
    pattern: str,
    share: float,
    by: str,
    batches: list[Batch],
) -> Draft:
    units = [unit for unit in search_units(draft.model) if unit.layer >= 0 and fnmatchcase(unit.name, pattern)]
    ranks = {unit.name: rank_within(draft, unit, share) for unit in units}
    if by != "target":
        return cut_ranks(draft, ranks, batches if by == "inputs" else [])[0]
    model = copy.deepcopy(draft.model)
    for unit in units:
        for module in unit.modules:
            part = module.partition(f"layers.{unit.layer}.")[2]
            theirs = layer_stack(target().model)[layers[unit.layer]].get_submodule(part).weight.detach()
            basis = torch.linalg.svd(theirs, full_matrices=False).U[:, : ranks[unit.name]].contiguous()
            own = model.get_submodule(module)
            model.set_submodule(
                module, FactoredLinear(linear_of(basis.T @ own.weight.detach()), linear_of(basis, own.bias))
            )
    return Draft(model, draft.head_token_ids)


def _dense(cut: Draft) -> Draft:
    model = copy.deepcopy(cut.model)
    multiply_out(model)
    return Draft(model, cut.head_token_ids)


def _megabytes(draft: Draft) -> tuple[float, float]:
    """Return what a step reads and what is not the target's own table and head, in bfloat16."""
    ends = {id(module.weight) for module in (draft.model.get_input_embeddings(), draft.model.get_output_embeddings())}
    beside = sum(weight.numel() for weight in draft.model.parameters() if id(weight) not in ends)
    return pass_facts(draft.model, len(draft.head_token_ids)).weight_bytes / 2e6, beside * 2 / 1e6


def _step_ms(*drafts: Draft) -> list[float]:
    """Return the median processor time of a step of one token behind CONTEXT others, the drafts in turns."""
    token_ids = torch.arange(CONTEXT)[None] + 100
    texts = [CausalLMDrafter(draft, SamplingLaw(), 49152).texts(token_ids) for draft in drafts]
    times: list[list[float]] = [[] for _ in texts]
    for _ in range(STEPS):
        for text, taken in zip(texts, times, strict=True):
            text.again()
            started = time.process_time()
            text.logits(token_ids[:, :1])
            taken.append(time.process_time() - started)
    return [1000 * median(taken) for taken in times]


if __name__ == "__main__":
    main()
