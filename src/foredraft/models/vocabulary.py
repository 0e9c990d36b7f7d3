"""What can be known of a model without its weights: its tokens, what ends an answer, how much it reads."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.core.errors import ModelError
from foredraft.models.gguf import read_gguf_vocabulary
from foredraft.models.loading import load_tokenizer, locate, tokenizer_fingerprint


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and what its folder says of the model that speaks it.

    Attributes:
        num_rows: Rows of the model's head, padding included; the tokenizer's tokens where the folder does not say.
        stop_ids: Tokens after which an answer ends.
        max_context: Tokens that the model reads; sys.maxsize where the folder does not say.
    """

    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    num_rows: int
    stop_ids: tuple[int, ...]
    max_context: int


def load_vocabulary(source: str, trust_remote_code: bool = False) -> Vocabulary:
    """Return the vocabulary of a folder, a .gguf file or a hub id; weights are neither fetched nor read.

    Raises:
        ModelError: there is none; the message says what to do.
    """
    path = locate(source, trust_remote_code, weights=False)
    if path.suffix == ".gguf":
        config, tokenizer = read_gguf_vocabulary(path)
        settings = config.to_dict()
    else:
        tokenizer = load_tokenizer(path, trust_remote_code)
        settings = _json(path / "config.json") | _json(path / "generation_config.json")
    text_settings = settings.get("text_config") or settings
    return Vocabulary(
        tokenizer,
        tokenizer_fingerprint(tokenizer),
        max(int(text_settings.get("vocab_size") or 0), len(tokenizer)),
        _stops(settings, tokenizer),
        int(text_settings.get("max_position_embeddings") or sys.maxsize),
    )


def _stops(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ids = settings.get("eos_token_id", tokenizer.eos_token_id)
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelError(f"{path} is no JSON object ({error}): copy it from the model again.") from error
