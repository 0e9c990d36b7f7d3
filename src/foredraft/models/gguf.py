"""Reading GGUF files of llama and qwen2 models into plain transformers parts.

transformers has an import of its own, which cuts digits wrongly for SmolLM2 and gives a model that
cannot be saved. What a GGUF file leaves out is kept here: the regular expressions of the
pre-tokenizers, and which control tokens of Qwen2 are shown in decoded text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config

from foredraft.core.errors import ModelError

ARCHITECTURES: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_TIED_COSINE = 0.99

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
INTERLEAVED = ("attn_q", "attn_k")
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SHOWN = frozenset(
    ["<tool_call>", "</tool_call>", "<|repo_name|>", "<|file_sep|>"]
    + [f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix", "pad")]
)


@dataclass(frozen=True, slots=True)
class _File:
    """The metadata and tensors of a GGUF file."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        return str(self.field("general.architecture"))

    def field(self, key: str) -> Any:
        if key not in self.fields:
            raise ModelError(f"{self.path} lacks {key}: it is no complete language model.")
        return self.fields[key]

    def size(self, key: str) -> Any:
        return self.field(f"{self.architecture}.{key}")

    def weight(self, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise ModelError(f"{self.path} lacks the tensor {name}: it is no complete language model.")
        tensor = self.tensors[name]
        flat = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return flat.reshape([int(size) for size in reversed(tensor.shape)])


def read_gguf(path: Path) -> tuple[PreTrainedConfig, dict[str, Tensor], PreTrainedTokenizerFast]:
    """Return the configuration, the float32 weights under their transformers names, and the tokenizer.

    The configuration's eos_token_id lists every token that ends an answer.

    Raises:
        ModelError: it is no GGUF file, is cut short, or holds an architecture or tokenizer that is not read.
    """
    file = _open(path)
    if file.architecture not in ARCHITECTURES:
        raise ModelError(f"{path} holds the architecture {file.architecture!r}; read are: {', '.join(ARCHITECTURES)}.")
    try:
        state_dict, tied = _read_weights(file)
        tokenizer = _read_tokenizer(file)
    except (ValueError, IndexError, TypeError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as a language model: {error}. Download it again.") from error
    return _read_config(file, tied), state_dict, tokenizer


def read_gguf_tokenizer(path: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer that a file's metadata describe; None for a kind that is not read."""
    try:
        return _read_tokenizer(_File(path, fields, {}))
    except (ModelError, ValueError, IndexError, TypeError, KeyError):
        return None


def read_gguf_vocabulary(path: Path) -> tuple[PreTrainedConfig, PreTrainedTokenizerFast]:
    """Return the configuration and the tokenizer, without reading any weight; see read_gguf."""
    file = _open(path)
    if file.architecture not in ARCHITECTURES:
        raise ModelError(f"{path} holds the architecture {file.architecture!r}; read are: {', '.join(ARCHITECTURES)}.")
    try:
        return _read_config(file, tied=True), _read_tokenizer(file)
    except (ValueError, IndexError, TypeError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as a language model: {error}. Download it again.") from error


def _open(path: Path) -> _File:
    try:
        reader = GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no GGUF file, or is cut short: {error}. Download it again.") from error
    return _File(path, fields, {tensor.name: tensor for tensor in reader.tensors})


def _read_config(file: _File, tied: bool) -> PreTrainedConfig:
    eos = file.field("tokenizer.ggml.eos_token_id")
    stops = [eos, *_also_stops(file, eos)]
    return ARCHITECTURES[file.architecture](
        architectures=[{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[file.architecture]],
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=file.size("embedding_length"),
        intermediate_size=file.size("feed_forward_length"),
        num_hidden_layers=file.size("block_count"),
        num_attention_heads=file.size("attention.head_count"),
        num_key_value_heads=file.size("attention.head_count_kv"),
        **_head_size(file),
        max_position_embeddings=file.size("context_length"),
        rms_norm_eps=round(file.size("attention.layer_norm_rms_epsilon"), 9),
        rope_theta=file.size("rope.freq_base"),
        tie_word_embeddings=tied,
        bos_token_id=file.fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=stops if len(stops) > 1 else eos,
        pad_token_id=file.fields.get("tokenizer.ggml.padding_token_id", eos),
    )


def _head_size(file: _File) -> dict[str, int]:
    """Narrowed heads are no longer hidden_size / heads wide; the file says so, or leaves it out."""
    width = file.fields.get(f"{file.architecture}.attention.key_length")
    return {} if width is None or file.architecture != "llama" else {"head_dim": int(width)}


def _also_stops(file: _File, eos: int) -> list[int]:
    """Qwen2 models end a turn with <|im_end|> and a document with <|endoftext|>; a file names one of them."""
    tokens = file.field("tokenizer.ggml.tokens")
    if file.architecture != "qwen2" or "<|endoftext|>" not in tokens:
        return []
    end_of_text = tokens.index("<|endoftext|>")
    return [] if end_of_text == eos else [end_of_text]


def _read_weights(file: _File) -> tuple[dict[str, Tensor], bool]:
    weights = {"model.norm.weight": file.weight("output_norm.weight")}
    embeddings = file.weight("token_embd.weight")
    head = file.weight("output.weight") if "output.weight" in file.tensors else embeddings
    tied = _same_matrix(embeddings, head)
    # A tied matrix that is stored twice is stored at two precisions; the head's is the finer one.
    weights["model.embed_tokens.weight"] = head if tied else embeddings
    if not tied:
        weights["lm_head.weight"] = head
    read = {"output_norm.weight", "token_embd.weight", "output.weight"}
    for layer in range(file.size("block_count")):
        for part, name in LAYER_PARTS.items():
            for kind in ("weight", "bias"):
                source = f"blk.{layer}.{part}.{kind}"
                if source in file.tensors:
                    weights[f"model.layers.{layer}.{name}.{kind}"] = _in_order(file, part, file.weight(source))
                    read.add(source)
    if unread := sorted(set(file.tensors) - read):
        raise ModelError(
            f"{file.path} holds tensors that are not read, such as {unread[0]}: its model is another kind."
        )
    return {name: torch.from_numpy(np.ascontiguousarray(weight)) for name, weight in weights.items()}, tied


def _in_order(file: _File, part: str, weight: np.ndarray) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotary halves of q and k, done for llama only."""
    if file.architecture != "llama" or part not in INTERLEAVED:
        return weight
    heads = file.size("attention.head_count" if part == "attn_q" else "attention.head_count_kv")
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _same_matrix(embeddings: np.ndarray, head: np.ndarray) -> bool:
    """Whether two matrices are one, rounded twice; judged on some rows."""
    if embeddings.shape != head.shape:
        return False
    left, right = (matrix[:: max(1, len(matrix) // 256)].ravel() for matrix in (embeddings, head))
    return float(left @ right) >= _TIED_COSINE * float(np.linalg.norm(left) * np.linalg.norm(right))


def _read_tokenizer(file: _File) -> PreTrainedTokenizerFast:
    model, cut = file.field("tokenizer.ggml.model"), file.fields.get("tokenizer.ggml.pre", "none")
    if model != "gpt2" or cut not in CUTS:
        raise ModelError(
            f"{file.path} has a tokenizer of kind {model!r} with the pre-tokenizer {cut!r}; read are byte-level BPE "
            f"('gpt2') with: {', '.join(CUTS)}."
        )
    tokens, kinds = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    added = [index for index, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    # Special tokens with ids below the first ordinary token belong to the BPE vocabulary, later ones
    # are added behind it. Rows of other kinds pad the matrix and are no tokens.
    first_normal = kinds.index(NORMAL)
    in_vocab = {index for index in added if index < first_normal}
    vocab = {token: index for index, token in enumerate(tokens) if kinds[index] == NORMAL or index in in_vocab}
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    CUTS[cut](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    shown = _QWEN2_SHOWN if cut == "qwen2" else frozenset()
    tokenizer.add_tokens(
        [AddedToken(tokens[i], normalized=False, special=kinds[i] == CONTROL and tokens[i] not in shown) for i in added]
    )
    for index in added:
        if tokenizer.token_to_id(tokens[index]) != index:
            raise ModelError(f"{file.path}: the special token {tokens[index]!r} does not keep its id {index}.")
    return _dressed(file, tokenizer)


def _dressed(file: _File, tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its named special tokens, its chat template and its length."""
    tokens = file.field("tokenizer.ggml.tokens")
    ids = {"eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    if file.architecture == "llama":
        ids |= {"bos_token": "bos_token_id", "unk_token": "unknown_token_id"}
    keys = {name: f"tokenizer.ggml.{key}" for name, key in ids.items()}
    special = {name: tokens[file.fields[key]] for name, key in keys.items() if key in file.fields}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=int(file.size("context_length")),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=file.fields.get("tokenizer.chat_template"),
        **special,
    )


def _cut_like_smollm(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)


def _cut_like_qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)


CUTS = {"smollm": _cut_like_smollm, "qwen2": _cut_like_qwen2}
