"""A simulation of policies as one HTML page that needs nothing else: regret, choice over time, bars by domain."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from foredraft.acceptance.html import layout, plots, tables
from foredraft.acceptance.html.charts import Axis, Frame, Line, draw_lines, frame, ticks
from foredraft.acceptance.html.markup import Content, element, extend
from foredraft.acceptance.wording import Figure, number, percent, quantity, times
from foredraft.core.files import whole_file

_ORACLE = "oracle by request"
_GAP = 0.2  # of a group of bars, between it and the next


def render_simulation(found: Mapping[str, Any]) -> str:
    """Return what `simulate_policies` found as a page: the choice over time, regret curves, bars by domain."""
    policies = found["policies"]
    colours = plots.colours_of([one["policy"] for one in policies])
    arms = plots.colours_of(_arms_by_share(found))
    sections = (
        layout.section("policies", "Policies", _about(found), _policy_table(found, colours)),
        layout.section(
            "regret", "Regret over time",
            "Seconds behind the best fixed drafter and length, which is known only afterwards; below 0 is ahead of it.",
            *layout.grid([layout.panel("All policies", partial(_regret_plot, policies, colours))]),
        ),
        layout.section(
            "choice", "Choice over time", "Share of the blocks that each drafter and length got, in order of arrival.",
            _legend(arms),
            *layout.grid([layout.panel(one["policy"], partial(_choice_plot, one, arms)) for one in policies]),
        ),
        layout.section(
            "domains", "By domain", "Tokens per second / those of plain decoding. The oracle knows the best drafter "
            "and length of each request beforehand.",
            _legend(colours),
            *layout.grid([_domain_panel(domain, found, colours) for domain in found["best_fixed"]["domains"]]),
        ),
    )  # fmt: skip
    return layout.page(f"foredraft: choosing for {found['target']}", _headline(found), sections)


def write_page(path: Path, found: Mapping[str, Any]) -> None:
    """Write the page, in place of an older one."""
    with whole_file(path) as page:
        page.write_text(render_simulation(found), encoding="utf-8")


def _headline(found: Mapping[str, Any]) -> list[Element]:
    best = max(found["policies"], key=lambda one: one["tokens_per_second"])
    kicker = element("p", "foredraft simulation · target ", element("bdi", found["target"]), class_="kicker")
    lead = (
        f"{times(best['over_best_fixed'])} the best fixed choice, {found['best_fixed']['arm']}, "
        f"{times(best['over_plain'])} plain decoding, and {percent(best['of_request_oracle'])} of an oracle that knows "
        "the best arm of each request."
    )
    return [kicker, element("h1", element("bdi", best["policy"])), element("p", lead, class_="lead")]


def _about(found: Mapping[str, Any]) -> str:
    costs = "measured costs" if found["costs"]["measured"] else "costs as given, none was measured for the target"
    return f"{quantity(found['tokens'])} tokens of {found['answers']} answers, {found['law']}, cold start; {costs}."


def _policy_table(found: Mapping[str, Any], colours: Mapping[str, int]) -> Element:
    headers = ("policy", "tok/s", "tokens per call", "x plain", "x best fixed", "of the oracle", "regret, s", "changes")
    references = [
        ("no speculation", found["plain"]), (f"{found['best_fixed']['arm']}, the best fixed", found["best_fixed"]),
        (_ORACLE, found["request_oracle"]), ("oracle by position", found["position_oracle"]),
    ]  # fmt: skip
    best, oracle = (found[name]["tokens_per_second"] for name in ("best_fixed", "request_oracle"))
    rows: list[Sequence[Content]] = [_cells(name, one, best, oracle, "", "") for name, one in references]
    rows += [
        _cells(
            tables.drafter_name(one["policy"], colours[one["policy"]]), one, best, oracle,
            f"{one['regret_seconds']:+.2f}", str(one["shifts"]),
        )
        for one in found["policies"]
    ]  # fmt: skip
    return tables.table("Policies, and what they are compared with", headers, rows, "figures")


def _cells(
    name: Content, one: Mapping[str, Any], best: float, oracle: float, regret: str, shifts: str
) -> list[Content]:
    rate = one["tokens_per_second"]
    return [
        name, number(rate), number(one["mean_tokens_per_call"]), times(one["over_plain"]), number(rate / best, 3),
        number(rate / oracle, 3), regret, shifts,
    ]  # fmt: skip


def _regret_plot(policies: Sequence[Mapping[str, Any]], colours: Mapping[str, int], paper: plots.Paper) -> Element:
    lines = [
        Line(
            one["policy"], colours[one["policy"]],
            tuple((float(part["answers"]), Figure(part["regret_seconds"])) for part in one["over_time"]),
        )
        for one in policies
    ]  # fmt: skip
    values = [figure.value for line in lines for _, figure in line.points] + [0.0]
    low, high = min(values), max(max(values), min(values) + 1e-9)
    last = max(point for line in lines for point, _ in line.points)
    x = Axis("answers", ticks(0, last, 4, lambda value: f"{value:g}"), 0, last)
    y = Axis("seconds", ticks(low, high, 5, lambda value: f"{value:g}"), low, high)
    plot = frame(x, y, paper.width, paper.height, paper.right, "Regret against the best fixed drafter")
    level = plot.y(0.0)
    extend(plot.svg, element("line", x1=plot.x.start, x2=plot.x.end, y1=level, y2=level, class_="break-even"))
    draw_lines(plot, lines, lambda value: f"{value:+.2f} s")
    return plot.svg


def _choice_plot(policy: Mapping[str, Any], colours: Mapping[str, int], paper: plots.Paper) -> Element:
    stretches = policy["over_time"]
    last = stretches[-1]["answers"]
    x = Axis("answers", ticks(0, last, 4, lambda value: f"{value:g}"), 0, last)
    y = Axis("share of blocks", ticks(0, 1, 4, percent), 0, 1)
    plot = frame(x, y, paper.width, paper.height, 14, f"Choice over time of {policy['policy']}")
    begin = 0
    for part in stretches:
        floor = 0.0
        for arm in colours:
            if share := part["chosen"].get(arm, 0.0):
                title = f"{arm}: {percent(share)} of the blocks up to answer {part['answers']}"
                _box(plot, (float(begin), float(part["answers"])), (floor, floor + share), colours[arm], title)
                floor += share
        begin = part["answers"]
    return plot.svg


def _domain_panel(domain: str, found: Mapping[str, Any], colours: Mapping[str, int]) -> Element:
    bars = [(one["policy"], one["domains"][domain]["over_plain"], colours[one["policy"]]) for one in found["policies"]]
    bars.append((f"{found['best_fixed']['arm']} (fixed)", found["best_fixed"]["domains"][domain], 0))
    bars.append((_ORACLE, found["request_oracle"]["domains"][domain], 0))
    rows = [[name, times(value)] for name, value, _ in bars]
    numbers = tables.table(f"Times plain decoding, {domain}", ("", "x plain"), rows, "figures")
    return layout.panel(domain or "unlabelled", partial(_domain_plot, domain, bars), numbers)


def _domain_plot(domain: str, bars: Sequence[tuple[str, float, int]], paper: plots.Paper) -> Element:
    highest = max(1.0, *(value for _, value, _ in bars)) * 1.05
    x = Axis("policies, then the references", ((len(bars) - 1.5, "fixed"), (len(bars) - 0.5, "oracle")), 0, len(bars))
    y = Axis("x plain decoding", ticks(0, highest, 5, lambda value: f"{value:g}"), 0, highest)
    plot = frame(x, y, paper.width, paper.height, 14, f"Speed by policy, {domain}")
    for index, (name, value, colour) in enumerate(bars):
        _box(plot, (index + _GAP / 2, index + 1 - _GAP / 2), (0.0, value), colour, f"{name}: {times(value)}")
    level = plot.y(1.0)
    extend(plot.svg, element("line", x1=plot.x.start, x2=plot.x.end, y1=level, y2=level, class_="break-even"))
    return plot.svg


def _box(plot: Frame, across: tuple[float, float], along: tuple[float, float], colour: int, title: str) -> None:
    left, right = plot.x(across[0]), plot.x(across[1])
    low, high = plot.y(along[0]), plot.y(along[1])
    box = element("rect", x=left, y=high, width=max(right - left, 0.5), height=max(low - high, 0.0), class_="dot")
    extend(plot.svg, element("g", element("title", title), box, class_=f"c{colour}"))


def _legend(colours: Mapping[str, int]) -> Element:
    named = [tables.drafter_name(arm, colour) for arm, colour in colours.items() if colour]
    if any(not colour for colour in colours.values()):
        named.append(tables.drafter_name("all others", 0))
    return element("div", *named, class_="beside")


def _arms_by_share(found: Mapping[str, Any]) -> list[str]:
    """Return the arms that any policy chose, the most chosen first."""
    total: dict[str, float] = {}
    for policy in found["policies"]:
        for part in policy["over_time"]:
            for arm, share in part["chosen"].items():
                total[arm] = total.get(arm, 0.0) + share
    return sorted(total, key=lambda arm: -total[arm])
