"""What widths and repairs are measured on: answers of the target, read a few at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import UserError
from foredraft.core.protocols import Answer

_TEXTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts.

    Attributes:
        token_ids: Padded behind, where no position that is read sees it.
        read: Positions from which an answer token follows. A first token, whose state is unlike all
            others in many models, is among them only where the prompt is no longer than it.
    """

    token_ids: Int[Tensor, "texts tokens"]
    read: Bool[Tensor, "texts tokens"]

    @property
    def texts(self) -> Int[Tensor, " positions"]:
        """The text of each position that is read."""
        return self.read.nonzero()[:, 0]


# Told what a module read and what it gave, at the positions that count.
Watcher = Callable[[Float[Tensor, "positions in"], Float[Tensor, "positions out"]], None]


def calibration_batches(answers: Sequence[Answer]) -> list[Batch]:
    """Return the answers in batches, the shortest texts first, so that little is padded.

    Raises:
        UserError: there is no answer token.
    """
    answers = sorted((answer for answer in answers if answer.num_tokens), key=lambda answer: len(answer.token_ids))
    if not answers:
        raise UserError("This is measured on answers of the target, and none was given: collect a trace.")
    return [_batch(answers[start : start + _TEXTS_AT_ONCE]) for start in range(0, len(answers), _TEXTS_AT_ONCE)]


def _batch(answers: Sequence[Answer]) -> Batch:
    width = max(len(answer.token_ids) for answer in answers) - 1
    token_ids = torch.zeros(len(answers), width, dtype=torch.long)
    read = torch.zeros(len(answers), width, dtype=torch.bool)
    for row, answer in enumerate(answers):
        length = len(answer.token_ids) - 1
        token_ids[row, :length] = answer.token_ids[:-1]
        read[row, answer.start - 1 : length] = True
    return Batch(token_ids, read)


@torch.no_grad()
def watch(model: PreTrainedModel, batch: Batch, watchers: Mapping[nn.Module, Watcher]) -> None:
    """Run the body of a model on a batch; tell each watcher, in float64, what its module read and gave."""
    read = batch.read.to(model.device)
    with ExitStack() as stack:
        for module, watcher in watchers.items():
            stack.enter_context(_watched(module, watcher, read))
        model.base_model(batch.token_ids.to(model.device), use_cache=False)


@contextmanager
def _watched(module: nn.Module, watcher: Watcher, read: Bool[Tensor, "texts tokens"]) -> Iterator[None]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # Some families, such as OPT, flatten texts and tokens in their feed-forward parts.
        seen, given = (features.view(*read.shape, -1)[read] for features in (inputs[0], output))
        watcher(seen.double(), given.double())

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
