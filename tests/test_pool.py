"""The main job end to end on a tiny target, through the command line: briefly here, in processes of its own if slow."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from tests.tiny import WORDS

RECIPE = """
target: {{model: {target}, dtype: float32}}
trace:
  prompts: [{{file: {prompts}, train: 40, eval: 12}}]
  max_new_tokens: 24
  batch_size: 8
candidates:
  lookup: [{{ngram: {{kind: prompt-lookup}}}}]
  ngram: [{{ngram: {{kind: ngram, order: 3}}}}]
  untrained: [{{init: {{layers: first-3, vocab: 128}}}}]
  prefix:
    - from: untrained
    - distill: {{tokens: 6000, batch_tokens: 256, finish: lk_hybrid, checkpoint_every: 0.3}}
  pruned: [{{from: prefix}}, {{prune: {{layers: 1, by: last}}}}, {{distill: {{tokens: 1500, batch_tokens: 256}}}}]
{more}
evaluate: {{num_draft_tokens: 1..3, audit_prompts: 2, audit_tokens: 16, cost_repeats: 3}}
select: {{memory_fraction: 2.0, runtime: transformers}}
"""
MORE = """
  matched:
    - from: untrained
    - distill: {tokens: 3000, batch_tokens: 256, layer_matching: 0.1}
  int8: [{from: prefix}, {quantize: {bits: 8}}]
  sure: [{from: prefix}, {wrap: "confident:threshold=0.2"}]
  own-law: [{from: prefix}, {law: {num_draft_tokens: 2, answers: 8}}]
  full-head: [{from: prefix}, {head: {rows: full}}]
