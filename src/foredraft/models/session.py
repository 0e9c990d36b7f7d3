"""A model reading one growing text: what it has read is never read again."""

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.models.head import Head
from foredraft.models.kv_cache import KeyValueCache
from foredraft.models.masks import attention_masks


@final
class Session:
    """A key-value cache that follows a list of tokens. Speed only: answers depend on the arguments alone."""

    def __init__(self, model: PreTrainedModel, head: Head) -> None:
        self.model = model
        self.head = head
        self._cache = KeyValueCache(model)
        self._read = torch.empty(0, dtype=torch.long)
        self._nodes = torch.empty(0, dtype=torch.long)

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
        known = min(common_prefix(self._read.to(token_ids.device), token_ids), len(token_ids) - last)
        self._cache.crop(known)
        self._read = token_ids[:known]
        return self._feed(token_ids[known:])[-last:]

    @torch.no_grad()
    def append(self, token_ids: Int[Tensor, " new"]) -> Float[Tensor, "new rows"]:
        """Read more tokens behind the text read so far; return the logits after each of them."""
        self._cache.crop(len(self._read))
        return self.head.logits(self._feed(token_ids))

    @torch.no_grad()
    def tree_logits(
        self, token_ids: Int[Tensor, " tokens"], nodes: Int[Tensor, " nodes"], parents: tuple[int, ...]
    ) -> Float[Tensor, "positions rows"]:
        """Return the logits after the text (row 0) and after each node of a tree behind it (row i + 1).

        One pass: a node sees the text and its ancestors. Until `keep` says which path stands, none does.

        Args:
            parents: Of each node the index of its parent, which comes before it; -1 for children of the text.
        """
        known = min(common_prefix(self._read.to(token_ids.device), token_ids), len(token_ids) - 1)
        self._cache.crop(known)
        self._read = token_ids[:known]
        mask, depths = _tree_mask(len(token_ids) - known, known, parents)
        new = torch.cat([token_ids[known:], nodes])
        columns = torch.cat([torch.arange(len(token_ids)), len(token_ids) + depths])
        positions = columns[None, known:]
        device = self.model.device
        hidden = self.model.base_model(
            input_ids=new[None].to(device),
            attention_mask=attention_masks(self.model, mask[None], positions, columns[None]),
            position_ids=positions.to(device),
            cache=self._cache.inner,
            use_cache=True,
        ).last_hidden_state[0]
        self._read, self._nodes = token_ids, nodes
        return self.head.logits(hidden[-len(nodes) - 1 :])

    def keep(self, path: tuple[int, ...]) -> None:
        """Make one path of the tree read last, given as indices of its nodes, part of the text."""
        self._cache.keep(len(self._read), [len(self._read) + node for node in path])
        self._read = torch.cat([self._read, self._nodes[list(path)]])

    @torch.no_grad()
    def _feed(self, token_ids: Int[Tensor, " new"]) -> Float[Tensor, "new hidden"]:
        output = self.model.base_model(
            input_ids=token_ids[None].to(self.model.device), cache=self._cache.inner, use_cache=True
        )
        self._read = torch.cat([self._read.to(token_ids.device), token_ids])
        return output.last_hidden_state[0]


def _tree_mask(
    num_new: int, known: int, parents: tuple[int, ...]
) -> tuple[Bool[Tensor, "rows columns"], Int[Tensor, " nodes"]]:
    """Return what each new token sees, text before nodes, and the depth of each node, 0 for children of the text."""
    text, nodes = known + num_new, len(parents)
    mask = torch.zeros(num_new + nodes, text + nodes, dtype=torch.bool)
    mask[:num_new, :text] = torch.arange(text) <= torch.arange(known, text)[:, None]
    mask[num_new:, :text] = True
    depths = torch.zeros(nodes, dtype=torch.long)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[num_new + node, text:] = mask[num_new + parent, text:]
            depths[node] = depths[parent] + 1
        mask[num_new + node, text + node] = True
    return mask, depths


def common_prefix(left: Int[Tensor, " left"], right: Int[Tensor, " right"]) -> int:
    """Return how many tokens two texts begin with together."""
    length = min(len(left), len(right))
    differs = (left[:length] != right[:length]).nonzero()
    return int(differs[0]) if len(differs) else length
