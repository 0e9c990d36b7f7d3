"""Recipes: one YAML that describes a pool of draft candidates. The only reader of YAML.

Every default lives in a class of this file and nowhere else. The verbs of the command line take the same
classes, so that `foredraft distill --set tokens=50000` and a recipe's `distill: {tokens: 50_000}` mean
the same.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from foredraft.core.errors import RecipeError
from foredraft.core.law import SamplingLaw

QUICKSTART_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHIPPED_PROMPTS = "shipped"


def _draft_lengths(value: Any) -> Any:
    """Read `1..8`, `4` or `[1, 2, 4]`."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\.\.(\d+)", value)):
        return list(range(int(match[1]), int(match[2]) + 1))
    return [value] if isinstance(value, int) else value


DraftLengths = Annotated[list[Annotated[int, Field(ge=1, le=64)]], BeforeValidator(_draft_lengths), Field(min_length=1)]


BatchSizes = Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)]


class Settings(BaseModel):
    """A part of a recipe: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, populate_by_name=True)


SettingsT = TypeVar("SettingsT", bound=Settings)


class TargetSettings(Settings):
    """The model whose output law must be kept."""

    model: str = Field(description="Folder, GGUF file, or hub id.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 where the processor computes in it, else float32."
    )
    adapter: str = Field("", description="Folder or hub id of a LoRA adapter that the target is served with.")


class LawSettings(Settings):
    """A sampling law under which the target answers."""

    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0, description="0 keeps all tokens.")
    top_p: float = Field(1.0, gt=0.0, le=1.0)

    def law(self) -> SamplingLaw:
        return SamplingLaw(self.temperature, self.top_k, self.top_p)


class PromptSource(Settings):
    """Where prompts come from, and how many are for training and for evaluation."""

    file: str = Field(
        "",
        description="JSONL with prompt, messages or turns, or a question file of Spec-Bench, MT-bench, HumanEval or "
        "GSM8K; may be packed by gzip. `shipped` for the package's own set.",
    )
    dataset: str = Field("", description="A `datasets` id or folder, instead of file.")
    split: str = Field("train", description="Split of the dataset.")
    domains: list[str] = Field([], description="Keep only these domains; empty keeps all.")
    train: int = Field(0, ge=0, description="Prompts whose answers teach drafts. Both 0: all, a fifth for eval.")
    eval: int = Field(0, ge=0, description="Prompts that only score. Never overlaps train.")

    @model_validator(mode="after")
    def _one_source(self) -> "PromptSource":
        if bool(self.file) == bool(self.dataset):
            raise ValueError("give either file or dataset")
        return self


class TraceSettings(Settings):
    """Collecting the target's answers."""

    prompts: list[PromptSource] = Field(min_length=1)
    laws: list[LawSettings] = Field([LawSettings(temperature=0.0), LawSettings(temperature=1.0)], min_length=1)
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")
    top: int = Field(64, ge=0, description="Most probable tokens kept for each position; 0 keeps none.")
    batch_size: int = Field(48, ge=1, description="Answers written at once; also the rows of a shard.")
    seed: int = 0


class InitStep(Settings):
    """Start a draft from layers of the target."""

    source: Literal["target"] = Field("target", alias="from")
    layers: str = Field("first-6", description="first-6, every-5, first-4+last-2, or a list 0,1,2,28,29.")
    vocab: int = Field(0, ge=0, description="Rows of the head kept, most frequent in the trace first; 0 keeps all.")


class DistillStep(Settings):
    """Teach the draft the target's law on the target's own answers."""

    loss: dict[str, float] = Field({"forward_kl": 1.0}, min_length=1, description="Loss names with weights.")
    finish: str = Field("", description="Loss of the last part of training; empty keeps `loss` to the end.")
    finish_fraction: float = Field(0.3, ge=0.0, le=1.0, description="Share of the steps under `finish`.")
    temperature: float = Field(1.0, gt=0.0, description="Softens both laws in forward_kl; scaled by its square.")
    layer_matching: float = Field(0.0, ge=0.0, description="Weight of hidden-state matching, decayed to zero.")
    tokens: int = Field(100_000, ge=1, description="Answer positions trained on, repeats included.")
    batch_tokens: int = Field(2048, ge=1, description="Answer positions in one optimizer step, about.")
    learning_rate: float = Field(6e-4, gt=0.0)
    warmup: float = Field(0.05, ge=0.0, lt=1.0, description="Share of the steps in which the rate rises.")
    weight_decay: float = Field(0.0, ge=0.0)
    clip: float = Field(1.0, gt=0.0, description="Largest gradient norm.")
    checkpoint_every: float = Field(20.0, gt=0.0, description="Seconds between points a killed run resumes from.")
    seed: int = 0


