"""Another family's model that speaks the target's tokens: its embeddings and head, composed anew for each of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import embedding_bag
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.distill.init.sibling import replace_rows

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Origins:
    """Which tokens of another vocabulary each token of the target's is made of.

    Attributes:
        pieces: By id of the target: ids of the other, the mean of whose rows is the token's; none where nothing fits.
        copied: Tokens that both have, letter for letter.
    """

    pieces: Sequence[Sequence[int]]
    copied: int


def transplant_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase, rows: int
) -> Origins:
    """Give a model, in place, embeddings and a head for the target's tokens.

    The row of a token that both vocabularies have is copied; that of another is the mean of the rows of the
    pieces that the model's own tokenizer cuts its text into. A special token that the model does not have gets the row
    of the one with the same role (end of text, padding, ...). Padding rows, and tokens that nothing fits, get the
    mean of all rows.

    Args:
        model: Of any family.
        tokenizer: The model's.
        target_tokenizer: Whose tokens the model speaks afterwards.
        rows: Rows of the target's embeddings, padding included.

    Source: Gee et al. 2022, Fast Vocabulary Transfer (arXiv 2402.09977); the idea of making drafts so
    is that of transplant-vocab (github.com/jukofyork/transplant-vocab).
    """
    origins = find_origins(tokenizer, target_tokenizer, rows)
    num_tokens = len(tokenizer)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    replace_rows(
        model,
        _composed(table.weight.detach()[:num_tokens], origins.pieces),
        _composed(head.weight.detach()[:num_tokens], origins.pieces),
    )
    for config in (model.config.get_text_config(), model.generation_config):
        if config is not None:
            config.bos_token_id = target_tokenizer.bos_token_id
            config.eos_token_id = target_tokenizer.eos_token_id
            config.pad_token_id = target_tokenizer.pad_token_id
    return origins


def find_origins(tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase, rows: int) -> Origins:
    """Return what each of the target's tokens is made of; see transplant_vocabulary."""
    spelled, texts = tokenizer.get_vocab(), _texts(tokenizer)
    own = _ids_by_text(texts, tokenizer)
    roles = _shared_roles(tokenizer, target_tokenizer)
    pieces: list[Sequence[int]] = [()] * rows
    copied, cut = 0, []
    for index, text in _texts(target_tokenizer).items():
        same = spelled.get(target_tokenizer.convert_ids_to_tokens(index))
        if same is not None and texts[same] == text:
            pieces[index], copied = (same,), copied + 1
        elif text in own:
            pieces[index], copied = (own[text],), copied + 1
        elif index in roles:
            pieces[index] = (roles[index],)
        else:
            cut.append((index, text))
    for index, text in cut:
        pieces[index] = _cut(text, tokenizer, own)
    return Origins(pieces, copied)


def _cut(text: bytes, tokenizer: PreTrainedTokenizerBase, own: Mapping[bytes, int]) -> Sequence[int]:
    """Return the tokens of a text, or of its single bytes where it is no whole text."""
    try:
        return tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
    except UnicodeDecodeError:
        return [own[byte] for byte in (text[at : at + 1] for at in range(len(text))) if byte in own]


def _shared_roles(tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """Return the model's special token for each of the target's with the same role, the first role counting."""
    roles: dict[int, int] = {}
    for role in _ROLES:
        here, there = getattr(target_tokenizer, f"{role}_id", None), getattr(tokenizer, f"{role}_id", None)
        if here is not None and there is not None:
            roles.setdefault(here, there)
    return roles


def _texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes that each token stands for, by increasing id; those of an added token are its own spelling."""
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    byte_of = _byte_of_letter() if _is_byte_level(tokenizer) else {}
    texts = {}
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if index in added:
            texts[index] = added[index].encode("utf-8")
        elif byte_of:
            texts[index] = b"".join(byte_of.get(letter, letter.encode("utf-8")) for letter in token)
        else:
            texts[index] = _piece_text(token)
    return texts


def _ids_by_text(texts: Mapping[int, bytes], tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Return the token of each text, the first one where several spell it; bytes stand in only where no piece does."""
    tokens = dict(zip(texts, tokenizer.convert_ids_to_tokens(list(texts)), strict=True))
    return {
        text: index for index, text in sorted(texts.items(), key=lambda item: (not _is_byte(tokens[item[0]]), -item[0]))
    }


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _piece_text(token: str) -> bytes:
    """Return what a SentencePiece token stands for: <0x0A> is a byte, the low line a blank."""
    if _is_byte(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode("utf-8")


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.is_fast and '"ByteLevel"' in json.dumps(
        json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    )


def _byte_of_letter() -> dict[str, bytes]:
    """Return the byte behind each letter of byte-level vocabularies: printable ones stand for themselves, the others
    for the letters from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    return {letter: bytes([byte]) for letter, byte in letters.items()}


def _composed(weight: Float[Tensor, "before hidden"], pieces: Sequence[Sequence[int]]) -> Float[Tensor, "rows hidden"]:
    counts = torch.tensor([0, *(len(piece) for piece in pieces)])
    token_ids = torch.tensor([index for piece in pieces for index in piece])
    rows = embedding_bag(token_ids, weight.float(), counts.cumsum(0)[:-1], mode="mean")
    rows[counts[1:] == 0] = weight.float().mean(0)
    return rows.to(weight)
