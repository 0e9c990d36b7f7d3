"""From hidden states to logits, over all rows of a model's head or over a chosen few."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.models.few_rows import few_rows_linear

NO_IDS = torch.empty(0, dtype=torch.long)


def kept_rows(
    weight: Float[Tensor, "rows hidden"], token_ids: Int[Tensor, " kept"]
) -> Float[Tensor, "computed hidden"]:
    """Return the rows of a head that are computed: those of `token_ids`, all where it is empty."""
    return weight[token_ids] if len(token_ids) else weight


@final
class Head:
    """The output embeddings of a model, read without running its body.

    Attributes:
        token_ids: The token of each row, increasing; empty where row i is token i.
        num_rows: Rows computed.
    """

    def __init__(self, model: PreTrainedModel, token_ids: Int[Tensor, " kept"] = NO_IDS, num_tokens: int = 0) -> None:
        """Keep `token_ids` of the rows, or all; rows from `num_tokens` on (0: none) are padding and get -inf."""
        linear = model.get_output_embeddings()
        if linear is None:
            raise ModelError(f"{type(model).__name__} has no language-model head.")
        if len(token_ids) and int(token_ids.max()) >= linear.out_features:
            raise ModelError(
                f"The trimmed head keeps token {int(token_ids.max())}, the model has {linear.out_features} rows: "
                "the two are not of one draft. Make it again."
            )
        self.token_ids = token_ids.to(next(linear.parameters()).device)
        self._linear = linear
        self._weight = linear.weight.detach()[self.token_ids] if len(token_ids) else torch.empty(0)
        self._bias = linear.bias.detach()[self.token_ids] if len(token_ids) and linear.bias is not None else None
        self._num_tokens = num_tokens
        config = model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None) or 0.0
        self._factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) or int(self._linear.out_features)

    @property
    def num_columns(self) -> int:
        """Rows of the whole head: the vocabulary with its padding."""
        return int(self._linear.out_features)

    @property
    def copied_bytes(self) -> int:
        """Memory of the rows kept beside the model's own."""
        return self._weight.numel() * self._weight.element_size()

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch rows"]:
        """Return the logits of the rows, in float32."""
        if len(self.token_ids):
            logits = few_rows_linear(hidden, self._weight, self._bias).float()
        else:
            logits = self._linear(hidden).float()
        if self._factor != 1.0:
            logits = logits * self._factor
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        if 0 < self._num_tokens < self.num_columns and not len(self.token_ids):
            logits[..., self._num_tokens :] = float("-inf")
        return logits
