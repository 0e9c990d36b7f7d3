"""Drafts in the formats of bitsandbytes, NF4 and LLM.int8: for this process and for training, not for other runtimes.

Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), for NF4; Dettmers et al. 2022 (arXiv 2208.07339) for LLM.int8.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from foredraft.core.errors import MissingExtraError, ModelError
from foredraft.models.draft import Draft
from foredraft.models.kept_packing import keep_packing
from foredraft.models.loading import without_bars

BnbFormat = Literal["nf4", "llm-int8"]
_ROWS = 32  # NF4 on processors is written for outputs in multiples of this


def quantize_bnb(source: Path, draft: Draft, kind: BnbFormat) -> Draft:
    """Return the draft of a folder with the matrices of its body in a format of bitsandbytes; the head stays plain.

    Args:
        source: Its folder, plain.
        draft: What stands in it; left as it was.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
        ModelError: a width that NF4 does not take on this device.
    """
    _require_package()
    config = draft.model.config.get_text_config()
    if kind == "nf4" and not torch.cuda.is_available():
        _refuse_odd_rows(draft.model)
    plan = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        if kind == "nf4"
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    with without_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=plan, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    if model.config.get_text_config().num_hidden_layers != config.num_hidden_layers:
        raise ModelError(f"{source} does not hold the draft that was loaded from it. Make the draft again.")
    keep_packing(model)
    return Draft(model.eval(), draft.head_token_ids)


def _require_package() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            'The formats nf4 and llm-int8 need the package bitsandbytes: pip install "foredraft[quantize]".'
        ) from error


def _refuse_odd_rows(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module.out_features % _ROWS and "layers." in name:
            raise ModelError(
                f"nf4 has kernels on processors for outputs in multiples of {_ROWS}, and {name} has "
                f"{module.out_features}: take bits: 4 of compressed-tensors, a GPU, or cut the width to a multiple."
            )
