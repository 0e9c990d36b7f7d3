"""The command line with a server as the target, with logs, and with traces whose target is not here."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli import main
from foredraft.trace.store import open_trace
from tests.fake_server import FakeServer, serving
from tests.markov import MarkovTarget
from tests.test_acceptance_counters import metrics
from tests.tiny import tiny_tokenizer


def foredraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    """Run the command line with --json in this process; return its exit status and what it printed."""
    monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, words), "--json"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serving(FakeServer(MarkovTarget())) as running:
        yield running


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    tiny_tokenizer().save_pretrained(root / "tokenizer")
    (root / "tokenizer" / "config.json").write_text('{"vocab_size": 272, "eos_token_id": 2}')
    rows = [{"id": f"p{index}", "prompt": f"owl {index}"} for index in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: FakeServer, places: Path
) -> Path:
    words = ("--target", server.address, "--tokenizer", places / "tokenizer", "--prompts", places / "prompts.jsonl")
    status, figures = foredraft(
        monkeypatch, capsys, "collect", *words, "--max-new-tokens", 16, "--out", places / "trace"
    )
    assert (status, figures["answers"], figures["law"]) == (0, 6, "T=1")
    return places / "trace"


def test_a_servers_trace_is_scored_without_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path, server: FakeServer, tmp_path: Path
) -> None:
    assert open_trace(trace).info.top == 20
    server.metrics = metrics("llamacpp")
    words = (
        "--trace",
        trace,
        "--drafter",
        "prompt-lookup",
        "--server-metrics",
        server.address,
        "--out",
        tmp_path / "s",
    )
    status, report = foredraft(monkeypatch, capsys, "evaluate-acceptance", *words)
    assert status == 0
    (law,) = report["laws"]
    (entry,) = law["drafters"]
    assert entry["mean_tokens_per_call"]["3"] >= 1.0
    assert entry["interval"]["mean_tokens_per_call"]["3"]
    assert (entry["cost_ratio"], entry["predicted_speedup"], entry["best_k"], entry["audit"]) == (None,) * 4
    assert law["target_seconds"] == {}
    assert report["target"] == {
        "name": "served",
        "fingerprint": open_trace(trace).info.target_fingerprint,
        "dtype": "unknown",
    }
    assert report["server"]["counters"]["num_accepted"] == 7
    assert report["server"]["replayed"][0]["k"] == 3
    assert any("llamacpp: 2.17 tokens per call" in note for note in report["notes"])
    assert json.loads((tmp_path / "s" / "report.json").read_text()) == report
    page = (tmp_path / "s" / "report.html").read_text()
    assert "prompt-lookup" in page
    assert "llamacpp: 2.17 tokens per call" in page
    status, error = foredraft(monkeypatch, capsys, "select", tmp_path / "s" / "report.json")
    assert (status, "has no costs" in error["error"]) == (2, True)


def test_the_terminal_orders_by_tokens_where_nothing_was_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path, places: Path, tmp_path: Path
) -> None:
    status, _ = foredraft(monkeypatch, capsys, "build-ngram", "--trace", trace, "--out", tmp_path / "ngram")
    assert status == 0
    monkeypatch.setattr(
        sys, "argv", ["foredraft", "evaluate-acceptance", "--trace", str(trace), "--drafter", "prompt-lookup",
                      "--drafter", str(tmp_path / "ngram"), "--out", str(tmp_path / "s")],
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "by tokens per call at the longest k" in shown
    # Built from the very text that is scored, the table guesses more of it.
    lines = [line for line in shown.splitlines() if " 8 " in line]
    assert [("ngram" in line, "prompt-lookup" in line) for line in lines] == [(True, False), (False, True)]


def test_counters_are_a_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: FakeServer
) -> None:
    server.metrics = metrics("llamacpp")
    status, figures = foredraft(monkeypatch, capsys, "counters", server.address)
    assert (status, figures["mean_tokens_per_call"]) == (0, pytest.approx(1 + 7 / 6))


def test_a_log_is_read_by_the_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_target_folder: Path,
    places: Path,
    tmp_path: Path,
) -> None:
    words = ("collect", "--target", tiny_target_folder, "--dtype", "float32")
    prompts = ("--prompts", places / "prompts.jsonl")
    status, _ = foredraft(
        monkeypatch, capsys, *words, *prompts, "--temperature", 0, "--max-new-tokens", 8, "--out", tmp_path / "t"
    )
    assert status == 0
    rows = [{"id": row.prompt_id, "answer_ids": row.answer_ids.tolist()} for row in open_trace(tmp_path / "t").rows()]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    logged = (*words, *prompts, "--answers-from-log", log)
    status, figures = foredraft(monkeypatch, capsys, *logged, "--temperature", 0, "--out", tmp_path / "u")
    assert (status, figures["answers"], figures["logged"]["near_ties"]) == (0, 6, 0)
    assert open_trace(tmp_path / "u").info.provenance == "logged"
    log.write_text(json.dumps({"id": "p0", "answer_ids": [7, 7, 7]}) + "\n")
    status, error = foredraft(monkeypatch, capsys, *logged, "--temperature", 0, "--out", tmp_path / "v")
    assert (status, "is none that" in error["error"]) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("collect", "--target", "SERVER", "--prompts", "shipped", "--out", "OUT"), "name the tokenizer of its model"),
        (("collect", "--target", "SERVER", "--out", "OUT"), "Give --prompts for the target to answer"),
        (("distill", "--target", "SERVER", "--trace", "TRACE", "--out", "OUT"), "keeps its weights to itself"),
        (("evaluate-acceptance", "--drafter", "prompt-lookup", "--prompts", "shipped", "--out", "OUT"), "--target"),
    ],
)
def test_what_a_server_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    server: FakeServer,
    trace: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    known = {"SERVER": server.address, "TRACE": str(trace), "OUT": str(tmp_path / "out")}
    status, error = foredraft(monkeypatch, capsys, *[known.get(word, word) for word in words])
    assert (status, message in error["error"]) == (2, True), error
