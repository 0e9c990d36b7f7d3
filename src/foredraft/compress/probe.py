"""What a change to a draft does to its measured acceptance, at the cost of the layers behind the change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.acceptance.evaluate import score_rows
from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.prefix import Prefix, final_norm, read_prefix, run_from, run_layer
from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw, token_logprobs
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft
from foredraft.models.head import Head
from foredraft.models.layers import layer_stack
from foredraft.models.loading import max_context
from foredraft.trace.rows import TraceRow

_POSITIONS = 512

FinalStates = Callable[[Prefix], Tensor]


@dataclass(frozen=True, slots=True)
class Bench:
    """What drafts are measured on.

    Attributes:
        rows: Answers of the target, none of them empty.
        law: That they were drawn from.
        vocab_size: Width of the target's laws.
        ks: Draft lengths.
    """

    rows: tuple[TraceRow, ...]
    law: SamplingLaw
    vocab_size: int
    ks: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)

    @staticmethod
    def of(
        rows: Sequence[TraceRow], law: SamplingLaw, vocab_size: int, ks: Sequence[int] = tuple(range(1, 9))
    ) -> "Bench":
        """Return a bench of the answers that hold tokens, the shortest texts first.

        Raises:
            UserError: there is none.
        """
        kept = sorted((row for row in rows if len(row.answer_ids)), key=lambda row: len(row.answer().token_ids))
        if not kept:
            raise UserError("Acceptance is measured on answers of the target, and none was given: collect a trace.")
        return Bench(tuple(kept), law, vocab_size, tuple(ks))


@final
class Probe:
    """Measures a draft, and changes to it, on a bench. Hidden states of the unchanged draft are kept.

    Attributes:
        baseline: Of the draft as it was when the probe was made.
        passes: Passes over the bench that were spent since, in parts of a whole one by layers run.
    """

    def __init__(self, draft: Draft, bench: Bench) -> None:
        """Read the bench once."""
        self._draft = draft
        self._bench = bench
        self._prefixes = [read_prefix(draft.model, batch) for batch in calibration_batches(_answers(bench))]
        self._layers = len(layer_stack(draft.model))
        self.passes = 0.0
        self.baseline = self.report_from(self._layers)

    def report_from(self, first: int) -> AcceptanceReport:
        """Return the report of the draft's model as it is now, which may have changed from layer `first` on, or in its
        head where `first` is the number of layers."""
        self.passes += 1.0 - first / self._layers
        return self._report(lambda prefix: run_from(self._draft.model, prefix, first))

    def report_without(self, layer: int) -> AcceptanceReport:
        """Return the report of the draft without one of its layers."""
        self.passes += 1.0 - (layer + 1) / self._layers
        return self._report(lambda prefix: _skip(self._draft.model, prefix, layer))

    def _report(self, final_states: FinalStates) -> AcceptanceReport:
        head = Head(self._draft.model, self._draft.head_token_ids, num_tokens=self._bench.vocab_size)
        states = torch.cat([final_states(prefix)[prefix.batch.read] for prefix in self._prefixes])
        probs = _emitted_probs(head, states, torch.cat([row.answer_ids for row in self._bench.rows]), self._bench.law)
        said = _Said(probs, self._bench.law, self._bench.vocab_size, max_context(self._draft.model))
        return AcceptanceReport.of(self._bench.ks, score_rows("the draft", said, self._bench.rows, self._bench.ks))


def measure(draft: Draft, bench: Bench) -> AcceptanceReport:
    """Return the report of a draft on a bench."""
    return Probe(draft, bench).baseline


@dataclass(frozen=True, slots=True)
class _Said:
    """A drafter whose probabilities are known; it cannot draft. Implements as much of Drafter as scoring asks for.

    Attributes:
        probs: What it gave to each token of the answers; behind a text of `max_context` tokens it has no guess.
    """

    probs: Float[Tensor, " positions"]
    law: SamplingLaw
    vocab_size: int
    max_context: int
    kind: str = "causal-lm"
    num_parameters: int = 0
    num_bytes: int = 0

    def bind(self, law: SamplingLaw) -> "_Said":
        return replace(self, law=law)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        return Proposal.empty(self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        parts = self.probs.split([answer.num_tokens for answer in answers])
        guessed = [torch.arange(answer.num_tokens) + answer.start <= self.max_context for answer in answers]
        return [EmittedProbs(part * known, known) for part, known in zip(parts, guessed, strict=True)]


@torch.no_grad()
def _skip(model: PreTrainedModel, prefix: Prefix, layer: int) -> Tensor:
    state = prefix.states[layer]
    for number in range(layer + 1, len(prefix.settings)):
        state = run_layer(layer_stack(model)[number], state, prefix.settings[number])
    return final_norm(model)(state)


@torch.no_grad()
def _emitted_probs(
    head: Head, states: Float[Tensor, "positions hidden"], token_ids: Tensor, law: SamplingLaw
) -> Float[Tensor, " positions"]:
    rows, known = token_ids, torch.ones(len(token_ids), dtype=torch.bool)
    if len(head.token_ids):
        rows = torch.searchsorted(head.token_ids, token_ids).clamp(max=len(head.token_ids) - 1)
        known = head.token_ids[rows] == token_ids
    logprobs = [
        token_logprobs(head.logits(some), which, law)
        for some, which in zip(states.split(_POSITIONS), rows.split(_POSITIONS), strict=True)
    ]
    return torch.where(known, torch.cat(logprobs).exp(), 0.0)


def _answers(bench: Bench) -> list[Answer]:
    return [row.answer() for row in bench.rows]
