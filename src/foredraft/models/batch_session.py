"""A model reading several growing texts at once, each at its own pace: what it has read is never read again."""

from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from foredraft.models.head import Head
from foredraft.models.kv_cache import RaggedCache
from foredraft.models.masks import attention_masks
from foredraft.models.session import common_prefix

_PASS_TOKENS = 4096


@final
class BatchSession:
    """Key-value caches that follow several lists of tokens. Speed only: answers depend on the arguments alone."""

    def __init__(self, model: PreTrainedModel, head: Head, num_texts: int) -> None:
        """Make room for `num_texts` texts, which are known by their numbers from 0 on."""
        self._model = model
        self._head = head
        self._cache = RaggedCache(model, num_texts)
        self._texts = list(range(num_texts))  # the text of each row
        self._read: list[Tensor] = [torch.empty(0, dtype=torch.long) for _ in self._texts]  # by row

    @torch.no_grad()
    def logits(self, texts: Mapping[int, Int[Tensor, " _"]], last: Mapping[int, int]) -> dict[int, Tensor]:
        """Return, for some of the texts, the logits after each of their last tokens, [last, rows of the head].

        One pass reads what is new in all of them; each text's cache is cut to the prefix that it shares with what
        was read before.

        Args:
            texts: The whole texts by number, each of at least `last` tokens.
            last: Positions asked for, >= 1, by number.
        """
        new = [torch.empty(0, dtype=torch.long)] * len(self._texts)
        for row, number in enumerate(self._texts):
            if number in texts:
                text = texts[number]
                known = min(common_prefix(self._read[row].to(text.device), text), len(text) - last[number])
                self._cache.lengths[row] = known
                new[row], self._read[row] = text[known:], text
        try:
            hidden = self._feed(new, [last.get(number, 0) for number in self._texts])
        except BaseException:
            self._forget()
            raise
        asked = [number for number in self._texts if number in texts]
        parts = self._head.logits(torch.cat(hidden)).split([last[number] for number in asked])
        return dict(zip(asked, parts, strict=True))

    def drop(self, number: int) -> None:
        """Forget a text for good; its row goes to the last one, and passes get shorter."""
        row, end = self._texts.index(number), len(self._texts) - 1
        self._cache.drop(row)
        self._texts[row], self._read[row] = self._texts[end], self._read[end]
        self._texts.pop()
        self._read.pop()

    def _feed(self, new: list[Tensor], last: list[int]) -> list[Float[Tensor, "_ hidden"]]:
        """Read the new tokens of every row, a block of columns at a time; return the states behind the last ones."""
        lengths = torch.tensor([len(tokens) for tokens in new])
        padded = pad_sequence(new, batch_first=True)
        step = max(1, _PASS_TOKENS // len(new))
        states: list[list[Tensor]] = [[] for _ in new]
        for start in range(0, padded.shape[1], step):
            block = padded[:, start : start + step]
            hidden = self._pass(block)
            self._cache.lengths += (lengths - start).clamp(0, block.shape[1])
            for row, (length, wanted) in enumerate(zip(lengths.tolist(), last, strict=True)):
                first, end = max(length - wanted - start, 0), min(length - start, block.shape[1])
                if first < end:
                    states[row].append(hidden[row, first:end])
        return [torch.cat(parts) for parts in states if parts]

    def _pass(self, token_ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows new hidden"]:
        """Read one block. Rows with fewer new tokens read padding behind them, which their lengths leave out."""
        positions = self._cache.lengths[:, None] + torch.arange(token_ids.shape[1])
        columns = torch.arange(int(positions.max()) + 1).expand(len(positions), -1)
        masks = attention_masks(self._model, columns[:, None, :] <= positions[:, :, None], positions, columns)
        device = self._model.device
        output = self._model.base_model(
            input_ids=token_ids.to(device),
            attention_mask=masks,
            position_ids=positions.to(device),
            cache=self._cache.inner,
            use_cache=True,
        )
        return output.last_hidden_state

    def _forget(self) -> None:
        self._cache.lengths.zero_()
        self._read = [torch.empty(0, dtype=torch.long) for _ in self._texts]
