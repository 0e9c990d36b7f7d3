"""A draft in training: its weights in float32, and their gradients from packed text."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError, TraceError
from foredraft.distill.data import Group, num_positions, rows_of_tokens
from foredraft.distill.live import LiveTarget, by_source, is_live
from foredraft.distill.losses import Laws, Loss, loss_gradient, total_variation
from foredraft.distill.matching import LayerMatching
from foredraft.distill.packed import run_body
from foredraft.distill.packing import Pack, pack
from foredraft.models.draft import Draft
from foredraft.models.head import Head

_PACK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the positions of one step: the loss, and sum min(target, draft) over events."""

    loss: float
    acceptance: float


@final
class Student:
    """A copy of a draft whose body and final norm learn; embeddings and head are frozen.

    Attributes:
        model: The copy.
        weights: What learns, by name.
        row_of_token: The row of its head for each token, or UNSAYABLE.
        live: Who is asked for laws that are not stored; None for nobody.
    """

    def __init__(
        self, model: PreTrainedModel, head: Float[Tensor, "rows hidden"], row_of_token: Int[Tensor, " vocab"]
    ) -> None:
        """Take over a model that nobody else uses, and the head's rows; see `of`."""
        frozen = {id(module.weight) for module in _embeddings(model)}
        self.model = model
        self.weights = {name: weight for name, weight in model.named_parameters() if id(weight) not in frozen}
        self.row_of_token = row_of_token
        self.live: LiveTarget | None = None
        self._head = head

    @staticmethod
    def of(draft: Draft) -> "Student":
        """Return a student that starts as `draft`, which is left as it was.

        Raises:
            ModelError: nothing in it can be trained, or its head is more than a matrix.
        """
        model = _float32_copy(draft.model)
        head = model.get_output_embeddings().weight.detach()
        row_of_token = rows_of_tokens(draft.head_token_ids, head.shape[0])
        if len(draft.head_token_ids):
            head = head[draft.head_token_ids]
        _refuse_other_heads(model, draft, head)
        student = Student(model, head, row_of_token)
        if not any(weight.dim() > 1 for weight in student.weights.values()):
            raise ModelError("The draft has no weight matrix that can be trained: distil it before it is quantized.")
        for weight in student.weights.values():
            weight.requires_grad_()
        return student

    def backward(self, groups: Sequence[Group], loss: Loss, matching: LayerMatching | None, weight: float) -> Figures:
        """Set the gradient of the mean loss over all answer positions of `groups`; return the means.

        Args:
            groups: The text of one step.
            loss: What is made small.
            matching: Layers to match, added with `weight`; None for none.
        """
        for parameter in self.weights.values():
            parameter.grad = None
        positions = sum(map(num_positions, groups))
        loss_sum = acceptance_sum = 0.0
        for part in chain.from_iterable(map(_microbatches, by_source(groups))):
            packed = pack(part, self.row_of_token).to(self.model.device)
            laws = self._laws(part, packed)
            output = run_body(self.model, packed, output_hidden_states=matching is not None)
            hidden = output.last_hidden_state[0, packed.read] / packed.temperatures[:, None]
            result = loss_gradient(hidden.detach(), self._head, laws, loss)
            roots, gradients = [hidden], [result.hidden / positions]
            loss_sum += float(result.losses.sum())
            acceptance_sum += float(result.acceptance.sum())
            if matching is not None:
                differences = matching.losses(output.hidden_states, packed)
                roots.append(differences)
                gradients.append(torch.full_like(differences, weight / positions))
                loss_sum += weight * float(differences.detach().sum())
            torch.autograd.backward(roots, gradients)
        return Figures(loss_sum / positions, acceptance_sum / positions)

    @torch.no_grad()
    def acceptance(self, groups: Sequence[Group]) -> Float[Tensor, " positions"]:
        """Return sum min(target, draft) over events at every position of groups that are packed together."""
        packed = pack(groups, self.row_of_token).to(self.model.device)
        laws = self._laws(groups, packed)
        hidden = run_body(self.model, packed).last_hidden_state[0, packed.read] / packed.temperatures[:, None]
        return loss_gradient(hidden, self._head, laws, total_variation).acceptance

    def _laws(self, groups: Sequence[Group], packed: Pack) -> Laws:
        """Return the laws of groups that are all stored or all asked for."""
        if not is_live(groups[0]):
            return packed.law
        if self.live is None:
            raise TraceError("The laws of these answers must be asked for, and there is no target to ask.")
        return self.live.laws(packed)


def _float32_copy(model: PreTrainedModel) -> PreTrainedModel:
    shared = {id(module.weight): module.weight for module in _embeddings(model)} if model.dtype == torch.float32 else {}
    return copy.deepcopy(model, shared).float()


def _embeddings(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _refuse_other_heads(model: PreTrainedModel, draft: Draft, head: Float[Tensor, "rows hidden"]) -> None:
    probe = torch.linspace(-1.0, 1.0, head.shape[1], device=head.device)[None]
    if not torch.allclose(Head(model, draft.head_token_ids).logits(probe), probe @ head.T, rtol=1e-3, atol=1e-4):
        raise ModelError(
            f"The head of {type(model).__name__} is more than a matrix (a bias, a scale or a soft cap); "
            "such drafts cannot be trained."
        )


def _microbatches(groups: Sequence[Group]) -> Iterator[list[Group]]:
    part: list[Group] = []
    filled = 0
    for group in groups:
        tokens = max(len(example.row.prompt_ids) for example in group) + num_positions(group)
        if part and filled + tokens > _PACK_TOKENS:
            yield part
            part, filled = [], 0
        part.append(group)
        filled += tokens
    if part:
        yield part
