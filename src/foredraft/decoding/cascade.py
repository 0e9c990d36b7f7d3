"""Cascades: a small drafter drafts for a middle model, whose text is the proposal to the target."""

from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.errors import CapabilityError, UserError
from foredraft.core.law import SamplingLaw, law_probs
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import TOKENS_EXACT, Answer, Drafter, EmittedProbs
from foredraft.decoding.rules import verify_chain
from foredraft.decoding.speculative import TargetSession, uniforms
from foredraft.models.causal_lm import CausalLMDrafter


@final
class Cascade:
    """Proposes what a middle model says, decoded speculatively with a smaller drafter.

    Speculation keeps the middle model's law, so that each token is drawn from that law, and the target tests it
    as a token of the middle model. A token that only the middle model accepted is still a proposal.

    Args:
        middle: The middle model as a drafter: its law, its width, its replay.
        session: The same model as a target.
        drafter: Drafts for the middle model.
        inner_k: Draft tokens of the small drafter in a block.
    """

    kind = "cascade"
    validity = TOKENS_EXACT

    def __init__(self, middle: Drafter, session: TargetSession, drafter: Drafter, inner_k: int) -> None:
        self.middle = middle
        self.drafter = drafter
        self.inner_k = inner_k
        self._session = session

    @property
    def law(self) -> SamplingLaw:
        return self.middle.law

    @property
    def vocab_size(self) -> int:
        return self.middle.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.middle.num_parameters + self.drafter.num_parameters

    @property
    def num_bytes(self) -> int:
        return self.middle.num_bytes + self.drafter.num_bytes

    def bind(self, law: SamplingLaw) -> "Cascade":
        return Cascade(self.middle.bind(law), self._session, self.drafter.bind(law), self.inner_k)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        text, laws, uniform = context, [], uniforms(generator)
        while (room := k - (len(text) - len(context))) > 0:
            inner = self.drafter.propose(text, min(self.inner_k, room), generator)
            logits = self._session.logits(torch.cat([text, inner.token_ids.to(text)]), len(inner) + 1)
            probs = law_probs(logits, self.law)
            verdict = verify_chain(probs, inner, uniform)
            said = [*inner.token_ids[: verdict.num_accepted].tolist(), verdict.next_token][:room]
            text = torch.cat([text, torch.tensor(said).to(text)])
            laws.append(probs[: len(said)])
        drafted = text[len(context) :]
        if self.law.is_greedy or not laws:
            return Proposal.certain(drafted, self.vocab_size)
        return Proposal.chain(drafted, Laws.from_dense(torch.cat(laws)))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        """Return the middle model's figures: tokens are exact, the cost is the middle model's own."""
        return self.middle.replay(answers, k)


def cascade(drafter: Drafter, load: Callable[[str], Drafter], middle: str = "", inner_k: int = 2) -> Cascade:
    """Return what `+cascade:middle=DRAFT` makes of a drafter: it drafts for the middle model.

    Raises:
        UserError: no middle model is named, or inner_k is not positive.
        CapabilityError: the middle model cannot say its law over the whole vocabulary.
    """
    if not middle or inner_k < 1:
        raise UserError("A cascade needs middle=DRAFT (folder or hub id) and inner_k of 1 or more.")
    model = load(middle)
    if not isinstance(model, CausalLMDrafter):
        raise CapabilityError(f"{middle} is no language model: a cascade needs one in the middle.")
    return Cascade(model, model.target_session(), drafter, inner_k)
