"""What each runtime demands of a draft: one function a runtime, from the facts of a pair to a verdict.

Rules as the runtimes' sources state them; the versions read are named at each function. Nothing here has run the
runtime: a pair that "loads" by these rules is proven by an export's verification.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from foredraft.core.pair import CUT_OTHERWISE, Finding, PairFacts

LOADS, TRAP, REFUSED = "loads", "loads with a trap", "refused"
_LLAMACPP_SIZE_DIFFERENCE = 128
_LLAMACPP_FIRST_COMPARED = 5
_BLOCK = 256
VLLM_PATH_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
_TRANSPLANT = "Make the draft from the target, or give it the target's vocabulary."
_FACTORED = {"factored": "holds factors in the place of matrices"}
_UNREAD = {"gguf": "is a GGUF file", **_FACTORED}
_FOLDER_FIRST = "Name the transformers folder, or write one: foredraft export DRAFT --target TARGET --out FOLDER."


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a runtime takes a pair.

    Attributes:
        findings: Why not, and what goes wrong in silence.
        command: How to start it; empty where it is refused.
    """

    runtime: str
    findings: tuple[Finding, ...]
    command: str = ""

    @property
    def outcome(self) -> str:
        if any(finding.refuses for finding in self.findings):
            return REFUSED
        return TRAP if self.findings else LOADS


def verdict(runtime: str, pair: PairFacts, k: int = 4) -> Verdict:
    """Return what `runtime`, a key of RUNTIMES, does with a pair; the command asks for k draft tokens."""
    rule, command = RUNTIMES[runtime]
    found = Verdict(runtime, tuple(rule(pair)))
    return found if found.outcome == REFUSED else Verdict(runtime, found.findings, command(pair, k))


def foredraft(pair: PairFacts) -> Iterator[Finding]:
    """This package: drafters.load_drafter."""
    yield from (Finding(facts.fault, "", True) for facts in (pair.target, pair.draft) if facts.fault)
    yield from _other_tokens(pair, "foredraft scores and decodes only drafts of the target's tokenizer")
    if pair.same_tokens and not pair.cut_alike:
        yield replace(CUT_OTHERWISE, refuses=True)
    yield from _recurrent(pair)


def transformers(pair: PairFacts) -> Iterator[Finding]:
    """assistant_model of transformers 5.24: equal vocab_size means that ids are shared, nothing else is compared."""
    yield from _needs_folders(pair, "transformers")
    yield from _recurrent(pair)
    if pair.target.has_sliding_window:
        yield Finding(
            "The target has sliding-window layers, whose cache cannot be cut back once the window is full.",
            "Keep prompt and answer within the window, or check the text against plain decoding.",
        )
    equal = pair.target.num_rows == pair.draft.num_rows
    if equal and not pair.same_tokens:
        yield Finding(
            f"Equal vocab_size, so ids are taken as shared without a look at the tokens: acceptance near 0, and no "
            f"error. {pair.named_differences()}.",
            _TRANSPLANT,
        )
    if not equal:
        why = "only padding differs" if pair.same_tokens else f"{pair.shared:.0%} of the draft's tokens map"
        yield Finding(
            f"vocab_size {pair.target.num_rows:,} and {pair.draft.num_rows:,} differ ({why}): generate() wants both "
            "tokenizers, and goes through text at every block.",
            _pad_to(pair.target.num_rows)
            if pair.same_tokens
            else f"Pass tokenizer= and assistant_tokenizer=, or: {_TRANSPLANT}",
        )
    if "num_assistant_tokens" not in pair.draft.settings:
        yield Finding(
            "The draft's generation_config.json says no draft length: transformers takes 20, and stops early below a "
            "confidence of 0.4.",
            "foredraft export DRAFT --target TARGET --k K writes the measured length into it.",
        )


