"""The report page and the terminal table, by laws over made-up reports."""

import itertools
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from foredraft.acceptance.html import render
from foredraft.acceptance.html.charts import spread, ticks
from foredraft.acceptance.html.plots import NUM_COLOURS, colours_of
from foredraft.acceptance.reading import read_report
from foredraft.acceptance.terminal import leaderboard_table
from foredraft.acceptance.wording import cost, duration, percent, quantity, shortened, size, times
from foredraft.core.errors import UserError
from tests.made_up_report import QUICKSTART, made_up_report, many_candidates

SECTIONS = ("leaderboard", "positions", "tokens", "cost", "domains", "training", "audit", "reasons", "method")
VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[31m"
PAIR = QUICKSTART[2], QUICKSTART[5]
OPTIONAL = ("target", "selection", "curves", "machine", "stages", "paired", "notes", "laws")
OPTIONAL_OF_DRAFTER = (
    "kind", "expected_acceptance", "acceptance_by_position", "mean_tokens_per_call", "interval", "domains",
    "cost_ratio",
    "predicted_speedup", "best_k", "measured_speedup", "audit", "parameters", "bytes", "prompts", "tokens",
)  # fmt: skip


class Page(HTMLParser):
    """What a page holds; fails on a tag that closes another one than the last opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), "an attribute is given twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def with_every_text_hostile(value: Any) -> Any:
    """Return the report with every string, and every key that is a name, replaced by a hostile one."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, list):
        return [with_every_text_hostile(part) for part in value]
    if isinstance(value, dict):
        changed = {key: with_every_text_hostile(part) for key, part in value.items()}
        for names in ("domains", "reasons", "curves"):
            if names in changed:
                changed[names] = {name + HOSTILE: part for name, part in changed[names].items()}
        return changed
    return value


def terminal_lines(report: dict[str, Any], width: int = 100) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(leaderboard_table(report))
        return console.export_text().splitlines()


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render(made_up_report()))


def test_page_needs_nothing_but_itself(page: Page) -> None:
    assert not page.every("script")
    assert not page.every("iframe")
    links = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert {link for link in links if link and not link.startswith("#")} == {"data:,"}
    style = files("foredraft").joinpath("data/report.css").read_text("utf-8")
    assert not re.search(r"@import|url\(|https?:", style)


def test_page_has_every_section_and_its_links_lead_there(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert ids == list(SECTIONS)
    assert [link["href"] for link in page.every("a")] == [f"#{name}" for name in SECTIONS]


def test_names_with_markup_are_harmless() -> None:
    report = with_every_text_hostile(made_up_report(PAIR))
    page = Page(render(report))
    assert not page.every("script")
    assert not page.every("img")
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert "<script>alert(1)</script>" in page.words
    lines = terminal_lines(report)
    assert not any("\x1b" in line for line in lines)


def test_markup_of_the_terminal_in_a_name_is_shown_as_it_is() -> None:
    candidates = [("[red]x[/red]", *QUICKSTART[0][1:])]
    assert any("[red]x[/red]" in line for line in terminal_lines(made_up_report(candidates)))


def test_winner_reasons_notes_and_figures_are_in_words(page: Page) -> None:
    report = made_up_report()
    selection = report["selection"]
    for sentence in (
        selection["sentence"],
        *selection["reasons"].values(),
        *report["notes"],
        *report["machine"].values(),
    ):
        assert str(sentence) in page.words
    assert "float32, 135 M parameters, 269 MB" in page.words
    for candidate in QUICKSTART:
        assert candidate[0] in page.words


@pytest.mark.parametrize("absent", OPTIONAL)
def test_a_report_without_an_optional_part_renders(absent: str) -> None:
    report = made_up_report(PAIR)
    del report[absent]
    assert len(Page(render(report)).every("section")) == len(SECTIONS)
    assert terminal_lines(report)


@pytest.mark.parametrize("absent", OPTIONAL_OF_DRAFTER)
@pytest.mark.parametrize("how", ["absent", "none or nan"])
def test_a_drafter_without_an_optional_part_renders(absent: str, how: str) -> None:
    report = made_up_report(PAIR)
    is_number = isinstance(report["laws"][0]["drafters"][0][absent], float)
    for law in report["laws"]:
        for drafter in law["drafters"]:
            if how == "absent":
                del drafter[absent]
            else:
                drafter[absent] = math.nan if is_number else None
    text = render(report)
    assert len(Page(text).every("section")) == len(SECTIONS)
    assert not re.search(r'"[^"]*\bnan\b[^"]*"', text)
    assert terminal_lines(report)
    if absent in ("cost_ratio", "measured_speedup", "audit", "parameters", "bytes", "expected_acceptance"):
        assert "not measured" in Page(text).words


def test_the_emptiest_report_says_what_is_missing() -> None:
    page = Page(render({"schema": 1}))
    assert len(page.every("section")) == len(SECTIONS)
    assert "No drafter has been chosen yet" in page.words
    assert "not measured" in page.words.lower()


def test_a_report_of_another_schema_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"schema 2, this foredraft reads schema 1\. Score the drafters again"):
        render(made_up_report() | {"schema": 2})
    with pytest.raises(UserError, match="schema 2"):
        leaderboard_table(made_up_report() | {"schema": 2})


