"""From drafters and traces to the report: replay, costs, audits, each kept under a digest."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.acceptance.audit import Audit, audit
from foredraft.acceptance.batches import measure_batch
from foredraft.acceptance.cost import Costs, measure_costs
from foredraft.acceptance.criteria import measure_criteria, sampled_rows
from foredraft.acceptance.evaluate import score
from foredraft.acceptance.leaderboard import DrafterFacts, LawScores, build_report
from foredraft.acceptance.prediction import passes_json, with_hardware
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.digest import digest_of
from foredraft.core.errors import TraceError, UserError
from foredraft.core.files import write_json
from foredraft.core.own_law import bound_for
from foredraft.core.progress import Progress
from foredraft.core.protocols import Drafter, LawGiver, Speaker, validity_of
from foredraft.hardware.profile import load_profile
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.target import LocalTarget
from foredraft.settings import EvaluateSettings
from foredraft.trace.store import TEXT, Trace, require_same
from foredraft.workspace import Workspace

_TIMING_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter to score.

    Attributes:
        key: Digest of everything that its figures depend on.
        load: Makes it.
        twin, parent: See DrafterFacts.
    """

    key: str
    load: Callable[[], Drafter]
    twin: str = ""
    parent: str = ""


def evaluate(
    target: Speaker,
    contenders: Mapping[str, Contender],
    traces: Sequence[Trace],
    settings: EvaluateSettings,
    workspace: Workspace,
    progress: Progress,
) -> dict[str, Any]:
    """Score every contender on every trace, time them, decode a few prompts literally; return the report.

    A target that is not in this process is neither timed nor asked for text: costs and audits are left out.

    Raises:
        TraceError: there is no trace, or one was not written by this target.
        VocabMismatchError: a drafter does not speak the target's tokens.
    """
    if not traces:
        raise TraceError("There is no text to score on: ask for evaluation prompts (trace.prompts[].eval in a recipe).")
    for trace in traces:
        if trace.info.provenance == TEXT:
            raise TraceError(f"{trace.path} holds text that no target wrote: drafts learn from it, and are not scored.")
        require_same(
            trace,
            f"the target {target.name}",
            target_fingerprint=target.fingerprint,
            tokenizer_fingerprint=target.tokenizer_fingerprint,
        )
    for name in settings.hardware:
        load_profile(name)
    described = {name: [one.key, one.twin, one.parent] for name, one in contenders.items()}
    untimed = [] if isinstance(target, LocalTarget) else ["untimed"]
    shown = settings.model_dump(exclude={"hardware"})
    key = digest_of([described, [trace.digest for trace in traces], shown, "with counts", *untimed])
    path = workspace.root / "scores" / f"report-{key[:8]}.json"
    if not path.is_file():
        write_json(path, _Evaluation(target, contenders, settings, workspace, progress).report(traces))
    report = read_report(path)
    return predicted_elsewhere(report, settings.hardware, settings) if settings.hardware else report