def vllm(pair: PairFacts) -> Iterator[Finding]:
    """Method draft_model of vLLM 0.32: equal config.vocab_size, or use_heterogeneous_vocab."""
    yield from _needs_folders(pair, "vLLM")
    if pair.target.num_rows != pair.draft.num_rows:
        yield Finding(
            f"vocab_size must be equal, padding included: {pair.target.num_rows:,} and {pair.draft.num_rows:,}.",
            _pad_to(pair.target.num_rows)
            if pair.same_tokens
            else 'Set "use_heterogeneous_vocab": true (greedy draft only; tokens that only one side has are never '
            f"drafted: {pair.shared:.0%} map), or: {_TRANSPLANT}",
            refuses=pair.same_tokens,
        )
    elif not pair.same_tokens:
        yield Finding(
            f"Tokens are never compared, and the target's tokenizer is used for both: acceptance near 0. "
            f"{pair.named_differences()}.",
            _TRANSPLANT,
        )
    yield from _shorter(pair, "vLLM stops drafting for the whole batch behind the draft's context")
    if pair.draft.dtype and pair.target.dtype and pair.draft.dtype != pair.target.dtype:
        yield Finding(f"vLLM runs the draft in the target's {pair.target.dtype}, not in its own {pair.draft.dtype}.")
    if found := [word for word in VLLM_PATH_WORDS if word in pair.draft.source.lower()]:
        yield Finding(
            f"The draft's path contains {found[0]!r}: vLLM guesses its method from that, whatever you ask for.",
            "Rename the folder.",
        )


def sglang(pair: PairFacts) -> Iterator[Finding]:
    """STANDALONE of SGLang 0.5.23: equal sizes, and get_vocab() of both tokenizers equal."""
    yield from _needs_folders(pair, "SGLang")
    yield from _other_tokens(pair, "SGLang compares the two vocabularies token by token")
    yield from _unequal_rows(pair, "SGLang wants equal vocab_size")
    yield from _shorter(pair, "SGLang does not stop there, and guesses behind it are worth little")
    if pair.target.quantization and not pair.draft.quantization:
        yield Finding(
            f"The draft inherits the target's quantization {pair.target.quantization}.",
            "Say --speculative-draft-model-quantization unquant.",
        )


def llamacpp(pair: PairFacts) -> Iterator[Finding]:
    """draft-simple of llama.cpp b11434: same kind of tokenizer, sizes at most 128 apart, same text from id 5 on."""
    if pair.draft.form == "model-free":
        yield _without_model("llama.cpp", "its own lookup cache (llama-lookup -lcs)")
        return
    yield from _unread(pair, "the converter of llama.cpp", _FACTORED)
    target, draft = pair.target, pair.draft
    if target.tokenizer_kind != draft.tokenizer_kind:
        yield Finding(
            f"The tokenizers are of kinds {target.tokenizer_kind} and {draft.tokenizer_kind}.", _TRANSPLANT, True
        )
    for name in ("bos", "eos"):
        adds = getattr(target, f"adds_{name}"), getattr(draft, f"adds_{name}")
        ids = getattr(target, f"{name}_id"), getattr(draft, f"{name}_id")
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            yield Finding(
                f"add_{name} is {adds[0]} with id {ids[0]} in the target, {adds[1]} with id {ids[1]} in the draft.",
                "Copy the target's tokenizer files into the draft, and convert it again.",
                True,
            )
    if (apart := abs(target.num_rows - draft.num_rows)) > _LLAMACPP_SIZE_DIFFERENCE:
        yield Finding(
            f"The vocabularies are {apart:,} rows apart; at most {_LLAMACPP_SIZE_DIFFERENCE} are taken.",
            _pad_to(target.num_rows) if pair.same_tokens else _TRANSPLANT,
            True,
        )
    both = min(target.num_rows, draft.num_rows)
    differing = pair.differing_from(_LLAMACPP_FIRST_COMPARED)
    if differing and differing[0] < both:
        yield Finding(
            f"Texts differ: {pair.named_differences(_LLAMACPP_FIRST_COMPARED)}. The server says so on one line and "
            "goes on without speculation.",
            _TRANSPLANT,
            True,
        )
    if target.eos_id != draft.eos_id or (draft.chat_template and target.chat_template != draft.chat_template):
        yield Finding("End tokens or chat templates differ, which llama.cpp does not compare.")
    yield from _converted(pair)


def openvino(pair: PairFacts) -> Iterator[Finding]:
    """OpenVINO GenAI: one fixed sentence must give as many tokens on both sides, and bos, eos, pad be equal."""
    yield from _needs_folders(pair, "optimum-cli export openvino")
    for name in ("bos", "eos", "pad"):
        here, there = getattr(pair.target, f"{name}_id"), getattr(pair.draft, f"{name}_id")
        if here != there:
            yield Finding(
                f"The {name} token is {here} and {there}.", "Copy the target's tokenizer files into the draft.", True
            )
    if not pair.same_tokens:
        yield Finding(
            "Only the number of tokens of one sentence is compared: another vocabulary may pass, with acceptance near "
            f"0. {pair.named_differences()}.",
            _TRANSPLANT,
        )


