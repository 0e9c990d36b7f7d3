"""A trimmed head: which tokens a draft can say at all."""

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.models.head import NO_IDS
from foredraft.trace.store import Trace


def frequent_rows(traces: Iterable[Trace], tokenizer: PreTrainedTokenizerBase, rows: int) -> Int[Tensor, " kept"]:
    """Return the rows of a trimmed head by how often the traces' answers hold a token; see rank_tokens."""
    answers = (row.answer_ids.numpy() for trace in traces for row in trace.rows(tops=False))
    return rank_tokens(answers, tokenizer, rows)


def rank_tokens(answers: Iterable[np.ndarray], tokenizer: PreTrainedTokenizerBase, rows: int) -> Int[Tensor, " kept"]:
    """Return the rows of a trimmed head, increasing: the tokens that the target emits most often.

    Always holds every special and added token, and never fewer than `rows` tokens, unless the tokenizer
    has no more: what the answers leave open is filled in the order of ids, which in byte-pair
    vocabularies is that of frequency.

    Args:
        answers: Token ids that the target wrote.
        tokenizer: Names the special tokens, and the ids that are tokens and not padding.
        rows: Rows asked for; 0 keeps the whole head and returns an empty list.
    """
    if rows == 0:
        return NO_IDS
    num_tokens = len(tokenizer)
    counts = sum(
        (np.bincount(answer, minlength=num_tokens) for answer in answers), np.zeros(num_tokens, dtype=np.int64)
    )
    special = sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})
    counts[special] = np.iinfo(np.int64).max
    kept = np.argsort(-counts, kind="stable")[: max(rows, len(special))]
    return torch.from_numpy(np.sort(kept))