def test_no_speculation_can_win() -> None:
    report = made_up_report(PAIR)
    report["selection"] |= {"drafter": "no speculation", "k": 0, "sentence": "Nothing beats the target alone."}
    page = Page(render(report))
    assert "Nothing beats the target alone." in page.words
    assert "0 draft tokens" not in page.words


def test_drawings_stay_on_their_paper() -> None:
    for candidates in (QUICKSTART[:1], QUICKSTART):
        text = render(made_up_report(candidates))
        for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
            width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', drawing).groups())
            xs = re.findall(r' (?:x|x1|x2|cx)="([^"]+)"', drawing)
            ys = re.findall(r' (?:y|y1|y2|cy)="([^"]+)"', drawing)
            corners = " ".join(re.findall(r' points="([^"]+)"', drawing)).split()
            xs += [corner.split(",")[0] for corner in corners]
            ys += [corner.split(",")[1] for corner in corners]
            assert all(0 <= float(x) <= width for x in xs)
            assert all(0 <= float(y) <= height for y in ys)


def test_a_drafter_has_one_colour_and_at_most_eight_have_their_own() -> None:
    reading = read_report(made_up_report(many_candidates(10)))
    colours = colours_of(reading.ranking)
    own = [colour for colour in colours.values() if colour]
    assert sorted(own) == list(range(1, NUM_COLOURS + 1))
    assert colours[reading.choice.drafter] == 1
    again = colours_of(["new", reading.choice.drafter], colours)
    assert again[reading.choice.drafter] == 1
    assert again["new"] != 1


def test_drafters_are_sorted_by_predicted_speedup() -> None:
    for law in read_report(made_up_report(many_candidates(10))).laws:
        speedups = [drafter.predicted_at_best.value for drafter in law.drafters]
        assert speedups == sorted(speedups, reverse=True)


def test_the_interval_of_a_predicted_speedup_is_that_of_its_tokens_per_call() -> None:
    drafter = read_report(made_up_report()).laws[0].drafters[0]
    predicted, tokens = drafter.predicted_at_best, drafter.tokens_at_best
    assert predicted.low / predicted.value == pytest.approx(tokens.low / tokens.value)
    assert predicted.high / predicted.value == pytest.approx(tokens.high / tokens.value)


def test_a_report_read_back_from_json_gives_the_same_page() -> None:
    report = made_up_report(PAIR)
    assert render(json.loads(json.dumps(report))) == render(report)


