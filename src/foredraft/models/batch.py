"""Prompts that are answered together, and leave when they are done."""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from foredraft.models.kv_cache import KeyValueCache

_GROUP_TOKENS = 2048
_SHARED_TOKENS = 8  # Fewer are not worth a pass of their own.


@final
class Batch:
    """Prompts that are being answered. A row that ends is replaced by the last one, and the batch gets shorter.

    Attributes:
        live: For each row of the next pass, the index of its prompt.
        prompt_lengths: Tokens of each prompt.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Int[Tensor, " _"]], max_new_tokens: int) -> None:
        self._model = model
        self._prompts = prompts
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self._width = max(self.prompt_lengths)
        self._padding = self._width - torch.tensor(self.prompt_lengths, device=model.device)
        self._mask = torch.arange(self._width + max_new_tokens, device=model.device) >= self._padding[:, None]
        self._cache = KeyValueCache(model, capacity=self._width + max_new_tokens)
        self.live = list(range(len(prompts)))

    def read_prompts(self) -> Float[Tensor, "rows hidden"]:
        """Read all prompts; return the hidden states after their last tokens.

        What they all begin with is read once, the rest in groups of similar length.
        """
        order = sorted(self.live, key=lambda row: self.prompt_lengths[row])
        shared = self._read_shared()
        hidden = torch.cat([self._read_group(rows, shared) for rows in _groups(order, self.prompt_lengths)])
        return hidden[torch.tensor(order).argsort()]

    def read(self, token_ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows hidden"]:
        """Read one more token of each live row."""
        return self._pass(self._cache, token_ids[:, None], self._padding[self.live], self._mask[self.live])

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

    def _read_shared(self) -> KeyValueCache:
        """Return a cache of one row that holds the tokens with which all prompts begin; empty if they are few."""
        length = _shared_length(self._prompts)
        cache = KeyValueCache(self._model, length)
        if length >= _SHARED_TOKENS:
            token_ids = self._prompts[0][None, :length].to(self._model.device)
            self._pass(
                cache, token_ids, torch.zeros_like(token_ids[:, 0]), torch.ones_like(token_ids, dtype=torch.bool)
            )
        return cache

    def _read_group(self, rows: list[int], shared: KeyValueCache) -> Float[Tensor, "rows hidden"]:
        """Read some prompts, padded on the left to the longest of them, and put them where the batch ends."""
        width = max(self.prompt_lengths[row] for row in rows)
        token_ids = torch.stack([pad(self._prompts[row], (width - self.prompt_lengths[row], 0)) for row in rows])
        spared = self._width - width
        cache, padding, mask = (
            KeyValueCache(self._model, width),
            self._padding[rows] - spared,
            self._mask[rows, spared:],
        )
        if shared.length:
            cache.begin_with(shared, padding.tolist())
        step = max(1, _GROUP_TOKENS // len(rows))
        for start in range(shared.length, width, step):
            hidden = self._pass(cache, token_ids[:, start : start + step].to(self._model.device), padding, mask)
        self._cache.place(cache, rows, len(self._prompts), end=self._width)
        return hidden

    def _pass(
        self,
        cache: KeyValueCache,
        token_ids: Int[Tensor, "rows new"],
        padding: Int[Tensor, " rows"],
        mask: Bool[Tensor, "rows columns"],
    ) -> Float[Tensor, "rows hidden"]:
        start, end = cache.length, cache.length + token_ids.shape[1]
        columns = torch.arange(start, end, device=token_ids.device)
        output = self._model.base_model(
            input_ids=token_ids,
            attention_mask=mask[:, :end],
            position_ids=(columns - padding[:, None]).clamp(min=0),
            cache=cache.inner,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]


def _groups(order: list[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield rows of similar length, about _GROUP_TOKENS tokens with padding at a time; `order` is by length."""
    group: list[int] = []
    for row in order:
        if group and (len(group) + 1) * lengths[row] > _GROUP_TOKENS:
            yield group
            group = []
        group.append(row)
    yield group


def _shared_length(prompts: Sequence[Int[Tensor, " _"]]) -> int:
    """Return how many tokens all of several prompts begin with; each keeps one of its own to read."""
    if len(prompts) == 1:
        return 0
    length = min(len(prompt) for prompt in prompts) - 1
    differs = (torch.stack([prompt[:length] for prompt in prompts]) != prompts[0][:length]).any(0).nonzero()
    return int(differs[0]) if len(differs) else length
