"""The page: sections in the order in which a reader asks."""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from xml.etree.ElementTree import Element

from foredraft.acceptance.html import layout, plots, tables
from foredraft.acceptance.html.markup import Content, element
from foredraft.acceptance.reading import Choice, LawStandings, Reading, Standing, read_report
from foredraft.acceptance.wording import (
    NO_BREAK,
    NOT_MEASURED,
    interval,
    number,
    percent,
    percent_interval,
    quantity,
    times,
)

Colours = Mapping[str, int]

MEANINGS = (
    ("expected acceptance", "Mean of Σ min(target, draft) over positions of text that the target wrote, 0 to 100 %."),
    ("acceptance by position", "How often draft token i was accepted, given that all before it in the block were."),
    ("tokens per call", "Tokens emitted / target calls, bonus token included, a ratio of sums. Plain decoding is 1."),
    ("cost ratio", "Measured time of one draft step / time of one target step of one token."),
    ("predicted speedup", "Tokens per call / block time in target steps: k draft steps, k + 1 positions verified."),
    ("best k", "The draft length of the largest predicted speedup; a large dot in the plot."),
    ("measured speedup", "Wall clock, plain / speculative decoding: same engine, same prompts, taken in turns."),
    ("break-even", "Drafting can pay for some k only where acceptance exceeds the cost ratio."),
    ("interval", "95 %, by resampling whole prompts. That of a predicted speedup leaves out the noise of the timings."),
    ("replay", "Exact score of every k from one pass over the target's own text; literal decoding is its audit."),
)  # fmt: skip


def render(report: Mapping[str, Any]) -> str:
    """Return the report as one HTML page that needs nothing else: no scripts, no fonts, no network.

    Args:
        report: report.json by its contract, schema 1; optional parts may be absent.

    Raises:
        UserError: the report has another schema.
    """
    reading = read_report(report)
    colours = plots.colours_of(reading.ranking)
    sections = (
        _leaderboards(reading, colours),
        _positions(reading, colours),
        _tokens(reading, colours),
        _costs(reading, colours),
        *_batches(reading, colours),
        *_criteria(reading, colours),
        _domains(reading, colours),
        _training(reading, colours),
        _audits(reading, colours),
        _losers(reading, colours),
        _method(reading),
    )
    title = f"foredraft: {reading.choice.drafter or 'draft models'} for {reading.target or 'a target'}"
    return layout.page(title, _headline(reading), sections)


def _headline(reading: Reading) -> list[Element]:
    choice = reading.choice
    parts = [element("p", "foredraft report · target ", element("bdi", reading.target or "unnamed"), class_="kicker")]
    if not choice.drafter:
        parts.append(element("h1", "No drafter has been chosen yet"))
    elif choice.k:
        noun = "token" if choice.k == 1 else "tokens"
        parts.append(element("h1", element("bdi", choice.drafter), f", {choice.k} draft {noun} a block"))
    else:
        parts.append(element("h1", element("bdi", choice.drafter)))
    parts.append(element("p", choice.sentence or "The report holds no reason in words.", class_="lead"))
    figures = (_key_figures(law, choice) for law in reading.laws)
    parts += [element("div", *row, class_="key-figures") for row in figures if row]
    if reading.notes:
        parts.append(element("ul", *(element("li", note) for note in reading.notes), class_="notes"))
    return parts


def _key_figures(law: LawStandings, choice: Choice) -> list[Element]:
    """The chosen drafter at the chosen k under one law; nothing where it was not scored."""
    for drafter in law.drafters:
        if drafter.name == choice.drafter and choice.k:
            predicted, tokens = drafter.predicted_at(choice.k), drafter.tokens_at(choice.k)
            measured, accepted = drafter.measured_speedup, drafter.score.expected_acceptance
            at = f" at k{NO_BREAK}={NO_BREAK}{drafter.measured_k}" if drafter.measured_k not in (0, choice.k) else ""
            return [
                element("div", *_law_name(law), class_="law"),
                _key_figure("predicted speedup", times(predicted.value), interval(predicted)),
                _key_figure("measured speedup" + at, times(measured.value), interval(measured)),
                _key_figure("tokens per call", number(tokens.value), interval(tokens)),
                _key_figure("accepted", percent(accepted.value), percent_interval(accepted)),
            ]
    return []


