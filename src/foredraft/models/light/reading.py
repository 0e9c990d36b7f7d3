"""Many texts read by a light net, each alone."""

from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.models.head import Head
from foredraft.models.light.model import LightForCausalLM
from foredraft.models.light.session import LightSession


@final
class LightBatchSession:
    """Sessions of several texts, known by their numbers from 0 on; see LightSession."""

    def __init__(self, model: LightForCausalLM, head: Head, num_texts: int) -> None:
        self._sessions = {number: LightSession(model, head) for number in range(num_texts)}

    def logits(
        self, texts: Mapping[int, Int[Tensor, " _"]], last: Mapping[int, int]
    ) -> dict[int, Float[Tensor, "1 rows"]]:
        """Return, for some of the texts, the logits after the last token; `last` is 1 for each of them."""
        return {number: self._sessions[number].logits(text) for number, text in texts.items()}

    def drop(self, number: int) -> None:
        """Forget a text for good."""
        del self._sessions[number]


@final
class LightTexts:
    """A batch of texts that were read; what is read behind them is forgotten by `again`."""

    def __init__(self, model: LightForCausalLM, head: Head, token_ids: Int[Tensor, "rows context"]) -> None:
        """Read the texts."""
        self._model, self._head = model, head
        with torch.no_grad():
            _, self._begun = model.model.read(token_ids.to(model.device))
        self._states = self._begun

    def again(self) -> None:
        """Forget what was read behind the texts."""
        self._states = self._begun

    @torch.no_grad()
    def logits(self, token_ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows new columns"]:
        """Read new tokens behind each text; return the logits after each of them."""
        hidden, self._states = self._model.model.read(token_ids.to(self._model.device), self._states)
        return self._head.logits(hidden)