"""
FEW = {"lookup", "ngram", "untrained", "prefix", "pruned"}
ALL = FEW | {"matched", "int8", "sure", "own-law", "full-head"}


# What the run of every suite does less of.
SMALLER = (
    "trace.prompts.0.train=32",
    "trace.max_new_tokens=16",
    "candidates.pruned.2.distill.tokens=800",
    "evaluate.audit_tokens=8",
)

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def foredraft(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "foredraft.cli", *map(str, words)],
        capture_output=True,
        text=True,
        env=ONE_THREAD,
        **options,
    )


def written(more: str, target: Path, folder: Path) -> Path:
    words = random.Random(0)
    rows = [
        {"id": f"p{index}", "domain": ("left", "right")[index % 2], "prompt": " ".join(words.choices(WORDS, k=6))}
        for index in range(60)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(target=target, prompts=folder / "prompts.jsonl", more=more))
    return path


def uninterrupted(recipe: Path, out: Path) -> tuple[Path, dict]:
    ended = foredraft("run", recipe, "--out", out, "--json")
    assert ended.returncode == 0, ended.stderr
    return out, json.loads(ended.stdout)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> tuple[Path, dict]:
    """A run of few candidates and its report."""
    folder = tmp_path_factory.mktemp("short")
    words = ["run", str(written("", tiny_target_folder, folder)), "--out", str(folder / "run"), "--json"]
    ended = CliRunner().invoke(app, [*words, *(word for value in SMALLER for word in ("--set", value))])
    assert ended.exit_code == 0, ended.output
    return folder / "run", json.loads(ended.stdout)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    return written(MORE, tiny_target_folder, tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run of all candidates and its report."""
    return uninterrupted(recipe, tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(params=["short", pytest.param("finished", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest) -> tuple[Path, dict, set[str]]:
    """A run, its report, and the candidates that its recipe names."""
    return (*request.getfixturevalue(request.param), FEW if request.param == "short" else ALL)


def test_the_report_keeps_its_contract(run: tuple[Path, dict, set[str]]) -> None:
    out, report, names = run
    assert report == json.loads((out / "report.json").read_text())
    assert report["schema"] == 1
    assert [law["temperature"] for law in report["laws"]] == [0.0, 1.0]
    for law in report["laws"]:
        assert {"temperature", "top_k", "top_p", "drafters"} <= set(law)
        assert {entry["name"] for entry in law["drafters"]} == names
        for entry in law["drafters"]:
            assert 0.0 <= entry["expected_acceptance"] <= 1.0
            assert set(entry["mean_tokens_per_call"]) == {"1", "2", "3"}
            assert all(1.0 <= value <= int(k) + 1 for k, value in entry["mean_tokens_per_call"].items())
            assert [len(entry["acceptance_by_position"][k]) for k in ("1", "2", "3")] == [1, 2, 3]
            assert set(entry["domains"]) == {"left", "right"}
            assert entry["cost_ratio"] > 0
            assert set(entry["predicted_speedup"]) == {"1", "2", "3"}
            assert entry["best_k"] in (0, 1, 2, 3)
            assert entry["measured_speedup"]["value"] > 0
            assert entry["audit"]["prompts"] == 2
            assert {"interval", "parameters", "bytes", "prompts", "tokens", "kind"} <= set(entry)
    assert (out / "report.html").read_text().startswith("<!doctype html>")


def test_distillation_beats_its_initialisation_paired(run: tuple[Path, dict, set[str]]) -> None:
    _, report, names = run
    for name in names & {"prefix", "matched"}:
        gains = {
            pair["law"]: pair for pair in report["paired"] if {pair["better"], pair["worse"]} == {name, "untrained"}
        }
        assert {gain["better"] for gain in gains.values()} == {name}
        assert gains["T=1"]["interval"][0] > 0


def test_the_winner_has_a_reason_and_so_has_every_loser(run: tuple[Path, dict, set[str]]) -> None:
    _, report, _ = run
    selection = report["selection"]
    assert selection["sentence"]
    losers = {entry["name"] for entry in report["laws"][0]["drafters"]} - {selection["drafter"]}
    assert set(selection["reasons"]) >= losers


@pytest.mark.slow
def test_a_second_run_makes_nothing(recipe: Path, finished: tuple[Path, dict]) -> None:
    out, report = finished
    before = _state(out)
    again = foredraft("run", recipe, "--out", out, "--json")
    assert json.loads(again.stdout) == report
    assert {path: stat for path, stat in _state(out).items() if path.name not in REWRITTEN} == {
        path: stat for path, stat in before.items() if path.name not in REWRITTEN
    }


REWRITTEN = ("report.json", "report.html")


@pytest.mark.slow
def test_an_edit_remakes_only_what_depends_on_it(recipe: Path, finished: tuple[Path, dict], tmp_path: Path) -> None:
    out, _ = finished
    before = _state(out)
    ended = foredraft("run", recipe, "--out", out, "--json", "--set", "candidates.pruned.2.distill.tokens=1600")
    assert ended.returncode == 0, ended.stderr
    new = {path.relative_to(out).parts[:3] for path in _state(out) if path not in before}
    made = {parts[:2] for parts in new if parts[0] in ("drafts", "traces")}
    assert made == {("drafts", "pruned")}


@pytest.mark.slow
def test_killed_anywhere_and_run_again_equals_uninterrupted(
    recipe: Path, finished: tuple[Path, dict], tmp_path: Path
) -> None:
    whole, report = finished
    out, chance = tmp_path / "killed", random.Random(7)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "foredraft.cli", "run", str(recipe), "--out", str(out)],
            env=ONE_THREAD,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(chance.uniform(4, 9))
        process.send_signal(signal.SIGKILL)
        process.wait()
    ended = foredraft("run", recipe, "--out", out, "--json")
    assert ended.returncode == 0, ended.stderr
    assert _without_seconds(json.loads(ended.stdout)) == _without_seconds(report)
    made = [file for part in ("traces", "drafts") for file in sorted((out / part).rglob("*"))]
    weights = [file for file in made if file.suffix in (".parquet", ".safetensors")]
    assert len(weights) > 10
    for file in weights:
        assert file.read_bytes() == (whole / file.relative_to(out)).read_bytes(), file


@pytest.mark.slow
def test_the_readme_s_lines_run(finished: tuple[Path, dict], tiny_target_folder: Path, tmp_path: Path) -> None:
    out, report = finished
    trace = next((out / "traces").glob("eval-T0-*"))
    named = {
        "my-model": str(tiny_target_folder),
        '"draft"': f'"{next((out / "drafts" / "prefix").glob("distill-*"))}"',
        '"trace"': f'"{trace}"',
        '"scores"': f'"{tmp_path / "scores"}"',
        "runs/quickstart/exports/transformers/NAME": report["exports"]["transformers"],
    }
    before = (
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        f"target = AutoModelForCausalLM.from_pretrained({str(tiny_target_folder)!r})\n"
        "inputs = dict(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3), max_new_tokens=8)\n"
    )
    lines = [_replaced(_code_under(heading), named) for heading in ("## Using the exported draft", "## From Python")]
    after = (
        f"assert report['schema'] == 1\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tiny_target_folder)!r})\n"
        f"draft = AutoModelForCausalLM.from_pretrained({report['exports']['transformers']!r})\n"
        f"assert torch.equal(model.generate(**inputs), model.generate(**inputs, assistant_model=draft))\n"
    )
    # A process of its own is free of this one's checks of shapes, which take most of the time.
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join([before, *lines, after])], env=ONE_THREAD, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "scores" / "report.html").is_file()


def _code_under(heading: str) -> str:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    section = readme.split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    return "".join(f"{line[4:]}\n" for line in section.splitlines() if line.startswith("    "))


def _replaced(text: str, values: dict[str, str]) -> str:
    for old, new in values.items():
        text = text.replace(old, new)
    return text


def _state(out: Path) -> dict[Path, tuple[int, int]]:
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in out.rglob("*") if file.is_file()}


def _without_seconds(report: dict) -> dict:
    counted = ("expected_acceptance", "acceptance_by_position", "mean_tokens_per_call", "interval", "domains", "tokens")
    return {
        str(law["temperature"]): {entry["name"]: {key: entry[key] for key in counted} for entry in law["drafters"]}
        for law in report["laws"]
    }
