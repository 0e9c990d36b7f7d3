"""Facts of a model from its configuration, tokenizer files and weight headers; weights stay on disk.

transformers is imported only where a tokenizer is not in tokenizer.json, and for GGUF files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer

from foredraft.checkpoint import FACTORS, MANIFEST, DraftManifest, read_manifest
from foredraft.core.digest import digest_of, file_digest
from foredraft.core.errors import ModelError
from foredraft.core.pair import ModelFacts
from foredraft.models.foreign import head_sentence
from foredraft.models.gguf_header import read_header
from foredraft.models.quantized import missing_package, quantization_method
from foredraft.models.tokenizer_facts import (
    adds,
    chat_template,
    folder_tokenizer,
    kind_of,
    known_tokens,
    read_json,
    special,
    special_ids,
)

_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HEADS = frozenset(("lm_head.weight", "embed_out.weight", "output.weight", "language_model.lm_head.weight"))
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = frozenset(("I8", "U8", "I32"))
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_RECURRENT = frozenset((
    "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "rwkv", "recurrent_gemma", "falcon_h1",
    "granitemoehybrid", "nemotron_h", "qwen3_next", "lfm2", "xlstm",
))  # fmt: skip
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_BOOKKEEPING = ("_from_model_config", "transformers_version")
_GGUF_FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
_GGUF_UNUSED, _GGUF_CONTROL = 5, 3
_GGUF_TOKENIZERS = {"gpt2": "byte-level", "llama": "sentencepiece"}


@dataclass(frozen=True, slots=True)
class Side:
    """A model's facts, with what can read more of it.

    Attributes:
        tokenizer: Cuts text as the model does; None where it is not known.
        manifest: What foredraft.json says, for a draft made here; None for others.
    """

    facts: ModelFacts
    path: Path
    tokenizer: Tokenizer | None = None
    manifest: DraftManifest | None = None


def read_side(source: str) -> Side:
    """Return what is known of a folder, a .gguf file, a hub id or a foredraft draft, without its weights.

    Raises:
        ModelError: there is no such thing, or it is no model.
        CheckpointError: its foredraft.json cannot be read.
    """
    path = _locate(source)
    if path.suffix == ".gguf":
        return _gguf_side(source, path)
    manifest = read_manifest(path) if (path / MANIFEST).is_file() else None
    if manifest is not None and manifest.kind != "causal-lm":
        return Side(ModelFacts(source, "model-free", manifest.kind), path, None, manifest)
    try:
        return _folder_side(source, path, manifest)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / 'config.json'} or what lies beside it cannot be read: {error}.") from error


def cut_alike(one: Side, other: Side) -> bool:
    """Return whether two tokenizers are one: the same file, or the same vocabulary, control tokens and rules.

    What is not known is taken to agree.
    """
    if one.tokenizer is None or other.tokenizer is None:
        return True
    files = [side.path / "tokenizer.json" for side in (one, other)]
    if all(file.is_file() for file in files) and file_digest(files[0]) == file_digest(files[1]):
        return True
    return backend_fingerprint(one.tokenizer) == backend_fingerprint(other.tokenizer)


def backend_fingerprint(tokenizer: Tokenizer) -> str:
    """Return loading.tokenizer_fingerprint of the tokenizer that transformers wraps around this one."""
    added = {
        str(index): [token.content, token.special] for index, token in tokenizer.get_added_tokens_decoder().items()
    }
    backend = json.loads(tokenizer.to_str())
    rules = {key: backend[key] for key in ("normalizer", "pre_tokenizer", "model")}
    return digest_of({"vocab": tokenizer.get_vocab(with_added_tokens=True), "added": added, "rules": rules})


def _locate(source: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ModelError(f"{source} is a file: name a model folder, a .gguf file or a hub id.")
        return path
    if path.suffix == ".gguf" or source.count("/") > 1:
        raise ModelError(f"There is no folder or file {source}.")
    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES, etag_timeout=5.0))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"There is no folder {source}, and the hub does not give a model of that name.") from error


def _folder_side(source: str, path: Path, manifest: DraftManifest | None) -> Side:
    if not (path / "config.json").is_file():
        raise ModelError(f"{source} is no model folder: it has no config.json.")
    config = read_json(path / "config.json")
    text_config = {**config, **(config.get("text_config") or {})}
    settings = read_json(path / "generation_config.json")
    header = dict(_tensor_headers(path))
    architecture = str((config.get("architectures") or ["unknown"])[0])
    tokenizer, named = folder_tokenizer(path)
    tokens = known_tokens(tokenizer, named)
    has_head = any(name in _HEADS for name in header) if header else None
    stops = settings.get("eos_token_id", text_config.get("eos_token_id"))
    facts = ModelFacts(
        source=source,
        form="factored" if (path / FACTORS).is_file() else "folder",
        architecture=architecture,
        num_rows=int(text_config.get("vocab_size") or 0),
        tokens=tokens,
        special_ids=special_ids(tokenizer, named),
        base_tokens=tokenizer.get_vocab_size(with_added_tokens=False) if tokenizer else 0,
        tokenizer_kind=kind_of(tokenizer),
        bos_id=special("bos", named, tokens, text_config),
        eos_id=special("eos", named, tokens, text_config),
        pad_id=special("pad", named, tokens, text_config),
        adds_bos=adds("bos", named, tokenizer, tokens),
        adds_eos=adds("eos", named, tokenizer, tokens),
        stop_ids=tuple(stops) if isinstance(stops, list) else () if stops is None else (int(stops),),
        chat_template=chat_template(path, named),
        max_context=int(text_config.get("max_position_embeddings") or 0),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or next(iter(header.values()), "")),
        is_tied=bool(text_config.get("tie_word_embeddings", has_head is False)),
        has_head=has_head,
        quantization=quantization_method(config),
        has_integers=any(kind in _INTEGERS for kind in header.values()),
        tokenizer_class=str(named.get("tokenizer_class", "")),
        settings={name: value for name, value in settings.items() if name not in _BOOKKEEPING},
        is_recurrent=_is_recurrent(text_config),
        has_sliding_window=_has_sliding_window(text_config),
        hidden_size=int(text_config.get("hidden_size") or 0),
        fault=_fault(source, path, config, text_config, architecture, tokenizer is None),
        head_rows=int(manifest.options.get("head_rows", 0)) if manifest else 0,
    )
    return Side(facts, path, tokenizer, manifest)


def _gguf_side(source: str, path: Path) -> Side:
    from foredraft.models.gguf import read_gguf_tokenizer  # brings transformers

    fields, shapes = read_header(path)
    wrapped = read_gguf_tokenizer(path, fields)
    architecture = str(fields.get("general.architecture", "unknown"))
    texts, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    tokens = {index: text for index, (text, kind) in enumerate(zip(texts, kinds, strict=False)) if kind != _GGUF_UNUSED}
    control = frozenset(index for index, kind in enumerate(kinds) if kind == _GGUF_CONTROL)
    tokenizer = wrapped.backend_tokenizer if wrapped is not None else None
    eos = int(fields.get("tokenizer.ggml.eos_token_id", -1))
    model = str(fields.get("tokenizer.ggml.model", "unknown"))
    facts = ModelFacts(
        source=source,
        form="gguf",
        architecture=architecture,
        num_rows=shapes.get("token_embd.weight", (0,))[0],
        tokens=tokens,
        special_ids=control,
        base_tokens=tokenizer.get_vocab_size(with_added_tokens=False) if tokenizer else 0,
        tokenizer_kind=_GGUF_TOKENIZERS.get(model, model),
        bos_id=int(fields.get("tokenizer.ggml.bos_token_id", -1)),
        eos_id=eos,
        pad_id=int(fields.get("tokenizer.ggml.padding_token_id", -1)),
        adds_bos=bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        adds_eos=bool(fields.get("tokenizer.ggml.add_eos_token", False)),
        stop_ids=(eos,) if eos >= 0 else (),
        chat_template=str(fields.get("tokenizer.chat_template", "")),
        max_context=int(fields.get(f"{architecture}.context_length", 0)),
        dtype=_GGUF_FILE_TYPES.get(int(fields.get("general.file_type", -1)), ""),
        is_tied="output.weight" not in shapes,
        has_head="output.weight" in shapes,
        is_recurrent=architecture in _RECURRENT or any(".ssm." in name or ".wkv." in name for name in fields),
        hidden_size=int(fields.get(f"{architecture}.embedding_length", 0)),
        fault=_gguf_fault(source, architecture, tokenizer is None),
    )
    return Side(facts, path, tokenizer)


def _gguf_fault(source: str, architecture: str, unread_tokenizer: bool) -> str:
    if architecture not in ("llama", "qwen2"):
        return f"{source} holds the architecture {architecture!r}; read are llama and qwen2."
    return f"{source} has a tokenizer of a kind that is not read." if unread_tokenizer else ""


def _fault(
    source: str,
    path: Path,
    config: Mapping[str, Any],
    text_config: Mapping[str, Any],
    architecture: str,
    no_tokenizer: bool,
) -> str:
    """Return why foredraft does not load a folder; empty if nothing speaks against it."""
    if sentence := head_sentence(source, config):
        return sentence
    if architecture != "unknown" and not architecture.endswith(_CAUSAL):
        return f"{source} is a {architecture}, no causal language model."
    if config.get("is_encoder_decoder"):
        return f"{source} is an encoder with a decoder, no causal language model."
    if Path(source).expanduser().is_dir() and not any(path.glob("*.safetensors")):
        pickles = [file.name for kind in _PICKLES for file in path.glob(kind)]
        held = f"its weights as pickle ({pickles[0]}), which is never read" if pickles else "no *.safetensors"
        return f"{source} holds {held}."
    if missing := missing_package(config):
        return f"{source} {missing}"
    for name in _SIZES:
        if isinstance(size := text_config.get(name), int) and size < 1:
            return f"The config.json of {source} says {name}: {size}."
    return f"{source} has no tokenizer." if no_tokenizer else ""


def _tensor_headers(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the dtype of every stored tensor; nothing but headers is read."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(length))
            except (ValueError, MemoryError, OverflowError) as error:
                raise ModelError(f"{file} is no safetensors file, or is cut short.") from error
        for name, tensor in header.items():
            if name not in ("__metadata__", "head_token_ids"):
                yield name, _DTYPES.get(tensor["dtype"], tensor["dtype"])


def _is_recurrent(config: Mapping[str, Any]) -> bool:
    layers = {str(layer) for layer in config.get("layer_types") or config.get("layers_block_type") or ()}
    return config.get("model_type") in _RECURRENT or bool(layers & {"linear_attention", "mamba", "recurrent", "conv"})


def _has_sliding_window(config: Mapping[str, Any]) -> bool:
    if layers := config.get("layer_types"):
        return "sliding_attention" in layers
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is not False
