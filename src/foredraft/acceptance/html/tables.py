"""The tables of the report. Every table scrolls inside its own box."""

import math
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from foredraft.acceptance.html.charts import Scale, strip, ticks
from foredraft.acceptance.html.markup import Content, element, extend
from foredraft.acceptance.reading import Choice, CurvePoint, LawStandings, PairedDifference, Reading, Standing
from foredraft.acceptance.wording import (
    NOT_MEASURED,
    RANGE,
    Figure,
    cost,
    duration,
    interval,
    number,
    percent,
    percent_interval,
    quantity,
    shortened,
    size,
    times,
)

TALL = 24  # rows beyond which a table scrolls in its height too
PLAIN = 1.0  # plain decoding on the scale of speedups


def table(caption: str, headers: Sequence[Content], rows: Sequence[Sequence[Content]], kind: str) -> Element:
    """Return a table in its box; the first cell of each row is the row's header."""
    head = element("tr", *(element("th", header, scope="col") for header in headers))
    body = element("tbody")
    for first, *others in rows:
        cells = (other if _is_cell(other) else element("td", other) for other in others)
        extend(body, element("tr", element("th", first, scope="row"), *cells))
    whole = element("table", element("caption", caption), element("thead", head), body, class_=kind)
    tall = " tall" if len(rows) > TALL else ""
    return element("div", whole, class_="box" + tall, tabindex="0", role="region", aria_label=caption)


def drafter_name(name: str, colour: int, kind: str = "", chosen: bool = False) -> Element:
    """Return a drafter's name with the colour it has in the plots."""
    label = element("span", element("span", class_=f"key c{colour}"), element("bdi", name), class_="name", title=name)
    if chosen:
        extend(label, " ", element("span", "chosen", class_="badge"))
    if kind:
        extend(label, element("small", kind))
    return label


def leaderboard(
    law: LawStandings, choice: Choice, colours: Mapping[str, int], slowest: float, fastest: float
) -> Element:
    """Return the drafters under one law, best predicted speedup first, on a common scale of speedups."""
    scale = Scale(min(slowest, PLAIN), max(fastest, 1.2), 8, 156)
    headers = (
        "drafter", "predicted speedup", _strip_axis(scale), "best k", "tokens per call", "expected acceptance",
        "cost ratio", "measured speedup", "parameters", "size",
    )  # fmt: skip
    rows = []
    for drafter in law.drafters:
        chosen = drafter.name == choice.drafter
        predicted, tokens = drafter.predicted_at_best, drafter.tokens_at(drafter.shown_k)
        rows.append(
            (
                drafter_name(drafter.name, colours[drafter.name], _kind(drafter), chosen),
                _with_interval(times(predicted.value), interval(predicted)),
                element("td", strip(predicted, scale, PLAIN, _in_words(drafter)), class_="plot"),
                str(drafter.shown_k) if drafter.shown_k else _missing(),
                _with_interval(number(tokens.value), interval(tokens)),
                _share(drafter.score.expected_acceptance),
                _or_missing(cost(drafter.cost_ratio)),
                _measured_speedup(drafter),
                _or_missing(quantity(drafter.parameters)),
                _or_missing(size(drafter.num_bytes)),
            )
        )
    return table(f"Leaderboard at {law.label}", headers, rows, "figures leaderboard")


def position_numbers(law: LawStandings, colours: Mapping[str, int], k: int) -> Element:
    """Return acceptance by position at one k, in numbers."""
    rows = []
    for drafter in law.drafters:
        known = drafter.score.acceptance_by_position.get(k, ())
        cells = [_share(figure) for figure in known] or [_missing() for _ in range(k)]
        name = drafter_name(drafter.name, colours[drafter.name])
        rows.append((name, _share(drafter.score.expected_acceptance), *cells))
    headers = ("drafter", "all text", *(str(position) for position in range(1, k + 1)))
    return table(f"Acceptance by position at k = {k}, {law.label}", headers, rows, "figures")


def tokens_numbers(law: LawStandings, colours: Mapping[str, int]) -> Element:
    """Return tokens per call and predicted speedup for every k, in numbers."""
    lengths = sorted({k for drafter in law.drafters for k in drafter.score.mean_tokens_per_call})
    rows = []
    for drafter in law.drafters:
        cells = []
        for k in lengths:
            tokens = drafter.score.mean_tokens_per_call.get(k, Figure())
            cell = _with_interval(number(tokens.value), interval(tokens))
            if k in drafter.predicted_speedup:
                extend(cell, element("small", times(drafter.predicted_speedup[k])))
            if k == drafter.best_k:
                cell.set("class", cell.get("class", "") + " best")
            cells.append(cell)
        rows.append((drafter_name(drafter.name, colours[drafter.name]), *cells))
    headers = ("drafter", *(f"k = {k}" for k in lengths))
    return table(f"Tokens per call and predicted speedup by k, {law.label}", headers, rows, "figures")


