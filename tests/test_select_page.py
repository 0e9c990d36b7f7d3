"""The page of a simulation, by laws over what a simulation of a made-up stream finds."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.selection import simulate_policies
from foredraft.selection_page import render_simulation
from foredraft.settings import SimulateSettings
from foredraft.trace.store import open_trace
from tests.test_report_page import HOSTILE, Page
from tests.traces import build_trace, trace_row

POLICIES = ["hedge", "marginal"]


def stream(folder: Path) -> Path:
    """Write four answers that repeat their prompt, and four that say nothing twice, of two domains."""
    phrase = list(range(10, 18))
    rows = [trace_row(f"r{n}", phrase * 2, phrase * 4, domain=HOSTILE) for n in range(4)]
    rows += [trace_row(f"s{n}", [3, 4], list(range(20 * n + 20, 20 * n + 40)), domain="new") for n in range(4)]
    build_trace(folder, rows)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    trace = stream(tmp_path_factory.mktemp("page") / "trace")
    return simulate_policies([open_trace(trace)], ["prompt-lookup"], POLICIES, SimulateSettings(lengths=[2, 4]))


def test_the_page_shows_every_policy_in_every_part_and_needs_nothing_else(found: dict) -> None:
    page = Page(render_simulation(found))
    text = " ".join(page.text)
    assert [dict(attributes)["id"] for tag, attributes in page.tags if tag == "section"] == [
        "policies", "regret", "choice", "domains",
    ]  # fmt: skip
    assert all(text.count(policy) >= 3 for policy in POLICIES)
    assert not any(tag in ("script", "img", "iframe") for tag, _ in page.tags)
    assert all("http" not in str(value) for _, attributes in page.tags for value in dict(attributes).values())


def test_shares_of_a_stretch_fill_its_height(found: dict) -> None:
    """Every box of a choice over time stands on the one before; all of a stretch reach from 0 to 1."""
    page = Page(render_simulation(found))
    titles = [line for line in page.text if "of the blocks up to answer" in line]
    shares = sum(len(part["chosen"]) for one in found["policies"] for part in one["over_time"])
    assert len(titles) == 2 * shares, "once for wide pages and once for narrow ones"
    for one in found["policies"]:
        for part in one["over_time"]:
            assert sum(part["chosen"].values()) == pytest.approx(1.0)


def test_bars_are_those_of_the_figures(found: dict) -> None:
    text = " ".join(Page(render_simulation(found)).text)
    for one in found["policies"]:
        for part in one["domains"].values():
            assert f"{one['policy']}: {part['over_plain']:.2f}x" in text


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", stream(tmp_path / "trace")
    arguments = ["select", "--simulate", "--trace", str(trace), "--drafter", "prompt-lookup", "--policy", "hedge"]
    result = CliRunner().invoke(app, [*arguments, "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "Choice over time" in page.read_text(encoding="utf-8")
