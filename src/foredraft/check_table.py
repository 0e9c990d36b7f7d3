"""A checked pair for a terminal of 100 columns, returned and never printed: traps first, then the runtimes."""

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foredraft.check import PairCheck
from foredraft.core.pair import Finding, ModelFacts, PairFacts
from foredraft.core.runtimes import LOADS, REFUSED, Verdict

_NONE = "\N{EN DASH}"
_STYLES = {LOADS: "green", REFUSED: "red"}


def check_table(check: PairCheck) -> RenderableType:
    """Return traps, runtimes, facts of both sides, and the command of each runtime that was asked for."""
    parts: list[RenderableType] = [Text(_sentence(check), style="bold"), *_traps(check), _runtimes(check.verdicts)]
    parts.append(_facts(check.pair))
    for one in check.verdicts:
        if one.runtime in check.asked and one.command:
            parts.append(Text(f"{one.runtime}: {one.command}"))
    return Group(*parts)


def _sentence(check: PairCheck) -> str:
    usable = "usable" if check.is_usable else "not usable"
    return f"{check.pair.draft.source} for {check.pair.target.source}: {usable} in {' and '.join(check.asked)}."


def _traps(check: PairCheck) -> list[RenderableType]:
    return [_found(finding, "!") for finding in check.findings]


def _found(finding: Finding, mark: str) -> RenderableType:
    text = Text.assemble((f"{mark} ", "yellow"), finding.reason)
    if finding.fix:
        text.append(f" Fix: {finding.fix}", style="dim")
    return Padding(text, (0, 0, 0, 2))


def _runtimes(verdicts: tuple[Verdict, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("runtime", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why, and what fixes it", overflow="fold")
    for one in verdicts:
        table.add_row(one.runtime, Text(one.outcome, style=_STYLES.get(one.outcome, "yellow")), _reasons(one))
    return table


def _reasons(one: Verdict) -> Text:
    """Return what refuses the pair, where something does: its traps matter only behind that."""
    refusing = [finding for finding in one.findings if finding.refuses]
    text = Text("\n").join(
        Text.assemble(finding.reason, (f" {finding.fix}" if finding.fix else "", "dim"))
        for finding in refusing or one.findings
    )
    return text if text.plain else Text(_NONE, style="dim")


def _facts(pair: PairFacts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("", "target", "draft"):
        table.add_column(heading, overflow="fold")
    for name, one, other in zip(
        _rows(pair.target), _rows(pair.target).values(), _rows(pair.draft).values(), strict=True
    ):
        table.add_row(name, one, other, style="" if one == other else "yellow")
    if not pair.same_tokens:
        share = f"{pair.shared:.1%} of the draft's tokens are tokens of the target"
        traffic = "" if pair.traffic_shared != pair.traffic_shared else f"; on the trace {pair.traffic_shared:.1%}"
        table.add_row("tokens that map", "", share + traffic, style="yellow")
    return table


def _rows(facts: ModelFacts) -> dict[str, Any]:
    named = {
        name: _NONE if index < 0 else f"{index} {facts.tokens.get(index, '')}"
        for name, index in (("bos", facts.bos_id), ("eos", facts.eos_id), ("pad", facts.pad_id))
    }
    return {
        "architecture": f"{facts.architecture or facts.kind} ({facts.form})",
        "rows of the vocabulary": f"{facts.num_rows:,}, {facts.num_padding_rows:,} of them padding",
        "tokens": f"{len(facts.tokens):,}, {facts.tokenizer_kind}",
        **named,
        "answers end with": ", ".join(map(str, facts.stop_ids)) or _NONE,
        "bos put in front": "yes" if facts.adds_bos else "no",
        "chat template": "yes" if facts.chat_template else "no",
        "context": f"{facts.max_context:,}" if facts.max_context else _NONE,
        "weights": facts.quantization or facts.dtype or _NONE,
        "head tied": "yes" if facts.is_tied else "no",
    }