def heat_map(law: LawStandings, colours: Mapping[str, int], low: float, high: float) -> Element:
    """Return expected acceptance by domain; the shade runs from `low` to `high`."""
    domains = _domains_by_ease(law.drafters)
    rows = []
    for drafter in law.drafters:
        cells = []
        for domain in domains:
            score = drafter.domains.get(domain)
            figure = score.expected_acceptance if score else Figure()
            cell = _share(figure)
            if figure.is_measured:
                cell.set("style", f"--heat: {100 * (figure.value - low) / max(high - low, 1e-9):.0f}")
            cells.append(cell)
        rows.append((drafter_name(drafter.name, colours[drafter.name]), *cells))
    headers: list[Content] = ["drafter"]
    for domain in domains:
        prompts = max(drafter.domains[domain].prompts for drafter in law.drafters if domain in drafter.domains)
        count = element("small", f"n = {prompts}" if prompts else "")
        headers.append(element("span", element("bdi", domain), count))
    return table(f"Expected acceptance by domain at {law.label}, n prompts", headers, rows, "figures heat")


def training_ends(curves: Mapping[str, Sequence[CurvePoint]], colours: Mapping[str, int]) -> Element:
    """Return where each training ended and what it took."""
    rows = []
    for name, curve in curves.items():
        end = curve[-1]
        rate = end.positions / end.seconds if end.seconds else math.nan
        texts = (
            quantity(end.positions),
            duration(end.seconds),
            number(rate, 0),
            number(end.loss),
            percent(end.acceptance),
        )
        rows.append((drafter_name(name, colours[name]), *map(_or_missing, texts)))
    headers = ("drafter", "positions", "time", "positions/s", "last loss", "last acceptance")
    return table("Where training ended", headers, rows, "figures")


def audits(law: LawStandings, colours: Mapping[str, int]) -> Element:
    """Return replay beside literal decoding, one row for each drafter and k that was decoded."""
    headers = ["drafter", "k", "replay, all", "replay, same text", "literal", "prompts"]
    headers += ["text unchanged", "verdict"] if law.is_greedy else ["verdict"]
    rows: list[Sequence[Content]] = []
    for drafter in law.drafters:
        audit = drafter.audit
        if not audit.prompts:
            name = drafter_name(drafter.name, colours[drafter.name])
            rows.append((name, *(_missing() for _ in headers[1:])))
        for k, literal in sorted(audit.mean_tokens_per_call.items()):
            everywhere = drafter.tokens_at(k)
            row: list[Content] = [
                drafter_name(drafter.name, colours[drafter.name]),
                str(k),
                _with_interval(number(everywhere.value), interval(everywhere)),
                _or_missing(number(audit.replayed.get(k, math.nan))),
                _or_missing(number(literal)),
                str(audit.prompts),
            ]
            if law.is_greedy:
                row.append(_missing() if audit.same_text < 0 else f"{audit.same_text} of {audit.prompts}")
            verdict = "✓ agrees" if audit.agrees else "✗ differs"
            rows.append((*row, element("span", verdict, class_="yes" if audit.agrees else "no")))
    return table(f"Tokens per call: replay and literal decoding at {law.label}", headers, rows, "figures audit")


def paired_differences(paired: Sequence[PairedDifference], colours: Mapping[str, int]) -> Element:
    """Return the differences between two drafters on the same prompts."""
    rows = []
    for pair in paired:
        share = pair.metric == "expected_acceptance"
        shown = pair.difference.scaled(100.0) if share else pair.difference
        decimals, unit = (1, " points") if share else (3, "")
        bounds = f"{shown.low:+.{decimals}f} to {shown.high:+.{decimals}f}" if shown.has_interval else ""
        value = f"{shown.value:+.{decimals}f}{unit}" if shown.is_measured else NOT_MEASURED
        rows.append(
            (
                drafter_name(pair.better, colours.get(pair.better, 0)),
                element("td", drafter_name(pair.worse, colours.get(pair.worse, 0)), class_="words"),
                element("td", pair.law, class_="words"),
                element("td", pair.metric.replace("_", " "), class_="words"),
                _with_interval(value, bounds),
                element("td", _verdict(pair.difference), class_="words"),
                _or_missing(number(pair.prompts_needed, 0)),
            )
        )
    headers = ("drafter", "against", "law", "metric", "difference", "reading", "prompts needed")
    return table("Paired differences on the same prompts", headers, rows, "figures paired")


def reasons(choice: Choice, colours: Mapping[str, int]) -> Element:
    """Return why each drafter was not chosen, in a sentence each."""
    rows = [
        (drafter_name(name, colours.get(name, 0)), element("td", reason, class_="words"))
        for name, reason in choice.reasons
    ]
    return table("Why the others were not chosen", ("drafter", "reason"), rows, "reasons")