@pytest.mark.parametrize("count", [1, 12])
def test_the_terminal_table_fits_in_a_hundred_columns_and_cuts_no_figure(count: int) -> None:
    report = made_up_report([(f"{c[0]}-with-a-name-beyond-all-bounds", *c[1:]) for c in many_candidates(count)])
    lines = terminal_lines(report)
    assert max(map(len, lines)) <= 100
    assert not any("…" in line[45:] for line in lines if "%" in line)
    text = "\n".join(lines)
    for drafter in (drafter for law in read_report(report).laws for drafter in law.drafters):
        assert f"{times(drafter.predicted_at_best.value)} " in text
        assert size(drafter.num_bytes) in text
    assert report["selection"]["sentence"] in " ".join(text.split())


def test_the_terminal_marks_the_chosen_drafter_only() -> None:
    marked = [line for line in terminal_lines(made_up_report()) if line.startswith("*")]
    assert len(marked) == 2
    assert all(made_up_report()["selection"]["drafter"] in line for line in marked)


@given(st.lists(st.floats(0, 200), max_size=12), st.floats(0.5, 40))
def test_spread_labels_keep_order_gap_and_bounds(wanted: list[float], gap: float) -> None:
    places = spread(wanted, gap, 0.0, 200.0)
    assert all(-1e-6 <= place <= 200 + 1e-6 for place in places)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    room = min(gap, 200 / max(len(wanted) - 1, 1))
    for before, after in itertools.pairwise(order):
        assert places[after] - places[before] >= room - 1e-6


@given(st.floats(-50, 50), st.floats(1e-3, 1e6), st.integers(1, 8))
def test_ticks_are_few_round_and_inside(low: float, span: float, wanted: int) -> None:
    values = [value for value, _ in ticks(low, low + span, wanted, str)]
    assert len(values) <= wanted + 1
    assert all(low - 1e-6 * span <= value <= low + span * (1 + 1e-6) for value in values)


@given(st.text(max_size=60), st.integers(3, 40))
def test_a_shortened_name_keeps_its_ends(name: str, length: int) -> None:
    short = shortened(name, length)
    assert len(short) <= length or short == name
    assert short == name or (short[0] == name[0] and short[-1] == name[-1])


def test_figures_carry_units() -> None:
    assert (times(1.618), percent(0.618).split()) == ("1.62x", ["62", "%"])
    assert tuple(map(quantity, (0.0, 812.0, 34_112_000.0, 999_999.0))) == ("0", "812", "34.1 M", "1.0 M")
    assert tuple(map(size, (0.0, 70_300_000.0, 102_400_000.0))) == ("0 B", "70.3 MB", "102 MB")
    assert tuple(map(duration, (2.42, 48.2, 185.0, 7801.0))) == (
        "2.4 s",
        "48 s",
        "3 min 05 s",
        "2 h 10 min",
    )
    assert (cost(0.2124), cost(0.00042), cost(0.0)) == ("0.212", "0.0004", "0.000")
    for words in (times, percent, quantity, size, duration, cost):
        assert words(math.nan) == "not measured"


def test_every_colour_can_be_read_on_its_background() -> None:
    style = files("foredraft").joinpath("data/report.css").read_text("utf-8")
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", style.split("@media")[0]))
    dark = light | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", style.split("@media")[1]))
    strongest = float(re.search(r"calc\(4% \+ var\(--heat\) \* ([.\d]+)%\)", style).group(1)) + 0.04
    for scheme in (light, dark):
        for name in ("ink", "soft", "gain", "loss", *(f"c{number}" for number in range(1, NUM_COLOURS + 1))):
            assert contrast(scheme[name], scheme["paper"]) >= 4.5, name
        assert contrast(scheme["ink"], mixed(scheme["heat-ink"], scheme["paper"], strongest)) >= 4.5


def channels(colour: str) -> list[float]:
    return [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]


def mixed(colour: str, other: str, share: float) -> str:
    parts = (share * a + (1 - share) * b for a, b in zip(channels(colour), channels(other), strict=True))
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def contrast(colour: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2.2, 1 to 21."""

    def luminance(colour: str) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels(colour)]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    brighter, darker = sorted((luminance(colour), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)
