"""Reading text that was written before: what a target says of each token of given answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from foredraft.core.law import SamplingLaw, law_logprobs
from foredraft.core.protocols import Answer, Reading
from foredraft.models.head import Head

_BATCH_TOKENS = 2048
_POSITIONS = 128  # Rows of logits held at a time.


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model with its head."""

    model: PreTrainedModel
    head: Head
    num_tokens: int

    @torch.no_grad()
    def read(
        self, answers: Sequence[Answer], law: SamplingLaw, top: int, on_tokens: Callable[[int], None]
    ) -> list[Reading]:
        """Return what the model says of each answer's tokens; see core.protocols.Reading.

        Never holds the logits of more than 128 positions.
        """
        readings: dict[int, Reading] = {}
        for group in _groups([len(answer.token_ids) for answer in answers]):
            for index, hidden in zip(group, self._hidden([answers[index] for index in group]), strict=True):
                answer = answers[index]
                readings[index] = self._reading(hidden, answer.token_ids[answer.start :], law, top)
                on_tokens(answer.num_tokens)
        return [readings[index] for index in range(len(answers))]

    def _hidden(self, answers: Sequence[Answer]) -> list[Float[Tensor, "answer hidden"]]:
        """Return the states from which each answer's tokens follow. Padding lies behind the text, unseen by it."""
        width = max(len(answer.token_ids) for answer in answers) - 1
        device = self.model.device
        token_ids = torch.stack([pad(one.token_ids[:-1], (0, width + 1 - len(one.token_ids))) for one in answers])
        states = self.model.base_model(input_ids=token_ids.to(device), use_cache=False).last_hidden_state
        return [row[answer.start - 1 : len(answer.token_ids) - 1] for row, answer in zip(states, answers, strict=True)]

    def _reading(
        self, hidden: Float[Tensor, "answer hidden"], token_ids: Int[Tensor, " answer"], law: SamplingLaw, top: int
    ) -> Reading:
        parts = [
            _read(self.head.logits(states), ids.to(states.device), law, min(top, self.num_tokens))
            for states, ids in zip(hidden.split(_POSITIONS), token_ids.split(_POSITIONS), strict=True)
        ]
        return Reading(*(torch.cat([part[field] for part in parts]).cpu() for field in range(len(parts[0]))))


def _read(
    logits: Float[Tensor, "positions vocab"], token_ids: Int[Tensor, " positions"], law: SamplingLaw, top: int
) -> tuple[Tensor, ...]:
    """Return the fields of a Reading, in order."""
    stored = law_logprobs(logits, law.stored)
    best = stored.topk(top, dim=-1)
    own = stored.gather(-1, token_ids[:, None]).squeeze(-1)
    outside, gap = _beyond_the_cut(logits, stored, token_ids, law) if law.is_cut else (own, _impossible(own))
    probs = stored.exp()
    finite = stored.masked_fill(stored == -torch.inf, 0.0)
    mean = (probs * finite).sum(-1)
    spread = (probs * finite.square()).sum(-1) - mean.square()
    emitted = torch.zeros_like(own) if law.is_greedy else torch.where(own == -torch.inf, outside, own)
    tail = (1.0 - best.values.exp().sum(-1)).clamp(0.0, 1.0)
    return emitted, best.indices, best.values, tail, gap, mean, spread.clamp(min=0.0)


def _beyond_the_cut(
    logits: Float[Tensor, "positions vocab"],
    stored: Float[Tensor, "positions vocab"],
    token_ids: Int[Tensor, " positions"],
    law: SamplingLaw,
) -> tuple[Float[Tensor, " positions"], Float[Tensor, " positions"]]:
    """Return the log-probability of a token that rounding put just outside a cut, as if just inside, and its gap."""
    scaled = logits if law.is_greedy else logits / law.temperature
    given = scaled.gather(-1, token_ids[:, None]).squeeze(-1)
    # The least that the law leaves: the likeliest token of a greedy law, the least likely one kept by a cut.
    cut = (stored if not law.is_greedy else law_logprobs(logits, law)) == -torch.inf
    least = scaled.masked_fill(cut, torch.inf).min(-1).values
    return given - torch.logsumexp(scaled.masked_fill(cut, -torch.inf), -1), (least - given).clamp(min=0.0)


def _impossible(own: Float[Tensor, " positions"]) -> Float[Tensor, " positions"]:
    """Return the gap under a law that cuts nothing: 0, but for rows that are no tokens."""
    return torch.zeros_like(own).masked_fill(own == -torch.inf, torch.inf)


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of similar length, about 2048 tokens with padding at a time."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if group and (len(group) + 1) * lengths[index] > _BATCH_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
