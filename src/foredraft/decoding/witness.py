"""What literal decoding saw of an answer: the target's law before each token, and the draft's token tested there."""

from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.law import SamplingLaw, law_logprobs
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Continuation
from foredraft.decoding.trees import TreeVerdict
from foredraft.trace.buffer import UNTESTED


@runtime_checkable
class Witness(Protocol):
    """Looks on while an answer is written."""

    def see(
        self,
        logits: Float[Tensor, "positions vocab"],
        proposal: Proposal,
        verdict: TreeVerdict,
        emitted: Int[Tensor, " tokens"],
    ) -> None:
        """Be told of one block.

        Args:
            logits: The target's after the context (row 0) and after each draft token i (row i + 1).
            emitted: The tokens that joined the answer.
        """


@final
class Blind:
    """Sees nothing."""

    def see(
        self,
        logits: Float[Tensor, "positions vocab"],
        proposal: Proposal,
        verdict: TreeVerdict,
        emitted: Int[Tensor, " tokens"],
    ) -> None: ...


BLIND = Blind()


@final
class Recorder:
    """Keeps the target's law at every token of one answer as a trace does, and the draft's tokens."""

    def __init__(self, law: SamplingLaw, top: int) -> None:
        """Record an answer under `law`; `top` most probable tokens of each stored law, at most the vocabulary."""
        self._law = law
        self._stored = law.stored
        self._top = top
        self._blocks: list[tuple[Tensor, ...]] = []

    def see(
        self,
        logits: Float[Tensor, "positions vocab"],
        proposal: Proposal,
        verdict: TreeVerdict,
        emitted: Int[Tensor, " tokens"],
    ) -> None:
        """Keep one block; see Witness."""
        rows = torch.tensor([0, *(node + 1 for node in verdict.path)][: len(emitted)], device=logits.device)
        logprobs = law_logprobs(logits[rows], self._stored)
        best = logprobs.topk(self._top, dim=-1)
        own = logprobs.gather(-1, emitted.to(logits.device)[:, None]).squeeze(-1)
        own = torch.zeros_like(own) if self._law.is_greedy else own
        guesses = _tested(proposal, verdict, len(emitted))
        self._blocks.append((emitted.cpu(), own.cpu(), best.indices.cpu(), best.values.cpu(), guesses))

    def continuation(self, finish_reason: str) -> Continuation:
        """Return the answer with its laws, as LocalTarget.write does."""
        token_ids, logprobs, top_ids, top_logprobs = (self._joined(field) for field in range(4))
        tail = (1.0 - top_logprobs.exp().sum(-1)).clamp(0.0, 1.0)
        return Continuation(token_ids, logprobs, top_ids, top_logprobs, tail, finish_reason)

    def guess_ids(self) -> Int[Tensor, " tokens"]:
        """Return the draft's token tested at each answer token, UNTESTED for none."""
        return self._joined(4)

    def _joined(self, field: int) -> Tensor:
        return torch.cat([block[field] for block in self._blocks])


def _tested(proposal: Proposal, verdict: TreeVerdict, num_emitted: int) -> Int[Tensor, " tokens"]:
    """Return the draft token tested at each emitted one. Of the rejected children of a tree there is not one."""
    tested = proposal.token_ids[list(verdict.path)].cpu()
    if proposal.is_chain:
        tested = proposal.token_ids[: verdict.examined].cpu()
    tested = tested[:num_emitted]
    return torch.nn.functional.pad(tested, (0, num_emitted - len(tested)), value=UNTESTED)
