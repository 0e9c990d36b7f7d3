"""Evaluation prompts have no place in what a draft learns from."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.core.errors import CorpusError, TraceError
from foredraft.distill.documents import Document
from foredraft.trace.near import word_sequences
from foredraft.trace.prompts import Prompt, render
from foredraft.trace.store import Trace

_log = logging.getLogger(__name__)

# A prompt is in a text where so large a share of its sequences of so many words is.
_WORDS, _SHARE = 13, 0.3

Sequences = NDArray[np.uint64]


def refuse_leaked_answers(traces: Iterable[Trace], prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Raise where a trace to learn from holds an answer to one of `prompts`, by its id or by what it says.

    Raises:
        TraceError: names the trace and the prompt.
    """
    if not prompts:
        return
    names = {prompt.id for prompt in prompts}
    begins = {bytes(render(prompt, tokenizer).numpy()): prompt.id for prompt in prompts}
    lengths = {len(begin) for begin in begins}
    for trace in traces:
        for row in trace.rows(tops=False):
            said = bytes(row.prompt_ids.numpy())
            same = [begins[said[:length]] for length in lengths if said[:length] in begins]
            if row.prompt_id in names or same:
                raise TraceError(
                    f"{trace.path} holds an answer to {row.prompt_id!r}, which is the evaluation prompt "
                    f"{(same or [row.prompt_id])[0]!r}: a draft must not learn from what it is scored on. Collect "
                    "training answers to other prompts."
                )


def without_leaks(documents: Sequence[Document], prompts: Sequence[Prompt], drop: bool) -> list[Document]:
    """Return the documents that may be learnt from when `prompts` score drafts.

    A prompt is in the text where 30 % of its sequences of 13 words are. Fewer are warned of. Case, punctuation and
    spacing do not count; a prompt of less than 13 words is only found as a whole document or message.

    Args:
        drop: Leave out every document that shares a sequence with a prompt, instead of refusing.

    Raises:
        CorpusError: prompts are in the text; or none of it would be left.
    """
    if not prompts:
        return list(documents)
    owned = {prompt.id: word_sequences(prompt.text, _WORDS) for prompt in prompts}
    every = np.unique(np.concatenate(list(owned.values())))
    shared = [np.intersect1d(_sequences(document), every) for document in documents]
    kept = [document for document, hits in zip(documents, shared, strict=True) if not len(hits)]
    if len(kept) == len(documents):
        return kept
    if drop:
        _log.warning("%d of %d documents share text with evaluation prompts and are left out.",
                     len(documents) - len(kept), len(documents))  # fmt: skip
        if not kept:
            raise CorpusError("Every document shares text with an evaluation prompt: name other text.")
        return kept
    found = np.unique(np.concatenate(shared))
    shares = {name: float(np.isin(grams, found).mean()) for name, grams in owned.items()}
    if leaked := [name for name, share in shares.items() if share >= _SHARE]:
        raise CorpusError(_leak(leaked, shares, owned[leaked[0]], documents, shared))
    _log.warning("%d evaluation prompts share a few sequences of %d words with the text; the most is %.0f %% of one.",
                 sum(share > 0 for share in shares.values()), _WORDS, 100 * max(shares.values()))  # fmt: skip
    return list(documents)


def _sequences(document: Document) -> Sequences:
    """Return the word sequences of a document, and of each message as a text of its own."""
    said = [document.said, *(str(message["content"]) for message in document.messages)]
    return np.concatenate([word_sequences(text, _WORDS) for text in said])


def _leak(
    leaked: Sequence[str],
    shares: Mapping[str, float],
    grams: Sequences,
    documents: Sequence[Document],
    shared: Sequence[Sequences],
) -> str:
    most = max(range(len(documents)), key=lambda index: int(np.isin(grams, shared[index]).sum()))
    return (
        f"{len(leaked)} evaluation prompts are in the text to train on, {leaked[0]!r} first: "
        f"{100 * shares[leaked[0]]:.0f} % of it stands in {documents[most].where}. Leave such documents out "
        "(text.leaks: drop), or score on other prompts."
    )
