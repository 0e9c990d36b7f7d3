"""A light net reading one growing text: what stands is never read again, what was only drafted is."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.models.head import Head
from foredraft.models.light.model import LightForCausalLM, States
from foredraft.models.session import common_prefix


@final
class LightSession:
    """The states behind a text, and behind what was drafted after it.

    States cannot be cropped: a text that does not go on from the one read before is read from its start. Speed only:
    answers depend on the arguments alone.
    """

    def __init__(self, model: LightForCausalLM, head: Head) -> None:
        self._model = model
        self._head = head
        self._read = torch.empty(0, dtype=torch.long)
        self._states: States = ()
        self._drafted: States = ()

    @torch.no_grad()
    def logits(self, token_ids: Int[Tensor, " tokens"]) -> Float[Tensor, "1 rows"]:
        """Return the logits after the last token, one column for each row of the head."""
        known = len(self._read)
        before = token_ids[:-1]
        if common_prefix(self._read.to(token_ids.device), before) < known:
            known, self._states = 0, ()
        if len(before) > known:
            _, self._states = self._model.model.read(self._there(before[known:]), self._states)
        self._read, self._drafted = before, self._states
        return self.append(token_ids[-1:])

    @torch.no_grad()
    def append(self, token_ids: Int[Tensor, " new"]) -> Float[Tensor, "new rows"]:
        """Read drafted tokens behind what was read or drafted last; return the logits after each of them."""
        hidden, self._drafted = self._model.model.read(self._there(token_ids), self._drafted)
        return self._head.logits(hidden[0])

    def _there(self, token_ids: Int[Tensor, " tokens"]) -> Int[Tensor, "1 tokens"]:
        return token_ids[None].to(self._model.device)
