"""A server's own counts of drafted and accepted tokens, under the names that scores have here.

Servers count since their start, over all requests and laws. vLLM and llama.cpp count tokens; SGLang gives the
ratios of its last batches. None of them counts the first token of an answer, which no draft came before, as a call.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from foredraft.acceptance.wording import NOT_MEASURED, number
from foredraft.core.errors import CapabilityError
from foredraft.models.remote.client import Client

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_COUNTS = "spec_decode_num_"


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """What a server says of its speculative decoding; NaN for what it does not say.

    Attributes:
        runtime: vllm, llamacpp or sglang.
        num_drafts: Blocks that were verified.
        num_draft_tokens: Draft tokens offered in them.
        num_accepted: Draft tokens that were accepted.
        accepted_by_position: Blocks whose draft token of each position was accepted; empty where it is not counted.
        mean_tokens_per_call: Tokens emitted / target calls, the bonus token included: 1 + accepted / drafts. Calls
            without a guess are left out, which n-gram drafters have many of.
        accepted_of_drafted: Accepted / offered draft tokens, those behind a rejection included. Not an
            acceptance_rate: it falls as blocks get longer.
    """

    runtime: str
    num_drafts: float
    num_draft_tokens: float
    num_accepted: float
    accepted_by_position: tuple[float, ...]
    mean_tokens_per_call: float
    accepted_of_drafted: float

    @property
    def draft_tokens_per_call(self) -> float:
        """Mean length of a block."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts > 0 else math.nan

    @property
    def num_draft_tokens_at_most(self) -> int:
        """The draft length as far as counts show it, since the last blocks of answers are shorter; 0: unknown."""
        mean = self.draft_tokens_per_call
        return max(len(self.accepted_by_position), round(mean) if math.isfinite(mean) else 0)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """P(draft token i accepted | all before it were), if every block had as many tokens as there are positions."""
        before = (self.num_drafts, *self.accepted_by_position)
        return tuple(
            now / then if then else math.nan for then, now in zip(before, self.accepted_by_position, strict=False)
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted / examined draft tokens, by the same assumption; NaN where positions are not counted."""
        examined = self.num_drafts + sum(self.accepted_by_position[:-1])
        return sum(self.accepted_by_position) / examined if self.accepted_by_position and examined else math.nan

    @property
    def sentence(self) -> str:
        """What the counts say, in words."""
        gives = "its own accepted / drafted" if not math.isfinite(self.acceptance_rate) else "accepted / examined"
        rate = self.accepted_of_drafted if not math.isfinite(self.acceptance_rate) else self.acceptance_rate
        length = f" of {self.draft_tokens_per_call:.2f} draft tokens" if self.num_drafts > 0 else ""
        return (
            f"{self.runtime}: {number(self.mean_tokens_per_call)} tokens per call{length}, {rate:.3f} {gives}"
            + (f" ({self.num_accepted:.0f} of {self.num_draft_tokens:.0f} drafted tokens accepted in "
               f"{self.num_drafts:.0f} blocks)" if self.num_drafts > 0 else "")
            + "."
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return plain values; None for what the server does not say."""
        return {
            "runtime": self.runtime,
            "num_drafts": _known(self.num_drafts),
            "num_draft_tokens": _known(self.num_draft_tokens),
            "num_accepted": _known(self.num_accepted),
            "mean_tokens_per_call": _known(self.mean_tokens_per_call),
            "accepted_of_drafted": _known(self.accepted_of_drafted),
            "acceptance_rate": _known(self.acceptance_rate),
            "acceptance_by_position": [_known(value) for value in self.acceptance_by_position],
            "draft_tokens_per_call": _known(self.draft_tokens_per_call),
        }

    def since(self, earlier: "ServerCounters") -> "ServerCounters":
        """Return what came after `earlier`, counts only."""
        # Servers name a position when it is first accepted.
        positions = zip_longest(self.accepted_by_position, earlier.accepted_by_position, fillvalue=0.0)
        return _of_counts(
            self.runtime,
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted - earlier.num_accepted,
            tuple(now - then for now, then in positions),
        )


def read_server(url: str) -> ServerCounters:
    """Return the counters behind an address, with or without /v1 or /metrics.

    Raises:
        ServerError: the server cannot be reached.
        CapabilityError: it gives no metrics, or none of speculative decoding.
    """
    root = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    text = Client(root).get("/metrics")
    if not text.strip():
        raise CapabilityError(
            f"{root}/metrics gives nothing: switch metrics on (llama.cpp: --metrics; SGLang: --enable-metrics)."
        )
    return parse_metrics(text, root)


def parse_metrics(text: str, where: str = "the server") -> ServerCounters:
    """Return the counters of a Prometheus text; those of several engines add up.

    Raises:
        CapabilityError: it holds none of speculative decoding.
    """
    samples = [
        (match["name"].removesuffix("_total"), match["labels"] or "", float(match["value"]))
        for match in _SAMPLE.finditer(text)
        if "spec_" in match["name"] and not match["name"].endswith("_created")
    ]
    for runtime in ("vllm", "llamacpp"):
        prefix = f"{runtime}:{_COUNTS}"
        own = [(name.removeprefix(prefix), labels, value) for name, labels, value in samples if prefix in name]
        if own:
            return _counted(runtime, own)
    lengths = _of(samples, "sglang:spec_accept_length")
    if lengths:
        rates = _of(samples, "sglang:spec_accept_rate")
        return ServerCounters("sglang", math.nan, math.nan, math.nan, (), _mean(lengths), _mean(rates))
    raise CapabilityError(
        f"{where} counts no speculative decoding: is a drafter loaded and switched on? vLLM needs "
        "--speculative-config, llama.cpp --spec-type, SGLang --speculative-algorithm."
    )


def beside(counters: ServerCounters, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters next to what replay says at the draft length that they show, by law and drafter."""
    length = counters.num_draft_tokens_at_most
    replayed = [
        {
            "law": law["label"],
            "drafter": entry["name"],
            "k": int(k),
            "mean_tokens_per_call": value,
            "mean_tokens_per_guess": _per_guess(value, entry["guess_share"][k]),
        }
        for law in report["laws"]
        for entry in law["drafters"]
        for k, value in entry["mean_tokens_per_call"].items()
        if length in (0, int(k))
    ]
    return {"counters": counters.to_json(), "replayed": replayed}


def comparison(counters: ServerCounters, replayed: Sequence[Mapping[str, Any]]) -> str:
    """Return in words what the server counted and what replay says; `replayed` is that of `beside`."""
    figures = (
        f"{entry['drafter']} {number(entry['mean_tokens_per_guess'] or math.nan)} at k = {entry['k']}, {entry['law']}"
        for entry in replayed
    )
    return f"{counters.sentence} Replayed, calls with a guess only: {'; '.join(figures) or NOT_MEASURED}."


def _counted(runtime: str, samples: Sequence[tuple[str, str, float]]) -> ServerCounters:
    by_position: dict[int, float] = {}
    for name, labels, value in samples:
        position = _POSITION.search(labels)
        if name == "accepted_tokens_per_pos" and position:
            by_position[int(position[1])] = by_position.get(int(position[1]), 0.0) + value
    drafts, offered, accepted = (sum(_of(samples, name), 0.0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return _of_counts(runtime, drafts, offered, accepted, tuple(by_position[key] for key in sorted(by_position)))


def _of_counts(
    runtime: str, drafts: float, offered: float, accepted: float, by_position: tuple[float, ...]
) -> ServerCounters:
    return ServerCounters(
        runtime,
        drafts,
        offered,
        accepted,
        by_position,
        1.0 + accepted / drafts if drafts else math.nan,
        accepted / offered if offered else math.nan,
    )


def _of(samples: Sequence[tuple[str, str, float]], name: str) -> list[float]:
    return [value for own, _, value in samples if own == name]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _per_guess(mean_tokens_per_call: float, guess_share: float) -> float | None:
    """Return tokens per call over the calls that had a guess, which are those that servers count."""
    return 1.0 + (mean_tokens_per_call - 1.0) / guess_share if guess_share > 0 else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
