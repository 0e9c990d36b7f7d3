"""Real text for the benchmarks of n-gram drafters: source code, man pages, and edits of code, as token ids."""

import gzip
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from words import Words

from foredraft.core.protocols import Answer

HELD_OUT_TOKENS = 150_000
LONGEST_DRAFTED = 6_000
LONGEST_EDIT = 12_000
_SHORTEST_BYTES, _LONGEST_BYTES = 200, 400_000
_TEXTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TextSet:
    """A corpus, texts to fit on, and texts to score: no file is in two of them.

    Attributes:
        corpus: What is indexed.
        fitted, scored: Halves of the held-out texts, with the first token that is drafted.
    """

    corpus: list[np.ndarray]
    fitted: list[Answer]
    scored: list[Answer]


def library_files() -> list[Path]:
    """Return the Python sources of the running interpreter's standard library."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in stdlib.rglob("*.py") if "site-packages" not in path.parts]


def manual_files() -> list[Path]:
    """Return this machine's English man pages, each once."""
    return sorted({path.resolve() for path in Path("/usr/share/man").glob("man*/*")})


def text_set(files: Iterable[Path], tokenizer: Tokenizer, corpus_tokens: int) -> TextSet:
    """Return held-out texts and a corpus of about so many tokens, by file in the order of a hash of its name."""
    corpus: list[np.ndarray] = []
    held_out: list[Answer] = []
    corpus_size = held_out_size = 0
    for token_ids in token_lists(in_hash_order(files), tokenizer):
        if held_out_size < HELD_OUT_TOKENS:
            held_out.append(Answer(torch.from_numpy(token_ids[:LONGEST_DRAFTED].astype(np.int64)), 1))
            held_out_size += held_out[-1].num_tokens
            continue
        corpus.append(token_ids[: corpus_tokens - corpus_size])
        corpus_size += len(corpus[-1])
        if corpus_size == corpus_tokens:
            break
    return TextSet(corpus, held_out[::2], held_out[1::2])


def edits(path: Path, tokenizer: Tokenizer) -> list[Answer]:
    """Return code edits: the old version, inside its instruction, is the prompt and the new one is drafted."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = []
    for row in rows[1::2]:
        old, new = (tokenizer.encode(text).ids for text in (row["prompt"] + "\n", row["reference"]))
        if len(old) < LONGEST_EDIT:
            answers.append(Answer(torch.tensor((old + new)[:LONGEST_EDIT]), len(old)))
    return answers


def in_hash_order(files: Iterable[Path]) -> list[Path]:
    """Return files in an order that mixes folders and is the same on every run."""
    return sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())


def token_lists(files: Iterable[Path], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of each readable text of 200 bytes to 400 kB; no text twice."""
    words = Words(tokenizer)
    seen: set[bytes] = set()
    batch: list[str] = []
    for text in _texts(files):
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        batch.append(text)
        if len(batch) == _TEXTS_AT_ONCE:
            yield from words.encode(batch)
            batch = []
    yield from words.encode(batch)


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        except (OSError, UnicodeDecodeError):
            continue
        if _SHORTEST_BYTES < len(text) < _LONGEST_BYTES:
            yield text
