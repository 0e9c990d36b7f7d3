"""check: facts without weights, a verdict for each runtime, and exit statuses."""

import io
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foredraft import drafters, verbs
from foredraft.check import check_pair
from foredraft.check_table import check_table
from foredraft.cli import main
from foredraft.core.errors import ModelError, TraceError, UnknownNameError
from foredraft.core.law import SamplingLaw
from foredraft.core.pair import ModelFacts, PairFacts
from foredraft.core.pair_findings import pair_findings
from foredraft.core.runtimes import LOADS, REFUSED, RUNTIMES, TRAP, Verdict, verdict
from foredraft.corpora import build_drafter
from foredraft.models.facts import backend_fingerprint, read_side
from foredraft.models.gguf import read_gguf
from foredraft.models.gguf_header import read_header
from foredraft.models.loading import load_tokenizer, tokenizer_fingerprint
from foredraft.models.target import load_target
from foredraft.steps import InitStep, NgramStep
from tests.test_models_gguf import _write_gguf as write_gguf
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.traces import build_trace, trace_row

TOKENS = {index: f"t{index}" for index in range(300)}
HF_RUNTIMES = [name for name in RUNTIMES if name not in ("foredraft", "llama.cpp")]


def facts(**changes: Any) -> ModelFacts:
    """A plain transformers folder, ready to draft in every runtime."""
    plain: dict[str, Any] = {
        "source": "models/plain", "architecture": "LlamaForCausalLM", "num_rows": 320, "tokens": TOKENS,
        "base_tokens": 300, "eos_id": 2, "pad_id": 0, "stop_ids": (2,), "max_context": 512, "dtype": "bfloat16",
        "is_tied": True, "has_head": False, "hidden_size": 256, "settings": {"num_assistant_tokens": 4},
    }  # fmt: skip
    return ModelFacts(**(plain | changes))


def other_tokens(*ids: int) -> dict[int, str]:
    return TOKENS | {index: f"other{index}" for index in ids}


def outcome(runtime: str, target: dict[str, Any], draft: dict[str, Any]) -> Verdict:
    return verdict(runtime, PairFacts.of(facts(**target), facts(**draft)))


def reasons(one: Verdict) -> str:
    return " ".join(finding.reason for finding in one.findings)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_draft_that_equals_its_target_in_all_but_weights_loads_everywhere(runtime: str) -> None:
    one = outcome(runtime, {}, {"source": "models/small"})
    assert (one.outcome, one.findings) == (LOADS, ())
    assert one.command


