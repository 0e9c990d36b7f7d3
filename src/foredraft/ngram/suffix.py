"""The suffix drafter: earlier occurrences of the context's end, in the request and in corpora, vote on what follows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from foredraft.checkpoint import DraftManifest, read_manifest, write_draft
from foredraft.core.errors import CheckpointError, CorpusError, UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.progress import Progress
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.ngram.automaton import Automaton, followed_rows
from foredraft.ngram.container import ANY_FILE
from foredraft.ngram.corpus import Corpus, Meter, gathered
from foredraft.ngram.index import SuffixIndex, build_suffix_index, open_suffix_index
from foredraft.ngram.jit import jit
from foredraft.ngram.votes import vote_chain, vote_tree
from foredraft.steps import NgramStep

KIND = "suffix"
CONTEXT_KIND = "suffix-automaton"
_LONGEST_COUNTED = 32


@runtime_checkable
class Tier(Protocol):
    """A store of text that finds where the end of a context occurred."""

    @property
    def num_bytes(self) -> int: ...

    def rows(
        self,
        context: Int64[np.ndarray, " context"],
        lengths: Int64[np.ndarray, " rows"],
        tokens: Int64[np.ndarray, "rows k"],
        row: int,
        end_row: int,
    ) -> int:
        """Write occurrences into rows `row` .. `end_row`, best first; return the first row left free."""


@dataclass(frozen=True, slots=True)
class Voting:
    """How occurrences vote. The defaults were fitted on half of the files of benchmarks/ngram.

    Attributes:
        base: An occurrence whose match is one token longer counts `base` times as much, up to 32 tokens.
        context_weight: An occurrence in the request itself counts so many times as much.
        num_context: Occurrences taken from the request, each of another match length.
        num_nearest: Occurrences taken from each corpus.
        doubt: Votes for "none of these"; makes short matches less confident.
        least_confidence: A chain or branch ends where its confidence would fall below.
    """

    base: float = 1.7
    context_weight: float = 10.0
    num_context: int = 4
    num_nearest: int = 24
    doubt: float = 8.0
    least_confidence: float = 0.0

    def __post_init__(self) -> None:
        if self.base < 1.0 or self.doubt < 0.0 or self.num_context < 0 or self.num_nearest < 1:
            raise UserError("Voting needs base >= 1, doubt >= 0, num_context >= 0 and num_nearest >= 1.")


class SuffixDrafter:
    """Deterministic chains, and trees; without a corpus it knows the request only.

    Args:
        tiers: Corpora, with the weight of each.
        kind: Its name in the catalog.
    """

    law: SamplingLaw = GREEDY
    num_parameters: int = 0

    def __init__(
        self,
        vocab_size: int,
        tiers: Sequence[tuple[Tier, float]] = (),
        voting: Voting | None = None,
        kind: str = KIND,
    ) -> None:
        self.kind = kind
        self.vocab_size = vocab_size
        self.tiers = tuple(tiers)
        self.voting = voting or Voting()
        self._request = Automaton.empty()
        scales = _scales(self.voting, [weight for _, weight in self.tiers])
        self._votes = scales, self.voting.base ** np.arange(_LONGEST_COUNTED + 1, dtype=np.float64)
        self._limits = float(self.voting.doubt), float(self.voting.least_confidence)
        self._rows = _Rows.empty(len(scales), 8)

    @property
    def num_bytes(self) -> int:
        return sum(tier.num_bytes for tier, _ in self.tiers)

    def bind(self, law: SamplingLaw) -> "SuffixDrafter":
        return SuffixDrafter(self.vocab_size, self.tiers, self.voting, self.kind)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        return Proposal.certain(torch.from_numpy(self._chain(context.numpy(), k)), self.vocab_size)

    def propose_tree(self, context: Int[Tensor, " tokens"], k: int, max_nodes: int) -> Proposal:
        """Return a tree of certain tokens, at most k levels deep; see vote_tree."""
        known = context.numpy()
        rows = self._consulted(known, k)
        draft, parents = np.empty(max_nodes if k else 0, np.int64), np.empty(max_nodes if k else 0, np.int64)
        self._request.rows(known, rows.lengths, rows.tokens, self.voting.num_context)
        nodes = vote_tree(rows.lengths, *self._votes, rows.tokens, *self._limits, draft, parents)
        laws = Laws.one_hot(nodes, self.vocab_size)
        return Proposal(torch.from_numpy(draft[:nodes]), laws, tuple(parents[:nodes].tolist()))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        return [self._replay_one(answer, k) for answer in answers]

    def _replay_one(self, answer: Answer, k: int) -> EmittedProbs:
        tokens = answer.token_ids.numpy()
        chains = np.full((answer.num_tokens, k), -1, np.int64)
        self._request.follow(tokens[: answer.start])
        for start in range(answer.num_tokens):
            chain = self._chain(tokens[: answer.start + start], k, grown=True)
            chains[start, : len(chain)] = chain
        return chain_hits(torch.from_numpy(chains), answer)

    def _chain(self, context: Int64[np.ndarray, " context"], k: int, grown: bool = False) -> Int64[np.ndarray, " k"]:
        rows, draft = self._consulted(context, k), np.empty(k, np.int64)
        length = _voted_chain(
            *self._request.arena(len(context)), context, grown, self.voting.num_context,
            rows.lengths, *self._votes, rows.tokens, *self._limits, draft,
        )  # fmt: skip
        return draft[:length]

    def _consulted(self, context: Int64[np.ndarray, " context"], k: int) -> "_Rows":
        """Return rows in which each tier has written occurrences, behind those that are kept for the request."""
        if self._rows.tokens.shape[1] != k:
            self._rows = _Rows.empty(len(self._rows.lengths), k)
        rows, end = self._rows, self.voting.num_context
        rows.lengths.fill(0)
        for tier, _ in self.tiers:
            begin, end = end, end + self.voting.num_nearest
            tier.rows(context, rows.lengths, rows.tokens, begin, end)
        return rows


@jit
def _voted_chain(
    states: np.ndarray,
    edges: np.ndarray,
    table: np.ndarray,
    counters: np.ndarray,
    text: np.ndarray,
    context: np.ndarray,
    grown: bool,
    num_context: int,
    lengths: np.ndarray,
    scales: np.ndarray,
    powers: np.ndarray,
    tokens: np.ndarray,
    doubt: float,
    least_confidence: float,
    draft: np.ndarray,
) -> int:
    """Add the rows of the request and vote, in one call: entering compiled code takes as long as the work."""
    followed_rows(states, edges, table, counters, text, context, grown, lengths, tokens, num_context)
    return vote_chain(lengths, scales, powers, tokens, doubt, least_confidence, draft)


def context_drafter(vocab_size: int, **voting: float) -> SuffixDrafter:
    """Return a drafter that copies from the request itself; options are those of Voting."""
    return SuffixDrafter(vocab_size, (), _voting(voting), CONTEXT_KIND)


def build_suffix(
    sequences: Iterable[np.ndarray],
    vocab_size: int,
    settings: NgramStep,
    manifest: DraftManifest,
    out: Path,
    progress: Progress,
) -> DraftManifest:
    """Index token sequences and write the index as a draft checkpoint; see build_weighted_suffix."""
    corpus = Corpus("the corpus", 1.0, 0, iter(sequences))
    return build_weighted_suffix([corpus], vocab_size, settings, manifest, out, progress)


def build_weighted_suffix(
    corpora: Sequence[Corpus],
    vocab_size: int,
    settings: NgramStep,
    manifest: DraftManifest,
    out: Path,
    progress: Progress,
) -> DraftManifest:
    """Index corpora, each with its weight, and write the shards as a draft checkpoint; return its manifest.

    Holds one shard in memory at a time, so that the corpora may be larger than that.

    Raises:
        CorpusError: a corpus is empty or speaks another vocabulary, or a shard of it does not fit into memory.
        OutputError: `out` holds something else, or the disk is full.
    """
    manifest = replace(manifest, kind=KIND, vocab_size=vocab_size, law=GREEDY)
    fingerprint = manifest.tokenizer_fingerprint

    def fill(folder: Path) -> None:
        number = 0
        for corpus in corpora:
            for shard in _shards(corpus, settings.shard_tokens, progress):
                size = sum(map(len, shard))
                path = folder / f"shard-{number:05d}.ngram"
                with progress.task(f"indexing shard {number} of {corpus.name}", float(size), "tokens") as task:
                    meter = Meter(task)
                    build_suffix_index(shard, vocab_size, fingerprint, settings.depth, path, corpus.weight)
                    meter.advance(size)
                number += 1

    try:
        return write_draft(out, manifest, fill)
    except MemoryError:
        raise CorpusError(
            f"Memory ran out: a shard of {settings.shard_tokens:,} tokens takes about "
            f"{16e-9 * settings.shard_tokens:.2g} GB. Give a smaller shard_tokens: corpora may be larger than memory."
        ) from None


def load_suffix(path: Path, dtype: str = "auto") -> SuffixDrafter:
    """Return the drafter of a checkpoint: every shard in its folder, mapped, blocks checked when first read.

    Token ids have no dtype: it is ignored.

    Raises:
        CheckpointError: a file is missing, truncated or damaged.
    """
    manifest = read_manifest(path)
    shards = [open_suffix_index(file) for file in sorted(path.glob(ANY_FILE))]
    if not shards:
        raise CheckpointError(f"{path} holds no shard of a suffix index. Build it again.")
    weights = [shard.weight for shard in shards]
    return pooled(shards, manifest.vocab_size, manifest.tokenizer_fingerprint, weights)


def pooled(
    shards: Sequence[SuffixIndex],
    vocab_size: int,
    tokenizer_fingerprint: str,
    weights: Sequence[float] = (),
    voting: Voting | None = None,
) -> SuffixDrafter:
    """Return the drafter over several shards of one vocabulary; weights are 1 unless given.

    Raises:
        VocabMismatchError: a shard speaks another vocabulary.
    """
    for shard in shards:
        shard.container.require_tokenizer(vocab_size, tokenizer_fingerprint)
    weights = weights or [1.0] * len(shards)
    return SuffixDrafter(vocab_size, list(zip(shards, weights, strict=True)), voting)


def chain_hits(chains: Int[Tensor, "answer k"], answer: Answer) -> EmittedProbs:
    """Return what chains, one for each block start and ended by -1, gave to the answer's tokens."""
    text = answer.token_ids[answer.start :]
    at = torch.arange(len(text))[:, None] + torch.arange(chains.shape[1])
    guessed: Bool[Tensor, "answer k"] = (chains >= 0) & (at < len(text))
    hits = (chains == text[at.clamp(max=len(text) - 1)]) & guessed if len(text) else guessed
    return EmittedProbs(hits.float(), guessed)