class PruneStep(Settings):
    """Cut layers out of a draft."""

    layers: int = Field(1, ge=1, description="Number of layers to remove.")
    by: Literal["block-influence", "last"] = Field("block-influence", description="Which layers go first.")


class QuantizeStep(Settings):
    """Round a draft's weights."""

    bits: Literal[8] = Field(8, description="Bits of each body weight; one scale a row.")
    activation_bits: Literal[8, 16] = Field(
        16, description="Bits of what each layer reads; 8 is the form that vLLM runs on CPUs, and accepted less."
    )


class NgramStep(Settings):
    """A drafter without a model."""

    kind: str = Field(description="prompt-lookup, suffix-automaton, ngram, ngram-law, lookup-table or suffix.")
    order: int = Field(4, ge=1, le=16, description="ngram, ngram-law: longest context, in tokens.")
    min_count: int = Field(1, ge=1, description="Contexts and keys seen less often are dropped (not suffix).")
    key: int = Field(8, ge=1, le=64, description="lookup-table: tokens looked up.")
    continuation: int = Field(16, ge=1, le=256, description="lookup-table: tokens stored for each key.")
    smoothing: Literal["interpolated", "stupid-backoff"] = Field("interpolated", description="ngram-law.")
    max_match: int = Field(3, ge=1, description="prompt-lookup: longest suffix looked up, in tokens.")
    min_match: int = Field(1, ge=1, description="prompt-lookup: shortest suffix looked up, in tokens.")
    depth: int = Field(32, ge=1, le=64, description="suffix: longest match, in tokens.")
    shard_tokens: int = Field(
        200_000_000, ge=1, description="suffix: tokens of a file; building takes about 16 bytes of memory for each."
    )
    corpus: Literal["trace"] = Field("trace", description="What kinds that are built are built from.")


class HeadStep(Settings):
    """Which rows of the head a draft computes."""

    rows: Literal["full"] = Field("full", description="full: every row, as runtimes without a map of token ids run it.")


class LawStep(Settings):
    """The law that a draft draws from itself, where the target samples; fitted for acceptance unless it is given.

    Under a greedy target a draft is greedy: there is nothing to choose.
    """

    temperature: float | None = Field(
        None, ge=0.0, allow_inf_nan=False, description="0 is greedy. Left out with top_k: the best on training answers."
    )
    top_k: int | None = Field(None, ge=0, description="0 keeps all tokens.")
    num_draft_tokens: int = Field(4, ge=1, le=64, description="Draft length at which laws are compared.")
    answers: int = Field(48, ge=2, description="Training answers that the law is fitted on.")

    @property
    def is_fitted(self) -> bool:
        return self.temperature is None and self.top_k is None


class Step(Settings):
    """One step of a candidate; exactly one key."""

    ngram: NgramStep | None = None
    init: InitStep | None = None
    checkpoint: str | None = Field(None, description="A draft that exists: folder or hub id.")
    source: str | None = Field(None, alias="from", description="The result of another candidate.")
    distill: DistillStep | None = None
    prune: PruneStep | None = None
    quantize: QuantizeStep | None = None
    head: HeadStep | None = None
    wrap: str | None = Field(
        None, description="Another way of drafting with it: tree:max_nodes=16, confident:threshold=0.4."
    )
    law: LawStep | None = None

    @model_validator(mode="after")
    def _one_key(self) -> "Step":
        if len(self.model_fields_set) != 1:
            raise ValueError(f"a step has exactly one of: {', '.join(_step_keys())}")
        return self

    @property
    def verb(self) -> str:
        """The key that was given, as written in a recipe."""
        (name,) = self.model_fields_set
        return "from" if name == "source" else name

    @property
    def settings(self) -> Any:
        """What was given under that key."""
        (name,) = self.model_fields_set
        return getattr(self, name)


