"""A draft in training: its weights in float32, and their gradients from packed text."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError, RecipeError, TraceError
from foredraft.core.processes import Processes, summed
from foredraft.distill.alone import refuse_what_attends, states_alone
from foredraft.distill.data import Group, num_positions, rows_of_tokens
from foredraft.distill.emphasis import Emphasis
from foredraft.distill.learned_head import learned_head_losses
from foredraft.distill.live import LiveTarget, by_source, is_live
from foredraft.distill.losses import Laws, Loss, loss_gradient, loss_values, total_variation
from foredraft.distill.matching import Matching
from foredraft.distill.packed import packed_attention, run_body
from foredraft.distill.packing import Pack, pack
from foredraft.distill.parallel import Spread
from foredraft.distill.seeing import NOTHING, look
from foredraft.models.draft import Draft
from foredraft.models.head import Head, kept_rows
from foredraft.models.layers import layer_stack
from foredraft.models.light.model import LightForCausalLM
from foredraft.steps import DistillStep

_DEFAULTS = DistillStep()
_ALONE = Processes()


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the positions of one step: the loss, and sum min(target, draft) over events."""

    loss: float
    acceptance: float


@final
class Student:
    """A copy of a draft that learns: its body and final norm, low-rank updates of its body, or all of it.

    Attributes:
        model: The copy.
        weights: What learns, by name.
        row_of_token: The row of its head for each token, or UNSAYABLE.
        live: Who is asked for laws that are not stored; None for nobody.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head_token_ids: Int[Tensor, " kept"],
        settings: DistillStep = _DEFAULTS,
        processes: Processes = _ALONE,
    ) -> None:
        """Take over a model that nobody else uses, in which what learns has requires_grad; see `of`."""
        head = model.get_output_embeddings().weight
        outside = {id(module.weight): module.weight for module in _embeddings(model)}
        self._outside = [weight for weight in outside.values() if weight.requires_grad]
        self._head = kept_rows(head, head_token_ids)
        self._settings = settings
        self._spread = Spread(model, outside.values(), processes)
        self.model = model
        self._attends = not isinstance(model, LightForCausalLM)
        self.head_token_ids = head_token_ids
        self.row_of_token = rows_of_tokens(head_token_ids, head.shape[0])
        self.live: LiveTarget | None = None
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        if settings.gradient_checkpointing:
            _compute_layers_twice(model)

    @staticmethod
    def of(draft: Draft, settings: DistillStep = _DEFAULTS, processes: Processes = _ALONE) -> "Student":
        """Return a student that starts as `draft`, which is left as it was.

        Args:
            settings: What learns and how it is computed; rates and lengths are not read.
            processes: Who trains it together.

        Raises:
            ModelError: nothing in it can be trained, or its head is more than a matrix.
            RecipeError: its head is trimmed and shall learn, lora cannot be put in, or a light net is asked for what
                only attention has.
        """
        if settings.train == "all" and len(draft.head_token_ids):
            raise RecipeError(
                f"train: all would move the {len(draft.head_token_ids)} rows of the head that the draft computes and "
                "leave the cut ones behind. Keep the head whole (vocab: 0), or train: body."
            )
        if settings.train == "all" and settings.lora.rank:
            raise RecipeError("lora trains updates of the body's matrices only: train: body, or lora.rank: 0.")
        if isinstance(draft.model, LightForCausalLM):
            refuse_what_attends(settings)
        model = _trainable(draft, settings)
        _refuse_other_heads(model, draft)
        if settings.lora.rank:
            _add_lora(model, settings)
        return Student(model, draft.head_token_ids, settings, processes)

    @property
    def processes(self) -> Processes:
        return self._spread.processes

    def adopt(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Let weights learn beside the draft's own that are no part of it, such as projections."""
        self.weights |= weights
        self._outside += weights.values()

    def draft(self) -> Draft:
        """Return the student as it is now as a draft, to be run and not kept."""
        return Draft(self.model, self.head_token_ids)

    def precision(self) -> AbstractContextManager[None]:
        """Return the context that passes are computed in.

        bfloat16 is autocast over weights in float32: an update of relative size 2^-9 would be lost in a bfloat16
        weight, and norms, the head and the loss stay exact.
        """
        if self._settings.precision == "float32":
            return nullcontext()
        return torch.autocast(self.model.device.type, torch.bfloat16)

    def backward(
        self,
        groups: Sequence[Group],
        loss: Loss,
        matching: Matching | None = None,
        emphasis: Emphasis | None = None,
    ) -> Figures:
        """Set the gradient of the mean loss over all answer positions of `groups`; return the means.

        On several processes each reads its share of the groups, and all get the same gradient and figures.

        Args:
            groups: The text of one step, the same in every process.
            loss: What is made small.
            matching: What of the target to match, added to the loss; None for nothing.
            emphasis: What each position weighs in the loss; None where all weigh the same.
        """
        for parameter in self.weights.values():
            parameter.grad = None
        positions = sum(map(num_positions, groups))
        loss_sum = acceptance_sum = 0.0
        for part in self._spread.parts(groups, self._cut):
            share = positions / self._spread.factor if part.counts else float("inf")
            with self._spread.during(part), packed_attention(self.model) if self._attends else nullcontext():
                losses, accepted = self._pass(part.groups, loss, matching, emphasis, share)
            loss_sum, acceptance_sum = loss_sum + part.counts * losses, acceptance_sum + part.counts * accepted
        self._spread.average(self._outside)
        loss_sum, acceptance_sum = summed(loss_sum, acceptance_sum)
        return Figures(loss_sum / positions, acceptance_sum / positions)

    def _pass(
        self,
        groups: Sequence[Group],
        loss: Loss,
        matching: Matching | None,
        emphasis: Emphasis | None,
        positions: float,
    ) -> tuple[float, float]:
        """Add the gradient of the sum of losses over `positions`; return the sums of losses and acceptance."""
        packed = pack(groups, self.row_of_token).to(self.model.device)
        laws = self._laws(groups, packed)
        with self.precision():
            asked = matching.asks_draft if matching is not None else NOTHING
            if self._attends:
                seen = look(self.model, packed, asked, body=self._spread.body)
                read = seen.last[0, packed.read]
            else:
                read = states_alone(self._spread.body, groups, self.model.device)
        hidden = read.float() / packed.temperatures[:, None]
        if self._head.requires_grad:
            result = learned_head_losses(hidden, self._head, laws, loss, positions)
        else:
            result = loss_gradient(hidden.detach(), self._head, laws, loss)
        if emphasis is not None:
            lengths = [num_positions((example,)) for group in groups for example in group]
            result = emphasis.weigh(result, lengths, emphasis.reference_losses(packed, laws, loss))
        roots, gradients = [hidden], [result.hidden / positions]
        total = float(result.losses.sum())
        if matching is not None:
            differences = matching.losses(seen, packed)
            roots.append(differences)
            gradients.append(torch.full_like(differences, 1.0 / positions))
            total += float(differences.detach().sum())
        torch.autograd.backward(roots, gradients)
        return total, float(result.acceptance.sum())

    @torch.no_grad()
    def acceptance(self, groups: Sequence[Group]) -> Float[Tensor, " positions"]:
        """Return sum min(target, draft) over events at every position of groups that are packed together."""
        packed = pack(groups, self.row_of_token).to(self.model.device)
        laws = self._laws(groups, packed)
        with self.precision():
            hidden = (
                run_body(self.model, packed).last_hidden_state[0, packed.read]
                if self._attends
                else states_alone(self.model.base_model, groups, self.model.device)
            )
        return 1.0 - loss_values(hidden.float() / packed.temperatures[:, None], self._head, laws, total_variation)

    def _laws(self, groups: Sequence[Group], packed: Pack) -> Laws:
        """Return the laws of groups that are all stored or all asked for."""
        if not is_live(groups[0]):
            return packed.law
        if self.live is None:
            raise TraceError("The laws of these answers must be asked for, and there is no target to ask.")
        return self.live.laws(packed)

    def _cut(self, groups: Sequence[Group]) -> list[list[Group]]:
        return [some for part in by_source(groups) for some in _passes(part, self._settings.pack_tokens)]


