"""A model reading one growing text: what it has read is never read again."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.models.head import Head
from foredraft.models.kv_cache import KeyValueCache


@final
class Session:
    """A key-value cache that follows a list of tokens. Speed only: answers depend on the arguments alone."""

    def __init__(self, model: PreTrainedModel, head: Head) -> None:
        self.model = model
        self.head = head
        self._cache = KeyValueCache(model)
        self._read = torch.empty(0, dtype=torch.long)

    @torch.no_grad()
    def logits(self, token_ids: Int[Tensor, " tokens"], last: int = 1) -> Float[Tensor, "last rows"]:
        """Return the logits after each of the `last` last tokens, one column for each row of the head.

        Keeps the longest prefix shared with what was read before, crops behind it and reads the rest
        in one pass.

        Args:
            token_ids: The whole text, at least `last` tokens.
            last: Positions asked for, >= 1. Row i is about the token after token_ids[len - last + i].
        """
        return self.head.logits(self.hidden(token_ids, last))

    @torch.no_grad()
    def hidden(self, token_ids: Int[Tensor, " tokens"], last: int = 1) -> Float[Tensor, "last hidden"]:
        """Return the final hidden states of the `last` last tokens; see `logits`."""
        known = min(_common_prefix(self._read.to(token_ids.device), token_ids), len(token_ids) - last)
        self._cache.crop(known)
        self._read = token_ids[:known]
        return self._feed(token_ids[known:])[-last:]

    @torch.no_grad()
    def append(self, token_ids: Int[Tensor, " new"]) -> Float[Tensor, "new rows"]:
        """Read more tokens behind the text read so far; return the logits after each of them."""
        return self.head.logits(self._feed(token_ids))

    @torch.no_grad()
    def _feed(self, token_ids: Int[Tensor, " new"]) -> Float[Tensor, "new hidden"]:
        output = self.model.base_model(
            input_ids=token_ids[None].to(self.model.device), cache=self._cache.inner, use_cache=True
        )
        self._read = torch.cat([self._read.to(token_ids.device), token_ids])
        return output.last_hidden_state[0]


def _common_prefix(left: Int[Tensor, " left"], right: Int[Tensor, " right"]) -> int:
    length = min(len(left), len(right))
    differs = (left[:length] != right[:length]).nonzero()
    return int(differs[0]) if len(differs) else length
