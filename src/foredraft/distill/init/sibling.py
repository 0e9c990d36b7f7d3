"""Drafts cut out of another model than the target: one that speaks the target's tokens."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.core.errors import VocabMismatchError
from foredraft.models.loading import first_difference


def require_same_tokens(
    name: str, tokenizer: PreTrainedTokenizerBase, target_name: str, target_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise unless two tokenizers name the same tokens, id by id.

    Raises:
        VocabMismatchError: names the first id that they read differently.
    """
    if difference := first_difference(tokenizer, target_tokenizer):
        raise VocabMismatchError(
            f"{name} does not speak the tokens of {target_name}: {difference}. Set transplant: true to give it the "
            "target's vocabulary, or start from a model of the target's family."
        )


def set_rows(model: PreTrainedModel, rows: int) -> None:
    """Cut or pad, in place, the embeddings and the head of a model to `rows`, as runtimes ask of a pair.

    Rows that are added are the mean of the others: their logit is the mean logit, so that no softmax gives one of
    them more than one part in `rows`.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table.weight.shape[0] != rows:
        replace_rows(model, _with_rows(table.weight.detach(), rows), _with_rows(head.weight.detach(), rows))


def replace_rows(
    model: PreTrainedModel, embeddings: Float[Tensor, "rows hidden"], head: Float[Tensor, "rows hidden"]
) -> None:
    """Give a model, in place, other embeddings and another head; where the two are tied, the former serve as both."""
    table, linear = model.get_input_embeddings(), model.get_output_embeddings()
    tied = linear.weight is table.weight
    table.weight = nn.Parameter(embeddings)
    linear.weight = table.weight if tied else nn.Parameter(head)
    table.num_embeddings = linear.out_features = embeddings.shape[0]
    table.padding_idx = None
    table.embedding_dim = linear.in_features = embeddings.shape[1]
    model.config.get_text_config().vocab_size = embeddings.shape[0]


def _with_rows(weight: Float[Tensor, "before hidden"], rows: int) -> Float[Tensor, "rows hidden"]:
    added = max(rows - len(weight), 0)
    return torch.cat([weight[:rows], weight.float().mean(0).to(weight).expand(added, -1)])