@pytest.mark.parametrize(
    ("runtime", "target", "draft", "expected", "named"),
    [
        # sizes
        ("foredraft", {}, {"num_rows": 328}, LOADS, ""),
        ("transformers", {}, {"num_rows": 328}, TRAP, "only padding differs"),
        ("vllm", {}, {"num_rows": 328}, REFUSED, "320 and 328"),
        ("sglang", {}, {"num_rows": 328}, REFUSED, "320 and 328"),
        ("llama.cpp", {}, {"num_rows": 320 + 128}, LOADS, ""),
        ("llama.cpp", {}, {"num_rows": 320 + 129}, REFUSED, "129 rows apart"),
        ("onnxruntime-genai", {}, {"num_rows": 328}, REFUSED, "equal width"),
        ("mlx-lm", {}, {"num_rows": 328}, LOADS, ""),
        ("openvino", {}, {"num_rows": 328}, LOADS, ""),
        ("tensorrt-llm", {}, {"num_rows": 328}, TRAP, "incompatible buffers"),
        # one token of equally many is another
        ("foredraft", {}, {"tokens": other_tokens(7)}, REFUSED, "id 7 is 't7' in the target and 'other7'"),
        ("transformers", {}, {"tokens": other_tokens(7)}, TRAP, "acceptance near 0"),
        ("vllm", {}, {"tokens": other_tokens(7)}, TRAP, "id 7"),
        ("sglang", {}, {"tokens": other_tokens(7)}, REFUSED, "id 7"),
        ("llama.cpp", {}, {"tokens": other_tokens(7)}, REFUSED, "id 7"),
        ("llama.cpp", {}, {"tokens": other_tokens(4)}, LOADS, ""),
        ("llama.cpp", {}, {"tokens": other_tokens(5)}, REFUSED, "id 5"),
        ("openvino", {}, {"tokens": other_tokens(7)}, TRAP, "one sentence"),
        ("onnxruntime-genai", {}, {"tokens": other_tokens(7)}, TRAP, "Only the width"),
        ("mlx-lm", {}, {"tokens": other_tokens(7)}, TRAP, "Only sizes"),
        ("mlx-lm", {}, {"base_tokens": 299}, REFUSED, "300 and 299"),
        ("exllamav3", {}, {"tokens": other_tokens(7)}, TRAP, "Nothing is compared"),
        ("tensorrt-llm", {}, {"tokens": other_tokens(7)}, TRAP, "not compared"),
        # both
        ("vllm", {}, {"num_rows": 400, "tokens": other_tokens(7)}, TRAP, "vocab_size must be equal"),
        ("transformers", {}, {"num_rows": 400, "tokens": other_tokens(7)}, TRAP, "100% of the draft's tokens map"),
        # special tokens
        ("llama.cpp", {"adds_bos": True, "bos_id": 1}, {"bos_id": 1}, REFUSED, "add_bos is True with id 1"),
        ("llama.cpp", {"adds_bos": True, "bos_id": 1}, {"adds_bos": True, "bos_id": 0}, REFUSED, "id 0"),
        ("llama.cpp", {}, {"eos_id": 3}, TRAP, "does not compare"),
        ("llama.cpp", {}, {"tokenizer_kind": "sentencepiece"}, REFUSED, "kinds byte-level and sentencepiece"),
        ("openvino", {}, {"eos_id": 3}, REFUSED, "eos token is 2 and 3"),
        # context, dtype, names, quantization, layers
        ("vllm", {}, {"max_context": 128}, TRAP, "whole batch"),
        ("sglang", {}, {"max_context": 128}, TRAP, "128"),
        ("vllm", {}, {"dtype": "float32"}, TRAP, "bfloat16"),
        ("vllm", {}, {"source": "drafts/my-EAGLE-like"}, TRAP, "eagle-"),
        ("sglang", {"quantization": "fp8"}, {}, TRAP, "inherits"),
        ("llama.cpp", {}, {"hidden_size": 576}, TRAP, "multiple of 256"),
        ("transformers", {"is_recurrent": True}, {}, REFUSED, "recurrent"),
        ("foredraft", {}, {"is_recurrent": True}, REFUSED, "recurrent"),
        ("mlx-lm", {"is_recurrent": True}, {}, REFUSED, "recurrent"),
        ("transformers", {"has_sliding_window": True}, {}, TRAP, "sliding-window"),
        ("transformers", {}, {"settings": {}}, TRAP, "20"),
        ("foredraft", {}, {"fault": "It is pickled."}, REFUSED, "It is pickled."),
    ],
)  # fmt: skip
def test_each_runtime_judges_by_its_own_rule(
    runtime: str, target: dict[str, Any], draft: dict[str, Any], expected: str, named: str
) -> None:
    one = outcome(runtime, target, {"source": "models/small", **draft})
    assert one.outcome == expected
    assert named in reasons(one)
    assert bool(one.command) == (expected != REFUSED)


@pytest.mark.parametrize("runtime", HF_RUNTIMES)
def test_gguf_files_and_drafts_without_a_model_are_refused_where_folders_are_read(runtime: str) -> None:
    assert "GGUF" in reasons(outcome(runtime, {}, {"form": "gguf"}))
    assert "GGUF" in reasons(outcome(runtime, {"form": "gguf"}, {}))
    assert "no model" in reasons(outcome(runtime, {}, {"form": "model-free", "tokens": {}, "num_rows": 0}))
    assert outcome(runtime, {}, {"form": "gguf"}).outcome == REFUSED