def _key_figure(what: str, value: str, bounds: str) -> Element:
    missing = " missing" if value == NOT_MEASURED else ""
    return element(
        "div",
        element("span", value, class_="value" + missing),
        element("span", what, class_="what"),
        element("span", bounds, class_="bounds"),
    )


def _leaderboards(reading: Reading, colours: Colours) -> Element:
    about = "Sorted by predicted speedup at each drafter's best k. The line at 1x is plain decoding."
    if any(len(law.drafters) > tables.TALL for law in reading.laws):
        about += " Long tables scroll inside their box."
    speedups = [drafter.predicted_at_best for drafter in _standings(reading)]
    fastest = _largest(bound for figure in speedups for bound in (figure.value, figure.high))
    slowest = min((figure.value for figure in speedups if figure.is_measured), default=1.0)
    boards: list[Content] = []
    for law in reading.laws:
        boards += [_law_heading(law), tables.leaderboard(law, reading.choice, colours, slowest, fastest)]
    return layout.section("leaderboard", "Leaderboard", about, *boards)


def _positions(reading: Reading, colours: Colours) -> Element:
    k = plots.longest_draft(_standings(reading))
    about = f"How far into a block of {k} drafts stay right; at the left, all text with its interval."
    panels = [
        layout.panel(law.label, partial(plots.position_plot, law, colours, k), tables.position_numbers(law, colours, k))
        for law in reading.laws
        if k
    ]
    return layout.section(
        "positions", "Acceptance by position", f"{about} {_about_colours(colours)}", *layout.grid(panels)
    )


def _tokens(reading: Reading, colours: Colours) -> Element:
    about = "What one target call yields as blocks grow, with its interval; the large dot is the best k."
    figures = (figure for drafter in _standings(reading) for figure in drafter.score.mean_tokens_per_call.values())
    highest = _largest(bound for figure in figures for bound in (figure.value, figure.high))
    panels = [
        layout.panel(law.label, partial(plots.tokens_plot, law, colours, highest), tables.tokens_numbers(law, colours))
        for law in reading.laws
    ]
    return layout.section("tokens", "Tokens per call", f"{about} {_about_colours(colours)}", *layout.grid(panels))


def _costs(reading: Reading, colours: Colours) -> Element:
    about = "Up is better drafts, left is cheaper drafts: the best corner is top left."
    costliest = _largest(drafter.cost_ratio for drafter in _standings(reading))
    panels = [layout.panel(law.label, partial(plots.cost_plot, law, colours, costliest)) for law in reading.laws]
    return layout.section("cost", "Speed against quality", about, *layout.grid(panels))


def _batches(reading: Reading, colours: Colours) -> list[Element]:
    """Nothing where one batch size was timed here and no other machine was asked for."""
    found = [figures for drafter in _standings(reading) for figures in drafter.batches]
    machines = [
        name for name in dict.fromkeys(one.machine for one in found) if name or len({one.rows for one in found}) > 1
    ]
    if not machines:
        return []
    about = (
        "Requests decoded together share each step: verifying stops being free, and drafting pays less. k = 0 is plain "
    )
    about += "decoding. Other machines are predicted from their profiles, by moving and computing; drafters without a "
    about += "model keep the time measured here."
    boxes = [tables.batches(law, machine, colours) for machine in machines for law in reading.laws]
    return [layout.section("batches", "By batch size", about, *layout.beside(boxes))]


def _criteria(reading: Reading, colours: Colours) -> list[Element]:
    laws = [law for law in reading.laws if any(drafter.criteria for drafter in law.drafters)]
    if not laws:
        return []
    about = (
        "None of these ranks drafts by itself: acceptance and time do. They say where a draft's law differs from the "
    )
    about += "target's, on some answers. What the target's law is outside its stored tokens is not known, hence bounds."
    return [
        layout.section("criteria", "Criteria", about, *layout.beside([tables.criteria(law, colours) for law in laws]))
    ]