def finished(draft: Draft, settings: DistillStep, weights: Mapping[str, Float[Tensor, "..."]]) -> Draft:
    """Return a plain copy of `draft`, in its dtype, with trained weights in place; low-rank updates are merged."""
    model = _trainable(draft, settings)
    if settings.lora.rank:
        model = _with_lora(model, settings, weights)
    else:
        parameters = dict(model.named_parameters())
        for name, weight in weights.items():
            parameters[name].data.copy_(weight)
    return Draft(model.to(draft.model.dtype), draft.head_token_ids)


def _trainable(draft: Draft, settings: DistillStep) -> PreTrainedModel:
    """Return a copy in float32 in which the right weights learn; embeddings that do not are shared if they can be."""
    fixed = [module.weight for module in _embeddings(draft.model)] if settings.train == "body" else []
    memo = {id(weight): nn.Parameter(weight.detach().float(), requires_grad=False) for weight in fixed}
    frozen = {id(weight) for weight in memo.values()}
    model = copy.deepcopy(draft.model, memo).float()
    matrices = 0
    for weight in model.parameters():
        if id(weight) not in frozen:
            weight.requires_grad_()
            matrices += weight.dim() > 1
    if not matrices:
        raise ModelError("The draft has no weight matrix that can be trained: distil it before it is quantized.")
    return model


# peft is loaded by those who use it: that takes seconds.
def _add_lora(model: PreTrainedModel, settings: DistillStep) -> Any:
    from foredraft.distill.lora import add_lora

    return add_lora(model, settings.lora, settings.seed)


def _with_lora(
    model: PreTrainedModel, settings: DistillStep, weights: Mapping[str, Float[Tensor, "..."]]
) -> PreTrainedModel:
    from foredraft.distill.lora import merge_lora

    return merge_lora(_add_lora(model, settings), weights)


def _embeddings(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _refuse_other_heads(model: PreTrainedModel, draft: Draft) -> None:
    head = kept_rows(model.get_output_embeddings().weight.detach(), draft.head_token_ids)
    probe = torch.linspace(-1.0, 1.0, head.shape[1], device=head.device)[None]
    if not torch.allclose(Head(model, draft.head_token_ids).logits(probe), probe @ head.T, rtol=1e-3, atol=1e-4):
        raise ModelError(
            f"The head of {type(model).__name__} is more than a matrix (a bias, a scale or a soft cap); "
            "such drafts cannot be trained."
        )


def _compute_layers_twice(model: PreTrainedModel) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # Embeddings that do not learn would ask for a gradient.
    for layer in layer_stack(model):
        # Layers ask for this before they checkpoint; what is inside them stays in evaluation mode, without dropout.
        layer.training = True


def _passes(groups: Sequence[Group], tokens: int) -> Iterator[list[Group]]:
    part: list[Group] = []
    filled = 0
    for group in groups:
        size = max(len(example.row.prompt_ids) for example in group) + num_positions(group)
        if part and filled + size > tokens:
            yield part
            part, filled = [], 0
        part.append(group)
        filled += size
    if part:
        yield part