def test_the_commands_ask_for_k_tokens_and_mixed_vocabularies() -> None:
    pair = PairFacts.of(facts(), facts(source="drafts/d", num_rows=400, tokens=other_tokens(7)))
    assert '"num_speculative_tokens": 6, "use_heterogeneous_vocab": true' in verdict("vllm", pair, 6).command
    assert "assistant_tokenizer" in verdict("transformers", pair).command
    files = PairFacts.of(facts(form="gguf", source="a.gguf"), facts(form="gguf", source="b.gguf"))
    assert verdict("llama.cpp", files, 3).command == (
        "llama-server -m a.gguf -md b.gguf --spec-type draft-simple --spec-draft-n-max 3"
    )


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ({"settings": {"repetition_penalty": 1.1}}, {}, "repetition_penalty = 1.1"),
        ({"settings": {"no_repeat_ngram_size": 3}}, {}, "no longer the argmax"),
        ({}, {"settings": {"repetition_penalty": 1.2}}, "to what the draft guesses"),
        ({"settings": {"do_sample": True, "temperature": 0.6}}, {}, "samples by default (temperature 0.6)"),
        ({}, {"bos_id": 5}, "The bos token is none in the target and 5 't5' in the draft"),
        ({}, {"special_ids": frozenset({3})}, "Token 3, 't3', is a control token on one side only"),
        ({"adds_bos": True, "bos_id": 1}, {"bos_id": 1}, "puts 1 't1' before every text"),
        ({}, {"stop_ids": (2, 3)}, "[2], those of the draft with [2, 3]"),
        ({"chat_template": "a"}, {"chat_template": "b"}, "chat templates differ"),
        ({}, {"num_rows": 304}, "Pad the draft's embeddings and head to 320 rows"),
        ({}, {"num_rows": 400}, "Trim the draft's"),
        ({}, {"max_context": 100}, "reads 100 tokens"),
        ({}, {"head_rows": 64}, "64 of 320 rows"),
        ({}, {"has_head": True}, "ties it to the embeddings"),
        ({}, {"is_tied": False}, "no head is stored"),
        ({}, {"tokens": other_tokens(7, 8, 9, 10)}, "id 9 is 't9' in the target and 'other9' in the draft; 1 more"),
    ],
)  # fmt: skip
def test_what_goes_wrong_everywhere_is_named_with_both_values(
    target: dict[str, Any], draft: dict[str, Any], expected: str
) -> None:
    found = pair_findings(PairFacts.of(facts(**target), facts(**draft)))
    assert any(expected in f"{finding.reason} {finding.fix}" for finding in found), found


def test_neutral_generation_settings_are_no_trap() -> None:
    neutral = {
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "temperature": 0.5,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [],
    }
    assert not pair_findings(PairFacts.of(facts(settings=neutral), facts(settings=neutral)))


def test_a_space_is_a_space_whatever_its_mark() -> None:
    bytes_ = facts(tokens={0: "Ġsea", 1: "owl"})
    pieces = facts(tokens={0: "▁sea", 1: "fox"}, tokenizer_kind="sentencepiece")
    assert PairFacts.of(bytes_, pieces).shared == 0.5
    assert PairFacts.of(pieces, bytes_).shared == 0.5


# ------ from files


