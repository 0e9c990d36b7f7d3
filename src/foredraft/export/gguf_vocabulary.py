"""The tokenizer fields of a GGUF file: a GGUF target's own, or written from a folder's tokenizer.

What llama.cpp knows of a pre-tokenizer is its name. Only those that are known here by name are written: another
name would cut text differently in silence.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter
from tokenizers import Tokenizer, models

from foredraft.core.errors import ModelError
from foredraft.models.gguf import CONTROL, CUTS, NORMAL, UNUSED, USER_DEFINED
from foredraft.models.target import LocalTarget

_PREFIX = "tokenizer."
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# llama.cpp's converter takes tokens of these forms for control tokens too, whatever their tokenizer calls them.
_FORMS = (("<|", "|>"), ("<｜", "｜>"))


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a file's metadata; `items` is the type of an array's entries."""

    key: str
    value: Any
    type: GGUFValueType
    items: GGUFValueType | None = None

    def write(self, writer: GGUFWriter) -> None:
        writer.add_key_value(self.key, self.value, self.type, sub_type=self.items)


def vocabulary_fields(target: LocalTarget) -> list[Field]:
    """Return the tokenizer fields that a draft of this target needs, one token a row of its embeddings.

    Raises:
        ModelError: the target's tokenizer is none that llama.cpp is known to cut alike.
    """
    if target.path.suffix == ".gguf":
        return list(_copied(GGUFReader(target.path)))
    return list(_written(target))


def pre_tokenizer_name(tokenizer: Tokenizer) -> str:
    """Return llama.cpp's name of how a byte-level tokenizer cuts text before merging.

    Raises:
        ModelError: it is no byte-level BPE, or cuts text in a way that has no name here.
    """
    given = json.loads(tokenizer.to_str())
    if given["model"]["type"] == "BPE" and not given["model"].get("byte_fallback"):
        for name, cut in CUTS.items():
            if _rules(given) == _rules_of(cut):
                return name
    raise ModelError(
        f"The target's tokenizer cannot be written as GGUF: it is {given['model']['type']} behind "
        f"{json.dumps(given['pre_tokenizer'], ensure_ascii=False)[:120]}, known are byte-level BPE cut as "
        f"{', '.join(CUTS)}. Convert the target with llama.cpp's convert_hf_to_gguf.py, and export for that .gguf file."
    )


def _copied(reader: GGUFReader) -> Iterator[Field]:
    for key, field in reader.fields.items():
        if key.startswith(_PREFIX):
            yield Field(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)


def _written(target: LocalTarget) -> Iterator[Field]:
    tokenizer, backend = target.tokenizer, target.tokenizer.backend_tokenizer
    name = pre_tokenizer_name(backend)
    tokens, kinds = zip(*_tokens(target, backend), strict=True)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in _model(backend)["merges"]]
    text, number, flag = GGUFValueType.STRING, GGUFValueType.UINT32, GGUFValueType.BOOL
    yield Field("tokenizer.ggml.model", "gpt2", text)
    yield Field("tokenizer.ggml.pre", name, text)
    yield Field("tokenizer.ggml.tokens", list(tokens), GGUFValueType.ARRAY, text)
    yield Field("tokenizer.ggml.token_type", list(kinds), GGUFValueType.ARRAY, GGUFValueType.INT32)
    yield Field("tokenizer.ggml.merges", merges, GGUFValueType.ARRAY, text)
    for short, long in _IDS.items():
        if (token_id := _special_id(target, short)) is not None:
            yield Field(f"tokenizer.ggml.{long}_token_id", token_id, number)
    yield Field("tokenizer.ggml.add_bos_token", _adds_bos(tokenizer), flag)
    yield Field("tokenizer.ggml.add_space_prefix", False, flag)
    if isinstance(tokenizer.chat_template, str):
        yield Field("tokenizer.chat_template", tokenizer.chat_template, text)


def _tokens(target: LocalTarget, backend: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yield the text and the kind of each row's token."""
    texts = {index: text for text, index in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    for index in range(target.vocab_size):
        if index not in texts:
            yield f"[PAD{index}]", UNUSED
        elif index not in added:
            yield texts[index], NORMAL
        else:
            yield texts[index], CONTROL if added[index].special or _looks_special(texts[index]) else USER_DEFINED


def _looks_special(text: str) -> bool:
    return any(text.startswith(first) and text.endswith(last) for first, last in _FORMS)


def _special_id(target: LocalTarget, name: str) -> int | None:
    """Return the tokenizer's word for bos, eos, unk or pad, else the model's configuration's."""
    found = getattr(target.tokenizer, f"{name}_token_id")
    given = getattr(target.model.config, f"{name}_token_id", None) if found is None else found
    return given[0] if isinstance(given, list) else given


def _adds_bos(tokenizer: Any) -> bool:
    bare, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    return len(whole) > len(bare) and whole[0] == tokenizer.bos_token_id


def _rules_of(cut: Callable[[Tokenizer], None]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    cut(tokenizer)
    return _rules(json.loads(tokenizer.to_str()))


def _rules(given: Mapping[str, Any]) -> Any:
    """Return what of a tokenizer decides where text is cut; offsets are of no account."""
    return _without_offsets([given["normalizer"], given["pre_tokenizer"]])


def _without_offsets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_offsets(part) for key, part in value.items() if key != "trim_offsets"}
    return [_without_offsets(part) for part in value] if isinstance(value, list) else value


def _model(backend: Tokenizer) -> Any:
    return json.loads(backend.to_str())["model"]
