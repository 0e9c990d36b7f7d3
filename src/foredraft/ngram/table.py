"""The n-gram table: guesses the most frequent continuation of the longest known context."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from foredraft.checkpoint import DraftManifest, read_manifest, write_draft
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.progress import Progress
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.ngram.container import open_container, write_container
from foredraft.ngram.corpus import Meter, joined
from foredraft.ngram.counts import NAMES, ROOT_NODE, NgramCounts, count_ngrams, longest_context, read_counts
from foredraft.ngram.jit import jit
from foredraft.steps import NgramStep

KIND = "ngram"
FILE = "counts.ngram"
_NO_GUESS = -1


@dataclass(frozen=True, slots=True)
class NgramTable:
    """One-hot guesses from counts; each follows the ones before it as if they were accepted.

    A context whose last token was never seen has no guess.
    """

    vocab_size: int
    counts: NgramCounts
    law: SamplingLaw = GREEDY
    num_parameters: int = 0
    kind: str = KIND

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.counts.arrays)

    def bind(self, law: SamplingLaw) -> "NgramTable":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        counts = self.counts
        recent = context[-counts.order :].numpy()
        chain = _chain(counts.order, counts.older, counts.first_child, counts.first_next, counts.next_token, recent, k)
        return Proposal.certain(torch.from_numpy(chain), self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        return [self._replay_one(answer) for answer in answers]

    def _replay_one(self, answer: Answer) -> EmittedProbs:
        counts = self.counts
        guesses = torch.from_numpy(
            _guesses(
                counts.order, counts.older, counts.first_child, counts.first_next, counts.next_token,
                answer.token_ids.numpy(), answer.start,
            )
        )  # fmt: skip
        return EmittedProbs((guesses == answer.token_ids[answer.start :]).float(), guesses != _NO_GUESS)


def build_ngram_table(
    sequences: Iterable[np.ndarray],
    vocab_size: int,
    settings: NgramStep,
    manifest: DraftManifest,
    out: Path,
    progress: Progress,
) -> DraftManifest:
    """Count the n-grams of token sequences and write the table as a draft checkpoint; return its manifest.

    Raises:
        CorpusError: the corpus is empty or speaks another vocabulary.
        OutputError: `out` holds something else, or the disk is full.
    """
    tokens, bounds = joined(sequences, vocab_size)
    with progress.task("counting n-grams", float(len(tokens)), "tokens") as task:
        meter = Meter(task)
        counts = count_ngrams(tokens, bounds, settings.order, settings.min_count)
        meter.advance(len(tokens))
    return write_ngram_table(counts, vocab_size, replace(manifest, training_tokens=len(tokens)), out)


def write_ngram_table(counts: NgramCounts, vocab_size: int, manifest: DraftManifest, out: Path) -> DraftManifest:
    """Write counts as a draft checkpoint; return its manifest."""
    manifest = replace(manifest, kind=KIND, vocab_size=vocab_size, law=GREEDY)

    def fill(folder: Path) -> None:
        write_container(
            folder / FILE,
            KIND,
            vocab_size,
            manifest.tokenizer_fingerprint,
            list(zip(NAMES, counts.arrays, strict=True)),
            {"order": counts.order},
        )

    return write_draft(out, manifest, fill)


def load_ngram_table(path: Path, dtype: str = "auto") -> NgramTable:
    """Return the drafter of a checkpoint; its arrays stay on disk, mapped. Counts have no dtype: it is ignored.

    Raises:
        CheckpointError: a file is missing, truncated or damaged.
    """
    manifest = read_manifest(path)
    container = open_container(path / FILE, KIND).verify()
    container.require_tokenizer(manifest.vocab_size, manifest.tokenizer_fingerprint)
    return NgramTable(container.vocab_size, read_counts(container))


@jit
def _guess(
    order: int,
    older: np.ndarray,
    first_child: np.ndarray,
    first_next: np.ndarray,
    next_token: np.ndarray,
    tokens: np.ndarray,
    end: int,
) -> int:
    node = longest_context(order, older, first_child, tokens, end)
    if node == ROOT_NODE:
        return _NO_GUESS
    return next_token[first_next[node]]


@jit
def _chain(
    order: int,
    older: np.ndarray,
    first_child: np.ndarray,
    first_next: np.ndarray,
    next_token: np.ndarray,
    recent: np.ndarray,
    k: int,
) -> Int64[np.ndarray, " guesses"]:
    size = len(recent)
    tokens = np.empty(size + k, dtype=np.int64)
    tokens[:size] = recent
    for end in range(size, size + k):
        guess = _guess(order, older, first_child, first_next, next_token, tokens, end)
        if guess == _NO_GUESS:
            return tokens[size:end]
        tokens[end] = guess
    return tokens[size:]


@jit
def _guesses(
    order: int,
    older: np.ndarray,
    first_child: np.ndarray,
    first_next: np.ndarray,
    next_token: np.ndarray,
    tokens: np.ndarray,
    start: int,
) -> Int64[np.ndarray, " answer"]:
    guesses = np.empty(len(tokens) - start, dtype=np.int64)
    for end in range(start, len(tokens)):
        guesses[end - start] = _guess(order, older, first_child, first_next, next_token, tokens, end)
    return guesses
