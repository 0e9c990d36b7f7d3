"""Texts of equal length that a model goes on with again and again from the same point, to be timed."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.models.head import Head
from foredraft.models.kv_cache import KeyValueCache

_READ_AT_ONCE = 2048


@final
class EqualTexts:
    """A batch of texts that were read; what is read behind them is forgotten by `again`."""

    def __init__(self, model: PreTrainedModel, head: Head, token_ids: Int[Tensor, "rows context"]) -> None:
        """Read the texts; equal lengths need no padding and no mask."""
        self._model, self._head = model, head
        self._rows, self._length = token_ids.shape
        self._cache = KeyValueCache(model, capacity=self._length + 64)
        with torch.no_grad():
            for part in token_ids.split(max(1, _READ_AT_ONCE // self._rows), dim=1):
                self._hidden(part)

    def again(self) -> None:
        """Forget what was read behind the texts."""
        self._cache.crop(self._length)

    @torch.no_grad()
    def logits(self, token_ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows new columns"]:
        """Read new tokens behind each text; return the logits after each of them."""
        return self._head.logits(self._hidden(token_ids))

    def _hidden(self, token_ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows new hidden"]:
        output = self._model.base_model(
            input_ids=token_ids.to(self._model.device), cache=self._cache.inner, use_cache=True
        )
        return output.last_hidden_state