@dataclass(frozen=True, slots=True)
class _Rows:
    lengths: Int64[np.ndarray, " rows"]
    tokens: Int64[np.ndarray, "rows k"]

    @staticmethod
    def empty(num_rows: int, k: int) -> "_Rows":
        return _Rows(np.empty(num_rows, np.int64), np.empty((num_rows, k), np.int64))


def _scales(voting: Voting, weights: Sequence[float]) -> Float64[np.ndarray, " rows"]:
    """Return what a match of length 0 would count in each row."""
    scales = [voting.context_weight] * voting.num_context
    for weight in weights:
        scales += [weight] * voting.num_nearest
    return np.array(scales, np.float64)


def _shards(corpus: Corpus, shard_tokens: int, progress: Progress) -> Iterator[list[np.ndarray]]:
    """Yield lists of sequences of `shard_tokens` together, or one sequence more; the last may be shorter."""
    left, any_yet = corpus.tokens, False
    while True:
        shard = gathered(corpus.sequences, shard_tokens, left, f"reading {corpus.name}", progress)
        size = sum(map(len, shard))
        if size == 0 and any_yet:
            return
        yield shard
        left, any_yet = max(left - size, 0), True


def _voting(options: dict[str, float]) -> Voting:
    unknown = set(options) - set(Voting.__slots__)
    if unknown:
        raise UserError(f"Unknown option {min(unknown)!r} of {CONTEXT_KIND}. Known: {', '.join(Voting.__slots__)}.")
    return Voting(**options)  # type: ignore[arg-type]