def onnxruntime_genai(pair: PairFacts) -> Iterator[Finding]:
    """ONNX Runtime GenAI 0.18: the logits of both must be equally wide; one request at a time."""
    yield from _needs_folders(pair, "the ONNX model builder")
    yield from _unequal_rows(pair, "ONNX Runtime GenAI wants logits of equal width")
    if not pair.same_tokens and pair.target.num_rows == pair.draft.num_rows:
        yield Finding(f"Only the width is compared: acceptance near 0. {pair.named_differences()}.", _TRANSPLANT)


def mlx_lm(pair: PairFacts) -> Iterator[Finding]:
    """MLX-LM 0.32: tokenizer.vocab_size must agree (an error in the command, a warning in the server)."""
    yield from _needs_folders(pair, "MLX-LM")
    yield from _recurrent(pair)
    if pair.target.base_tokens != pair.draft.base_tokens and pair.draft.tokens:
        yield Finding(
            f"The tokenizers have {pair.target.base_tokens:,} and {pair.draft.base_tokens:,} tokens.", _TRANSPLANT, True
        )
    elif not pair.same_tokens:
        yield Finding(f"Only sizes are compared: acceptance near 0. {pair.named_differences()}.", _TRANSPLANT)


def exllamav3(pair: PairFacts) -> Iterator[Finding]:
    """exllamav3 1.6.5: EXL3 folders, CUDA; no check of the vocabulary was found in its generator."""
    yield from _needs_folders(pair, "exllamav3")
    if not pair.same_tokens:
        yield Finding(f"Nothing is compared: acceptance near 0. {pair.named_differences()}.", _TRANSPLANT)


def tensorrt_llm(pair: PairFacts) -> Iterator[Finding]:
    """TensorRT-LLM, PyTorch backend, by its documentation: the same tokenizer, or acceptance is extremely low."""
    yield from _needs_folders(pair, "TensorRT-LLM")
    if not pair.same_tokens:
        yield Finding(f"The tokens are not compared: acceptance near 0. {pair.named_differences()}.", _TRANSPLANT)
    if pair.only_padding_differs:
        yield Finding(
            f"vocab_size {pair.target.num_rows:,} and {pair.draft.num_rows:,} gave incompatible buffers in the past.",
            _pad_to(pair.target.num_rows),
        )


def _pad_to(rows: int) -> str:
    return f"Pad the draft to {rows:,} rows, as foredraft export does."


def _needs_folders(pair: PairFacts, runtime: str) -> Iterator[Finding]:
    if pair.draft.form == "model-free":
        yield _without_model(runtime, "the runtime's own n-gram speculation, if it has one")
    yield from _unread(pair, runtime, _UNREAD)


def _unread(pair: PairFacts, runtime: str, forms: Mapping[str, str]) -> Iterator[Finding]:
    for whose, facts in (("target", pair.target), ("draft", pair.draft)):
        if facts.form in forms:
            yield Finding(
                f"The {whose} {forms[facts.form]}; {runtime} reads a transformers folder.", _FOLDER_FIRST, True
            )


def _without_model(runtime: str, instead: str) -> Finding:
    return Finding(
        f"The draft is no model, and {runtime} takes only models.", f"Serve it here, or use {instead}.", True
    )


def _other_tokens(pair: PairFacts, rule: str) -> Iterator[Finding]:
    if not pair.same_tokens:
        yield Finding(f"{rule}: {pair.named_differences()}.", _TRANSPLANT, True)


def _unequal_rows(pair: PairFacts, rule: str) -> Iterator[Finding]:
    if pair.draft.num_rows and pair.target.num_rows != pair.draft.num_rows:
        fix = _pad_to(pair.target.num_rows) if pair.same_tokens else _TRANSPLANT
        yield Finding(f"{rule}: {pair.target.num_rows:,} and {pair.draft.num_rows:,}.", fix, True)


def _recurrent(pair: PairFacts) -> Iterator[Finding]:
    for whose, facts in (("target", pair.target), ("draft", pair.draft)):
        if facts.is_recurrent:
            yield Finding(
                f"The {whose} ({facts.architecture}) has recurrent layers, whose state cannot be cut back to the "
                "accepted tokens.",
                "Use a runtime that keeps checkpoints of the state, such as llama.cpp." if whose == "target" else "",
                True,
            )


