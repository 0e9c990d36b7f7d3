"""Hybrids of an n-gram drafter and a neural one: one mixed law, or n-gram first and neural when it has nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.errors import CapabilityError, TraceError, UserError, VocabMismatchError
from foredraft.core.law import SamplingLaw, sample_index
from foredraft.core.own_law import bound_for
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import EXACT, Answer, Branching, Drafter, EmittedProbs, Observer, validity_of
from foredraft.ngram.law import NgramLaw
from foredraft.trace.store import Trace, open_trace

_FIT_STEPS = 101


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws from lambda * n-gram + (1 - lambda) * neural; lossless, as the law it reports is the one drawn from.

    Where the neural drafter has no guess, the n-gram law is alone.

    Attributes:
        shares: lambda by the length of the longest context that the n-gram law knows: 0, 1, .. order. Under a
            greedy law a share of 1/2 or more lets the n-gram decide.
    """

    ngram: NgramLaw
    neural: Drafter
    shares: tuple[float, ...]
    kind: str = "ngram-mixture"

    def __post_init__(self) -> None:
        _require_same_vocabulary(self.ngram, self.neural)
        if len(self.shares) != self.ngram.counts.order + 1 or not all(0.0 <= share <= 1.0 for share in self.shares):
            raise UserError(f"A mixture needs {self.ngram.counts.order + 1} shares in [0, 1], not {self.shares}.")

    @property
    def vocab_size(self) -> int:
        return self.ngram.vocab_size

    @property
    def law(self) -> SamplingLaw:
        """The law of the part that samples, if one does."""
        return self.ngram.law if self.neural.law.is_greedy else self.neural.law

    @property
    def num_parameters(self) -> int:
        return self.neural.num_parameters

    @property
    def num_bytes(self) -> int:
        return self.ngram.num_bytes + self.neural.num_bytes

    def bind(self, law: SamplingLaw) -> "Mixture":
        return replace(self, ngram=self.ngram.bind(law), neural=self.neural.bind(law))

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        tokens, rows = context, torch.empty(k, self.vocab_size)
        uniforms = torch.rand(k, generator=generator, dtype=torch.float64).tolist()
        for index in range(k):
            answer = Answer(torch.cat([tokens, tokens.new_zeros(1)]), len(tokens))
            share = float(self._shares(self.ngram.matched(answer))[0])
            ours, theirs = _next_law(self.ngram, tokens), _next_law(self.neural, tokens)
            rows[index] = share * ours + (1.0 - share) * (theirs if len(theirs) else ours)
            tokens = torch.cat([tokens, torch.tensor([sample_index(rows[index], uniforms[index])])])
        drafted = tokens[len(context) :]
        if self.law.is_greedy:
            return Proposal.certain(drafted, self.vocab_size)
        return Proposal.chain(drafted, Laws.from_dense(rows))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        mixed = []
        for answer, ours, theirs in zip(
            answers, self.ngram.replay(answers, 1), self.neural.replay(answers, 1), strict=True
        ):
            shares = self._shares(self.ngram.matched(answer))
            probs = shares * ours.probs + (1.0 - shares) * _or_ngram(theirs, ours)
            mixed.append(EmittedProbs(probs, torch.ones_like(ours.guessed)))
        return mixed

    def _shares(self, lengths: Int[Tensor, " answer"]) -> Float[Tensor, " answer"]:
        shares = torch.tensor(self.shares)[lengths]
        return (shares >= 0.5).float() if self.law.is_greedy else shares