def _domains(reading: Reading, colours: Colours) -> Element:
    scores = (score for drafter in _standings(reading) for score in drafter.domains.values())
    shares = [score.expected_acceptance.value for score in scores if score.expected_acceptance.is_measured]
    if not shares:
        return layout.section("domains", "By domain", "")
    low, high = min(shares), max(shares)
    about = f"Stronger colour is more accepted, from {percent(low)} to {percent(high)}; easiest domain first."
    maps = [tables.heat_map(law, colours, low, high) for law in reading.laws]
    return layout.section("domains", "By domain", about, *layout.beside(maps))


def _training(reading: Reading, colours: Colours) -> Element:
    if not reading.curves:
        return layout.section("training", "Training", "", layout.plainly("Nothing was trained for this report."))
    own = plots.colours_of(reading.curves, colours)
    about = "Losses compare only between drafters trained on the same loss."
    points = [point for curve in reading.curves.values() for point in curve]
    panels = [
        layout.panel(metric.capitalize().replace("_", " "), partial(plots.training_plot, reading.curves, metric, own))
        for metric in plots.TRAINING_METRICS
        if any(math.isfinite(getattr(point, metric)) for point in points)
    ]
    return layout.section(
        "training", "Training", about, *layout.grid(panels), tables.training_ends(reading.curves, own)
    )


def _audits(reading: Reading, colours: Colours) -> Element:
    about = "A few prompts, decoded literally, must need the target calls that replay expects for the same text."
    return layout.section(
        "audit", "Audit", about, *layout.beside([tables.audits(law, colours) for law in reading.laws])
    )


def _losers(reading: Reading, colours: Colours) -> Element:
    about = "Each drafter that was not chosen, with the reason, and the differences that decide."
    parts = (
        [tables.reasons(reading.choice, colours)]
        if reading.choice.reasons
        else [layout.plainly("No reasons recorded.")]
    )
    if reading.paired:
        parts.append(tables.paired_differences(reading.paired, colours))
    return layout.section("reasons", "Why not the others", about, *parts)


def _method(reading: Reading) -> Element:
    facts: list[Content] = []
    target = ", ".join(filter(None, (reading.target, reading.target_facts)))
    for what, value in (("Machine", reading.machine), ("Target", target)):
        facts += [element("dt", what), element("dd", element("bdi", value or NOT_MEASURED))]
    for law in reading.laws:
        facts += [element("dt", f"Text at {law.label}"), element("dd", _amount(law))]
    words: list[Content] = []
    for term, meaning in MEANINGS:
        words += [element("dt", term), element("dd", meaning)]
    parts: list[Content] = [element("dl", *facts, class_="facts"), element("h3", "What the words mean")]
    parts.append(element("dl", *words, class_="meanings"))
    if reading.stages:
        parts += [element("h3", "Where the time went"), tables.stages(reading)]
    return layout.section("method", "How it was measured", "", *parts)


def _law_heading(law: LawStandings) -> Element:
    return element("h3", *_law_name(law))


def _law_name(law: LawStandings) -> tuple[Content, ...]:
    return law.label, element("small", " greedy" if law.is_greedy else " sampled")


def _about_colours(colours: Colours) -> str:
    others = sum(not colour for colour in colours.values())
    return f"The {len(colours) - others} fastest have names, the other {others} are grey." if others else ""


def _amount(law: LawStandings) -> str:
    prompts = max((drafter.score.prompts for drafter in law.drafters), default=0)
    tokens = max((drafter.score.tokens for drafter in law.drafters), default=0)
    return f"{prompts} prompts, {quantity(tokens)} tokens written by the target" if prompts else NOT_MEASURED


def _standings(reading: Reading) -> Iterator[Standing]:
    return (drafter for law in reading.laws for drafter in law.drafters)


def _largest(values: Iterable[float]) -> float:
    return max(filter(math.isfinite, values), default=1.0)
