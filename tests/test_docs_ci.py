"""docs/ci.md: its commands work, one after the other, as they stand there."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from foredraft.cli import main
from tests.made_up_costs import costs_as_said
from tests.tiny import save_tiny

PAGE = Path(__file__).parents[1] / "docs" / "ci.md"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_commands_of_the_page_catch_a_draft_that_has_lost_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(Path("my-model"), num_layers=1)
    save_tiny(Path("served/draft"), num_layers=1)
    save_tiny(Path("candidate/draft"), num_layers=1)
    save_tiny(Path("worse/draft"), num_layers=1, seed=9)
    rows = [{"prompt": f"say owl {index}"} for index in range(4)]
    Path("held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = commands()
    verbs = [shlex.split(line)[1] for line in lines]
    assert verbs == ["collect", "evaluate-acceptance", "check", "evaluate-acceptance", "compare"]
    assert [run(monkeypatch, line) for line in lines] == [0] * len(lines)
    capsys.readouterr()
    run(monkeypatch, lines[-2].replace("candidate/", "worse/").replace("ci/after", "ci/worse"))
    assert run(monkeypatch, lines[-1].replace("ci/after", "ci/worse")) == 1
    assert "beyond the noise" in capsys.readouterr().err


def run(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    """Run a line of the page; the audit and the timings, which take most of its time, are left out."""
    words = shlex.split(line)
    if words[1] == "evaluate-acceptance":
        words += ["--set", "audit_prompts=0", "--set", "num_draft_tokens=2"]
    if words[1] == "collect":
        words = ["8" if word == "64" else word for word in words]
    monkeypatch.setattr(sys, "argv", words)
    with costs_as_said(), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