def read_report(path: Path) -> dict[str, Any]:
    """Return report.json.

    Raises:
        UserError: it is missing or no report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no report: {error}.") from error
    if not isinstance(report, dict) or "laws" not in report:
        raise UserError(f"{path} is no report: it has no laws.")
    return report


def predicted_elsewhere(
    report: Mapping[str, Any], names: Sequence[str], settings: EvaluateSettings, rows: Sequence[int] = ()
) -> dict[str, Any]:
    """Return a report with what it predicts for other machines; no model is needed.

    Args:
        names: Of shipped profiles, or YAML files.
        rows: Batch sizes; those of the settings if none.

    Raises:
        UnknownNameError, RecipeError: a profile that cannot be read.
        UserError: the report does not hold what a prediction needs.
    """
    profiles = [load_profile(name) for name in names]
    labels = [Path(name).stem for name in names]
    return with_hardware(report, labels, profiles, list(rows or settings.batch_sizes), settings.batch_context)


class _Evaluation:
    """One evaluation in a workspace; drafters are loaded once."""

    def __init__(
        self,
        target: Speaker,
        contenders: Mapping[str, Contender],
        settings: EvaluateSettings,
        workspace: Workspace,
        progress: Progress,
    ) -> None:
        self._target = target
        self._contenders = contenders
        self._settings = settings
        self._workspace = workspace
        self._progress = progress
        self._drafters: dict[str, Drafter] = {}

    def report(self, traces: Sequence[Trace]) -> dict[str, Any]:
        self._drafters = {name: contender.load() for name, contender in self._contenders.items()}
        facts = {name: _facts(drafter, self._contenders[name]) for name, drafter in self._drafters.items()}
        reports = [self._reports(trace) for trace in traces]
        laws = [self._law(trace, scores) for trace, scores in zip(traces, reports, strict=True)]
        target: dict[str, Any] = {
            "name": self._target.name,
            "fingerprint": self._target.fingerprint,
            "dtype": self._target.dtype,
        }
        if isinstance(self._target, LocalTarget):
            target |= {
                "parameters": self._target.num_parameters,
                "bytes": self._target.num_bytes,
                "passes": passes_json(self._target.passes),
            }
        report = build_report(target, laws, facts)
        for law, trace in zip(report["laws"], traces, strict=True):
            self._point_to_counts(law, trace)
        return report

    def _point_to_counts(self, law: dict[str, Any], trace: Trace) -> None:
        """Say on which text a law was scored, and in which file each drafter's counts by prompt lie."""
        law["trace"] = trace.digest
        for entry in law["drafters"]:
            _, path = self._place("score", self._score_inputs(entry["name"], trace))
            entry["counts"] = str(path.relative_to(self._workspace.root))

    def _reports(self, trace: Trace) -> dict[str, AcceptanceReport]:
        reports = {}
        for name, drafter in self._drafters.items():
            data = self._kept(
                f"score {name} {trace.info.law}",
                self._score_inputs(name, trace),
                partial(self._scored, name, drafter, trace),
            )
            reports[name] = AcceptanceReport.from_json(data)
        return reports

    def _score_inputs(self, name: str, trace: Trace) -> list[Any]:
        return [self._contenders[name].key, trace.digest, self._settings.num_draft_tokens]

    def _scored(self, name: str, drafter: Drafter, trace: Trace) -> dict[str, Any]:
        return score(name, drafter, trace, self._settings.num_draft_tokens, self._progress).to_json()

    def _law(self, trace: Trace, reports: Mapping[str, AcceptanceReport]) -> LawScores:
        settings, law, target = self._settings, trace.info.law, self._target
        bound = {name: bound_for(drafter, law) for name, drafter in self._drafters.items()}
        laws = {name: drafter.law for name, drafter in bound.items()}
        if not isinstance(target, LocalTarget):
            return LawScores(law, reports, None, {}, criteria=self._criteria(trace), draft_laws=laws)
        inputs = [{name: one.key for name, one in self._contenders.items()}, trace.digest, _of_batch_one(settings)]
        costs = Costs.from_json(
            self._kept(
                f"time {law}",
                inputs,
                lambda: measure_costs(
                    target, bound, timing_text(trace), law, settings.num_draft_tokens, settings.cost_repeats,
                    self._progress,
                ).to_json(),
            )
        )  # fmt: skip
        lengths = {name: _best_k(costs, name, report) for name, report in reports.items()}
        audits = self._kept(
            f"audit {law}",
            [*inputs, lengths],
            lambda: {
                name: found.to_json()
                for name, found in audit(
                    target,
                    {name: (drafter, lengths[name]) for name, drafter in bound.items()},
                    _audit_prompts(trace, settings, target.max_context),
                    law,
                    settings.audit_tokens,
                    trace.info.seed,
                    self._progress,
                ).items()
            },
        )
        batches = {rows: self._batch(target, trace, bound, costs, rows) for rows in settings.batch_sizes if rows > 1}
        audited = {name: Audit(**found) for name, found in audits.items()}
        return LawScores(law, reports, costs, audited, batches, self._criteria(trace), laws)

    def _criteria(self, trace: Trace) -> dict[str, dict[str, Any]]:
        """Return the criteria of the drafters that have laws, under the law that the trace stores."""
        count, info, found = self._settings.criteria_answers, trace.info, {}
        for name, drafter in self._drafters.items():
            if count and isinstance(drafter, LawGiver):
                found[name] = self._kept(
                    f"criteria {name} {info.law}",
                    [self._contenders[name].key, trace.digest, count],
                    partial(_compared, drafter, trace, count),
                )
        return {name: figures for name, figures in found.items() if figures}

    def _batch(
        self, target: LocalTarget, trace: Trace, bound: Mapping[str, Drafter], single: Costs, rows: int
    ) -> Costs:
        settings, law = self._settings, trace.info.law
        lengths = [settings.num_draft_tokens, settings.cost_repeats, settings.batch_context]
        return Costs.from_json(
            self._kept(
                f"batch {law} {rows}",
                [{name: one.key for name, one in self._contenders.items()}, trace.digest, rows, lengths],
                lambda: measure_batch(
                    target, bound, timing_text(trace)[-settings.batch_context :], law,
                    settings.num_draft_tokens, rows, single, settings.cost_repeats, self._progress,
                ).to_json(),
            )
        )  # fmt: skip

    def _kept(self, name: str, inputs: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        key, path = self._place(name.split()[0], inputs)
        self._workspace.stage(name, key, path, lambda out: write_json(out, make()))
        return json.loads(path.read_text(encoding="utf-8"))

    def _place(self, what: str, inputs: Any) -> tuple[str, Path]:
        key = digest_of([what, inputs])
        return key, self._workspace.root / "scores" / f"{what}-{key}.json"


def _facts(drafter: Drafter, contender: Contender) -> DrafterFacts:
    head_rows, has_int8_body, passes = 0, False, None
    if isinstance(drafter, CausalLMDrafter):
        passes = drafter.passes
        head_rows = len(drafter.draft.head_token_ids)
        has_int8_body = drafter.draft.is_quantized
    return DrafterFacts(
        drafter.kind,
        drafter.num_parameters,
        drafter.num_bytes,
        head_rows,
        has_int8_body,
        contender.twin,
        contender.parent,
        passes,
        validity_of(drafter),
    )


def _of_batch_one(settings: EvaluateSettings) -> dict[str, Any]:
    """Return the settings that timings at batch size 1 and audits depend on."""
    return settings.model_dump(exclude={"hardware", "batch_sizes", "batch_context", "criteria_answers"})


def _compared(drafter: Drafter, trace: Trace, count: int) -> dict[str, Any]:
    rows, info = sampled_rows(trace, count), trace.info
    bound = bound_for(drafter, info.stored_law)
    if not rows or not isinstance(bound, LawGiver):
        return {}
    figures = measure_criteria(bound, rows).to_json(info.stored_law == info.law)
    return {"target_law": str(info.stored_law), "draft_law": str(bound.law), **figures}


def _best_k(costs: Costs, name: str, report: AcceptanceReport) -> int:
    return max(
        report.ks, key=lambda k: costs.predicted_speedup(name, k, report.mean_tokens_per_call(k), report.guess_share(k))
    )


def timing_text(trace: Trace) -> Int[Tensor, " tokens"]:
    """Return the end of the longest prompt with its answer, which steps are timed on."""
    texts = [row.answer().token_ids for row in trace.rows(tops=False)]
    return max(texts, key=len)[-_TIMING_TOKENS:]


def _audit_prompts(trace: Trace, settings: EvaluateSettings, max_context: int) -> list[Int[Tensor, " _"]]:
    """Return prompts spread over the trace that leave room for the audit's tokens."""
    prompts = [row.prompt_ids for row in trace.rows(tops=False)]
    fitting = [prompt for prompt in prompts if len(prompt) + settings.audit_tokens <= max_context]
    chosen = torch.linspace(0, len(fitting) - 1, min(settings.audit_prompts, len(fitting))).round().int().tolist()
    return [fitting[index] for index in chosen]
