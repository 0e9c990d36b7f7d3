"""What becomes of a draft once it is chosen what to cut: rounding, a short training with the rounding in place, and
what was measured at each stage."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.acceptance.intervals import expected_acceptance, paired_difference, tokens_per_call
from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.choice import step_facts
from foredraft.compress.gptq import GptqRounder
from foredraft.compress.in_training import with_rounding, without_rounding
from foredraft.compress.probe import Bench, measure
from foredraft.compress.quantize import Rounder, quantize, round_to_nearest
from foredraft.compressing import stored_as
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Answer
from foredraft.distill.train import distill
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.target import LocalTarget
from foredraft.models.widened import widened
from foredraft.shrink_steps import CompressStep, HealSettings
from foredraft.steps import DistillStep
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace


@dataclass(frozen=True, slots=True)
class Finish:
    """What a chosen draft is finished with.

    Attributes:
        source: Folder of the draft before the cut.
        bench: What every stage is measured on.
        k: Draft length at which tokens per call count.
        work: Folder for points that the training resumes from.
    """

    source: Path
    target: LocalTarget
    traces: Sequence[Trace]
    bench: Bench
    k: int
    work: Path
    held_out: Sequence[Prompt] = ()


def finish(
    before: Draft,
    plain: Draft,
    formats: Mapping[str, WeightFormat],
    answers: Sequence[Answer],
    step: CompressStep,
    job: Finish,
    progress: Progress = SILENT,
) -> tuple[Draft, list[dict[str, Any]]]:
    """Return the draft as it is written, rounded and healed, and its stages: before the cut, after it, after healing.

    Where healing does not raise tokens per call on the training's own held-out prompts, the weights stay.

    Args:
        before: The draft that was cut.
        plain: What is left of it, before rounding.
        formats: By unit of `plain`; none where nothing is rounded.
        answers: What gptq takes inputs from.
    """
    seen = [("before the cut", measure(before, job.bench), step_facts(before, {}).weight_bytes)]
    size = step_facts(plain, formats).weight_bytes

    def rounder() -> Rounder:
        return GptqRounder(plain.model, answers) if formats and step.method == "gptq" else round_to_nearest

    cut = _rounded(plain, formats, rounder(), job.source, progress)
    seen.append(("after it", measure_stored(cut, job.bench), size))
    if step.heal.tokens:
        cut = healed(plain, formats, rounder(), step.heal, job, progress)
        seen.append(("healed", measure_stored(cut, job.bench), size))
    return cut, [_stage(name, report, seen[0][1], size, job.k) for name, report, size in seen]


def healed(
    plain: Draft,
    formats: Mapping[str, WeightFormat],
    rounder: Rounder,
    heal: HealSettings,
    job: Finish,
    progress: Progress = SILENT,
) -> Draft:
    """Return a draft after a short distillation with its rounding in place."""
    student, scales = with_rounding(plain, formats, rounder)
    settings = DistillStep(
        loss=heal.loss,
        tokens=heal.tokens,
        learning_rate=heal.learning_rate,
        batch_tokens=heal.batch_tokens,
        seed=heal.seed,
    )
    trained = distill(student, job.traces, settings, job.target, job.work, progress, held_out=job.held_out)
    learnt, as_trained = without_rounding(trained.draft, scales)
    return _rounded(learnt, formats, as_trained, job.source, progress)


def measure_stored(draft: Draft, bench: Bench) -> AcceptanceReport:
    """Return the report of a stored draft, computed in float32 as everything here is."""
    with widened(draft.model):
        return measure(draft, bench)


def _rounded(
    plain: Draft, formats: Mapping[str, WeightFormat], rounder: Rounder, source: Path, progress: Progress
) -> Draft:
    """Return a draft as it is stored: rounded if any unit is; the rest in bfloat16, as it counts."""
    rounded = quantize(plain, formats, rounder, progress) if formats else plain
    return stored_as(Draft(copy.deepcopy(rounded.model), plain.head_token_ids), source, "bfloat16")


def _stage(name: str, report: AcceptanceReport, before: AcceptanceReport, size: float, k: int) -> dict[str, Any]:
    def change(metric: Any) -> list[float]:
        found = paired_difference(report, before, metric, np.random.default_rng(0)).difference
        return [found.value, found.low, found.high]

    return {
        "stage": name,
        "bytes": size,
        "expected_acceptance": report.expected_acceptance,
        "acceptance_change": change(expected_acceptance),
        "mean_tokens_per_call": report.mean_tokens_per_call(k),
        "tokens_per_call_change": change(tokens_per_call(k)),
        "tokens": report.tokens,
    }
