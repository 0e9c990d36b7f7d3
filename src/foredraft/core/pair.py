"""What is known of a target and a draft without their weights, and where the two differ."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHOWN_DIFFERENCES = 3
_NEUTRAL: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": (),
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
}
_MARKS = {"byte-level": {"Ġ": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r"}, "sentencepiece": {"▁": " "}}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One side of a pair.

    Attributes:
        source: As the user named it.
        form: "folder" (transformers), "factored" (of such matrices, read here only), "gguf" or "model-free".
        kind: "causal-lm", the foredraft kind of a model-free draft, or what else the model is.
        num_rows: Rows of the embeddings, padding included; 0 where there is no model.
        tokens: Text of each token as its tokenizer writes it, by id; padding rows are none.
        special_ids: Ids that the tokenizer treats as control tokens.
        base_tokens: Size of the vocabulary without added tokens.
        tokenizer_kind: "byte-level", "sentencepiece", or the name of another kind.
        bos_id, eos_id, pad_id: -1 where there is none.
        stop_ids: Tokens that end an answer.
        max_context: Tokens it can read; 0 where it does not say.
        dtype: Of the stored weights.
        is_tied: Whether the configuration ties head and embeddings.
        has_head: Whether a head is stored; None where no file says so.
        quantization: Method of weights stored in fewer bits; empty for plain ones.
        has_integers: Whether weights are stored as integers.
        tokenizer_class: As tokenizer_config.json names it.
        settings: generation_config.json, without its bookkeeping.
        is_recurrent: Whether its state cannot be cut back to a shorter text.
        fault: Why it is no causal language model that foredraft loads; empty if it is one.
        head_rows: Rows of a trimmed foredraft head; 0 for a full one.
    """

    source: str
    form: str = "folder"
    kind: str = "causal-lm"
    architecture: str = ""
    num_rows: int = 0
    tokens: Mapping[int, str] = field(default_factory=dict)
    special_ids: frozenset[int] = frozenset()
    base_tokens: int = 0
    tokenizer_kind: str = "byte-level"
    bos_id: int = -1
    eos_id: int = -1
    pad_id: int = -1
    adds_bos: bool = False
    adds_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    chat_template: str = ""
    max_context: int = 0
    dtype: str = ""
    is_tied: bool = False
    has_head: bool | None = None
    quantization: str = ""
    has_integers: bool = False
    tokenizer_class: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_recurrent: bool = False
    has_sliding_window: bool = False
    hidden_size: int = 0
    fault: str = ""
    head_rows: int = 0

    @property
    def num_padding_rows(self) -> int:
        return max(0, self.num_rows - len(self.tokens)) if self.tokens else 0

    @property
    def greedy_changes(self) -> dict[str, Any]:
        """The generation settings under which greedy decoding does not pick the most probable token."""
        return {
            name: value
            for name, value in self.settings.items()
            if name in _NEUTRAL and value not in (None, [], {}, _NEUTRAL[name])
        }


@dataclass(frozen=True, slots=True)
class PairFacts:
    """A target and a draft. Made by `of`.

    Attributes:
        differing: Ids that the two read differently or that only one has, increasing; none for a model-free draft.
        shared: Share of the draft's tokens whose text is a token of the target too; NaN where it has none.
        traffic_shared: The same, each token counted as often as a trace's text needs it; NaN without a trace.
        cut_alike: Whether the two tokenizers cut text alike, where they have the same tokens.
        changed: What of the target is no longer what the draft was made for; empty if nothing, or not known.
    """

    target: ModelFacts
    draft: ModelFacts
    differing: tuple[int, ...]
    shared: float
    traffic_shared: float = math.nan
    cut_alike: bool = True
    changed: str = ""

    @staticmethod
    def of(
        target: ModelFacts,
        draft: ModelFacts,
        traffic_shared: float = math.nan,
        cut_alike: bool = True,
        changed: str = "",
    ) -> "PairFacts":
        """Return the pair with its vocabularies compared."""
        here, there = target.tokens, draft.tokens
        either = {*here, *there} if draft.form != "model-free" else set()
        differing = tuple(sorted(index for index in either if here.get(index) != there.get(index)))
        shared = math.nan
        if there:
            known = token_texts(target)
            shared = sum(text in known for text in map(_reader(draft), there.values())) / len(there)
        return PairFacts(target, draft, differing, shared, traffic_shared, cut_alike, changed)

    @property
    def same_tokens(self) -> bool:
        return not self.differing

    @property
    def only_padding_differs(self) -> bool:
        return self.same_tokens and self.target.num_rows != self.draft.num_rows and self.draft.num_rows > 0

    def differing_from(self, first: int) -> tuple[int, ...]:
        """Return the ids from `first` on that differ."""
        return self.differing[bisect_left(self.differing, first) :]

    def named_differences(self, first: int = 0, shown: int = 1) -> str:
        """Return a clause with the first ids that differ and how many there are; empty if there are none."""
        differing = self.differing_from(first)
        named = [
            f"id {index} is {quoted(self.target.tokens.get(index))} in the target and "
            f"{quoted(self.draft.tokens.get(index))} in the draft"
            for index in differing[:shown]
        ]
        more = len(differing) - len(named)
        return "; ".join(named) + (f"; {more:,} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a pair that its user should know.

    Attributes:
        reason: What is so, with both values.
        fix: What to do about it; empty where nothing need be done.
        refuses: Whether it keeps the pair from being used at all.
    """

    reason: str
    fix: str = ""
    refuses: bool = False


CUT_OTHERWISE = Finding(
    "The two have the same tokens but cut text differently, or read other tokens as control tokens.",
    "Copy the target's tokenizer files into the draft.",
)


def token_texts(facts: ModelFacts) -> frozenset[str]:
    """Return the texts of all tokens, with the tokenizer's marks for spaces and line ends read as such."""
    return frozenset(map(_reader(facts), facts.tokens.values()))


def _reader(facts: ModelFacts) -> Any:
    marks = _MARKS.get(facts.tokenizer_kind, {})
    table = str.maketrans(marks)
    return lambda token: token.translate(table)


def quoted(token: str | None) -> str:
    return "absent" if token is None else repr(token)
