"""Prompts that are answered together, and leave when they are done."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.models.kv_cache import KeyValueCache

_PREFILL_TOKENS = 16384


@final
class Batch:
    """Prompts that are being answered. A row that ends is replaced by the last one, and the batch gets shorter.

    Attributes:
        live: For each row of the next pass, the index of its prompt.
        prompt_lengths: Tokens of each prompt.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Int[Tensor, " _"]], max_new_tokens: int) -> None:
        self._model = model
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self._width = max(self.prompt_lengths)
        self._token_ids = torch.zeros(len(prompts), self._width, dtype=torch.long, device=model.device)
        for row, prompt in enumerate(prompts):
            self._token_ids[row, self._width - len(prompt) :] = prompt.to(model.device)
        columns = torch.arange(self._width + max_new_tokens, device=model.device)
        self._padding = self._width - torch.tensor(self.prompt_lengths, device=model.device)
        self._mask = columns >= self._padding[:, None]
        self._cache = KeyValueCache(model, capacity=self._width + max_new_tokens)
        self.live = list(range(len(prompts)))

    def read_prompts(self) -> Float[Tensor, "rows hidden"]:
        """Read all prompts, padded on the left; return the hidden states after their last tokens."""
        step = max(1, _PREFILL_TOKENS // len(self.live))
        for start in range(0, self._width, step):
            hidden = self._pass(self._token_ids[:, start : start + step])
        return hidden

    def read(self, token_ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows hidden"]:
        """Read one more token of each live row."""
        return self._pass(token_ids[:, None])

    def drop(self, ended: Bool[Tensor, " rows"], token_ids: Int[Tensor, " rows"]) -> Int[Tensor, " live"]:
        """Let the rows that ended leave; return the tokens of those that stay, in their new order."""
        tokens = token_ids.tolist()
        for row in reversed(ended.nonzero().flatten().tolist()):
            last = len(self.live) - 1
            if row != last:
                self._cache.replace_row(row, by=last)
                self.live[row], tokens[row] = self.live[last], tokens[last]
            self.live.pop()
            tokens.pop()
        return torch.tensor(tokens, dtype=torch.long, device=token_ids.device)

    def _pass(self, token_ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows hidden"]:
        start, end = self._cache.length, self._cache.length + token_ids.shape[1]
        columns = torch.arange(start, end, device=token_ids.device)
        output = self._model.base_model(
            input_ids=token_ids,
            attention_mask=self._mask[self.live, :end],
            position_ids=(columns - self._padding[self.live, None]).clamp(min=0),
            cache=self._cache.inner,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]
