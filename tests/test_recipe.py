"""Recipes: what loads, and what every fault says."""

from importlib.resources import files
from pathlib import Path

import pytest
from annotated_types import Le

from foredraft.core.errors import RecipeError
from foredraft.core.lengths import LONGEST_DRAFT
from foredraft.recipe import load_recipe, parse_recipe, settings_from
from foredraft.settings import EvaluateSettings, Settings
from foredraft.steps import DistillStep, InitStep

GOOD = """
target: {model: some/model}
trace:
  prompts: [{file: shipped, train: 4, eval: 2}]
candidates:
  lookup: [{ngram: {kind: prompt-lookup}}]
  prefix:
    - init: {layers: first-2, vocab: 100}
    - distill: {tokens: 1_000, learning_rate: 1e-3}
  small:
    - from: prefix
    - quantize: {bits: 8}
evaluate: {num_draft_tokens: 1..4}
"""


def test_every_shipped_recipe_loads() -> None:
    recipes = sorted(Path(str(files("foredraft").joinpath("recipes"))).rglob("*.yaml"))
    assert [recipe.stem for recipe in recipes] == ["chat", "code", "default", "long", "many-gpus", "quickstart"]
    for recipe in recipes:
        assert load_recipe(recipe).candidates
        assert recipe.read_text(encoding="utf-8").startswith("# ")


def test_numbers_are_read_as_written() -> None:
    recipe = parse_recipe(GOOD)
    step = recipe.candidates["prefix"][1].settings
    assert (step.tokens, step.learning_rate) == (1000, 1e-3)
    assert recipe.evaluate.num_draft_tokens == [1, 2, 3, 4]
    assert [law.temperature for law in recipe.trace.laws] == [0.0, 1.0]


def test_overrides_reach_into_lists() -> None:
    recipe = parse_recipe(GOOD, overrides=["candidates.prefix.1.distill.tokens=7", "trace.prompts.0.train=9"])
    assert recipe.candidates["prefix"][1].settings.tokens == 7
    assert recipe.trace.prompts[0].train == 9


def test_a_part_takes_overrides_alone() -> None:
    assert settings_from(DistillStep, ["tokens=5", "loss={tvd: 2}"]).loss == {"tvd": 2.0}
    assert settings_from(DistillStep, ["loss=tvd"]).loss == {"tvd": 1.0}
    assert settings_from(InitStep, ["layers=3"]).layers == "3"
    assert settings_from(EvaluateSettings, ["num_draft_tokens=3"]).num_draft_tokens == [3]


def test_every_setting_of_a_draft_length_ends_at_the_longest() -> None:
    kinds = [kind for kind in Settings.__subclasses__() if kind.__module__.startswith("foredraft.")]
    lengths = [kind.model_fields[name] for kind in kinds for name in ("num_draft_tokens", "k", "longest")
               if name in kind.model_fields]  # fmt: skip
    whole = [field for field in lengths if field.annotation is int]
    assert len(whole) >= 8
    assert [Le(LONGEST_DRAFT) in field.metadata for field in whole] == [True] * len(whole)


def test_all_faults_come_together_with_key_and_line() -> None:
    bad = GOOD.replace("train: 4", "trian: 4").replace("bits: 8", "bits: 7").replace("1_000", "many")
    with pytest.raises(RecipeError) as error:
        parse_recipe(bad, "bad.yaml")
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("bad.yaml:4: trace.prompts.0.trian: unknown key")
    assert lines[1].startswith("bad.yaml:9: candidates.prefix.1.distill.tokens: ")
    assert lines[2].startswith("bad.yaml:12: candidates.small.1.quantize.bits: ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("small:", "lookup:", "bad.yaml:10: candidates.lookup: given twice"),
        ("from: prefix", "from: nothing", "candidate 'small' starts from 'nothing', which is no candidate"),
        ("from: prefix", "from: small", "candidates start from each other: small -> small"),
        ("- from: prefix", "- head: {rows: full}", "must start with ngram, init, from or checkpoint"),
        ("quantize: {bits: 8}", "init: {layers: first-2}", "step 2 (init) can only come first"),
        (
            "{bits: 8}",
            "{bits: 8}\n      prune: {layers: 1}",
            "a step has exactly one of: ngram, init, checkpoint, from",
        ),
        ("file: shipped", "file: a, dataset: b", "give either file or dataset"),
        ("1..4", "0..4", "greater than or equal to 1"),
        ("{kind: prompt-lookup}", "{kind: prompt-lookup, min_match: 4}", "min_match 4 is longer than max_match 3"),
        ("{num_draft_tokens: 1..4}", "{}\nselect: {batch_size: 7}", "select.batch_size 7 is not among evaluate.batch"),
        ("{kind: prompt-lookup}", "{kind: ngram, corpus: texts, texts: [{files: [a], weight: 1e9}]}", "equal to 1000"),
        ("1..4", "1..999999999", "1..999999999 goes beyond the longest draft, 64 tokens"),
        ("1e-3", ".inf", "bad.yaml:9: candidates.prefix.1.distill.learning_rate: Input should be a finite number"),
        ("{model: some/model}", "[", "bad.yaml is no YAML"),
        ("{model: some/model}", "{[a, b]: c}", "bad.yaml:2: a key is one word, not a list or a mapping"),
        ("{model: some/model}", "&a [*a]", "bad.yaml is nested too deeply, or an alias of it stands within what"),
    ],
)
def test_faults_name_what_to_change(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(RecipeError, match=_literally(message)):
        parse_recipe(GOOD.replace(old, new), "bad.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tokens", "--set takes key=value, not 'tokens'"),
        ("tokens.more=1", "tokens"),
        ("tokens=-1", "tokens: Input should be greater than or equal to 1"),
        ("tokens=[", "--set tokens=[: the value is no YAML"),
        ("learning_rate=1e999", "learning_rate: Input should be a finite number"),
        ("loss={tvd: .inf}", "loss.tvd: Input should be a finite number"),
        ("loss={tvd: -1}", "loss.tvd: Input should be greater than 0"),
    ],
)
def test_override_faults(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=_literally(message)):
        settings_from(DistillStep, [override])


def test_a_missing_or_empty_recipe_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="There is no recipe"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    with pytest.raises(RecipeError, match="is empty"):
        load_recipe(tmp_path / "empty.yaml")
    (tmp_path / "latin.yaml").write_bytes("# caf\xe9\n".encode("latin-1"))
    with pytest.raises(RecipeError, match="latin.yaml is no text in UTF-8: invalid continuation byte at byte 5"):
        load_recipe(tmp_path / "latin.yaml")


def _literally(text: str) -> str:
    import re

    return re.escape(text)


def test_every_recipe_of_the_benchmarks_loads() -> None:
    recipes = sorted((Path(__file__).parents[1] / "benchmarks").rglob("*.yaml"))
    assert len(recipes) >= 4
    for recipe in recipes:
        assert load_recipe(recipe).candidates
