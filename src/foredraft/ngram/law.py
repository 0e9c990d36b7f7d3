"""The n-gram law: probabilities over the whole vocabulary from counts, smoothed over shorter contexts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor

from foredraft.checkpoint import DraftManifest, read_manifest, write_draft
from foredraft.core.law import SamplingLaw, law_probs, sample_index
from foredraft.core.own_law import TARGETS_LAWS, OwnLaws
from foredraft.core.progress import Progress
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.ngram.container import open_container, write_container
from foredraft.ngram.corpus import Meter, joined
from foredraft.ngram.counts import NAMES, ROOT_NODE, NgramCounts, child_of, count_ngrams, merged, read_counts
from foredraft.ngram.jit import jit
from foredraft.steps import NgramStep

KIND = "ngram-law"
FILE = "counts.ngram"
DISCOUNT = 0.75
BACKOFF = 0.4
UNSEEN = 0.01  # mass of the uniform law below the shortest context
_LAWS_AT_ONCE = 256
_INTERPOLATED, _STUPID = 0, 1
SMOOTHINGS = {"interpolated": _INTERPOLATED, "stupid-backoff": _STUPID}


@dataclass(frozen=True, slots=True)
class NgramLaw:
    """Draws from smoothed counts; the law is never zero, so that it can be mixed with any other.

    interpolated: max(count - 0.75, 0) / total + (0.75 * distinct / total) * the law one token shorter (absolute
    discounting, Ney, Essen and Kneser 1994). stupid-backoff: count / total where the pair was seen, else 0.4 times
    the score one token shorter (Brants et al. 2007), made to sum to one. Below both lies the unigram law with 1 % of
    the uniform law.

    Attributes:
        base: The law of the empty context.
        own_laws: Which law to bind it to, by the target's.
    """

    vocab_size: int
    counts: NgramCounts
    smoothing: str
    base: Float32[np.ndarray, " vocab"]
    law: SamplingLaw
    num_parameters: int = 0
    kind: str = KIND
    own_laws: OwnLaws = TARGETS_LAWS

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.counts.arrays) + self.base.nbytes

    def bind(self, law: SamplingLaw) -> "NgramLaw":
        return replace(self, law=law)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        tokens = np.concatenate([context[-self.counts.order :].numpy(), np.zeros(k, np.int64)])
        end = len(tokens) - k
        rows = torch.empty(k, self.vocab_size)
        uniforms = torch.rand(k, generator=generator, dtype=torch.float64).tolist()
        for index in range(k):
            rows[index] = self._probs(tokens, end + index)
            tokens[end + index] = sample_index(rows[index], uniforms[index])
        token_ids = torch.from_numpy(tokens[end:])
        if self.law.is_greedy:
            return Proposal.certain(token_ids, self.vocab_size)
        return Proposal.chain(token_ids, Laws.from_dense(rows))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        return [self._replay_one(answer) for answer in answers]

    def laws(self, answers: Sequence[Answer]) -> Iterator[tuple[Int[Tensor, " some"], Float[Tensor, "some vocab"]]]:
        """Yield positions over all answers and the law there; see LawGiver."""
        begin = 0
        for answer in answers:
            tokens = answer.token_ids.numpy()
            for first in range(0, answer.num_tokens, _LAWS_AT_ONCE):
                some = torch.arange(first, min(first + _LAWS_AT_ONCE, answer.num_tokens))
                yield begin + some, torch.stack([self._probs(tokens, answer.start + index) for index in some.tolist()])
            begin += answer.num_tokens

    def matched(self, answer: Answer) -> Int[Tensor, " answer"]:
        """Return the length of the longest known context before each answer token."""
        tokens, counts = answer.token_ids.numpy(), self.counts
        return torch.from_numpy(_match_lengths(counts.order, counts.older, counts.first_child, tokens, answer.start))

    def _replay_one(self, answer: Answer) -> EmittedProbs:
        tokens = answer.token_ids.numpy()
        probs = torch.empty(answer.num_tokens)
        for index in range(answer.num_tokens):
            end = answer.start + index
            probs[index] = self._probs(tokens, end)[int(tokens[end])]
        return EmittedProbs(probs, torch.ones(answer.num_tokens, dtype=torch.bool))

    def _probs(self, tokens: Int64[np.ndarray, " tokens"], end: int) -> Float[Tensor, " vocab"]:
        counts = self.counts
        probs = torch.from_numpy(
            _dense_law(
                counts.order, counts.older, counts.first_child, counts.first_next, counts.next_token,
                counts.next_count, self.base, SMOOTHINGS[self.smoothing], tokens, end,
            )
        )  # fmt: skip
        return probs if self.law.is_plain else law_probs(probs.log(), self.law)


def ngram_law(vocab_size: int, counts: NgramCounts, smoothing: str, law: SamplingLaw | None = None) -> NgramLaw:
    """Return the law of some counts."""
    begin, end = counts.first_next[ROOT_NODE], counts.first_next[ROOT_NODE + 1]
    seen = np.bincount(counts.next_token[begin:end], counts.next_count[begin:end], minlength=vocab_size)
    base = (1.0 - UNSEEN) * seen / seen.sum() + UNSEEN / vocab_size
    return NgramLaw(vocab_size, counts, smoothing, base.astype(np.float32), law or SamplingLaw())


def updated(law: NgramLaw, sequences: Iterable[np.ndarray]) -> NgramLaw:
    """Return the law after more text: its counts and those of the new sequences, summed."""
    tokens, bounds = joined(sequences, law.vocab_size)
    counts = merged([law.counts, count_ngrams(tokens, bounds, law.counts.order, 1)])
    return ngram_law(law.vocab_size, counts, law.smoothing, law.law)


def build_ngram_law(
    sequences: Iterable[np.ndarray],
    vocab_size: int,
    settings: NgramStep,
    manifest: DraftManifest,
    out: Path,
    progress: Progress,
) -> DraftManifest:
    """Count the n-grams of token sequences and write them as a draft checkpoint; return its manifest.

    Raises:
        CorpusError: the corpus is empty or speaks another vocabulary.
        OutputError: `out` holds something else, or the disk is full.
    """
    tokens, bounds = joined(sequences, vocab_size)
    with progress.task("counting n-grams", float(len(tokens)), "tokens") as task:
        meter = Meter(task)
        counts = count_ngrams(tokens, bounds, settings.order, settings.min_count)
        meter.advance(len(tokens))
    options = {"smoothing": settings.smoothing}
    manifest = replace(manifest, kind=KIND, vocab_size=vocab_size, training_tokens=len(tokens), options=options)

    def fill(folder: Path) -> None:
        arrays = list(zip(NAMES, counts.arrays, strict=True))
        fingerprint = manifest.tokenizer_fingerprint
        write_container(folder / FILE, KIND, vocab_size, fingerprint, arrays, {"order": settings.order})

    return write_draft(out, manifest, fill)


def load_ngram_law(path: Path, dtype: str = "auto") -> NgramLaw:
    """Return the drafter of a checkpoint; its counts stay on disk, mapped, and have no dtype: it is ignored.

    Raises:
        CheckpointError: a file is missing, truncated or damaged.
    """
    manifest = read_manifest(path)
    container = open_container(path / FILE, KIND).verify()
    container.require_tokenizer(manifest.vocab_size, manifest.tokenizer_fingerprint)
    law = ngram_law(container.vocab_size, read_counts(container), manifest.options["smoothing"], manifest.law)
    return replace(law, own_laws=OwnLaws.from_json(manifest.options.get("own_laws", {})))


@jit
def _known_contexts(
    order: int, older: np.ndarray, first_child: np.ndarray, tokens: np.ndarray, end: int, nodes: np.ndarray
) -> int:
    """Write the nodes of the known contexts of tokens[:end], shortest first; return how many there are."""
    node, found = ROOT_NODE, 0
    while found < min(order, end):
        node = child_of(older, first_child, node, tokens[end - 1 - found])
        if node < 0:
            break
        nodes[found] = node
        found += 1
    return found


@jit
def _match_lengths(
    order: int, older: np.ndarray, first_child: np.ndarray, tokens: np.ndarray, start: int
) -> Int64[np.ndarray, " answer"]:
    lengths, nodes = np.empty(len(tokens) - start, np.int64), np.empty(order, np.int64)
    for end in range(start, len(tokens)):
        lengths[end - start] = _known_contexts(order, older, first_child, tokens, end, nodes)
    return lengths


@jit
def _dense_law(
    order: int,
    older: np.ndarray,
    first_child: np.ndarray,
    first_next: np.ndarray,
    next_token: np.ndarray,
    next_count: np.ndarray,
    base: np.ndarray,
    smoothing: int,
    tokens: np.ndarray,
    end: int,
) -> Float32[np.ndarray, " vocab"]:
    """Return the law after tokens[:end]: one pass over the vocabulary, then only over what was seen."""
    nodes, scale = np.empty(order, np.int64), np.ones(order + 1)
    found = _known_contexts(order, older, first_child, tokens, end, nodes)
    totals = np.zeros(order)
    for level in range(found - 1, -1, -1):
        begin, stop = first_next[nodes[level]], first_next[nodes[level] + 1]
        for index in range(begin, stop):
            totals[level] += next_count[index]
        left = DISCOUNT * (stop - begin) / totals[level] if smoothing == _INTERPOLATED else BACKOFF
        scale[level] = scale[level + 1] * left
    law = base * np.float32(scale[0])
    for level in range(found):
        weight = scale[level + 1] / totals[level]
        for index in range(first_next[nodes[level]], first_next[nodes[level] + 1]):
            if smoothing == _INTERPOLATED:
                law[next_token[index]] += np.float32(weight * (next_count[index] - DISCOUNT))
            else:
                law[next_token[index]] = np.float32(weight * next_count[index])
    if smoothing == _STUPID:
        law /= law.sum()
    return law
