"""Training passes of models that do not attend: each text is read alone, from its start, with a gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foredraft.core.errors import RecipeError
from foredraft.distill.data import Group
from foredraft.steps import DistillStep


def states_alone(
    body: Callable[..., Any], groups: Sequence[Group], device: torch.device
) -> Float[Tensor, "read hidden"]:
    """Return the final states that guess the tokens which are trained on, in the order in which a pack reads them."""
    examples = [example for group in groups for example in group]
    texts = [torch.cat([example.row.prompt_ids, example.row.answer_ids[:-1]]) for example in examples]
    # Padding on the right needs no mask: nothing looks ahead.
    hidden = body(input_ids=pad_sequence(texts, batch_first=True).to(device)).last_hidden_state
    read = [len(example.row.prompt_ids) - 1 + example.positions for example in examples]
    return torch.cat([row[at.to(device)] for row, at in zip(hidden, read, strict=True)])


def refuse_what_attends(settings: DistillStep) -> None:
    """Refuse parts of a training that light nets have nothing for.

    Raises:
        RecipeError: names the first one.
    """
    asked = {
        "layer_matching": settings.layer_matching.weight > 0,
        "attention_matching": settings.attention_matching.weight > 0,
        "selective": settings.selective.share < 1.0,
        "rollouts": settings.rollouts is not None,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "lora": settings.lora.rank > 0,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise RecipeError(f"{name} is for drafts that attend as the target does; leave it out for a light net.")
