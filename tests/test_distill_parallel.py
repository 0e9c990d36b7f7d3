"""Several processes through the recipe entry point: what one process makes, they make."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.core.errors import UserError
from foredraft.core.processes import Processes, join_processes
from foredraft.distill import loop
from foredraft.distill.data import num_positions, read_groups
from foredraft.distill.parallel import Spread
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.models.draft import load_draft
from foredraft.models.target import load_target
from foredraft.recipe import load_recipe
from foredraft.trace.store import open_trace
from tests.tiny import WORDS, tiny_model
from tests.traces import build_trace, trace_row

RECIPE = """
target: {{model: {target}, dtype: float32}}
trace:
  prompts: [{{file: {prompts}, train: 40, eval: 4}}]
  laws: [{{temperature: 1}}]
  max_new_tokens: 12
  batch_size: 40
candidates:
  prefix:
    - init: {{layers: first-2, vocab: 128}}
    - distill:
        {{tokens: 1000, batch_tokens: 100, pack_tokens: 150, finish: lk_hybrid, layer_matching: 0.1,
          validation: {{every: 300}}}}
evaluate: {{num_draft_tokens: 1..2, audit_prompts: 0, cost_repeats: 3}}
select: {{memory_fraction: 2.0}}
"""
LAUNCHERS = {
    "ddp": ["accelerate.commands.launch", "--multi_gpu"],
    "fsdp2": ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2"],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    folder, words = tmp_path_factory.mktemp("recipe"), random.Random(0)
    rows = [{"id": f"p{index}", "prompt": " ".join(words.choices(WORDS, k=6))} for index in range(50)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(target=tiny_target_folder, prompts=folder / "prompts.jsonl"))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run by one process."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    _run([sys.executable, "-m", "foredraft.cli"], recipe, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(LAUNCHERS))
def test_two_processes_give_the_curve_and_the_draft_of_one(
    kind: str, recipe: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / kind
    shutil.copytree(alone, out)
    made = _draft(out)
    shutil.rmtree(made)
    if kind == "fsdp2":
        _train_half(recipe, out, made, monkeypatch)
    launcher, *options = LAUNCHERS[kind]
    said = _run([sys.executable, "-m", launcher, *options, "--num_processes", "2", "-m", "foredraft.cli"], recipe, out)
    assert json.loads(said.stdout)["schema"] == 1
    curve, reference = _curve(made), _curve(_draft(alone))
    assert len(curve) == len(reference) >= 10
    for point, expected in zip(curve, reference, strict=True):
        for name in ("positions", "loss", "acceptance", "learning_rate", "gradient_norm"):
            assert point[name] == pytest.approx(expected[name], rel=1e-4)
        assert point.get("mean_tokens_per_call", 0.0) == pytest.approx(
            expected.get("mean_tokens_per_call", 0.0), rel=1e-2
        )
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (made, _draft(alone)))
    state = theirs.state_dict()
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, state[name], rtol=1e-2, atol=1e-4)
    assert not list(made.parent.glob(".*")), "points are left behind"


def _train_half(recipe: Path, out: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the points of a training that one process did half of."""
    settings = load_recipe(recipe)
    step = settings.candidates["prefix"][1].settings
    backward, calls = Student.backward, iter(range(100))

    def dies(self: Student, *arguments: object) -> object:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return backward(self, *arguments)

    monkeypatch.setattr(loop, "_POSITIONS_BETWEEN_POINTS", 300)
    monkeypatch.setattr(Student, "backward", dies)
    traces = [open_trace(next((out / "traces").glob("train-*")))]
    draft = load_draft(next(made.parent.glob("init-*")), "float32")
    points = made.with_name(f".{made.name}.training")
    often = step.model_copy(update={"checkpoint_every": 1e-9})
    with pytest.raises(KeyboardInterrupt):
        distill(draft, traces, often, load_target(settings.target.model, "float32"), points)
    assert (points / "resume.safetensors").is_file()


def test_shares_hold_every_group_once_and_all_processes_make_equally_many_passes(tmp_path: Path) -> None:
    rows = [trace_row(str(index), [1, 2], list(range(3, 4 + index % 5))) for index in range(11)]
    groups = read_groups([build_trace(tmp_path / "t", rows)])
    for count in (1, 2, 3):
        parts = []
        for rank in range(count):
            spread = Spread(tiny_model(1), [], Processes(rank, 1))
            spread.processes = Processes(rank, count)
            parts.append(spread.parts(groups, lambda share: [[group] for group in share]))
        assert len({len(mine) for mine in parts}) == 1
        assert all([part.is_last for part in mine] == [False] * (len(mine) - 1) + [True] for mine in parts)
        counted = [group[0].row.id for mine in parts for part in mine if part.counts for group in part.groups]
        assert sorted(counted) == sorted(row.id for row in rows)
        sizes = [sum(num_positions(group) for part in mine if part.counts for group in part.groups) for mine in parts]
        assert max(sizes) - min(sizes) <= 5


def test_a_step_with_fewer_groups_than_processes_gives_idle_processes_a_pass(tmp_path: Path) -> None:
    groups = read_groups([build_trace(tmp_path / "t", [trace_row("a", [1], [3, 4])])])
    spread = Spread(tiny_model(1), [], Processes(1, 1))
    spread.processes = Processes(1, 2)
    (part,) = spread.parts(groups, lambda share: [[group] for group in share])
    assert not part.counts
    assert part.is_last


def test_the_first_version_of_fsdp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="sharded by FSDP2 only: add --fsdp_version 2"):
        join_processes()


def _run(command: list[str], recipe: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "run", str(recipe), "--out", str(out), "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done


def _draft(out: Path) -> Path:
    return next((out / "drafts" / "prefix").glob("distill-*"))


def _curve(draft: Path) -> list[dict]:
    return json.loads((draft / "foredraft.json").read_text())["curve"]