class DecodeSettings(Settings):
    """Literal speculative decoding. Every choice keeps the target's law."""

    k: int = Field(
        4, ge=1, le=64, description="Draft tokens of a block, levels of a tree; the first length if it adapts."
    )
    rule: Literal["chain", "block"] = Field("chain", description="Token by token, or the block as a whole.")
    length: Literal["fixed", "window", "marginal"] = Field(
        "fixed", description="window: by recent acceptance (0.85 / 0.6); marginal: while one more token pays."
    )
    longest: int = Field(16, ge=1, le=64, description="Largest k of a length that adapts.")
    cost_ratio: float = Field(0.1, gt=0.0, description="marginal: time of a draft step / of a target step.")
    target_growth: float = Field(
        0.0, ge=0.0, description="marginal: what one more token adds to a target step, as a share of it."
    )
    fallback_after: int = Field(0, ge=0, description="Failed blocks in a row before decoding plainly; 0 never.")
    pause: int = Field(16, ge=1, description="Plain steps before drafting is tried again.")
    batch_size: int = Field(1, ge=1, description="Prompts answered at once.")


class EvaluateSettings(Settings):
    """Scoring by replay, and the audit by literal decoding."""

    num_draft_tokens: DraftLengths = Field(list(range(1, 9)), description="1..8, 4 or [1, 2, 4].")
    audit_prompts: int = Field(8, ge=0, description="Prompts decoded literally; 0 leaves the audit out.")
    audit_tokens: int = Field(64, ge=1, description="Tokens decoded for each audit prompt.")
    cost_repeats: int = Field(15, ge=3, description="Timings behind each cost; the median counts.")
    batch_sizes: BatchSizes = Field(
        [1], description="Requests decoded together, such as [1, 4, 16]; 1 is always timed."
    )
    batch_context: int = Field(128, ge=1, description="Tokens of context of each request where batches are timed.")
    hardware: list[str] = Field([], description="Machines to predict for: names of shipped profiles, or YAML files.")
    criteria_answers: int = Field(8, ge=0, description="Answers behind the criteria of each draft; 0 leaves them out.")


class SelectSettings(Settings):
    """Choosing the winner."""

    memory_fraction: float = Field(0.1, gt=0.0, description="Largest draft, as a share of the target's bytes.")
    runtime: Literal["foredraft", "transformers"] = Field("foredraft", description="Where the draft will be served.")


class Recipe(Settings):
    """A pool of candidates for one target."""

    target: TargetSettings
    trace: TraceSettings
    candidates: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], list[Step]] = Field(min_length=1)
    evaluate: EvaluateSettings = EvaluateSettings()
    select: SelectSettings = SelectSettings()
    export: list[str] = ["transformers"]

    @model_validator(mode="after")
    def _candidates_exist(self) -> "Recipe":
        for name, steps in self.candidates.items():
            if not steps:
                raise ValueError(f"candidate {name!r} has no step")
            for position, step in enumerate(steps):
                starts = step.verb in ("ngram", "init", "from", "checkpoint")
                if starts != (position == 0):
                    where = (
                        "must start with ngram, init, from or checkpoint"
                        if position == 0
                        else (f"step {position + 1} ({step.verb}) can only come first")
                    )
                    raise ValueError(f"candidate {name!r} {where}")
                if position and steps[position - 1].verb == "wrap" and step.verb != "wrap":
                    raise ValueError(f"candidate {name!r}: {step.verb} cannot follow wrap, which changes no file")
                if step.verb == "from" and step.source not in self.candidates:
                    raise ValueError(f"candidate {name!r} starts from {step.source!r}, which is no candidate")
        _refuse_cycles({name: steps[0].source for name, steps in self.candidates.items()})
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; `overrides` are `a.b=value` with YAML values.

    Raises:
        RecipeError: names every fault of the file, each with its dotted key and line.
    """
    if not path.is_file():
        raise RecipeError(f"There is no recipe {path}.")
    return parse_recipe(path.read_text(encoding="utf-8"), str(path), overrides)


def parse_recipe(text: str, name: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from text; see load_recipe."""
    data, lines = _read_yaml(text, name)
    _override(data, overrides)
    return validated(Recipe, data, name, lines)