def _shorter(pair: PairFacts, effect: str) -> Iterator[Finding]:
    if 0 < pair.draft.max_context < (pair.target.max_context or math.inf):
        yield Finding(
            f"{effect}: {pair.draft.max_context:,} tokens, the target reads {pair.target.max_context:,}.",
            f"Serve with a context of {pair.draft.max_context:,}, or raise the draft's max_position_embeddings if its "
            "positions allow it.",
        )


def _converted(pair: PairFacts) -> Iterator[Finding]:
    sides = (("target", pair.target), ("draft", pair.draft))
    odd = [
        f"{facts.hidden_size} long in the {whose}"
        for whose, facts in sides
        if facts.form == "folder" and facts.hidden_size % _BLOCK
    ]
    if odd:
        yield Finding(
            f"Rows are {' and '.join(odd)}, no multiple of {_BLOCK}: K-quants fall back to larger types.",
            "Convert to q8_0 or f16.",
        )


def _transformers_command(pair: PairFacts, k: int) -> str:
    both = "" if pair.target.num_rows == pair.draft.num_rows else ", tokenizer=tokenizer, assistant_tokenizer=other"
    return f"target.generate(**inputs, assistant_model=draft{both})"


def _vllm_command(pair: PairFacts, k: int) -> str:
    mixed = ', "use_heterogeneous_vocab": true' if pair.target.num_rows != pair.draft.num_rows else ""
    config = f'{{"method": "draft_model", "model": "{pair.draft.source}", "num_speculative_tokens": {k}{mixed}}}'
    return f"vllm serve {pair.target.source} --speculative-config '{config}'"


def _sglang_command(pair: PairFacts, k: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {pair.target.source} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {pair.draft.source} --speculative-num-steps {k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {k + 1}"
    )


def _llamacpp_command(pair: PairFacts, k: int) -> str:
    files = [
        (f"python convert_hf_to_gguf.py {facts.source} --outfile {name}.gguf && ", f"{name}.gguf")
        if facts.form == "folder"
        else ("", facts.source)
        for name, facts in (("target", pair.target), ("draft", pair.draft))
    ]
    convert = "".join(first for first, _ in files)
    return f"{convert}llama-server -m {files[0][1]} -md {files[1][1]} --spec-type draft-simple --spec-draft-n-max {k}"


def _foredraft_command(pair: PairFacts, k: int) -> str:
    return f'foredraft generate --target {pair.target.source} --drafter {pair.draft.source} --k {k} "..."'


def _mlx_command(pair: PairFacts, k: int) -> str:
    return f"mlx_lm.generate --model {pair.target.source} --draft-model {pair.draft.source} --num-draft-tokens {k}"


def _openvino_command(pair: PairFacts, k: int) -> str:
    return (
        'LLMPipeline(target, "CPU", draft_model=draft_model(draft, "CPU")), both exported by '
        f"optimum-cli export openvino; num_assistant_tokens={k}; compare text in f32 only"
    )


def _onnx_command(pair: PairFacts, k: int) -> str:
    return f"genai_config.json of the target with the draft's decoder under model.draft, max_draft_tokens {k}"


def _exllama_command(pair: PairFacts, k: int) -> str:
    return f"Generator(model, cache, tokenizer, draft_model=, draft_cache=, num_draft_tokens={k}), both in EXL3"


def _tensorrt_command(pair: PairFacts, k: int) -> str:
    return f"DraftTargetDecodingConfig(max_draft_len={k}, speculative_model={pair.draft.source!r})"


Rule = Callable[[PairFacts], Iterator[Finding]]
RUNTIMES: Mapping[str, tuple[Rule, Callable[[PairFacts, int], str]]] = {
    "foredraft": (foredraft, _foredraft_command),
    "transformers": (transformers, _transformers_command),
    "vllm": (vllm, _vllm_command),
    "sglang": (sglang, _sglang_command),
    "llama.cpp": (llamacpp, _llamacpp_command),
    "openvino": (openvino, _openvino_command),
    "onnxruntime-genai": (onnxruntime_genai, _onnx_command),
    "mlx-lm": (mlx_lm, _mlx_command),
    "exllamav3": (exllamav3, _exllama_command),
    "tensorrt-llm": (tensorrt_llm, _tensorrt_command),
}
