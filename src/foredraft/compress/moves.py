"""The moves of the search: what may be cut next, the least sensitive first, and what a try of it costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.choice import (
    Choice,
    Cutters,
    count_weights,
    cut_draft,
    formats_of,
    rounded_weights,
    simulated,
    swapped_weights,
)
from foredraft.compress.probe import Bench, Probe, measure
from foredraft.models.draft import Draft
from foredraft.models.units import HEAD, search_units

Kind = Literal["bits", "head", "layers", "ffn", "rows"]
_FFN_STEP, _FEWEST_ROWS = 8, 16


@dataclass(frozen=True, slots=True)
class Reach:
    """How far moves go.

    Attributes:
        kinds: Of moves.
        tries: Moves of each kind.
        chunk: Units that go down together.
        group: Inputs that share a scale in 4 bits.
        multiple: Of feed-forward channels; a multiple of group.
    """

    kinds: Sequence[Kind] = ("bits", "head", "layers", "ffn", "rows")
    tries: int = 2
    chunk: int = 8
    group: int = 32
    multiple: int = 32


@dataclass(frozen=True, slots=True)
class Move:
    """A step to another choice, in words."""

    name: str
    choice: Choice


def moves(draft: Draft, choice: Choice, fisher: Mapping[str, float], reach: Reach) -> Iterator[Move]:
    """Yield the moves that are worth trying from a choice.

    Args:
        draft: The one that the search began with.
        fisher: Of each unit but the embedding; see sensitivity.
    """
    makers = {
        "bits": _fewer_bits,
        "head": _smaller_head,
        "layers": _fewer_layers,
        "ffn": _narrower,
        "rows": _fewer_rows,
    }
    for kind in reach.kinds:
        yield from makers[kind](draft, choice, fisher, reach)


@final
class Tries:
    """Tries moves from one choice on a small bench: changes are made in place, and run from the first changed layer.

    Attributes:
        baseline: Of the choice itself.
        passes: Spent on tries, in passes over the small bench.
    """

    def __init__(self, draft: Draft, choice: Choice, bench: Bench, cutters: Cutters, group: int) -> None:
        self._draft, self._choice, self._bench = draft, choice, bench
        self._cutters, self._group = cutters, group
        self._plain = cut_draft(draft, choice, cutters)
        self._formats = formats_of(draft, choice, group)
        self._current = simulated(self._plain, self._formats)
        self._probe = Probe(self._current, bench)
        self._whole_passes = 0.0
        self.baseline = self._probe.baseline

    @property
    def passes(self) -> float:
        return self._probe.passes + self._whole_passes

    def report(self, choice: Choice) -> AcceptanceReport:
        """Return the report of a choice that is one move away."""
        here = self._choice
        if choice.ffn != here.ffn:
            self._whole_passes += 1.0
            plain = cut_draft(self._draft, choice, self._cutters)
            return measure(simulated(plain, formats_of(self._draft, choice, self._group)), self._bench)
        if choice.layers != here.layers:
            (gone,) = set(here.layers) - set(choice.layers)
            return self._probe.report_without(here.layers.index(gone))
        if choice.rows != here.rows:
            return self._probe.report_with_rows(self._cutters.rows(choice.rows))
        return self._rounded(choice)

    def _rounded(self, choice: Choice) -> AcceptanceReport:
        wanted = formats_of(self._draft, choice, self._group)
        changed = {name: chosen for name, chosen in wanted.items() if self._formats.get(name) != chosen}
        layers = [unit.layer for unit in search_units(self._plain.model) if unit.name in changed]
        first = min((layer for layer in layers if layer >= 0), default=len(self._choice.layers))
        with swapped_weights(self._current.model, dict(rounded_weights(self._plain.model, changed))):
            return self._probe.report_from(first)


def _fewer_bits(draft: Draft, choice: Choice, fisher: Mapping[str, float], reach: Reach) -> Iterator[Move]:
    """Yield the least sensitive units a step down."""
    units = [unit for unit in search_units(draft.model) if unit.layer in choice.layers]
    for bits in (8, 4):
        above = [unit for unit in units if choice.bits.get(unit.name, 16) > bits]
        above.sort(key=lambda unit: fisher[unit.name] / count_weights(draft.model, unit))
        chunks = [above[start : start + reach.chunk] for start in range(0, len(above), reach.chunk)]
        for chunk in chunks[: reach.tries]:
            changed = {**choice.bits, **{unit.name: bits for unit in chunk}}
            yield Move(f"{bits} bits: {', '.join(unit.name for unit in chunk)}", replace(choice, bits=changed))


def _smaller_head(draft: Draft, choice: Choice, fisher: Mapping[str, float], reach: Reach) -> Iterator[Move]:
    """Yield the head in fewer bits; rows that are chosen out of it stay in 16."""
    for bits in (8, 4) if not (len(draft.head_token_ids) or choice.rows) else ():
        if choice.bits.get(HEAD, 16) > bits:
            yield Move(f"{bits} bits: head", replace(choice, bits={**choice.bits, HEAD: bits}))


def _fewer_layers(draft: Draft, choice: Choice, fisher: Mapping[str, float], reach: Reach) -> Iterator[Move]:
    """Yield a layer out; the first and the last always stay."""
    units = search_units(draft.model)
    inner = sorted(
        choice.layers[1:-1], key=lambda layer: sum(fisher[unit.name] for unit in units if unit.layer == layer)
    )
    for layer in inner[: reach.tries]:
        kept = tuple(one for one in choice.layers if one != layer)
        yield Move(f"without layer {layer}", replace(choice, layers=kept))


def _narrower(draft: Draft, choice: Choice, fisher: Mapping[str, float], reach: Reach) -> Iterator[Move]:
    """Yield feed-forward parts narrower by an eighth of their first width."""
    first = draft.model.config.get_text_config().intermediate_size
    step = max(first // _FFN_STEP // reach.multiple, 1) * reach.multiple
    width = ((choice.ffn or first) - step) // reach.multiple * reach.multiple
    if width > 0:
        yield Move(f"{width} feed-forward channels", replace(choice, ffn=width))


def _fewer_rows(draft: Draft, choice: Choice, fisher: Mapping[str, float], reach: Reach) -> Iterator[Move]:
    """Yield half of the rows of the head, while it is not rounded."""
    all_rows = len(draft.head_token_ids) or draft.model.get_output_embeddings().out_features
    rows = (choice.rows or all_rows) // 2
    if rows >= max(all_rows // _FEWEST_ROWS, 1) and HEAD not in choice.bits:
        yield Move(f"{rows} rows of the head", replace(choice, rows=rows))
