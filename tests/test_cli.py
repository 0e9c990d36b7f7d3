"""The command line: help without torch, clear errors with their exit status, every verb alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_pool import WORDS, foredraft

VERBS = [
    "run", "collect", "distill", "quantize", "prune", "build-ngram", "evaluate-acceptance", "select", "export", "report",
    "generate",
]  # fmt: skip


def test_help_imports_no_torch() -> None:
    source = "import sys; from foredraft.cli import app; app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert shown.stdout.strip().endswith("False"), shown.stderr
    assert all(verb in shown.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_an_example_and_offers_json(verb: str) -> None:
    from typer.testing import CliRunner

    from foredraft.cli import app

    shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output
    assert f"foredraft {verb}" in shown
    assert "--json" in re.sub(r"\x1b\[[0-9;]*m", "", shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "missing.yaml"], "There is no recipe missing.yaml"),
        (["run"], "Name a recipe, or give --target and --prompts"),
        (["run", "--target", "T", "--prompts", "missing.jsonl", "--out", "OUT"], "missing.jsonl"),
        (["collect", "--target", "missing-folder/x/y", "--prompts", "shipped", "--out", "OUT"], "no folder missing-folder/x/y"),
        (["collect", "--target", "EMPTY", "--prompts", "shipped", "--out", "OUT"], "is no model folder"),
        (["collect", "--target", "T", "--prompts", "EMPTYFILE", "--out", "OUT"], "holds no prompts"),
        (["collect", "--target", "T", "--prompts", "LONG", "--out", "OUT"], "'long'"),
        (["evaluate-acceptance", "--target", "T", "--drafter", "prompt-lokup", "--prompts", "P", "--out", "OUT"],
         "Did you mean 'prompt-lookup'?"),
        (["evaluate-acceptance", "--target", "T", "--drafter", "prompt-lookup", "--prompts", "P", "--out", "FULL"],
         "holds something"),
        (["evaluate-acceptance", "--target", "T", "--drafter", "OTHER", "--prompts", "P", "--out", "OUT"], "token 3 is"),
        (["evaluate-acceptance", "--target", "T", "--drafter", "prompt-lookup", "--out", "OUT"], "Give --prompts"),
        (["distill", "--target", "T", "--trace", "EMPTY", "--out", "OUT"], "is no trace"),
        (["distill", "--target", "T", "--trace", "TRACE", "--layers", "first-9", "--out", "OUT"], "4 layers"),
        (["prune", "DRAFT", "--target", "T", "--trace", "TRACE", "--set", "layers=2", "--out", "OUT"], "layer"),
        (["report", "EMPTY"], "report.json"),
    ],
)  # fmt: skip
def test_bad_input_is_one_or_two_lines_and_status_2(places: dict[str, str], words: list[str], message: str) -> None:
    ended = foredraft(*[places.get(word, word) for word in words])
    assert ended.returncode == 2, ended.stdout + ended.stderr
    error = ended.stderr[ended.stderr.index("error:") :]
    assert message in error
    assert len(error.strip().splitlines()) <= 2
    assert "Traceback" not in ended.stderr


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path, tiny_draft_folder: Path
) -> dict[str, str]:
    """Files and folders that the commands above name."""
    from tests.tiny import tiny_model, tiny_tokenizer

    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    (root / "full").mkdir()
    (root / "full" / "thesis.txt").write_text("precious")
    (root / "empty.jsonl").write_text("")
    (root / "long.jsonl").write_text(json.dumps({"id": "long", "prompt": "word " * 400}) + "\n")
    rows = [{"id": f"p{i}", "prompt": f"{WORDS[i]} {WORDS[-i - 1]} {i}"} for i in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = root / "other"
    tiny_model(num_layers=1).save_pretrained(other)
    tokenizer = tiny_tokenizer()
    vocab = tokenizer.backend_tokenizer.to_str().replace('"!":3', '"!":4', 1).replace('"\\"":4', '"\\"":3', 1)
    from tokenizers import Tokenizer

    tokenizer._tokenizer = Tokenizer.from_str(vocab)
    tokenizer.save_pretrained(other)
    trace = root / "trace"
    made = foredraft("collect", "--target", tiny_target_folder, "--prompts", root / "prompts.jsonl", "--out", trace,
                     "--max-new-tokens", 8)  # fmt: skip
    assert made.returncode == 0, made.stderr
    return {
        "T": str(tiny_target_folder), "DRAFT": str(tiny_draft_folder), "OTHER": str(other), "EMPTY": str(root / "empty"),
        "FULL": str(root / "full"), "EMPTYFILE": str(root / "empty.jsonl"), "LONG": str(root / "long.jsonl"),
        "P": str(root / "prompts.jsonl"), "TRACE": str(trace), "OUT": str(root / "out"),
    }  # fmt: skip


def test_the_verbs_work_alone_on_files_the_user_names(places: dict[str, str], tmp_path: Path) -> None:
    common = ["--target", places["T"], "--json"]
    trace = ["--trace", places["TRACE"]]
    steps = [
        ("distill", *common, *trace, "--layers", "first-2", "--set", "tokens=600", "--set", "batch_tokens=64", "--out", tmp_path / "d"),
        ("prune", tmp_path / "d", *common, *trace, "--set", "by=last", "--out", tmp_path / "p"),
        ("quantize", tmp_path / "d", *common, "--out", tmp_path / "q"),
        ("build-ngram", *common, *trace, "--out", tmp_path / "n"),
        ("export", tmp_path / "d", *common, "--out", tmp_path / "e"),
        ("evaluate-acceptance", *common, *trace, *_drafters(tmp_path, "d", "p", "q", "n"), "--out", tmp_path / "s",
         "--set", "num_draft_tokens=2", "--set", "audit_prompts=1", "--set", "cost_repeats=3"),
        ("report", tmp_path / "s", "--json"),
        ("select", tmp_path / "s" / "report.json", "--json"),
        ("generate", "hello", *common, "--drafter", tmp_path / "d", "--max-new-tokens", 8),
    ]  # fmt: skip
    for words in steps:
        ended = foredraft(*words)
        assert ended.returncode == 0, (words, ended.stderr)
        assert isinstance(json.loads(ended.stdout), dict)


def _drafters(root: Path, *names: str) -> list[object]:
    return [word for name in names for word in ("--drafter", root / name)]
