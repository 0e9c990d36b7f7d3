"""Runs a recipe: whatever is not there yet is made, each stage under a digest of its inputs."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import yaml

from foredraft import scoring, verbs
from foredraft.catalog import resolve
from foredraft.core.digest import digest_of
from foredraft.core.files import whole_file, write_json
from foredraft.core.law import SamplingLaw
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.recipe import Recipe, Step, parse_recipe
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt, read_prompts, split
from foredraft.trace.store import Trace, open_trace
from foredraft.workspace import Workspace

_DEFAULT_POOL = "recipes/default.yaml"


@dataclass(frozen=True, slots=True)
class Made:
    """A candidate after some of its steps.

    Attributes:
        spec: What load_drafter takes.
        key: Digest of everything that went into it.
    """

    spec: str
    key: str


def run_recipe(
    recipe: Recipe, out: Path, progress: Progress = SILENT, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Make everything that `recipe` describes and is not in `out` yet; return the report.

    Leaves traces/, drafts/, scores/, report.json, report.html, selection.json and exports/ in `out`.
    A second call finds all of it; a killed one goes on where it was.
    """
    return Pool(recipe, Workspace.open(out), progress, trust_remote_code).run()


def default_recipe(target: str, prompts: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the shipped pool for a target and a file of prompts."""
    data = yaml.safe_load(files("foredraft").joinpath(_DEFAULT_POOL).read_text(encoding="utf-8"))
    data["target"]["model"] = target
    for source in data["trace"]["prompts"]:
        source["file"] = str(prompts)
    return parse_recipe(yaml.safe_dump(data), "the default pool", overrides)


@final
class Pool:
    """One run of a recipe in its workspace."""

    def __init__(self, recipe: Recipe, workspace: Workspace, progress: Progress, trust_remote_code: bool) -> None:
        self.recipe = recipe
        self.workspace = workspace
        self.progress = progress
        self.trust_remote_code = trust_remote_code

    @cached_property
    def target(self) -> LocalTarget:
        return load_target(self.recipe.target.model, self.recipe.target.dtype, self.trust_remote_code)

    def run(self) -> dict[str, Any]:
        """Make what is missing, in the order of the recipe; return the report."""
        train, evaluation = self.collect()
        made: dict[str, Made] = {}
        for name in self.recipe.candidates:
            self.make(name, train, made)
        report = self.evaluate(made, evaluation)
        self.export(made, report)
        return report

    def collect(self) -> tuple[list[Trace], list[Trace]]:
        """Return the traces to learn from and those to score by, one for each law."""
        sources = [
            (split(read_prompts(source), source.train, source.eval, self.recipe.trace.seed))
            for source in self.recipe.trace.prompts
        ]
        train = [prompt for learned, _ in sources for prompt in learned]
        evaluation = [prompt for _, held_out in sources for prompt in held_out]
        laws = [law.law() for law in self.recipe.trace.laws]
        return [self._trace("train", train, law) for law in laws], [
            self._trace("eval", evaluation, law) for law in laws
        ]
