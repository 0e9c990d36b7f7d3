"""What can go wrong with a pair of target and draft wherever it is served."""

import math
from collections.abc import Iterator

from foredraft.core.pair import CUT_OTHERWISE, SHOWN_DIFFERENCES, Finding, ModelFacts, PairFacts, quoted

_NEW_CLASS = "TokenizersBackend"


def pair_findings(pair: PairFacts) -> list[Finding]:
    """Return what can go wrong with a pair wherever it is served, the worst first."""
    found = [
        _changed(pair),
        _vocabulary(pair),
        *_settings(pair),
        *_special(pair),
        *_sizes(pair),
        *_stored(pair),
        *_read(pair),
    ]
    return [finding for finding in found if finding.reason]


def _changed(pair: PairFacts) -> Finding:
    if not pair.changed:
        return Finding("")
    return Finding(pair.changed, "Score the draft again on this target, and make it anew if it has lost acceptance.")


def _vocabulary(pair: PairFacts) -> Finding:
    if pair.same_tokens:
        return Finding("") if pair.cut_alike else CUT_OTHERWISE
    share = f"{pair.shared:.1%} of the draft's tokens are tokens of the target too"
    traffic = "" if math.isnan(pair.traffic_shared) else f", {pair.traffic_shared:.1%} of what the trace's text needs"
    return Finding(
        f"Tokens differ: {pair.named_differences(shown=SHOWN_DIFFERENCES)}. {share}{traffic}.",
        "Make the draft from the target, or give it the target's vocabulary.",
    )


def _settings(pair: PairFacts) -> Iterator[Finding]:
    for whose, facts in (("target", pair.target), ("draft", pair.draft)):
        for name, value in facts.greedy_changes.items():
            effect = (
                "servers apply it by default, and greedy output is no longer the argmax that foredraft scores"
                if whose == "target"
                else "transformers applies it to what the draft guesses"
            )
            yield Finding(
                f"The {whose}'s generation_config.json sets {name} = {value}: {effect}.",
                f"Take {name} out of {facts.source}/generation_config.json, or serve without it (vLLM: "
                "--generation-config vllm; SGLang: --sampling-defaults openai).",
            )
    if pair.target.settings.get("do_sample"):
        values = [
            f"{name} {pair.target.settings[name]}"
            for name in ("temperature", "top_k", "top_p")
            if name in pair.target.settings
        ]
        yield Finding(
            f"The target's generation_config.json samples by default ({', '.join(values) or 'temperature 1'}).",
            "Score the draft under that law too; greedy acceptance is another figure.",
        )


def _special(pair: PairFacts) -> Iterator[Finding]:
    target, draft = pair.target, pair.draft
    if draft.form == "model-free":
        return
    for name in ("bos", "eos", "pad"):
        here, there = getattr(target, f"{name}_id"), getattr(draft, f"{name}_id")
        if here != there:
            yield Finding(
                f"The {name} token is {_named(target, here)} in the target and {_named(draft, there)} in the draft.",
                "Copy the target's tokenizer files and token ids of config.json into the draft.",
            )
    special = {
        index for index in target.special_ids ^ draft.special_ids if index in target.tokens and index in draft.tokens
    }
    if pair.same_tokens and special:
        first = min(special)
        yield Finding(
            f"Token {first}, {target.tokens[first]!r}, is a control token on one side only ({len(special)} such).",
            "Copy the target's tokenizer files into the draft.",
        )
    if target.adds_bos != draft.adds_bos:
        one, other = ("target", "draft") if target.adds_bos else ("draft", "target")
        yield Finding(
            f"The {one}'s tokenizer puts {_named(getattr(pair, one), getattr(pair, one).bos_id)} before every text, "
            f"the {other}'s does not.",
            "Copy the target's tokenizer files into the draft.",
        )
    if draft.stop_ids and set(target.stop_ids) != set(draft.stop_ids):
        yield Finding(
            f"Answers of the target end with {list(target.stop_ids)}, those of the draft with {list(draft.stop_ids)}.",
            "Copy eos_token_id of the target's generation_config.json into the draft's.",
        )
    if target.chat_template and draft.chat_template and target.chat_template != draft.chat_template:
        yield Finding(
            "The chat templates differ: servers use the target's, and the draft may have learnt the other.",
            "Copy the target's tokenizer files into the draft; distil it on the target's answers.",
        )


def _sizes(pair: PairFacts) -> Iterator[Finding]:
    target, draft = pair.target, pair.draft
    if pair.only_padding_differs:
        yield Finding(
            f"The same tokens in {target.num_rows:,} rows of the target and {draft.num_rows:,} of the draft.",
            f"{'Pad' if draft.num_rows < target.num_rows else 'Trim'} the draft's embeddings and head to "
            f"{target.num_rows:,} rows, and vocab_size with them.",
        )
    if 0 < draft.max_context < (target.max_context or math.inf):
        yield Finding(
            f"The draft reads {draft.max_context:,} tokens, the target {target.max_context:,}: no guesses behind that."
            if target.max_context
            else f"The draft reads {draft.max_context:,} tokens, the target does not say how many.",
            "Serve shorter texts, or make the draft from the target, which keeps its context length.",
        )
    if draft.head_rows:
        yield Finding(
            f"The draft computes {draft.head_rows:,} of {draft.num_rows:,} rows of its head here; other runtimes "
            "compute all, at another cost and acceptance.",
            "Score its twin with the whole head (recipe step `head: {rows: full}`).",
        )


def _stored(pair: PairFacts) -> Iterator[Finding]:
    for whose, facts in (("target", pair.target), ("draft", pair.draft)):
        if facts.has_head is None or facts.form != "folder":
            continue
        if facts.is_tied and facts.has_head:
            yield Finding(
                f"The {whose} stores a head, but its config.json ties it to the embeddings: some runtimes use one, "
                "some the other.",
                f"Set tie_word_embeddings of {facts.source}/config.json to what its weights are.",
            )
        if not facts.is_tied and not facts.has_head:
            yield Finding(
                f"The {whose}'s config.json says tie_word_embeddings = false, but no head is stored.",
                f"Set tie_word_embeddings = true in {facts.source}/config.json, if that is how it was trained.",
            )


def _read(pair: PairFacts) -> Iterator[Finding]:
    """What readers of the files stumble over."""
    for whose, facts in (("target", pair.target), ("draft", pair.draft)):
        if facts.has_integers and not facts.quantization:
            yield Finding(
                f"The {whose} stores integers, but its config.json has no quantization_config: runtimes refuse it, or "
                "read the integers as weights.",
                "Write it with foredraft quantize, or with the quantization_config of the tool that rounded it.",
            )
        if facts.tokenizer_class == _NEW_CLASS:
            yield Finding(
                f"The {whose}'s tokenizer_config.json names the class {_NEW_CLASS}, which transformers before 5 and "
                "what builds on it do not know.",
                f"Copy the original tokenizer files, or write PreTrainedTokenizerFast into {facts.source}/"
                "tokenizer_config.json.",
            )


def _named(facts: ModelFacts, index: int) -> str:
    return "none" if index < 0 else f"{index} {quoted(facts.tokens.get(index))}"
