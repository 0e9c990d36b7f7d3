"""Runs a recipe: whatever is not there yet is made, each stage under a digest of its inputs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import yaml

from foredraft import compressing, drafters, factoring, searching, trainings, verbs
from foredraft.acceptance.counters import ServerCounters, beside, comparison
from foredraft.acceptance.html import render
from foredraft.checkpoint import MANIFEST, read_manifest, record_measurement
from foredraft.choosing import choose_among, choose_from
from foredraft.collecting import collected, prompts_to_score, writer_of
from foredraft.core.digest import digest_of
from foredraft.core.errors import UserError
from foredraft.core.files import whole_file, write_json
from foredraft.core.processes import processes
from foredraft.core.progress import SILENT, Prefixed, Progress
from foredraft.core.protocols import Drafter
from foredraft.corpora import build_drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.portfolios import make_portfolio
from foredraft.recipe import Recipe, parse_recipe
from foredraft.scoring import Contender, evaluate
from foredraft.select.portfolio import checked_mix
from foredraft.settings import EvaluateSettings, TraceSettings
from foredraft.steps import Step
from foredraft.trace.prompts import Prompt
from foredraft.trace.split import Split, split_sources
from foredraft.trace.store import Absent, Trace, open_trace
from foredraft.workspace import Workspace

DEFAULT_EVALUATION = EvaluateSettings()
_DEFAULT_POOL = "recipes/default.yaml"


@dataclass(frozen=True, slots=True)
class Made:
    """A candidate after some of its steps.

    Attributes:
        spec: What drafters.load_drafter takes.
        key: Digest of everything that went into it.
    """

    spec: str
    key: str

    @property
    def folder(self) -> Path:
        return Path(self.spec)


def run_recipe(
    recipe: Recipe, out: Path, progress: Progress = SILENT, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Make everything that `recipe` describes and is not in `out` yet; return the report.

    Leaves traces/, drafts/, scores/, exports/, report.json and report.html in `out`. Called again it makes
    nothing; after a kill it goes on where it was.

    Where several processes have met, all of them call it: the main one makes everything, the others help it train
    and return an empty report.

    Raises:
        UserError: the recipe asks for something that cannot be done, or `out` holds something else.
    """
    if not processes().is_main:
        target = load_target(recipe.target.model, recipe.target.dtype, trust_remote_code, recipe.target.adapter)
        trainings.help_training(target)
        return {}
    workspace = Workspace.open(out)
    prompts = split_sources(recipe.trace.prompts, recipe.trace.seed)
    target = load_target(recipe.target.model, recipe.target.dtype, trust_remote_code, recipe.target.adapter)
    for steps in recipe.candidates.values():
        for step in steps:
            verbs.refuse_impossible(step, target)
            verbs.text_keys(step, prompts.eval)
    for runtime in recipe.export:
        verbs.refuse_unknown_runtime(runtime)
    report = _Run(recipe, workspace, target, progress, trust_remote_code).finish(prompts)
    trainings.dismiss_helpers()
    return report