def read_settings(kind: type[SettingsT], text: str, name: str) -> SettingsT:
    """Return settings from YAML text of their own, such as a hardware profile.

    Raises:
        RecipeError: names every fault, each with its dotted key and line.
    """
    data, lines = _read_yaml(text, name)
    return validated(kind, data, name, lines)


def write_settings(settings: Settings) -> str:
    """Return YAML text that read_settings reads back; what has its default is left out."""
    return yaml.safe_dump(settings.model_dump(exclude_defaults=True), sort_keys=False, width=120)


def settings_from(kind: type[SettingsT], overrides: Sequence[str]) -> SettingsT:
    """Return one part of a recipe with its defaults and `key=value` overrides.

    Raises:
        RecipeError: names every fault.
    """
    data: dict[str, Any] = {}
    _override(data, overrides)
    return validated(kind, data, "--set")


def validated(kind: type[SettingsT], data: Any, name: str, lines: dict[str, int] | None = None) -> SettingsT:
    """Check plain data against a settings class.

    Raises:
        RecipeError: names every fault, each with its dotted key (and line where known).
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise RecipeError(_faults(error, name, lines or {})) from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 and 300_000 as numbers."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*)$"),
    list("-+0123456789."),
)


def _read_yaml(text: str, name: str) -> tuple[Any, dict[str, int]]:
    try:
        root = yaml.compose(text, _Loader)
        if root is None:
            raise RecipeError(f"{name} is empty.")
        lines = dict(_walk(root, ""))
        repeated = list(_duplicates(root, ""))
        if repeated:
            raise RecipeError("\n".join(f"{name}:{line}: {key}: given twice" for key, line in repeated))
        return yaml.load(text, _Loader), lines
    except yaml.YAMLError as error:
        raise RecipeError(f"{name} is no YAML: {' '.join(str(error).split())}") from error


def _walk(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    yield prefix, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}.{key.value}".lstrip(".")
            yield from _walk(value, dotted)
            yield dotted, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, f"{prefix}.{index}".lstrip("."))


def _duplicates(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    children = node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else []
    seen = set()
    for index, child in enumerate(children):
        if isinstance(node, yaml.MappingNode):
            key, value = child
            dotted = f"{prefix}.{key.value}".lstrip(".")
            if key.value in seen:
                yield dotted, key.start_mark.line + 1
            seen.add(key.value)
        else:
            value, dotted = child, f"{prefix}.{index}".lstrip(".")
        yield from _duplicates(value, dotted)


def _faults(error: ValidationError, name: str, lines: dict[str, int]) -> str:
    faults = []
    for fault in error.errors():
        dotted = ".".join(str(part) for part in fault["loc"] if part != "[key]")
        known = dotted
        while known and known not in lines:
            known = known.rpartition(".")[0]
        where = f"{name}:{lines[known]}" if known in lines else name
        message = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"].removeprefix("Value error, ")
        faults.append(f"{where}: {dotted + ': ' if dotted else ''}{message}")
    return "\n".join(faults)


def _override(data: Any, overrides: Sequence[str]) -> None:
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise RecipeError(f"--set takes key=value, not {override!r}.")
        _put(data, key.split("."), yaml.load(value, _Loader))


def _put(data: Any, keys: Sequence[str], value: Any) -> None:
    for depth, key in enumerate(keys):
        where: Any = int(key) if isinstance(data, list) and key.isdigit() else key
        if isinstance(data, list) and not (isinstance(where, int) and where < len(data)):
            raise RecipeError(f"--set {'.'.join(keys)}: there is no entry {key}.")
        if not isinstance(data, dict | list):
            raise RecipeError(f"--set {'.'.join(keys)}: {'.'.join(keys[:depth])} holds no keys.")
        if depth == len(keys) - 1:
            data[where] = value
        elif isinstance(data, dict):
            data = data.setdefault(where, {})
        else:
            data = data[where]


def _refuse_cycles(sources: dict[str, str | None]) -> None:
    for name in sources:
        path, at = [name], sources[name]
        while at is not None:
            if at in path:
                raise ValueError(f"candidates start from each other: {' -> '.join([*path, at])}")
            path.append(at)
            at = sources[at]


def _step_keys() -> list[str]:
    return [field.alias or name for name, field in Step.model_fields.items()]