def fitted_shares(
    ngram_probs: Float[Tensor, " positions"],
    neural_probs: Float[Tensor, " positions"],
    target_probs: Float[Tensor, " positions"],
    lengths: Int[Tensor, " positions"],
    order: int,
) -> tuple[float, ...]:
    """Return the share for each match length that gives the largest mean acceptance on a trace.

    Acceptance min(1, mixed / target) is concave in the share, so a grid of 0.01 is within 0.01 of the best share.

    Args:
        ngram_probs, neural_probs, target_probs: What each gave to the emitted token.
        lengths: Longest known context at each position; lengths that do not occur get the share of the next shorter.
    """
    grid = torch.linspace(0.0, 1.0, _FIT_STEPS)[:, None]
    shares: list[float] = []
    for length in range(order + 1):
        here = lengths == length
        if not bool(here.any()):
            shares.append(shares[-1] if shares else 0.0)
            continue
        mixed = grid * ngram_probs[here] + (1.0 - grid) * neural_probs[here]
        acceptance = (mixed / target_probs[here]).clamp(max=1.0).mean(-1)
        shares.append(float(grid[acceptance.argmax(), 0]))
    return tuple(shares)


def shares_on(trace: Trace, ngram: NgramLaw, neural: Drafter, answers: int) -> tuple[float, ...]:
    """Return the shares that a trace's target accepts most, on answers drawn by their hash; 0 takes all.

    Raises:
        TraceError: the trace is greedy, where a share decides nothing but who is argmax, or holds no answers.
    """
    if trace.info.law.is_greedy:
        raise TraceError(f"{trace.path} is greedy: fit a mixture on a trace that was written at a temperature.")
    rows = [row for row in (trace.sample(answers) if answers else trace.rows(tops=False)) if len(row.answer_ids)]
    if not rows:
        raise TraceError(f"{trace.path} holds no answers: collect some before fitting a mixture to them.")
    texts = [Answer(torch.cat([row.prompt_ids, row.answer_ids]), len(row.prompt_ids)) for row in rows]
    ours = bound_for(ngram, trace.info.law).replay(texts, 1)
    theirs = bound_for(neural, trace.info.law).replay(texts, 1)
    return fitted_shares(
        torch.cat([emitted.probs for emitted in ours]),
        torch.cat([_or_ngram(guess, own) for guess, own in zip(theirs, ours, strict=True)]),
        torch.cat([row.logprobs.exp() for row in rows]),
        torch.cat([ngram.matched(text) for text in texts]),
        ngram.counts.order,
    )


def mixture(
    drafter: Drafter,
    load: Callable[[str], Drafter],
    ngram: str = "",
    share: float = 0.2,
    shares: str = "",
    fit: str = "",
    answers: int = 48,
) -> Mixture:
    """Return what `+mixture:ngram=DRAFT,...` makes of a drafter: its law and that of n-gram counts, as one.

    Args:
        ngram: A checkpoint of kind ngram-law.
        share: lambda, whatever the match.
        shares: lambda by match length instead, from 0 on: 0/0.1/0.3/0.5.
        fit: A training trace to fit the shares on instead, and `answers` of it.

    Raises:
        UserError: no n-gram law is named, or several ways of setting lambda are.
        CapabilityError: it is another kind of draft, which has no law to mix, or the drafter grows trees or learns.
    """
    if not ngram:
        raise UserError("A mixture needs ngram=DRAFT, a checkpoint of kind ngram-law (foredraft build-ngram).")
    law = load(ngram)
    if not isinstance(law, NgramLaw):
        raise CapabilityError(f"{ngram} is of kind {law.kind}, whose guesses have no law to mix: name an ngram-law.")
    if isinstance(drafter, Branching | Observer):
        raise CapabilityError(
            f"A drafter of kind {drafter.kind} grows trees or learns from its own blocks: mix what it is made of."
        )
    _require_same_vocabulary(law, drafter)
    if shares and fit:
        raise UserError("Give a mixture either shares or a trace to fit them on.")
    if fit:
        return Mixture(law, drafter, shares_on(open_trace(Path(fit)), law, drafter, answers))
    return Mixture(law, drafter, _read_shares(shares) if shares else (share,) * (law.counts.order + 1))


def _read_shares(written: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in written.split("/"))
    except ValueError as error:
        raise UserError(f"shares are numbers with / between them, such as 0/0.1/0.3, not {written!r}.") from error


