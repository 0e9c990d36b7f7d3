"""Recipes: one YAML that describes a pool of draft candidates. The only reader of YAML.

What can be set, and every default, is in settings.py and steps.py. The verbs of the command line take the
same classes, so that `foredraft distill --set tokens=50000` and a recipe's `distill: {tokens: 50_000}` mean
the same.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from foredraft.core.errors import RecipeError
from foredraft.settings import EvaluateSettings, SelectSettings, Settings, TargetSettings, TraceSettings
from foredraft.steps import Step

SettingsT = TypeVar("SettingsT", bound=Settings)


class Recipe(Settings):
    """A pool of candidates for one target."""

    target: TargetSettings
    trace: TraceSettings
    candidates: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], list[Step]] = Field(min_length=1)
    evaluate: EvaluateSettings = EvaluateSettings()
    select: SelectSettings = SelectSettings()
    export: list[str] = Field(["transformers"], description="Runtimes that the winner is written for.")

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
                if position and steps[position - 1].verb == "adaptive":
                    raise ValueError(f"candidate {name!r}: {step.verb} cannot follow adaptive, which comes last")
                if step.verb == "adaptive":
                    self._require_known(name, position, step.settings.others)
                if position and steps[position - 1].verb == "wrap" and step.verb != "wrap":
                    raise ValueError(f"candidate {name!r}: {step.verb} cannot follow wrap, which changes no file")
                if step.verb == "from" and step.source not in self.candidates:
                    raise ValueError(f"candidate {name!r} starts from {step.source!r}, which is no candidate")
        _refuse_cycles({name: _sources(steps) for name, steps in self.candidates.items()})
        return self

    @model_validator(mode="after")
    def _chosen_batch_is_timed(self) -> "Recipe":
        if self.select.batch_size not in (1, *self.evaluate.batch_sizes):
            raise ValueError(f"select.batch_size {self.select.batch_size} is not among evaluate.batch_sizes")
        return self

    def _require_known(self, name: str, position: int, others: Sequence[str]) -> None:
        """Refuse an adaptive candidate that does not say which candidates it chooses among."""
        if position != 1 or self.candidates[name][0].verb != "from":
            raise ValueError(f"candidate {name!r}: adaptive comes second, behind the candidate that it starts from")
        if unknown := [other for other in others if other not in self.candidates]:
            raise ValueError(f"candidate {name!r} chooses {unknown[0]!r}, which is no candidate")
        members = [self.candidates[name][0].source, *others]
        if len(set(members)) < len(members):
            raise ValueError(f"candidate {name!r} names a candidate twice")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; `overrides` are `a.b=value` with YAML values.

    Raises:
        RecipeError: names every fault of the file, each with its dotted key and line.
    """
    if not path.is_file():
        raise RecipeError(f"There is no recipe {path}.")
    return parse_recipe(_text(path), str(path), overrides)


def parse_recipe(text: str, name: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from text; see load_recipe."""
    data, lines = _read_yaml(text, name)
    _override(data, overrides)
    return validated(Recipe, data, name, lines)


def load_settings(kind: type[SettingsT], path: Path) -> SettingsT:
    """Return settings from a YAML file of their own; see read_settings."""
    return read_settings(kind, _text(path), str(path))


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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}.") from error


def _read_yaml(text: str, name: str) -> tuple[Any, dict[str, int]]:
    try:
        root = yaml.compose(text, _Loader)
        if root is None:
            raise RecipeError(f"{name} is empty.")
        lines = dict(_walk(root, "", name))
        repeated = list(_duplicates(root, ""))
        if repeated:
            raise RecipeError("\n".join(f"{name}:{line}: {key}: given twice" for key, line in repeated))
        return yaml.load(text, _Loader), lines
    except yaml.YAMLError as error:
        raise RecipeError(f"{name} is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise RecipeError(f"{name} is nested too deeply, or an alias of it stands within what it names.") from error


def _walk(node: yaml.Node, prefix: str, name: str) -> Iterator[tuple[str, int]]:
    yield prefix, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{name}:{key.start_mark.line + 1}: a key is one word, not a list or a mapping")
            dotted = f"{prefix}.{key.value}".lstrip(".")
            yield from _walk(value, dotted, name)
            yield dotted, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, f"{prefix}.{index}".lstrip("."), name)


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
        _put(data, key.split("."), _value(value, override))


def _value(text: str, override: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override}: the value is no YAML: {' '.join(str(error).split())}") from error


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


def _sources(steps: Sequence[Step]) -> list[str]:
    """Return the candidates that one is made of."""
    start = [steps[0].source] if steps[0].source else []
    return start + [other for step in steps if step.verb == "adaptive" for other in step.settings.others]


def _refuse_cycles(sources: dict[str, list[str]], path: tuple[str, ...] = ()) -> None:
    for name in sources[path[-1]] if path else sources:
        if name in path:
            raise ValueError(f"candidates start from each other: {' -> '.join([*path, name])}")
        _refuse_cycles(sources, (*path, name))
