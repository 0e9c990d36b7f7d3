"""Narrower drafts: the hidden channels, heads and feed-forward channels that carry most, as many in every layer."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.distill.init.widths import Shape, Widths, narrowed_shape
from foredraft.models.calibration import Batch, watch
from foredraft.models.layers import PRE_NORMS, has_pre_norms_only, layer_stack

_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A narrower model.

    Attributes:
        channels: Hidden channels that it kept, increasing.
    """

    model: PreTrainedModel
    channels: Int[Tensor, " hidden"]


def narrow(model: PreTrainedModel, widths: Widths, batches: Sequence[Batch]) -> Narrowed:
    """Return a narrower copy of a model, which is left as it was. Embeddings and head are shared if `hidden` is kept.

    Kept are the hidden channels, the groups of heads and the feed-forward channels of largest importance on the
    batches; see Importance. Gains of norms are scaled by what the mean square of their input loses with
    the channels that go. The size of a head stays what it was, so that positions are told apart as before.

    Raises:
        RecipeError: widths that the model cannot have; see narrowed_shape.
        ModelError: the model is not built as Llama and Qwen2 are.
    """
    return narrow_by(model, widths, Importance(model, batches))


def narrow_by(model: PreTrainedModel, widths: Widths, importance: "Importance") -> Narrowed:
    """Return a narrower copy of a model by an importance that was measured before; see narrow."""
    shape = narrowed_shape(Shape.of(model.config), widths)
    channels = _largest(importance.hidden, shape.hidden)
    shared = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    smaller = copy.deepcopy(model, {id(weight): weight for weight in shared})
    for index, layer in enumerate(layer_stack(smaller)):
        groups = _largest(importance.heads[index], shape.heads // shape.group)
        _narrow_layer(layer, channels, groups, _largest(importance.ffn[index], shape.ffn), shape)
    for norm, squares in zip(_all_norms(smaller), importance.squares, strict=True):
        _narrow_norm(norm, channels, squares)
    _narrow_ends(smaller, channels)
    _describe(smaller.config.get_text_config(), shape)
    return Narrowed(smaller, channels)


def require_plain_decoder(model: PreTrainedModel) -> None:
    """Raise unless a model's layers are built as those of Llama and Qwen2.

    Raises:
        ModelError: a part is missing, or is there and would be left out.
    """
    for layer in layer_stack(model):
        matrices = {name for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
        plain = matrices == set(_LINEARS) and has_pre_norms_only(layer)
        if not plain or not isinstance(_final_norm(model), nn.Module):
            raise ModelError(
                f"{type(model).__name__} is not built as Llama and Qwen2 are; only such models can change their widths."
            )


@final
class Importance:
    """What each channel and head carries on calibration text, by its activations.

    Attributes:
        hidden: For each channel the root mean square of what the norms give, summed over the norms.
        heads: For each layer and key-value head the root mean square of what its group of heads adds to the
            residual stream, [layers, kv_heads]; correlations within the group are left out.
        ffn: The same for each feed-forward channel, [layers, ffn].
        squares: For each norm, in the order of `_all_norms`, the mean of its input's squares, relative to their mean
            over channels.

    Source: Muralidharan et al. 2024, Minitron (arXiv 2407.14679), whose measures are means of magnitudes
    of the same activations; that an activation counts with the norm of the weights that read it is Wanda's (Sun
    et al. 2023, arXiv 2306.11695).
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch]) -> None:
        """Measure on the batches.

        Raises:
            ModelError: the model is not built as Llama and Qwen2 are.
        """
        require_plain_decoder(model)
        layers, norms = layer_stack(model), _all_norms(model)
        outputs = [layer.self_attn.o_proj for layer in layers]
        downs = [layer.mlp.down_proj for layer in layers]
        means = {module: _MeanSquare(relative=module in norms) for module in (*norms, *outputs, *downs)}
        for batch in batches:
            watch(model, batch, {module: mean.add for module, mean in means.items()})
        self.squares = [means[norm].value for norm in norms]
        gains = [norm.weight.detach().double() for norm in norms]
        self.hidden = torch.stack(
            [(gain.cpu().square() * square).sqrt() for gain, square in zip(gains, self.squares, strict=True)]
        ).sum(0)
        kv_heads = Shape.of(model.config).heads // Shape.of(model.config).group
        self.ffn = torch.stack([_carried(down, means[down].value).sqrt() for down in downs])
        self.heads = torch.stack(
            [_carried(output, means[output].value).view(kv_heads, -1).sum(1).sqrt() for output in outputs]
        )

    def of_layers(self, layers: Sequence[int]) -> "Importance":
        """Return what a model of some of the layers has, as it was measured in the whole one."""
        part = copy.copy(self)
        part.heads, part.ffn = self.heads[list(layers)], self.ffn[list(layers)]
        norms = [len(PRE_NORMS) * layer + number for layer in layers for number in range(len(PRE_NORMS))]
        part.squares = [self.squares[norm] for norm in [*norms, -1]]
        return part


@final
class _MeanSquare:
    """The mean over positions of the squares of a module's input; relative to their mean over channels if asked."""

    def __init__(self, relative: bool) -> None:
        self._relative = relative
        self._sum = torch.zeros((), dtype=torch.float64)
        self._positions = 0

    def add(self, features: Float[Tensor, "positions in"], _: Tensor) -> None:
        squares = features.square()
        if self._relative:
            squares = squares / squares.mean(-1, keepdim=True).clamp(min=1e-12)
        self._sum = self._sum + squares.sum(0).cpu()
        self._positions += len(features)

    @property
    def value(self) -> Float[Tensor, " in"]:
        return self._sum / self._positions


def _carried(linear: nn.Linear, mean_square: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
    return mean_square * linear.weight.detach().double().square().sum(0).cpu()


def _largest(importance: Float[Tensor, " all"], count: int) -> Int[Tensor, " kept"]:
    return torch.argsort(importance, descending=True, stable=True)[:count].sort().values


def _narrow_layer(
    layer: nn.Module,
    channels: Int[Tensor, " hidden"],
    groups: Int[Tensor, " kv_heads"],
    ffn: Int[Tensor, " ffn"],
    shape: Shape,
) -> None:
    queries = _spread(groups, shape.group * shape.head_dim)
    keys = _spread(groups, shape.head_dim)
    attention, mlp = layer.self_attn, layer.mlp
    _narrow_linear(attention.q_proj, queries, channels)
    _narrow_linear(attention.k_proj, keys, channels)
    _narrow_linear(attention.v_proj, keys, channels)
    _narrow_linear(attention.o_proj, channels, queries)
    _narrow_linear(mlp.gate_proj, ffn, channels)
    _narrow_linear(mlp.up_proj, ffn, channels)
    _narrow_linear(mlp.down_proj, channels, ffn)


def _spread(groups: Int[Tensor, " groups"], rows: int) -> Int[Tensor, " rows"]:
    """Return the rows of the given groups, `rows` rows to a group."""
    return (groups[:, None] * rows + torch.arange(rows)).flatten()


def _narrow_linear(linear: nn.Linear, outputs: Int[Tensor, " out"], inputs: Int[Tensor, " in"]) -> None:
    linear.weight = _parameter(linear.weight.detach()[outputs][:, inputs])
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias.detach()[outputs])
    linear.out_features, linear.in_features = len(outputs), len(inputs)


def _narrow_norm(norm: nn.Module, channels: Int[Tensor, " hidden"], squares: Float[Tensor, " all"]) -> None:
    if len(channels) < len(squares):
        scale = float(squares[channels].mean().sqrt())
        norm.weight = _parameter(norm.weight.detach()[channels] * scale)


def _narrow_ends(model: PreTrainedModel, channels: Int[Tensor, " hidden"]) -> None:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if len(channels) == table.weight.shape[1]:
        return
    tied = head.weight is table.weight
    table.weight = _parameter(table.weight.detach()[:, channels])
    head.weight = table.weight if tied else _parameter(head.weight.detach()[:, channels])
    table.embedding_dim = head.in_features = len(channels)


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone(memory_format=torch.contiguous_format))


def _all_norms(model: PreTrainedModel) -> list[nn.Module]:
    return [getattr(layer, name) for layer in layer_stack(model) for name in PRE_NORMS] + [_final_norm(model)]


def _final_norm(model: PreTrainedModel) -> nn.Module | None:
    return getattr(model.base_model, "norm", None)


def _describe(config: PretrainedConfig, shape: Shape) -> None:
    config.hidden_size, config.intermediate_size = shape.hidden, shape.ffn
    config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.heads // shape.group
    if shape.head_dim * shape.heads != shape.hidden or getattr(config, "head_dim", None):
        config.head_dim = shape.head_dim