def default_recipe(target: str, prompts: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the shipped pool for a target and a file of prompts."""
    data = yaml.safe_load(files("foredraft").joinpath(_DEFAULT_POOL).read_text(encoding="utf-8"))
    data["target"]["model"] = target
    for source in data["trace"]["prompts"]:
        source["file"] = str(prompts)
    return parse_recipe(yaml.safe_dump(data), "the default pool", overrides)


def evaluate_drafters(
    target: LocalTarget | Absent,
    specs: Sequence[str],
    text: Sequence[Trace] | TraceSettings,
    out: Path | str,
    settings: EvaluateSettings = DEFAULT_EVALUATION,
    progress: Progress = SILENT,
    trust_remote_code: bool = False,
    server: ServerCounters | None = None,
) -> dict[str, Any]:
    """Score drafters on traces, or on answers to the evaluation prompts of `text`; return the report.

    A target that is absent leaves out the costs and the audit, and needs traces.

    Leaves report.json and report.html in `out`, and the traces if it collected them.

    Args:
        server: What a server that speculates counted, to be shown beside the scores.
    """
    workspace = Workspace.open(Path(out))
    contenders = {}
    for name, spec in _named(specs).items():
        drafter = drafters.load_drafter(spec, target, trust_remote_code)
        contenders[name] = Contender(_spec_key(spec), partial(_itself, drafter))
    if isinstance(text, TraceSettings):
        if isinstance(target, Absent):
            raise UserError("Prompts need a target that answers them: name it (--target), or give traces (--trace).")
        prompts = prompts_to_score(text)
        writer = writer_of(target, text)
        text = [collected(workspace, target, writer, text, "eval", prompts, law.law(), progress) for law in text.laws]
    report = evaluate(target, contenders, text, settings, workspace, progress)
    if server is not None:
        report["server"] = beside(server, report)
        report["notes"].append(comparison(server, report["server"]["replayed"]))
    _publish(workspace, report)
    return report


@final
class _Run:
    """One recipe in its workspace."""

    def __init__(
        self, recipe: Recipe, workspace: Workspace, target: LocalTarget, progress: Progress, trust_remote_code: bool
    ) -> None:
        self.recipe = recipe
        self.workspace = workspace
        self.target = target
        self.progress = progress
        self.trust_remote_code = trust_remote_code
        self._writer = writer_of(target, recipe.trace)
        self._made: dict[str, Made] = {}
        self._held_out: Sequence[Prompt] = ()
        self._stage_number = 0

    def finish(self, prompts: Split) -> dict[str, Any]:
        if not prompts.train and (learner := self._first_learner()):
            raise UserError(f"Candidate {learner} learns from answers: ask for prompts to train on (train: 100, say).")
        select = self.recipe.select
        if select.mix:
            checked_mix(select.mix, sorted({prompt.domain for prompt in prompts.eval}))
        self._held_out = prompts.eval
        train, held_out = self._traces("train", prompts.train), self._traces("eval", prompts.eval)
        for name in self.recipe.candidates:
            self._make(name, train)
        report = evaluate(
            self.target,
            self._contenders(),
            held_out,
            self.recipe.evaluate,
            self.workspace,
            self._numbered(""),
        )
        whole = bool(select.mix) or select.portfolio > 1
        report["selection"] = choose_among([report], select) if whole else choose_from(report, select)
        self._record(report)
        report["exports"] = self._export(report["selection"]["exported"])
        report["curves"] = {name: curve for name, made in self._made.items() if (curve := _curve(made.folder))}
        report["stages"] = [asdict(record) for record in self.workspace.records()]
        _publish(self.workspace, report)
        return report

    def _traces(self, part: str, prompts: Sequence[Prompt]) -> list[Trace]:
        settings, laws = self.recipe.trace, [law.law() for law in self.recipe.trace.laws]
        one = partial(collected, self.workspace, self.target, self._writer, settings, part, prompts)
        return [one(law, self._numbered(f"{part} prompts:")) for law in (laws if prompts else [])]

    def _numbered(self, what: str) -> Progress:
        """Return the progress of the next stage, which says how many there are."""
        self._stage_number += 1
        made_here = [
            step for steps in self.recipe.candidates.values() for step in steps if not verbs.is_reference(step)
        ]
        stages = 2 * len(self.recipe.trace.laws) + len(made_here) + 1
        return Prefixed(self.progress, f"[{self._stage_number}/{stages}] {what}".strip())

    def _first_learner(self) -> str:
        return next((name for name, steps in self.recipe.candidates.items() if any(map(verbs.learns, steps))), "")

    def _make(self, name: str, train: Sequence[Trace]) -> Made:
        if name not in self._made:
            steps = self.recipe.candidates[name]
            made = self._start(name, steps[0], train)
            for step in steps[1:]:
                made = self._follow(name, step, made, train)
            self._made[name] = made
        return self._made[name]

    def _start(self, name: str, step: Step, train: Sequence[Trace]) -> Made:
        match step.verb:
            case "from":
                return self._make(step.settings, train)
            case "checkpoint":
                return Made(step.settings, _spec_key(step.settings))
            case "ngram" if not verbs.needs_building(step.settings.kind):
                spec = verbs.model_free_spec(step.settings)
                return Made(spec, digest_of(spec))
        inputs = digest_of([self.target.fingerprint, *_keys(train), *verbs.text_keys(step, self._held_out)])
        progress = self._numbered(f"{name}:")
        if step.verb == "ngram":
            return self._stage(
                name, step, inputs, lambda out: build_drafter(self.target, train, step.settings, out, progress)
            )
        if step.settings.is_sibling:
            inputs = digest_of([inputs, _spec_key(step.settings.source)])
        return self._stage(name, step, inputs, lambda out: verbs.init_draft(self.target, train, step.settings, out))

    def _follow(self, name: str, step: Step, made: Made, train: Sequence[Trace]) -> Made:
        if step.verb == "wrap":
            return Made(f"{made.spec}+{step.settings}", digest_of([made.key, step.settings]))
        if step.verb == "adaptive":
            return self._choose_among(name, step, made, train)
        source, settings, progress = made.folder, step.settings, self._numbered(f"{name}:")
        make: dict[str, Callable[[Path], Any]] = {
            "distill": lambda out: trainings.distill_draft(
                source, self.target, train, settings, out, progress, self.workspace.root / "text", self._held_out
            ),
            "adapt": lambda out: trainings.adapt_draft(
                source,
                self.target,
                trainings.served_texts(settings.buffer, self.target),
                train,
                (),
                settings,
                out,
                progress,
            ),
            "meta": lambda out: trainings.meta_draft(source, self.target, train, settings, out, progress),
            "prune": lambda out: compressing.prune_draft(source, self.target, train, settings, out, progress),
            "quantize": lambda out: compressing.quantize_draft(source, self.target, train, settings, out, progress),
            "low_rank": lambda out: factoring.low_rank_draft(source, self.target, train, settings, out, progress),
            "compress": lambda out: searching.compress_draft(
                source, self.target, train, settings, out, progress, held_out=self._held_out
            ),
            "law": lambda out: verbs.set_law(source, self.target, train, settings, out, progress),
            "head": lambda out: verbs.set_head(source, self.target, train, settings, out),
        }
        learnt = [*_keys(train), *verbs.text_keys(step, self._held_out)] if verbs.learns(step) else []
        learnt += _keys([open_trace(folder) for folder in settings.buffer]) if step.verb == "adapt" else []
        return self._stage(name, step, digest_of([made.key, *learnt]), make[step.verb])

    def _choose_among(self, name: str, step: Step, first: Made, train: Sequence[Trace]) -> Made:
        """Write the selection of an adaptive candidate, whose drafters are other candidates."""
        made = {self.recipe.candidates[name][0].settings: first}
        made |= {other: self._make(other, train) for other in step.settings.others}
        specs = {member: one.spec for member, one in made.items()}
        inputs = digest_of([*(one.key for one in made.values()), *_keys(train[:1])])
        progress = self._numbered(f"{name}:")
        return self._stage(
            name, step, inputs,
            lambda out: make_portfolio(specs, self.target, train[0], step.settings, out, progress), ".json",
        )  # fmt: skip

    def _stage(self, name: str, step: Step, inputs: str, make: Callable[[Path], Any], suffix: str = "") -> Made:
        key = digest_of([step.verb, step.settings.model_dump(mode="json"), inputs])
        path = self.workspace.root / "drafts" / name / f"{step.verb}-{key[:8]}{suffix}"
        self.workspace.stage(f"{step.verb} {name}", key, path, make)
        return Made(str(path), key)

    def _contenders(self) -> dict[str, Contender]:
        parents = {name: steps[0].source or "" for name, steps in self.recipe.candidates.items()}
        twins = {
            parents[name]: name
            for name, steps in self.recipe.candidates.items()
            if [step.verb for step in steps] == ["from", "head"] and steps[1].settings.rows == "full"
        }
        return {
            name: Contender(
                made.key,
                partial(drafters.load_drafter, made.spec, self.target, self.trust_remote_code),
                twins.get(name, ""),
                parents[name],
            )
            for name, made in self._made.items()
        }

    def _record(self, report: dict[str, Any]) -> None:
        for name, made in self._made.items():
            if (made.folder / MANIFEST).is_file():
                entries = {
                    law["label"]: next(entry for entry in law["drafters"] if entry["name"] == name)
                    for law in report["laws"]
                }
                record_measurement(made.folder, entries)

    def _export(self, chosen: dict[str, Any]) -> dict[str, str]:
        folders = {}
        for runtime in self.recipe.export if chosen else []:
            name, k = chosen["drafter"], chosen["k"]
            key = digest_of([runtime, self._made[name].key, k])
            path = self.workspace.root / "exports" / runtime.partition(":")[0] / f"{name}-{key[:8]}"
            export = partial(verbs.export_draft, self._made[name].folder, self.target, runtime, k)
            self.workspace.stage(f"export {name} for {runtime}", key, path, export)
            folders[runtime] = str(path)
        return folders


def _itself(drafter: Drafter) -> Drafter:
    return drafter


def _publish(workspace: Workspace, report: dict[str, Any]) -> None:
    write_json(workspace.root / "report.json", report)
    with whole_file(workspace.root / "report.html") as page:
        page.write_text(render(report), encoding="utf-8")


def _keys(traces: Sequence[Trace]) -> list[str]:
    return [trace.digest for trace in traces]


def _spec_key(spec: str) -> str:
    """Identity of what a spec names: a draft's digest, a folder's files and their sizes, or the words themselves."""
    base, *wraps = drafters.split_spec(spec)
    if wraps:
        return digest_of([_spec_key(base), *wraps])
    folder = Path(spec)
    if (folder / MANIFEST).is_file():
        return read_manifest(folder).digest
    if folder.is_dir():
        return digest_of(
            [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(folder.iterdir())]
        )
    return digest_of(spec)


def _named(specs: Sequence[str]) -> dict[str, str]:
    """Name each spec by its last part, numbered where two agree."""
    named: dict[str, str] = {}
    for spec in specs:
        base, *wraps = drafters.split_spec(spec)
        name = "+".join([Path(base).name if Path(base).exists() else base, *wraps])
        number = sum(known == name or known.startswith(f"{name}#") for known in named)
        named[f"{name}#{number + 1}" if number else name] = spec
    return named


def _curve(folder: Path) -> list[dict[str, Any]]:
    if not (folder / MANIFEST).is_file():
        return []
    return [dict(point) for point in read_manifest(folder).curve]
