"""Adaptive candidates of recipes: what a recipe may say, and a run that measures, saves and scores one."""

import json
import random
from pathlib import Path

import pytest

from foredraft.core.errors import RecipeError, UnknownNameError, UserError
from foredraft.drafters import load_drafter
from foredraft.models.target import load_target
from foredraft.pool import run_recipe
from foredraft.recipe import parse_recipe
from foredraft.select.policies import Score
from tests.tiny import WORDS

RECIPE = """
target: {{model: {target}, dtype: float32}}
trace:
  prompts: [{{file: {prompts}, train: 4, eval: 2}}]
  laws: [{{temperature: 0}}]
  max_new_tokens: 24
candidates:
  lookup: [{{ngram: {{kind: prompt-lookup}}}}]
  suffix: [{{ngram: {{kind: suffix-automaton}}}}]
  chooser: [{chooser}]
evaluate: {{num_draft_tokens: 1..3, audit_prompts: 1, audit_tokens: 8, cost_repeats: 3, criteria_answers: 0}}
export: []
"""
ADAPTIVE = """{from: lookup}, {adaptive: {others: [suffix], lengths: [1, 3], batch_sizes: [1, 2], cost_repeats: 3,
  context: 16, policy: "score:speed=1,quality=0.2,resource=0.5"}}"""


@pytest.mark.slow
def test_a_run_measures_saves_and_scores_it(tiny_target_folder: Path, tmp_path: Path) -> None:
    words = random.Random(0)
    rows = [
        {"id": f"p{number}", "domain": ("left", "right")[number % 2], "prompt": " ".join(words.choices(WORDS, k=6))}
        for number in range(6)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RECIPE.format(target=tiny_target_folder, prompts=tmp_path / "prompts.jsonl", chooser=ADAPTIVE)
    text += "select: {portfolio: 2, mix: {left: 1, right: 3}}\n"
    report = run_recipe(parse_recipe(text), tmp_path / "run")
    kinds = {entry["name"]: entry["kind"] for entry in report["laws"][0]["drafters"]}
    assert kinds == {"lookup": "prompt-lookup", "suffix": "suffix-automaton", "chooser": "adaptive"}
    (saved,) = (tmp_path / "run/drafts/chooser").iterdir()
    target = load_target(str(tiny_target_folder), "float32")
    portfolio = load_drafter(str(saved), target).portfolio
    assert list(portfolio.drafters) == ["lookup", "suffix"]
    assert report["selection"]["mix"] == {"left": 0.25, "right": 0.75}
    assert set(report["selection"]["portfolio"]["serves"]) == {"left", "right"}
    assert portfolio.policy == Score(speed=1.0, quality=0.2, resource=0.5)
    beside = load_drafter("prompt-lookup+adaptive:lengths=2", target).portfolio
    assert portfolio.target_bytes == beside.target_bytes == target.num_bytes
    assert sorted(portfolio.costs) == [1, 2]
    assert all(one.plain > 0.0 and one.drafts.shape == (2, 4) for one in portfolio.costs.values())
    made = saved.stat().st_mtime_ns
    run_recipe(parse_recipe(text), tmp_path / "run")
    assert saved.stat().st_mtime_ns == made


@pytest.mark.parametrize(
    ("chooser", "message"),
    [
        ("{from: lookup}, {adaptive: {others: [sufix]}}", "chooses 'sufix', which is no candidate"),
        ("{from: lookup}, {adaptive: {others: [lookup]}}", "names a candidate twice"),
        ("{from: lookup}, {adaptive: {others: [chooser]}}", "start from each other: chooser -> chooser"),
        ("{ngram: {kind: prompt-lookup}}, {adaptive: {}}", "adaptive comes second, behind the candidate"),
        ("{from: lookup}, {adaptive: {}}, {wrap: tree}", "wrap cannot follow adaptive, which comes last"),
        ("{from: lookup}, {adaptive: {lengths: [0]}}", "greater than or equal to 1"),
    ],
)
def test_what_no_recipe_can_mean_is_refused(chooser: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(RECIPE.format(target="t", prompts="p", chooser=chooser))


def test_an_unknown_policy_is_refused_before_anything_is_made(tiny_target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n' * 4)
    chooser = "{from: lookup}, {adaptive: {policy: hege}}"
    text = RECIPE.format(target=tiny_target_folder, prompts=tmp_path / "prompts.jsonl", chooser=chooser)
    with pytest.raises(UnknownNameError, match="Did you mean 'hedge'"):
        run_recipe(parse_recipe(text), tmp_path / "run")
    assert not (tmp_path / "run/drafts").exists()


@pytest.mark.parametrize("mix", ["{nowhere: 1}", "{unlabelled: -1}"])
def test_a_mix_that_means_nothing_is_refused_before_anything_is_made(
    mix: str, tiny_target_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n' * 4)
    text = RECIPE.format(target=tiny_target_folder, prompts=tmp_path / "prompts.jsonl", chooser="{from: lookup}")
    with pytest.raises(UserError, match="mix: "):
        run_recipe(parse_recipe(f"{text}select: {{mix: {mix}}}\n"), tmp_path / "run")
    assert not (tmp_path / "run/traces").exists()