@pytest.fixture(scope="module")
def pairs(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path, tiny_draft_folder: Path
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pairs")
    save_tiny(root / "padded", num_layers=1, vocab_size=280)
    save_tiny(root / "other", num_layers=1)
    tiny_tokenizer(("<tool>",)).save_pretrained(root / "other")
    model = tiny_model(num_layers=1)
    write_gguf(root / "tiny.gguf", model)
    return {"target": tiny_target_folder, "draft": tiny_draft_folder} | {path.name: path for path in root.iterdir()}


def test_facts_of_a_folder_are_what_transformers_says(tiny_target_folder: Path) -> None:
    side = read_side(str(tiny_target_folder))
    tokenizer, model = load_tokenizer(tiny_target_folder), load_target(str(tiny_target_folder)).model
    assert side.facts.tokens == {index: token for token, index in tokenizer.get_vocab().items()}
    assert (side.facts.eos_id, side.facts.pad_id, side.facts.bos_id) == (2, 0, -1)
    assert side.facts.special_ids == set(tokenizer.all_special_ids) | {1}
    assert side.facts.chat_template == tokenizer.chat_template
    assert (side.facts.num_rows, side.facts.num_padding_rows) == (model.config.vocab_size, 13)
    assert (side.facts.is_tied, side.facts.has_head, side.facts.dtype) == (True, False, "float32")
    assert backend_fingerprint(side.tokenizer) == tokenizer_fingerprint(tokenizer)


def test_the_header_of_a_gguf_file_is_what_the_gguf_package_reads(pairs: dict[str, Path]) -> None:
    fields, shapes = read_header(pairs["tiny.gguf"])
    config, weights, tokenizer = read_gguf(pairs["tiny.gguf"])
    assert fields["llama.block_count"] == config.num_hidden_layers
    assert len(fields["tokenizer.ggml.tokens"]) == config.vocab_size
    assert shapes["token_embd.weight"] == tuple(weights["model.embed_tokens.weight"].shape)
    side = read_side(str(pairs["tiny.gguf"]))
    assert backend_fingerprint(side.tokenizer) == tokenizer_fingerprint(tokenizer)
    assert len(side.facts.tokens) == len(tokenizer)


@pytest.mark.parametrize("keep", [3, 20, 200, 4000])
def test_a_gguf_file_that_is_cut_short_says_so(pairs: dict[str, Path], tmp_path: Path, keep: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(pairs["tiny.gguf"].read_bytes()[:keep])
    with pytest.raises(ModelError, match="no GGUF file, or is cut short"):
        read_header(tmp_path / "cut.gguf")


def test_weights_are_never_read(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pairs["draft"], tmp_path / "draft"))
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    weights.write_bytes(data[:header])
    assert check_pair(str(pairs["target"]), str(folder)).is_usable


@pytest.mark.parametrize(
    ("draft", "usable", "refused"),
    [
        ("draft", True, set()),
        ("padded", True, {"vllm", "sglang", "onnxruntime-genai"}),
        ("other", False, {"foredraft", "sglang", "llama.cpp", "mlx-lm"}),
        ("tiny.gguf", False, set(RUNTIMES)),
    ],
)
def test_real_folders_and_files_are_judged(pairs: dict[str, Path], draft: str, usable: bool, refused: set[str]) -> None:
    found = check_pair(str(pairs["target"]), str(pairs[draft]))
    assert found.is_usable == usable
    assert {one.runtime for one in found.verdicts if one.outcome == REFUSED} == refused


def test_two_gguf_files_serve_here_and_in_llamacpp(pairs: dict[str, Path]) -> None:
    found = check_pair(str(pairs["tiny.gguf"]), str(pairs["tiny.gguf"]), ["llama.cpp"])
    assert {one.runtime for one in found.verdicts if one.outcome == LOADS} == {"foredraft", "llama.cpp"}


def test_the_verdict_on_foredraft_is_what_loading_the_draft_does(pairs: dict[str, Path]) -> None:
    target = load_target(str(pairs["target"]))
    for name in ("draft", "padded", "other", "tiny.gguf"):
        one = next(
            one for one in check_pair(target.path.as_posix(), str(pairs[name])).verdicts if one.runtime == "foredraft"
        )
        try:
            drafters.load_drafter(str(pairs[name]), target)
            loads = True
        except Exception:
            loads = False
        assert loads == (one.outcome != REFUSED), name


def test_a_generation_config_trap_is_read_from_the_file(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pairs["target"], tmp_path / "target"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.1}))
    found = check_pair(str(folder), str(pairs["draft"]))
    assert "repetition_penalty = 1.1" in found.findings[0].reason