@dataclass(frozen=True, slots=True)
class FirstGuess:
    """Proposes what the first drafter offers, and the second's block where the first has no guess."""

    first: Drafter
    second: Drafter
    kind: str = "first-guess"

    def __post_init__(self) -> None:
        _require_same_vocabulary(self.first, self.second)

    @property
    def vocab_size(self) -> int:
        return self.first.vocab_size

    @property
    def law(self) -> SamplingLaw:
        """The law of the part that samples, if one does."""
        return self.first.law if self.second.law.is_greedy else self.second.law

    @property
    def num_parameters(self) -> int:
        return self.first.num_parameters + self.second.num_parameters

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + self.second.num_bytes

    @property
    def validity(self) -> str:
        """What of its replay is exact: no more than of either part; see StatesValidity."""
        stated = map(validity_of, (self.first, self.second))
        return next((one for one in stated if one != EXACT), EXACT)

    def bind(self, law: SamplingLaw) -> "FirstGuess":
        return FirstGuess(self.first.bind(law), self.second.bind(law))

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        proposal = self.first.propose(context, k, generator)
        return proposal if len(proposal) else self.second.propose(context, k, generator)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        joined = []
        for ours, theirs in zip(self.first.replay(answers, k), self.second.replay(answers, k), strict=True):
            our_probs, our_guesses = _by_block_start(ours, k)
            their_probs, their_guesses = _by_block_start(theirs, k)
            known = our_guesses[:, :1]
            joined.append(
                EmittedProbs(torch.where(known, our_probs, their_probs), torch.where(known, our_guesses, their_guesses))
            )
        return joined


def first_guess(drafter: Drafter, load: Callable[[str], Drafter], first: str = "") -> FirstGuess:
    """Return what `+first-guess:first=DRAFTER` makes of a drafter: it drafts where the first has nothing.

    Raises:
        UserError: no first drafter is named.
        CapabilityError: one of the two learns from its blocks: it would not hear of the other's.
    """
    if not first:
        raise UserError("first-guess needs first=DRAFTER, a folder or a kind such as prompt-lookup.")
    pair = FirstGuess(load(first), drafter)
    for part in (pair.first, pair.second):
        if isinstance(part, Observer):
            raise CapabilityError(f"A drafter of kind {part.kind} learns from its own blocks: it cannot share them.")
    return pair


def _by_block_start(emitted: EmittedProbs, k: int) -> tuple[Float[Tensor, "answer k"], Bool[Tensor, "answer k"]]:
    """Return [answer, k] matrices: position t + i at (t, i), nothing past the end or behind a missing guess."""
    if emitted.by_block_start:
        return emitted.probs, emitted.guessed
    size = len(emitted.probs)
    at = torch.arange(size)[:, None] + torch.arange(k)
    inside = at < size
    at = at.clamp(max=max(size - 1, 0))
    guessed = (emitted.guessed[at] & inside).cumprod(-1).bool()
    return emitted.probs[at] * guessed, guessed


def _next_law(drafter: Drafter, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, " _"]:
    """Return the law that a drafter draws the next token from, empty without a guess; the draw is thrown away."""
    proposal = drafter.propose(tokens, 1, torch.Generator())
    return proposal.laws.probs(0, int(proposal.token_ids[0])).float().cpu() if len(proposal) else torch.empty(0)


def _or_ngram(theirs: EmittedProbs, ours: EmittedProbs) -> Float[Tensor, " answer"]:
    """Return what the neural law gave to each token, and the n-gram law where that had no guess."""
    return torch.where(theirs.guessed.reshape(-1), theirs.probs.reshape(-1), ours.probs)


def _require_same_vocabulary(ours: Drafter, theirs: Drafter) -> None:
    if ours.vocab_size != theirs.vocab_size:
        raise VocabMismatchError(f"The drafters of a hybrid speak {ours.vocab_size} and {theirs.vocab_size} tokens.")
