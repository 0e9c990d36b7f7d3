"""Whether a draft can serve a target, and where: facts of both, what differs, and a verdict for each runtime."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from foredraft.catalog import unknown_name_message
from foredraft.core.errors import TraceError, UnknownNameError
from foredraft.core.pair import SHOWN_DIFFERENCES, Finding, ModelFacts, PairFacts, token_texts
from foredraft.core.pair_findings import pair_findings
from foredraft.core.runtimes import REFUSED, RUNTIMES, Verdict, verdict
from foredraft.models.facts import Side, backend_fingerprint, cut_alike, read_side
from foredraft.trace.store import Trace, open_trace

DEFAULT_RUNTIMES = ("foredraft", "transformers")
_TRACE_ROWS = 256
_SHOWN_FACTS = (
    "form", "architecture", "num_rows", "num_padding_rows", "base_tokens", "tokenizer_kind", "bos_id", "eos_id",
    "pad_id", "adds_bos", "adds_eos", "max_context", "dtype", "is_tied", "quantization", "head_rows",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PairCheck:
    """A checked pair.

    Attributes:
        findings: What can go wrong wherever the pair is served.
        verdicts: One for each runtime.
        asked: The runtimes that must take the pair for it to be usable.
    """

    pair: PairFacts
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    asked: tuple[str, ...]

    @property
    def is_usable(self) -> bool:
        return all(one.outcome != REFUSED for one in self.verdicts if one.runtime in self.asked)

    def to_json(self) -> dict[str, Any]:
        pair = self.pair
        return {
            "usable": self.is_usable,
            "asked": list(self.asked),
            "target": _facts_json(pair.target),
            "draft": _facts_json(pair.draft),
            "same_tokens": pair.same_tokens,
            "first_differences": pair.named_differences(shown=SHOWN_DIFFERENCES) if not pair.same_tokens else "",
            "shared_tokens": _or_none(pair.shared),
            "shared_tokens_on_trace": _or_none(pair.traffic_shared),
            "traps": [_finding_json(finding) for finding in self.findings],
            "runtimes": [
                {
                    "runtime": one.runtime,
                    "outcome": one.outcome,
                    "findings": [_finding_json(finding) for finding in one.findings],
                    "command": one.command,
                }
                for one in self.verdicts
            ],
        }


def check_pair(
    target: str,
    draft: str,
    runtimes: Sequence[str] = (),
    trace: Path | None = None,
    k: int = 4,
    read_weights: bool = False,
) -> PairCheck:
    """Return what becomes of a draft behind a target, in every runtime, from their files alone.

    Args:
        runtimes: Those that must take the pair; foredraft and transformers if none is named.
        trace: Text by which the tokens that both share are weighted.
        k: Draft tokens that the commands ask for.
        read_weights: Whether to load the target, to see whether a foredraft draft was made for these weights.

    Raises:
        ModelError: one of the two is no model.
        UnknownNameError: no such runtime.
        TraceError: the trace cannot be opened, or is of another tokenizer than the target.
    """
    for name in runtimes:
        if name not in RUNTIMES:
            raise UnknownNameError(unknown_name_message("runtime", name, RUNTIMES))
    one, other = read_side(target), read_side(draft)
    facts = replace(other.facts, fault=other.facts.fault or _foreign(one, other))
    shared = math.nan if trace is None else _traffic_shared(one, other, open_trace(trace))
    alike = cut_alike(one, other)
    pair = PairFacts.of(one.facts, facts, shared, alike, _changed(one, other, read_weights))
    verdicts = tuple(verdict(name, pair, k) for name in RUNTIMES)
    return PairCheck(pair, tuple(pair_findings(pair)), verdicts, tuple(runtimes) or _defaults(pair))


def _defaults(pair: PairFacts) -> tuple[str, ...]:
    """A draft without a model is served here and nowhere else; what is no transformers folder may be too."""
    folders = pair.target.form == pair.draft.form == "folder"
    return DEFAULT_RUNTIMES if folders else DEFAULT_RUNTIMES[:1]


def _foreign(target: Side, draft: Side) -> str:
    """Return why foredraft refuses a draft of its own behind this target; empty if it does not."""
    made_for = draft.manifest
    if made_for is None or made_for.vocab_size == target.facts.num_rows:
        return ""
    return (
        f"{draft.facts.source} was made for {made_for.target} with {made_for.vocab_size:,} rows; "
        f"{target.facts.source} has {target.facts.num_rows:,}."
    )


def _changed(target: Side, draft: Side, read_weights: bool) -> str:
    made_for = draft.manifest
    if made_for is None:
        return ""
    if (fingerprint := _fingerprint(target, made_for.tokenizer_fingerprint)) != made_for.tokenizer_fingerprint:
        return (
            f"The tokenizer of the target behind this draft has changed: it was {made_for.target} with "
            f"{made_for.tokenizer_fingerprint[:8]}, and is {fingerprint[:8]}."
        )
    if not read_weights:
        return ""
    from foredraft.models.loading import load_causal_lm  # brings transformers

    found = [load_causal_lm(str(target.path), dtype).fingerprint for dtype in ("float32", "bfloat16")]
    if made_for.target_fingerprint in found:
        return ""
    return (
        f"The target behind this draft has changed: it was {made_for.target} with {made_for.target_fingerprint[:8]}, "
        f"and is {found[0][:8]}."
    )


def _fingerprint(target: Side, expected: str) -> str:
    """Return the fingerprint of the target's tokenizer; what transformers makes of its files counts in the end."""
    found = backend_fingerprint(target.tokenizer) if target.tokenizer else ""
    if found == expected or not target.path.is_dir():
        return found
    from foredraft.models.loading import load_tokenizer, tokenizer_fingerprint  # brings transformers

    return tokenizer_fingerprint(load_tokenizer(target.path))


def _traffic_shared(target: Side, draft: Side, trace: Trace) -> float:
    """Return the share of the draft's tokens in a trace's answers that are tokens of the target too."""
    if target.tokenizer is None or draft.tokenizer is None:
        return math.nan
    if trace.info.vocab_size != target.facts.num_rows:
        raise TraceError(
            f"{trace.path} was written by {trace.info.target} with {trace.info.vocab_size:,} rows, not by "
            f"{target.facts.source} with {target.facts.num_rows:,}. Name a trace of this target."
        )
    needed: Counter[int] = Counter()
    for row in islice(trace.rows(tops=False), _TRACE_ROWS):
        text = target.tokenizer.decode(row.answer_ids.tolist(), skip_special_tokens=True)
        needed.update(draft.tokenizer.encode(text, add_special_tokens=False).ids)
    known = token_texts(target.facts)
    texts = {index: _texts_of(draft.facts, index) for index in needed}
    return sum(count for index, count in needed.items() if texts[index] <= known) / max(1, needed.total())


def _texts_of(facts: ModelFacts, index: int) -> frozenset[str]:
    return token_texts(replace(facts, tokens={index: facts.tokens[index]}))


def _facts_json(facts: ModelFacts) -> dict[str, Any]:
    return {
        "source": facts.source,
        "kind": facts.kind,
        **{name: getattr(facts, name) for name in _SHOWN_FACTS},
        "num_tokens": len(facts.tokens),
        "stop_ids": list(facts.stop_ids),
        "has_chat_template": bool(facts.chat_template),
        "changes_greedy": facts.greedy_changes,
        "fault": facts.fault,
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {"reason": finding.reason, "fix": finding.fix, "refuses": finding.refuses}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
