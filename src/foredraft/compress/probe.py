"""What a change to a draft does to its measured acceptance, at the cost of the layers behind the change."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.acceptance.evaluate import score_rows
from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.prefix import Prefix, read_prefix, run_from
from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw, token_logprobs
from foredraft.core.memory import is_out_of_memory
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft
from foredraft.models.head import Head
from foredraft.models.layers import layer_stack
from foredraft.models.loading import max_context
from foredraft.trace.rows import TraceRow

_log = logging.getLogger(__name__)

_POSITIONS = 512
_OWN_LAW = SamplingLaw()

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

    def part(self, share: float) -> "Bench":
        """Return a bench of every n-th answer, so that lengths are mixed alike; of at least one."""
        every = max(1, min(round(1 / share), len(self.rows)))
        return replace(self, rows=self.rows[every // 2 :: every])

    @property
    def num_tokens(self) -> int:
        """Tokens read in a pass, prompts included."""
        return sum(len(row.answer().token_ids) for row in self.rows)


@final
class Probe:
    """Measures a draft, and changes to it, on a bench. Hidden states of the unchanged draft are kept.

    Where they do not fit into memory, each probe runs all layers: slower, and the same figures.

    Attributes:
        baseline: Of the draft as it was when the probe was made.
        passes: Passes over the bench that were spent since, in parts of a whole one by layers run.
        log_likelihood: Mean log-probability, at temperature 1, that the last report's draft gave to a token of the
            answers, of those that it can say.
    """

    def __init__(self, draft: Draft, bench: Bench) -> None:
        """Read the bench once."""
        self._draft = draft
        self._bench = bench
        self._layers = len(layer_stack(draft.model))
        self._prefixes, self._is_kept = _read_prefixes(draft.model, bench)
        self.passes, self.log_likelihood = 0.0, 0.0
        self.baseline = self.report_from(self._layers)
        self.passes = 0.0

    def report_from(self, first: int) -> AcceptanceReport:
        """Return the report of the draft's model as it is now, which may have changed from layer `first` on, or in its
        head where `first` is the number of layers."""
        return self._report(lambda prefix: self._run(prefix, first))

    def report_without(self, layer: int) -> AcceptanceReport:
        """Return the report of the draft without one of its layers."""
        return self._report(lambda prefix: self._run(prefix, layer, without=layer))

    def report_with_rows(self, token_ids: Int[Tensor, " kept"]) -> AcceptanceReport:
        """Return the report of the draft with other rows of its head."""
        return self._report(lambda prefix: self._run(prefix, self._layers), token_ids)

    def _run(self, prefix: Prefix, first: int, without: int = -1) -> Float[Tensor, "texts tokens hidden"]:
        """Return the final states of a batch, run from the first change on if its states are kept."""
        first = first if self._is_kept else 0
        run = self._layers - first - (without >= first)
        self.passes += run / self._layers / len(self._prefixes)
        return run_from(self._draft.model, prefix, first, without)

    def _report(self, final_states: FinalStates, rows: Int[Tensor, " kept"] | None = None) -> AcceptanceReport:
        rows = self._draft.head_token_ids if rows is None else rows
        head = Head(self._draft.model, rows, num_tokens=self._bench.vocab_size)
        states = torch.cat([final_states(prefix)[prefix.batch.read] for prefix in self._prefixes])
        token_ids = torch.cat([row.answer_ids for row in self._bench.rows])
        probs, self.log_likelihood = _emitted_probs(head, states, token_ids, self._bench.law)
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


def _read_prefixes(model: PreTrainedModel, bench: Bench) -> tuple[list[Prefix], bool]:
    """Return the bench as it stands before each layer, or before the first one only where memory ends, and which."""
    batches = calibration_batches(_answers(bench))
    try:
        return [read_prefix(model, batch) for batch in batches], True
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    _log.warning("The states of every layer do not fit into memory: each probe runs all layers, which takes longer.")
    return [read_prefix(model, batch, last=False) for batch in batches], False


@torch.no_grad()
def _emitted_probs(
    head: Head, states: Float[Tensor, "positions hidden"], token_ids: Tensor, law: SamplingLaw
) -> tuple[Float[Tensor, " positions"], float]:
    """Return what a draft gives to tokens under a law, and the mean of its own log-probability of those it can say."""
    rows, known = token_ids, torch.ones(len(token_ids), dtype=torch.bool)
    if len(head.token_ids):
        rows = torch.searchsorted(head.token_ids, token_ids).clamp(max=len(head.token_ids) - 1)
        known = head.token_ids[rows] == token_ids
    logprobs, own = [], []
    for some, which in zip(states.split(_POSITIONS), rows.split(_POSITIONS), strict=True):
        logits = head.logits(some)
        logprobs.append(token_logprobs(logits, which, law))
        own.append(logprobs[-1] if law == _OWN_LAW else token_logprobs(logits, which, _OWN_LAW))
    return torch.where(known, torch.cat(logprobs).exp(), 0.0), float(torch.cat(own)[known].double().mean())


def _answers(bench: Bench) -> list[Answer]:
    return [row.answer() for row in bench.rows]
