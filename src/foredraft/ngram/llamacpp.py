"""llama.cpp's lookup-cache files (--lookup-cache-static, --lookup-cache-dynamic): reading and writing.

The file is a repetition of [4 x int32 token ids, unused ones -1][int32 n][n x (int32 token, int32 count)], in the
machine's byte order. It has no header and does not say whose vocabulary it holds: a file of another tokenizer is
read without an error unless an id is too large.
"""

import logging
from pathlib import Path

import numpy as np

from foredraft.core.errors import CorpusError
from foredraft.core.files import whole_file
from foredraft.ngram.counts import NgramCounts, counts_from_contexts

MAX_ORDER = 4
STATIC_ORDER = 2
_UNUSED = -1
_KEY_INTS = MAX_ORDER + 1
_log = logging.getLogger(__name__)


def export_lookup_cache(counts: NgramCounts, path: Path, order: int = STATIC_ORDER) -> int:
    """Write the contexts of `order` tokens, or of all lengths up to 4 for order 0; return their number.

    A static cache is looked up with contexts of two tokens only, a dynamic one with one to four.
    """
    lengths = [order] if order else list(range(1, min(counts.order, MAX_ORDER) + 1))
    if lengths[-1] > min(counts.order, MAX_ORDER):
        raise CorpusError(
            f"The counts end at {counts.order} tokens of context, llama.cpp's at 4: {order} cannot be written."
        )
    written = 0
    with whole_file(path) as partial, partial.open("wb") as file:
        for length in lengths:
            begin, end = counts.levels()[length]
            contexts = counts.contexts(length)
            for node in range(begin, end):
                first, last = counts.first_next[node], counts.first_next[node + 1]
                key = np.full(_KEY_INTS, _UNUSED, np.int32)
                key[:length] = contexts[node - begin]
                key[MAX_ORDER] = last - first
                pairs = np.stack([counts.next_token[first:last], counts.next_count[first:last]], axis=1)
                file.write(key.tobytes() + pairs.astype(np.int32).tobytes())
                written += 1
    _log.warning("%s does not say whose vocabulary it holds: use it with the same model only.", path.name)
    return written


def import_lookup_cache(path: Path, vocab_size: int) -> NgramCounts:
    """Return the counts of a lookup-cache file; shorter contexts are the sums of longer ones where absent.

    Raises:
        CorpusError: the file is empty, cut short, or holds ids outside the vocabulary or counts below one.
    """
    if not path.is_file():
        raise CorpusError(f"There is no lookup cache {path}.")
    raw = path.read_bytes()
    if len(raw) == 0 or len(raw) % 4:
        raise CorpusError(f"{path} is no lookup cache of llama.cpp: it has {len(raw)} bytes.")
    data = np.frombuffer(raw, np.int32)
    contexts, continuations = [], []
    at = 0
    while at < len(data):
        size = int(data[at + MAX_ORDER]) if at + MAX_ORDER < len(data) else 0
        end = at + _KEY_INTS + 2 * size
        key = data[at : at + MAX_ORDER]
        context = key[: int((key != _UNUSED).sum())]
        whole = size > 0 and end <= len(data)
        pairs = data[at + _KEY_INTS : end if whole else at + _KEY_INTS].reshape(-1, 2)
        sound = (
            whole
            and len(context) > 0
            and bool(((context >= 0) & (context < vocab_size)).all())
            and bool(((pairs[:, 0] >= 0) & (pairs[:, 0] < vocab_size) & (pairs[:, 1] > 0)).all())
        )
        if not sound:
            raise CorpusError(
                f"{path} is cut short, or not of a vocabulary of {vocab_size}: its entry at byte {4 * at} is none."
            )
        contexts.append(context)
        continuations.append(pairs)
        at = end
    _log.warning("%s does not say whose vocabulary it holds: make sure that it is this model's.", path)
    return counts_from_contexts(contexts, continuations)
