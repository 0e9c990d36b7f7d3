"""A drafter that stops drafting where its own law is too flat to be worth a try."""

from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import UserError
from foredraft.core.law import SamplingLaw
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import TOKENS_EXACT, Answer, Drafter, EmittedProbs


@final
class ConfidentDrafter:
    """Drafts with another drafter while the largest probability of its law is at least `threshold`.

    The stop looks at the shape of the law that the next token would be drawn from, never at the token drawn, so
    that what stands was not selected by value. Shapes are read from the plain law where the drafter is greedy.
    """

    kind = "confident"
    validity = TOKENS_EXACT

    def __init__(self, drafter: Drafter, threshold: float) -> None:
        self.drafter = drafter
        self.threshold = threshold
        self._source = drafter.bind(SamplingLaw()) if drafter.law.is_greedy else drafter

    @property
    def law(self) -> SamplingLaw:
        return self.drafter.law

    @property
    def vocab_size(self) -> int:
        return self.drafter.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.drafter.num_parameters

    @property
    def num_bytes(self) -> int:
        return self.drafter.num_bytes

    def bind(self, law: SamplingLaw) -> "ConfidentDrafter":
        return ConfidentDrafter(self.drafter.bind(law), self.threshold)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        text, laws = context, []
        for _ in range(k):
            step = self._source.propose(text, 1, generator)
            if len(step) == 0:
                break
            law, token_id = step.laws.probs(0, int(step.token_ids[0])), int(step.token_ids[0])
            if confidence(law, token_id) < self.threshold:
                break
            if self.law.is_greedy:
                token_id = int(law.argmax())
            text = torch.cat([text, torch.tensor([token_id]).to(text)])
            laws.append(law)
        drafted = text[len(context) :]
        if self.law.is_greedy or not laws:
            return Proposal.certain(drafted, self.vocab_size)
        return Proposal.chain(drafted, Laws.from_dense(torch.stack(laws)))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        """Return what the law gave to each token, without a guess where it was too flat.

        Tokens per call are exact; draft steps are not, since drafting goes on over tokens that were not emitted
        (MATHS 4): take the cost from literal decoding.
        """
        return [self._replayed(answer) for answer in answers]

    def _replayed(self, answer: Answer) -> EmittedProbs:
        probs, guessed = torch.zeros(answer.num_tokens), torch.zeros(answer.num_tokens, dtype=torch.bool)
        generator = torch.Generator()
        for position in range(answer.num_tokens):
            end = answer.start + position
            step, emitted = self._source.propose(answer.token_ids[:end], 1, generator), int(answer.token_ids[end])
            if len(step) == 0:
                continue
            law = step.laws.probs(0, int(step.token_ids[0]))
            if confidence(law, int(step.token_ids[0])) >= self.threshold:
                guessed[position] = True
                probs[position] = float(int(law.argmax()) == emitted) if self.law.is_greedy else law[emitted]
        return EmittedProbs(probs, guessed)


def confident(drafter: Drafter, load: Callable[[str], Drafter], threshold: float = 0.4) -> ConfidentDrafter:
    """Return what `+confident:...` makes of a drafter.

    Raises:
        UserError: the threshold is no probability.
    """
    if not 0.0 <= threshold <= 1.0:
        raise UserError(f"threshold must lie in [0, 1], not {threshold}.")
    return ConfidentDrafter(drafter, threshold)


def confidence(law: Float[Tensor, " vocab"], token_id: int) -> float:
    """Return the largest probability of a law. `token_id`, the token drawn from it, must not matter."""
    return float(law.max())
