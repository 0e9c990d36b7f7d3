"""compare: paired by prompt, refused on other text; --fail-under: status 1 with the shortfall and the noise."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foredraft.cli import main
from foredraft.compare import Beside, Comparison, compare_reports, comparison_json
from foredraft.compare_table import comparison_table
from foredraft.core.errors import UnknownNameError, UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.limits import Limit, report_shortfalls, shortfalls
from foredraft.models.target import load_target
from foredraft.pool import evaluate_drafters
from foredraft.settings import EvaluateSettings
from foredraft.trace.store import Trace
from tests.made_up_costs import costs_as_said
from tests.test_trace_adapters import SGLANG, VLLM
from tests.tiny import save_tiny
from tests.traces import build_trace, trace_row

SETTINGS = EvaluateSettings(num_draft_tokens=[1, 2], audit_prompts=0, cost_repeats=3)


def scored(folder: Path, target: Path, specs: list[str], traces: list[Trace]) -> Path:
    with costs_as_said():
        evaluate_drafters(load_target(str(target), "float32"), specs, traces, folder, SETTINGS)
    return folder


def text(folder: Path, target: Path, law: SamplingLaw = GREEDY, shift: int = 0, prompts: int = 6) -> Trace:
    """Answers that repeat themselves after a while, longer ones more."""
    loaded = load_target(str(target), "float32")
    rows = []
    for index in range(prompts):
        answer = [(5 + index + step % (3 + index) + shift) % 200 for step in range(12)]
        rows.append(trace_row(f"p{index}", [1, 7, 8], answer, greedy=law.is_greedy))
    return build_trace(
        folder, rows, law,
        target_fingerprint=loaded.fingerprint, tokenizer_fingerprint=loaded.tokenizer_fingerprint,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> dict[str, Path]:
    """before and after: a draft of the same name, once random, once a copy of the target; all: two kinds in one."""
    root = tmp_path_factory.mktemp("runs")
    traces = [text(root / "greedy", tiny_target_folder), text(root / "warm", tiny_target_folder, SamplingLaw(1.0))]
    first = save_tiny(root / "a" / "draft", num_layers=1, seed=3)
    second = save_tiny(root / "b" / "draft", num_layers=2, seed=4)
    lookup = "prompt-lookup:max_match=1"
    other = [text(root / "other-text", tiny_target_folder, shift=3)]
    return {
        "before": scored(root / "before", tiny_target_folder, [str(first)], traces),
        "after": scored(root / "after", tiny_target_folder, [str(second)], traces),
        "all": scored(root / "all", tiny_target_folder, [str(first), lookup], traces[:1]),
        "other": scored(root / "other", tiny_target_folder, [str(first)], other),
    }


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def compared(*words: Any, **options: Any) -> list[Comparison]:
    found = compare_reports(*words, **options)
    assert all(isinstance(one, Comparison) for one in found)
    return found


def test_differences_are_those_of_the_reports_under_each_law(runs: dict[str, Path]) -> None:
    before, after = report_of(runs["before"]), report_of(runs["after"])
    found = compared(runs["before"], runs["after"], k=2)
    assert [one.first.law for one in found] == [law["label"] for law in before["laws"]]
    for one, here, there in zip(found, before["laws"], after["laws"], strict=True):
        first, second = here["drafters"][0], there["drafters"][0]
        for name, value in one.changes.items():
            figures = [entry[name] if name == "expected_acceptance" else entry[name]["2"] for entry in (first, second)]
            assert [value.first, value.second] == pytest.approx(figures)
            assert value.difference.value == pytest.approx(figures[1] - figures[0])
            assert value.difference.low <= value.difference.value <= value.difference.high
        assert set(one.changes) == {"expected_acceptance", "mean_tokens_per_call", "predicted_speedup"}
        assert set(one.tokens_by_k) == {1, 2}


def test_a_run_compared_with_itself_differs_by_nothing(runs: dict[str, Path]) -> None:
    for one in compared(runs["before"], runs["before"] / "report.json"):
        for change in one.changes.values():
            assert change.difference.bounds == [0.0, 0.0]
            assert change.paired.is_inside_noise
    assert "NaN" not in json.dumps(comparison_json(compared(runs["before"], runs["before"])), allow_nan=False)


def test_a_difference_that_shows_as_nothing_is_called_equal(runs: dict[str, Path]) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison_table(compared(runs["before"], runs["before"])))
    shown = console.export_text()
    assert shown.count("equal") == 6
    assert "better" not in shown
    assert "costs as measured" in shown


def test_the_other_way_round_the_signs_change(runs: dict[str, Path]) -> None:
    there, back = compared(runs["before"], runs["after"], k=1), compared(runs["after"], runs["before"], k=1)
    for one, other in zip(there, back, strict=True):
        for name, change in one.changes.items():
            assert change.difference.value == pytest.approx(-other.changes[name].difference.value)


def test_two_drafters_of_one_report_are_compared(runs: dict[str, Path]) -> None:
    (one,) = compared(runs["all"], None, ["draft", "prompt-lookup:max_match=1"])
    assert (one.first.drafter, one.second.drafter) == ("draft", "prompt-lookup:max_match=1")
    assert one.changes["expected_acceptance"].difference.value > 0.2
    assert not one.changes["expected_acceptance"].paired.is_inside_noise


def test_runs_that_share_one_law_are_compared_under_it(runs: dict[str, Path]) -> None:
    assert [one.first.law for one in compared(runs["all"], runs["before"])] == ["T=0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("before", "other"), "scored on other text under T=0 .*--trace on one trace"),
        (("all",), "Name two drafters of the report with --drafter; it has: draft, prompt-lookup"),
        (("before", "after", ["x"]), "The first report has no drafter 'x'; it has: draft"),
        (("before", "after", ["draft", "x"]), "The second report has no drafter 'x'"),
        (("before", "after", ["draft", "draft", "draft"]), "at most twice"),
        (("before", "after", [], 5), "at k = 1, 2, not at 5"),
    ],
)
def test_what_cannot_be_compared_says_why(runs: dict[str, Path], words: tuple[Any, ...], message: str) -> None:
    first, second, *rest = [*words, None] if len(words) == 1 else words
    with pytest.raises(UserError, match=message):
        compare_reports(runs[first], runs[second] if second else None, *rest)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda report: report["target"].update(fingerprint="0" * 16), "differences would be those of the targets"),
        (lambda report: report["laws"][0]["drafters"][0].pop("counts"), "score again with this version"),
        (lambda report: report["laws"][0]["drafters"][0].update(counts="scores/no.json"), "keep scores/ beside"),
        (lambda report: report["laws"][0].update(label="temperature=0.5") or report["laws"].pop(1), "no law in common"),
        (lambda report: report["laws"][0]["drafters"][0].update(name="x") or report["laws"].pop(1), None),
    ],
    ids=["target", "older report", "counts gone", "law", "one drafter each under another name"],
)
def test_other_targets_laws_and_lost_counts_are_refused(
    runs: dict[str, Path], tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], message: str | None
) -> None:
    folder = Path(shutil.copytree(runs["before"], tmp_path / "copy"))
    report = report_of(folder)
    spoil(report)
    (folder / "report.json").write_text(json.dumps(report))
    if message is None:
        assert compared(runs["before"], folder)
        return
    with pytest.raises(UserError, match=message):
        compare_reports(runs["before"], folder)


# ------ published figures


@pytest.mark.parametrize(
    ("row", "k", "name"), [({**VLLM, "spec_decode_num_drafts": 200}, 2, "vllm"), (SGLANG, 1, "sglang")]
)
def test_published_figures_stand_beside_the_replayed_ones(
    runs: dict[str, Path], tmp_path: Path, row: dict[str, Any], k: int, name: str
) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(row) + "\n")
    found = compare_reports(runs["before"], tmp_path / "bench.json", ["draft"], k=k)
    assert all(isinstance(one, Beside) for one in found)
    report = report_of(runs["before"])
    for one, law in zip(found, report["laws"], strict=True):
        assert one.mean_tokens_per_call == pytest.approx(law["drafters"][0]["mean_tokens_per_call"][str(k)])
        assert one.published.runtime == name
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison_table(found))
    assert name in console.export_text()
    json.dumps(comparison_json(found), allow_nan=False)
    with pytest.raises(UserError, match="two replayed drafters"):
        shortfalls(found, Limit.read("0", "expected_acceptance"))


def test_a_draft_length_that_was_not_scored_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(VLLM))
    with pytest.raises(UserError, match="scored at k = 1, 2, not at 4"):
        compare_reports(runs["before"], tmp_path / "bench.json")
    with pytest.raises(UserError, match="no such drafter; it has: draft"):
        compare_reports(runs["before"], tmp_path / "bench.json", ["x"])


# ------ limits


@pytest.mark.parametrize(
    ("limit", "metric", "fails"),
    [
        ("-0.001", "expected_acceptance", False),
        ("0.001", "expected_acceptance", True),
        ("0%", "mean_tokens_per_call", False),
        ("1%", "mean_tokens_per_call", True),
        ("1e-9", "predicted_speedup", True),
    ],
)
def test_no_change_fails_exactly_where_more_was_asked(
    runs: dict[str, Path], limit: str, metric: str, fails: bool
) -> None:
    found = compared(runs["before"], runs["before"])
    assert len(shortfalls(found, Limit.read(limit, metric))) == (len(found) if fails else 0)


def test_the_sentence_says_by_how_much_and_whether_it_is_noise(runs: dict[str, Path]) -> None:
    (one,) = compared(runs["all"], None, ["prompt-lookup:max_match=1", "draft"])
    loss = -one.changes["expected_acceptance"].difference.value
    (sentence,) = shortfalls([one], Limit.read("-0.05", "expected_acceptance"))
    assert f"is {loss - 0.05:.4g} under -0.05 (beyond the noise" in sentence
    bounds = one.changes["expected_acceptance"].difference
    inside = f"{(bounds.value + bounds.high) / 2}"
    (sentence,) = shortfalls([one], Limit.read(inside, "expected_acceptance"))
    assert "inside the noise" in sentence
    assert not shortfalls([one], Limit.read(inside, "expected_acceptance", spares_noise=True))
    assert shortfalls([one], Limit.read("-0.05", "expected_acceptance", spares_noise=True))


def test_a_value_under_its_limit_is_named_for_each_law(runs: dict[str, Path]) -> None:
    report = report_of(runs["all"])
    low, high = sorted(entry["expected_acceptance"] for entry in report["laws"][0]["drafters"])
    between = Limit.read(str((low + high) / 2), "expected_acceptance")
    (sentence,) = report_shortfalls(report, between)
    assert sentence.startswith("draft, T=0: expected_acceptance")
    assert not report_shortfalls(report, Limit.read(str(low), "expected_acceptance"))
    assert len(report_shortfalls(report, Limit.read("99", "predicted_speedup"))) == 2


@pytest.mark.parametrize("text", ["much", "", "nan", "5%%"])
def test_a_limit_is_a_number(text: str) -> None:
    with pytest.raises(UserError, match="--fail-under takes a"):
        Limit.read(text, "expected_acceptance")


def test_a_limit_is_about_a_known_metric() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'predicted_speedup'"):
        Limit.read("1", "predicted_speed")


# ------ the command line


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("compare before after", 0),
        ("compare before before --fail-under 0", 0),
        ("compare before before --fail-under 1% --metric mean_tokens_per_call", 1),
        ("compare before before --fail-under -2%", 0),
        ("compare before other", 2),
        ("compare before before --fail-under much", 2),
    ],
)
def test_the_exit_status_says_what_became_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: dict[str, Path], words: str, status: int
) -> None:
    known = {name: str(path) for name, path in runs.items()}
    monkeypatch.setattr(sys, "argv", ["foredraft", *[known.get(word, word) for word in words.split()], "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert int(ended.value.code or 0) == status
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert bool(data.get("under")) == (status == 1)
    assert ("under:" in shown.err) == (status == 1)


@pytest.mark.parametrize(("limit", "status"), [("0", 0), ("1.01", 1), ("2%", 2)])
def test_evaluate_acceptance_fails_under_its_limit(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: dict[str, Path],
    tiny_target_folder: Path,
    tmp_path: Path,
    limit: str,
    status: int,
) -> None:
    trace = runs["before"].with_name("greedy")
    words = ["evaluate-acceptance", "--target", str(tiny_target_folder), "--drafter", "prompt-lookup:max_match=1"]
    words += ["--trace", str(trace), "--out", str(tmp_path / "out"), "--dtype", "float32", "--fail-under", limit]
    words += ["--set", "num_draft_tokens=1", "--set", "audit_prompts=0", "--set", "cost_repeats=3", "--json"]
    monkeypatch.setattr(sys, "argv", ["foredraft", *words])
    with costs_as_said(), pytest.raises(SystemExit) as ended:
        main()
    assert int(ended.value.code or 0) == status
    assert ("under 1.01" in capsys.readouterr().err) == (status == 1)
    assert (tmp_path / "out" / "report.json").exists() == (status != 2)
