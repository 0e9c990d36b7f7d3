"""Drafts that other trainers make and that are no language models: recognised by their config.json, and named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.core.errors import CapabilityError

_HEADS = ("eagle", "medusa", "mlp_speculator", "dflash", "dspark", "peagle", "hydra")


def foreign_head(config: Mapping[str, Any]) -> str:
    """Return what kind of draft head a config.json describes, such as `eagle3 (speculators)`; empty for none.

    Recognised are folders of speculators 0.9 (`speculators_model_type`, or `speculators_config.algorithm`), and heads
    by their `model_type` or architecture. A one-layer Llama with `draft_vocab_size` is an EAGLE-3 head too.
    """
    inner = config.get("speculators_config") or {}
    if named := config.get("speculators_model_type") or inner.get("algorithm"):
        return f"{named} (speculators)"
    names = [str(config.get("model_type", "")), *map(str, config.get("architectures") or [])]
    for name in names:
        if any(head in name.lower() for head in _HEADS):
            return name
    return "eagle3" if "draft_vocab_size" in config else ""


def head_sentence(source: str, config: Mapping[str, Any]) -> str:
    """Return why foredraft does not score a draft head; empty for what is none."""
    if not (kind := foreign_head(config)):
        return ""
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path", "")
    return (
        f"{source} is a draft head of kind {kind}, which reads hidden states of its target"
        + (f" {verifier}" if verifier else "")
        + ": it is recognised, but only drafts that run alone are scored here. vLLM serves it: vllm serve TARGET "
        f'--speculative-config \'{{"model": "{source}"}}\'.'
    )


def refuse_foreign_head(source: str) -> None:
    """Raise a CapabilityError where a folder holds a draft head rather than a model."""
    file = Path(source).expanduser() / "config.json"
    if not file.is_file():
        return
    try:
        sentence = head_sentence(source, json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError):
        return  # loading says what is wrong with it
    if sentence:
        raise CapabilityError(sentence)
