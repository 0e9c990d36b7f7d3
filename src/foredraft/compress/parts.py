"""Parts smaller than units, groups of attention heads and of feed-forward channels, and what cutting each costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.choice import swapped_weights
from foredraft.compress.probe import Probe
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.models.draft import Draft
from foredraft.models.layers import layer_stack

# What heads and feed-forward channels are read by: in Llama and most others, OPT, Phi, GPT-NeoX, StarCoder2.
_READS_HEADS = ("self_attn.o_proj", "self_attn.out_proj", "self_attn.dense", "attention.dense")
_READS_CHANNELS = ("mlp.down_proj", "fc2", "mlp.fc2", "mlp.dense_4h_to_h", "mlp.c_proj")


@dataclass(frozen=True, slots=True)
class Part:
    """Columns of the matrix that a part is read by: without them it is not there.

    Attributes:
        name: layers.N.heads.G for the heads of key-value group G, or layers.N.ffn.A-B for channels A to B.
        module: The matrix, by its name in the model.
        fisher: Sum over answers of the squared derivative of their log-probability by a factor on the part; 0 before it
            is measured.
        measured: mean_tokens_per_call that cutting it alone costs; None where it was not probed.

    Source: Michel et al. 2019 (arXiv 1905.10650), equation 3, whose measure is the mean of the magnitudes.
    """

    name: str
    layer: int
    module: str
    first: int
    end: int
    fisher: float = 0.0
    measured: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"part": self.name, "fisher": self.fisher, "measured": self.measured}


def parts_of(model: PreTrainedModel, channels: int) -> list[Part]:
    """Return the key-value groups and the groups of `channels` feed-forward channels of every layer.

    What a layer does not have as one plain matrix, such as the channels of a mixture of experts, is left out.
    """
    names = {id(module): name for name, module in model.named_modules()}
    config, found = model.config.get_text_config(), []
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for number, layer in enumerate(layer_stack(model)):
        held = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        for output in [held[name] for name in _READS_HEADS if name in held]:
            width = output.in_features // kv_heads
            for group in range(kv_heads):
                name = f"layers.{number}.heads.{group}"
                found.append(Part(name, number, names[id(output)], group * width, (group + 1) * width))
        for down in [held[name] for name in _READS_CHANNELS if name in held]:
            for first in range(0, down.in_features, channels):
                end = min(first + channels, down.in_features)
                found.append(Part(f"layers.{number}.ffn.{first}-{end - 1}", number, names[id(down)], first, end))
    return found


@final
class GateFisher:
    """Sums what a part's Fisher information is made of, answer by answer, from gradients that are there anyway."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.start_over()

    def start_over(self) -> None:
        """Forget every answer."""
        self._sums = dict.fromkeys((part.name for part in self._parts), 0.0)

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Take the gradients of one answer, by module."""
        columns = {
            module: (weights[module].detach() * weights[module].grad).sum(0)
            for module in {part.module for part in self._parts} & set(weights)
        }
        for part in self._parts:
            if part.module in columns:
                self._sums[part.name] += float(columns[part.module][part.first : part.end].sum().square())

    def parts(self) -> list[Part]:
        """Return the parts with their Fisher information."""
        return [replace(part, fisher=self._sums[part.name]) for part in self._parts]


def probed_parts(
    draft: Draft, probe: Probe, parts: Sequence[Part], most: int, k: int, progress: Progress = SILENT
) -> list[Part]:
    """Return the parts with the loss measured for the `most` of largest Fisher information, each cut alone."""
    chosen = {part.name for part in sorted(parts, key=lambda part: part.fisher, reverse=True)[:most]}
    before = probe.baseline.mean_tokens_per_call(k)
    losses = {
        part.name: before - probe_without(draft, probe, part).mean_tokens_per_call(k)
        for part in tracked(progress, "cutting parts", [part for part in parts if part.name in chosen], "parts")
    }
    return [replace(part, measured=losses.get(part.name)) for part in parts]


@torch.no_grad()
def probe_without(draft: Draft, probe: Probe, part: Part) -> AcceptanceReport:
    """Return the report of the draft without a part; the draft is left as it was."""
    weight = draft.model.get_submodule(part.module).weight.detach().clone()
    weight[:, part.first : part.end] = 0.0
    with swapped_weights(draft.model, {part.module: weight}):
        return probe.report_from(part.layer)