def batches(law: LawStandings, machine: str, colours: Mapping[str, int]) -> Element:
    """Return what is predicted at each batch size, here or on another machine."""
    found = [(drafter, one) for drafter in law.drafters for one in drafter.batches if one.machine == machine]
    rows = []
    for drafter, one in found:
        rows.append(
            (
                drafter_name(drafter.name, colours[drafter.name]),
                str(one.rows),
                times(one.speedup) if one.best_k else element("td", "no gain", class_="words"),
                str(one.best_k or "0"),
                _or_missing(percent(one.break_even)),
                _or_missing(quantity(one.tokens_per_second)),
                _or_missing(number(one.joules, 3)),
                element("td", "fits" if one.fits else "too large", class_="words"),
            )
        )
    headers = (
        "drafter",
        "requests",
        "speedup",
        "best k",
        "break-even acceptance",
        "tokens/s",
        "joules/token",
        "memory",
    )
    where = f"on {machine}" if machine else "here"
    return table(f"Predicted by batch size {where}, {law.label}", headers, rows, "figures batches")


def criteria(law: LawStandings, colours: Mapping[str, int]) -> Element:
    """Return what explains the acceptance of the drafts that have laws."""
    rows = []
    for drafter in law.drafters:
        if drafter.criteria is None:
            continue
        found = drafter.criteria
        rows.append(
            (
                drafter_name(drafter.name, colours[drafter.name]),
                _or_missing(_between(found.acceptance_low, found.acceptance_high)),
                _or_missing(_between(found.kl_low, found.kl_high)),
                _or_missing(percent(found.kl_infinite_share)),
                _or_missing(percent(found.top10_coverage)),
                _or_missing(percent(found.frequent_token_accuracy)),
                _or_missing(number(found.entropy_ratio)),
                _or_missing(percent(found.memory_fraction)),
                _or_missing(cost(found.cost_ratio)),
            )
        )
    headers = (
        "drafter", "acceptance, bounds", "KL, nats", "KL infinite", "in its top 10", "right on frequent tokens",
        "entropy ratio", "memory", "cost ratio",
    )  # fmt: skip
    return table(f"Criteria at {law.label}", headers, rows, "figures criteria")


def _between(low: float, high: float) -> str:
    if math.isfinite(low) and not math.isfinite(high):
        return f"at least {number(low, 3)}"
    return f"{number(low, 3)}{RANGE}{number(high, 3)}" if math.isfinite(low) else NOT_MEASURED


def _kind(drafter: Standing) -> str:
    return f"{drafter.kind}, draws at {drafter.draft_law}" if drafter.draft_law else drafter.kind


def stages(reading: Reading) -> Element:
    """Return the seconds of each stage, with its share of the whole as a bar."""
    whole = sum(seconds for _, seconds in reading.stages if math.isfinite(seconds)) or 1.0
    rows: list[Sequence[Content]] = [
        (
            name,
            duration(seconds),
            element("td", element("span", class_="bar", style=f"--share: {100 * seconds / whole:.1f}")),
        )
        for name, seconds in reading.stages
        if math.isfinite(seconds)
    ]
    rows.append(("all stages", duration(whole), ""))
    return table("Wall time by stage", ("stage", "time", "share"), rows, "figures stages")


def _is_cell(content: Content) -> bool:
    return isinstance(content, Element) and content.tag == "td"


def _missing() -> Element:
    return element("td", NOT_MEASURED, class_="missing")


def _or_missing(text: str) -> Element:
    return _missing() if text == NOT_MEASURED else element("td", text)


def _with_interval(text: str, bounds: str) -> Element:
    if text == NOT_MEASURED:
        return _missing()
    return element("td", text, element("small", bounds)) if bounds else element("td", text)


def _share(figure: Figure) -> Element:
    return _with_interval(percent(figure.value), percent_interval(figure))


def _measured_speedup(drafter: Standing) -> Element:
    measured = drafter.measured_speedup
    cell = _with_interval(times(measured.value), interval(measured))
    if measured.is_measured and drafter.measured_k not in (0, drafter.best_k):
        extend(cell, element("small", f"at k = {drafter.measured_k}"))
    return cell


def _in_words(drafter: Standing) -> str:
    predicted = drafter.predicted_at_best
    return f"{shortened(drafter.name, 60)}: {times(predicted.value)} {interval(predicted)}".rstrip()


def _strip_axis(scale: Scale) -> Element:
    svg = element("svg", class_="strip", width=162, height=14, viewBox="0 0 162 14", role="img")
    svg.set("aria-label", "predicted speedup as a dot")
    for value, text in ticks(PLAIN, scale.high, 2, lambda value: f"{value:g}x"):
        extend(svg, element("text", text, x=scale(value), y=11, class_="tick middle"))
    return svg


def _domains_by_ease(drafters: Sequence[Standing]) -> list[str]:
    found: dict[str, list[float]] = {}
    for drafter in drafters:
        for name, score in drafter.domains.items():
            found.setdefault(name, []).append(score.expected_acceptance.value)
    means = {name: sum(filter(math.isfinite, values)) / len(values) for name, values in found.items()}
    return sorted(means, key=lambda name: (-means[name], name))


def _verdict(difference: Figure) -> str:
    if not difference.has_interval:
        return "no interval"
    return "clear" if difference.low > 0 or difference.high < 0 else "within noise"