def test_a_trace_weights_the_tokens_that_map_by_use(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder, tokenizer = save_tiny(tmp_path / "wordy", num_layers=1), tiny_tokenizer()
    wordy = tiny_tokenizer()
    wordy.add_tokens(["sea"])
    wordy.save_pretrained(folder)
    ids = tokenizer("seasea!")["input_ids"]
    trace = build_trace(tmp_path / "trace", [trace_row("a", [1], ids)], SamplingLaw(0.0))
    pair = check_pair(str(pairs["target"]), str(folder), trace=trace.path).pair
    assert pair.traffic_shared == pytest.approx(1 / 3)
    assert pair.shared == pytest.approx(259 / 260)
    other = build_trace(tmp_path / "wide", [trace_row("a", [1], ids)], SamplingLaw(0.0), vocab_size=99)
    with pytest.raises(TraceError, match="99 rows"):
        check_pair(str(pairs["target"]), str(folder), trace=other.path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    out = tmp_path_factory.mktemp("made") / "prefix"
    verbs.init_draft(load_target(str(tiny_target_folder), "float32"), [], InitStep(layers="first-2"), out)
    return out


def test_a_changed_target_is_noticed_behind_a_draft(
    made: Path, tiny_target_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = check_pair(str(tiny_target_folder), str(made), read_weights=True)
    assert same.is_usable
    assert not same.pair.changed
    changed = save_tiny(tmp_path / "changed", seed=7)
    assert not check_pair(str(changed), str(made)).pair.changed
    found = check_pair(str(changed), str(made), read_weights=True)
    assert "The target behind this draft has changed" in found.findings[0].reason
    with caplog.at_level(logging.WARNING):
        drafters.load_drafter(str(made), load_target(str(tiny_target_folder), "float32"))
        assert not caplog.records
        drafters.load_drafter(str(made), load_target(str(changed), "float32"))
    assert "has changed" in caplog.text
    caplog.clear()
    verbs.export_draft(made, load_target(str(changed), "float32"), "transformers", 2, tmp_path / "export")
    assert "has changed" in caplog.text


def test_a_changed_tokenizer_is_noticed_without_the_weights(
    made: Path, tiny_target_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_target_folder, tmp_path / "target"))
    tiny_tokenizer(("<tool>",)).save_pretrained(folder)
    assert "tokenizer of the target behind this draft has changed" in check_pair(str(folder), str(made)).pair.changed


def test_a_draft_without_a_model_serves_here_and_nowhere_else(tiny_target_folder: Path, tmp_path: Path) -> None:
    target = load_target(str(tiny_target_folder), "float32")
    trace = build_trace(
        tmp_path / "trace",
        [trace_row("a", [1], [5, 6, 7, 5, 6, 7])],
        target_fingerprint=target.fingerprint,
        tokenizer_fingerprint=target.tokenizer_fingerprint,
    )
    build_drafter(target, [trace], NgramStep(kind="ngram", order=2), tmp_path / "table")
    found = check_pair(str(tiny_target_folder), str(tmp_path / "table"))
    assert found.is_usable
    assert found.asked == ("foredraft",)
    assert {one.runtime for one in found.verdicts if one.outcome != REFUSED} == {"foredraft"}


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda config: config | {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM, no causal language model"),
        (lambda config: config | {"quantization_config": {"quant_method": "awq"}}, "pip install gptqmodel"),
        (lambda config: config | {"num_hidden_layers": -1}, "says num_hidden_layers: -1"),
    ],
)
def test_what_foredraft_cannot_load_is_refused_with_the_reason(
    pairs: dict[str, Path], tmp_path: Path, spoil: Callable[[dict[str, Any]], dict[str, Any]], fault: str
) -> None:
    folder = Path(shutil.copytree(pairs["draft"], tmp_path / "draft"))
    config = folder / "config.json"
    config.write_text(json.dumps(spoil(json.loads(config.read_text()))))
    found = check_pair(str(pairs["target"]), str(folder))
    assert not found.is_usable
    assert fault in reasons(found.verdicts[0])


def test_weights_that_foredraft_never_reads_are_a_fault(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pairs["draft"], tmp_path / "draft"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle (pytorch_model.bin)" in reasons(check_pair(str(pairs["target"]), str(folder)).verdicts[0])
    (folder / "pytorch_model.bin").unlink()
    assert "no *.safetensors" in reasons(check_pair(str(pairs["target"]), str(folder)).verdicts[0])


def test_what_is_no_model_and_no_runtime_is_an_error(pairs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it has no config.json"):
        check_pair(str(pairs["target"]), str(tmp_path))
    with pytest.raises(ModelError, match="There is no folder or file"):
        check_pair(str(pairs["target"]), "no/such/folder")
    with pytest.raises(UnknownNameError, match="Did you mean 'vllm'"):
        check_pair(str(pairs["target"]), str(pairs["draft"]), ["vlm"])


def test_the_table_puts_traps_before_runtimes_before_facts(pairs: dict[str, Path]) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(check_table(check_pair(str(pairs["target"]), str(pairs["padded"]))))
    shown = console.export_text()
    assert shown.index("rows of the target") < shown.index("sglang") < shown.index("architecture")
    assert "foredraft generate --target" in shown


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("target draft", 0),
        ("target other", 2),
        ("target padded --runtime vllm", 2),
        ("target padded --runtime llama.cpp", 0),
        ("target nothing", 2),
    ],
)
def test_the_exit_status_says_whether_the_pair_is_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pairs: dict[str, Path], words: str, status: int
) -> None:
    known = {name: str(path) for name, path in pairs.items()}
    monkeypatch.setattr(
        sys, "argv", ["foredraft", "check", *[known.get(word, word) for word in words.split()], "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert int(ended.value.code or 0) == status
    shown = json.loads(capsys.readouterr().out)
    assert "error" in shown or shown["usable"] == (status == 0)
    if "runtimes" in shown:
        assert [one["runtime"] for one in shown["runtimes"]] == list(RUNTIMES)
