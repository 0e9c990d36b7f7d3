"""The command line: help without torch, clear errors with their exit status, every verb alone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from foredraft.cli import app, main
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

VERBS = [
    "run", "collect", "init", "distill", "quantize", "prune", "build-ngram", "evaluate-acceptance", "select", "export",
    "report", "generate", "check", "compare", "fit-law", "hardware", "counters", "plan", "sensitivity", "compress",
    "low-rank",
]  # fmt: skip
RECIPE = """
target: {{model: {target}}}
trace: {{prompts: [{{file: {prompts}}}]}}
candidates:
  a: [{{ngram: {{kind: prompt-lookup}}}}]
  b: [{{init: {{layers: first-2}}}}, {{distill: {{tokens: 100}}}}]
"""
HELP_WITHOUT_TORCH = """
import sys
from foredraft.cli import app
app(["--help"], standalone_mode=False)
print("torch" in sys.modules)
"""


def foredraft(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path, tiny_draft_folder: Path
) -> dict[str, str]:
    """Files and folders that the commands below name in capitals."""
    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    (root / "full").mkdir()
    (root / "full" / "thesis.txt").write_text("precious")
    (root / "empty.jsonl").write_text("")
    (root / "long.jsonl").write_text(json.dumps({"id": "long", "prompt": "word " * 400}) + "\n")
    (root / "recipe.yaml").write_text(RECIPE.format(target=tiny_target_folder, prompts=root / "prompts.jsonl"))
    rows = [{"id": f"p{index}", "prompt": f"{WORDS[index]} {WORDS[-index - 1]} {index}"} for index in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "TARGET": str(tiny_target_folder),
        "DRAFT": str(tiny_draft_folder),
        "OTHER": str(_draft_of_another_tokenizer(root / "other")),
        "EMPTY": str(root / "empty"),
        "FULL": str(root / "full"),
        "NO-PROMPTS": str(root / "empty.jsonl"),
        "LONG": str(root / "long.jsonl"),
        "PROMPTS": str(root / "prompts.jsonl"),
        "RECIPE": str(root / "recipe.yaml"),
    }


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch, places: dict[str, str]) -> str:
    folder = Path(places["FULL"]).with_name("trace")
    words = ("--target", places["TARGET"], "--prompts", places["PROMPTS"], "--max-new-tokens", 8, "--out", folder)
    assert foredraft(monkeypatch, "collect", *words) == 0
    return str(folder)


def test_help_imports_no_torch() -> None:
    shown = subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], capture_output=True, text=True)
    assert shown.stdout.strip().endswith("False"), shown.stderr
    assert all(verb in shown.stdout for verb in VERBS)


def test_the_command_reference_is_current(tmp_path: Path) -> None:
    words = ("foredraft.cli", "utils", "docs", "--name", "foredraft", "--output", str(tmp_path / "commands.md"))
    subprocess.run([sys.executable, "-m", "typer", *words], check=True, capture_output=True)
    committed = Path(__file__).parents[1] / "docs" / "commands.md"
    assert committed.read_text() == (tmp_path / "commands.md").read_text(), "run make docs"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_an_example_and_offers_json(verb: str) -> None:
    shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert f"foredraft {verb}" in shown
    assert "--json" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run missing.yaml", "There is no recipe missing.yaml"),
        ("run", "Name a recipe, or give --target and --prompts"),
        ("run --target TARGET --prompts missing.jsonl --out OUT", "missing.jsonl"),
        ("run RECIPE --set candidates.a.0.ngram.kind=prompt-lokup --out OUT", "Did you mean 'prompt-lookup'?"),
        ("run RECIPE --set candidates.b.0.init.layers=first-9 --out OUT", "the target has 4"),
        ("run RECIPE --set candidates.b.1.distill.finish=lk --out OUT", "Unknown loss 'lk'"),
        ("run RECIPE --set export=[vlm] --out OUT", "Unknown runtime to export for 'vlm'"),
        ("run RECIPE --set trace.prompts.0.eval=2 --out OUT", "Candidate b learns from answers"),
        ("run RECIPE --set trace.prompts.0.train=50 --out OUT", "prompts"),
        ("collect --target no/such/folder --prompts shipped --out OUT", "There is no folder no/such/folder"),
        ("collect --target EMPTY --prompts shipped --out OUT", "is no model folder"),
        ("collect --target TARGET --prompts NO-PROMPTS --out OUT", "holds no prompts"),
        ("collect --target TARGET --prompts LONG --out OUT", "'long'"),
        ("collect --target TARGET --prompts PROMPTS --temperature -1 --out OUT", "temperature must be 0 or more"),
        ("collect --target TARGET --prompts PROMPTS --out FULL", "never overwritten"),
        ("evaluate-acceptance --target TARGET --drafter prompt-lokup --prompts PROMPTS --out OUT", "'prompt-lookup'?"),
        ("evaluate-acceptance --target TARGET --drafter prompt-lookup --prompts PROMPTS --out FULL", "holds something"),
        ("evaluate-acceptance --target TARGET --drafter OTHER --prompts PROMPTS --out OUT", "token 3 is"),
        ("evaluate-acceptance --target TARGET --drafter prompt-lookup --out OUT", "Give --prompts, or --trace"),
        ("init --target TARGET --set layers=first-9 --out OUT", "the target has 4"),
        ("init --target TARGET --set heal=linear --out OUT", "give --trace"),
        ("init --target TARGET --trace TRACE --set layers=all --set heads=1 --out OUT", "Nearest: 2."),
        ("init --target TARGET --set from=no/such/folder --out OUT", "There is no folder no/such/folder"),
        ("distill --target TARGET --trace EMPTY --out OUT", "is no trace"),
        ("distill --target TARGET --trace TRACE --layers first-9 --out OUT", "the target has 4"),
        ("distill --target TARGET --trace TRACE --set tokens=none --out OUT", "tokens: "),
        ("prune DRAFT --target TARGET --trace TRACE --out OUT", "layer"),
        ("quantize EMPTY --target TARGET --out OUT", "is no model folder"),
        ("build-ngram --kind ngrm --target TARGET --trace TRACE --out OUT", "Did you mean 'ngram'?"),
        ("export DRAFT --target TARGET --runtime vlm --out OUT", "Unknown runtime to export for 'vlm'"),
        ("report EMPTY", "is no report"),
        ("fit-law DRAFT --target TARGET --out OUT", "Give --trace to fit a law on"),
        ("fit-law DRAFT --target TARGET --set temperature=-1 --out OUT", "temperature: Input should be greater"),
        ("evaluate-acceptance --target TARGET --drafter DRAFT --trace TRACE --hardware h10O --out OUT", "h100-sxm"),
        ("evaluate-acceptance --target TARGET --drafter DRAFT --trace TRACE --set batch_sizes=[0] --out OUT", "batch_"),
        ("hardware --measure --out PROMPTS", "never overwritten"),
    ],
)
def test_bad_input_is_one_or_two_lines_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    places: dict[str, str],
    trace: str,
    tmp_path: Path,
    words: str,
    message: str,
) -> None:
    capsys.readouterr()
    known = {**places, "TRACE": trace, "OUT": str(tmp_path / "out")}
    assert foredraft(monkeypatch, *[known.get(word, word) for word in words.split()]) == 2
    shown = capsys.readouterr().err
    error = shown[shown.index("error:") :]
    assert message in error
    assert len(error.strip().splitlines()) <= 2
    assert "Traceback" not in shown
    assert not _results(tmp_path / "out")


@pytest.mark.parametrize(
    "words",
    [
        "init --set layers=first-2 --set vocab=100",
        "fit-law DRAFT",
        "quantize DRAFT --set method=gptq",
        "sensitivity DRAFT",
    ],
)
def test_what_another_target_wrote_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    places: dict[str, str],
    trace: str,
    tmp_path: Path,
    words: str,
) -> None:
    shutil.copytree(trace, tmp_path / "foreign")
    manifest = tmp_path / "foreign" / "manifest.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**fields, "target_fingerprint": "f" * 16}))
    verb, *rest = (places.get(word, word) for word in words.split())
    out = [] if verb == "sensitivity" else ["--out", tmp_path / "out"]
    named = ["--target", places["TARGET"], "--trace", tmp_path / "foreign"]
    capsys.readouterr()
    assert foredraft(monkeypatch, verb, *rest, *named, *out) == 2
    assert "collect a trace from that target" in capsys.readouterr().err


def test_json_errors_are_json_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert foredraft(monkeypatch, "run", "missing.yaml", "--json") == 2
    assert json.loads(capsys.readouterr().out) == {"error": "There is no recipe missing.yaml."}


@pytest.mark.parametrize("rest", [(), ("--json",)])
def test_an_interrupted_command_says_that_it_goes_on(
    rest: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foredraft.recipe.settings_from", interrupted)
    assert foredraft(monkeypatch, "prune", "draft", "--target", "t", "--trace", "t", "--out", "o", *rest) == 130
    assert "Interrupted. The same command goes on where it was." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare --nonsense --json", "No such option: --nonsense"),
        ("prune draft --json", "Missing option '--target'."),
        ("verify draft --target t --seconds inf --json", "Invalid value for '--seconds'"),
    ],
)
def test_wrong_command_lines_are_json_too(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert foredraft(monkeypatch, *line.split()) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"].startswith(message)
    assert message in shown.err


@pytest.mark.slow
def test_the_verbs_work_alone_on_files_the_user_names(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    places: dict[str, str],
    trace: str,
    tmp_path: Path,
) -> None:
    common = ("--target", places["TARGET"], "--json")
    drafters = [word for name in "dpqrnl" for word in ("--drafter", tmp_path / name)]
    small = ("--set", "num_draft_tokens=2", "--set", "audit_prompts=1", "--set", "cost_repeats=3")
    short = ("--set", "tokens=600", "--set", "batch_tokens=64")
    thin = ("--set", "by=weights", "--set", "rank=4", "--set", "form=factored")
    steps: list[tuple[object, ...]] = [
        ("init", *common, "--trace", trace, "--set", "layers=first-2", "--set", "heal=linear", "--out", tmp_path / "i"),
        ("distill", *common, "--trace", trace, "--layers", "first-3", *short, "--out", tmp_path / "d"),
        ("prune", tmp_path / "d", *common, "--trace", trace, "--out", tmp_path / "p"),
        ("quantize", tmp_path / "d", *common, "--out", tmp_path / "q"),
        ("low-rank", tmp_path / "d", *common, *thin, "--out", tmp_path / "r"),
        ("sensitivity", tmp_path / "d", *common, "--trace", trace, "--set", "answers=2", "--set", "probes=0"),
        ("build-ngram", *common, "--trace", trace, "--out", tmp_path / "n"),
        ("fit-law", tmp_path / "d", *common, "--set", "temperature=0.5", "--out", tmp_path / "l"),
        ("export", tmp_path / "d", *common, "--out", tmp_path / "e"),
        ("evaluate-acceptance", *common, "--trace", trace, *drafters, *small, "--out", tmp_path / "s"),
        ("report", tmp_path / "s", "--json"),
        ("report", tmp_path / "s", "--json", "--hardware", "rtx-4060", "--batch-size", 2, "--context", 64),
        ("hardware", "--json"),
        ("select", tmp_path / "s" / "report.json", "--json"),
        ("generate", "hello", *common, "--drafter", tmp_path / "d", "--max-new-tokens", 8),
    ]
    for words in steps:
        capsys.readouterr()
        assert foredraft(monkeypatch, *words) == 0, words
        assert isinstance(json.loads(capsys.readouterr().out), dict)


def _results(out: Path) -> list[Path]:
    """What a refused command left in its output folder, the claim on it aside."""
    return [file for file in out.rglob("*") if file.is_file() and file.name != "foredraft-run.json"]


def _draft_of_another_tokenizer(folder: Path) -> Path:
    """A draft whose tokens 3 and 4 have changed places."""
    tiny_model(num_layers=1).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = rules["model"]["vocab"]
    third, fourth = (token for token, index in sorted(vocab.items(), key=lambda item: item[1]) if index in (3, 4))
    vocab[third], vocab[fourth] = 4, 3
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))
    tokenizer.save_pretrained(folder)
    return folder
