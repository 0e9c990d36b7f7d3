"""What the tokenizer files of a model folder say; transformers is imported only where there is no tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from foredraft.core.errors import ModelError


def folder_tokenizer(path: Path) -> tuple[Tokenizer | None, dict[str, Any]]:
    """Return the tokenizer and the special tokens and switches that lie beside it."""
    named = {**read_json(path / "special_tokens_map.json"), **read_json(path / "tokenizer_config.json")}
    if (path / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_file(str(path / "tokenizer.json")), named
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path / 'tokenizer.json'} cannot be read: {error}.") from error
    if not any(path.glob("*.model")) and not (path / "vocab.json").is_file():
        return None, named
    from foredraft.models.loading import load_tokenizer  # brings transformers

    wrapped = load_tokenizer(path)
    return (wrapped.backend_tokenizer if wrapped.is_fast else None), named


def known_tokens(tokenizer: Tokenizer | None, named: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each token by id, added ones included."""
    if tokenizer is None:
        return {}
    found = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    return found | {int(index): str(token["content"]) for index, token in named.get("added_tokens_decoder", {}).items()}


def special_ids(tokenizer: Tokenizer | None, named: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that a tokenizer treats as control tokens."""
    known = tokenizer.get_added_tokens_decoder().items() if tokenizer else ()
    added = {index for index, token in known if token.special}
    added |= {int(index) for index, token in named.get("added_tokens_decoder", {}).items() if token.get("special")}
    return frozenset(added)


def special(name: str, named: Mapping[str, Any], tokens: Mapping[int, str], config: Mapping[str, Any]) -> int:
    """Return the id of bos, eos or pad: the tokenizer's word for it, else the configuration's."""
    token = named.get(f"{name}_token")
    text = token.get("content") if isinstance(token, dict) else token
    for index, known in tokens.items():
        if text is not None and known == text:
            return index
    given = config.get(f"{name}_token_id")
    given = given[0] if isinstance(given, list) and given else given
    return int(given) if isinstance(given, int) else -1


def adds(name: str, named: Mapping[str, Any], tokenizer: Tokenizer | None, tokens: Mapping[int, str]) -> bool:
    """Return whether a text gets bos in front or eos behind; the switch in the file counts before the rules."""
    if isinstance(switch := named.get(f"add_{name}_token"), bool):
        return switch
    if tokenizer is None:
        return False
    ids, bare = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    edge = ids[0] if name == "bos" else ids[-1]
    return len(ids) > len(bare) and edge == special(name, named, tokens, {})


def kind_of(tokenizer: Tokenizer | None) -> str:
    """Return byte-level, sentencepiece, or the name of another kind of tokenizer."""
    if tokenizer is None:
        return "unknown"
    model = tokenizer.model
    if isinstance(model, models.BPE):
        return "sentencepiece" if model.byte_fallback else "byte-level"
    return "sentencepiece" if isinstance(model, models.Unigram) else type(model).__name__.lower()


def chat_template(path: Path, named: Mapping[str, Any]) -> str:
    """Return the chat template of a folder, from its own file or from tokenizer_config.json; empty if none."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = named.get("chat_template") or ""
    return given if isinstance(given, str) else json.dumps(given, sort_keys=True)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is no file.

    Raises:
        ModelError: it cannot be read.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} cannot be read: it holds no object.")
    return found
