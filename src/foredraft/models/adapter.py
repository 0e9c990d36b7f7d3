"""Targets served with a LoRA adapter: the adapter's weights are added to the model's, as servers add its product."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.models.quantized import quantization_plan

_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_MERGED = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3")

_log = logging.getLogger(__name__)


def merge_adapter(model: PreTrainedModel, folder: Path, name: str) -> PreTrainedModel:
    """Return the model with the adapter of a peft folder merged into its weights; `model` itself is used up.

    Every weight of the adapter must find its place: peft alone leaves out in silence what has none.

    Args:
        name: What errors call the model.

    Raises:
        ModelError: it is no adapter, not one that can be merged, or was made for another base.
    """
    config = _read_config(folder)
    if quantization_plan(model.config.to_dict()):
        raise ModelError(
            f"{name} is quantized, and an adapter cannot be merged into rounded weights: name the model of full "
            "precision that it was made from."
        )
    from peft import PeftModel  # takes seconds to import, which targets without an adapter need not pay

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's own deprecations, and keys that are compared below
            adapted = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
            _refuse_other_base(adapted, folder, name)
            merged = adapted.merge_and_unload()
    except (RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"The adapter {folder} does not fit {name}: {reason}. Name the base it was made for."
        ) from error
    made_for = str(config.get("base_model_name_or_path") or "")
    if made_for and Path(made_for).name != Path(name).name:
        _log.warning("The adapter %s names the base %s; it was merged into %s, which it fits.", folder, made_for, name)
    return merged.eval()


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    if not file.is_file():
        raise ModelError(f"{folder} is no adapter: it has no {_CONFIG}.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error
    if config.get("peft_type") not in _MERGED:
        raise ModelError(
            f"{folder} is an adapter of kind {config.get('peft_type')}, which cannot be merged; merged are: "
            f"{', '.join(_MERGED)}."
        )
    if not (folder / _WEIGHTS).is_file():
        if (folder / _PICKLE).is_file():
            raise ModelError(f"{folder} holds its weights as pickle ({_PICKLE}), which is never read.")
        raise ModelError(f"{folder} is no adapter: it has no {_WEIGHTS}.")
    return config


def _refuse_other_base(adapted: Any, folder: Path, name: str) -> None:
    from peft import get_peft_model_state_dict

    with safe_open(folder / _WEIGHTS, "pt") as file:
        stored = set(file.keys())
    placed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if without_place := sorted(stored - placed):
        raise ModelError(
            f"The adapter {folder} does not fit {name}, which has no place for {without_place[0]} "
            f"({len(without_place)} such). Name the base it was made for."
        )
    if without_weight := sorted(placed - stored):
        raise ModelError(
            f"The adapter {folder} does not fit {name}: it has no weights for {without_weight[0]} "
            f"({len(without_weight)} such). Name the base it was made for."
        )
