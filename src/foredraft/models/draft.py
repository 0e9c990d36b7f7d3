"""A trained draft in memory, and as a folder that stock transformers loads, unless it holds factors."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.checkpoint import FACTORS, DraftManifest, write_draft
from foredraft.core.errors import CheckpointError, ModelError
from foredraft.models.factored import has_factors
from foredraft.models.head import NO_IDS
from foredraft.models.loading import load_model, without_bars
from foredraft.models.quantized import quantization_plan

HEAD_FILE = "head_token_ids.safetensors"


@dataclass(frozen=True, slots=True)
class Draft:
    """A causal language model that guesses for a target.

    Attributes:
        model: A transformers model with its full head; its layers may be rounded or factored.
        head_token_ids: Rows of the head that are computed, increasing; empty for all.
    """

    model: PreTrainedModel
    head_token_ids: Int[Tensor, " kept"] = NO_IDS

    @property
    def is_quantized(self) -> bool:
        """Whether weights of it are rounded to fewer bits."""
        return bool(quantization_plan(self.model.config.to_dict()))


def save_draft(
    draft: Draft,
    path: Path,
    manifest: DraftManifest,
    tokenizer: PreTrainedTokenizerBase,
    finish: Callable[[Path, PreTrainedModel], None] = lambda folder, model: None,
) -> DraftManifest:
    """Write a draft as a folder that transformers loads, with its manifest; return the manifest complete.

    One that holds factors is written under a name that only `load_draft` knows.

    Args:
        finish: Called with the folder before it gets its name, and the model; what it raises leaves nothing behind.

    Raises:
        OutputError: the folder exists, or the disk is full.
    """
    manifest = replace(manifest, options={**manifest.options, "head_rows": len(draft.head_token_ids)})

    def fill(folder: Path) -> None:
        _fill(folder, draft, tokenizer)
        finish(folder, draft.model)

    return write_draft(path, manifest, fill)


def load_draft(path: Path, dtype: str = "auto") -> Draft:
    """Read a draft folder, or that of an ordinary transformers model; `dtype` as in load_causal_lm.

    Raises:
        ModelError: the folder is no causal language model.
        CheckpointError: the list of head rows cannot be read, or a weight is no finite number.
    """
    draft = Draft(load_model(path, dtype), _read_head_token_ids(path / HEAD_FILE))
    for name, weight in draft.model.named_parameters():
        if not weight.isfinite().all():
            raise CheckpointError(f"{path} holds weights that are no finite numbers, in {name}. Make the draft again.")
    return draft


def stored_dtype(source: Path) -> str:
    """Return the precision that a folder's config.json names; float32 where it names none."""
    file = source / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _fill(folder: Path, draft: Draft, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        with without_bars():
            draft.model.save_pretrained(folder)
    except NotImplementedError as error:
        raise ModelError(
            "transformers does not write weights of this format that it has read, as those of bitsandbytes: go on from "
            "the draft that they were made from."
        ) from error
    if has_factors(draft.model):
        (folder / "model.safetensors").rename(folder / FACTORS)
    tokenizer.save_pretrained(folder)
    if len(draft.head_token_ids):
        save_file({"head_token_ids": draft.head_token_ids.contiguous()}, folder / HEAD_FILE)


def _read_head_token_ids(file: Path) -> Int[Tensor, " kept"]:
    if not file.is_file():
        return NO_IDS
    try:
        token_ids = load_file(file)["head_token_ids"]
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Make the draft again.") from error
    if token_ids.dtype != torch.long or token_ids.dim() != 1 or not bool((token_ids.diff() > 0).all()):
        raise CheckpointError(f"{file} does not hold increasing token ids. Make the draft again.")
    return token_ids
