"""Cutting layers out of a draft. What is left is a plain, smaller model that needs healing."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from foredraft.compress.probe import Bench, Probe
from foredraft.core.errors import UserError
from foredraft.core.progress import SILENT, Progress, tracked
from foredraft.core.protocols import Answer
from foredraft.models.draft import Draft
from foredraft.models.layers import keep_layers, layer_stack


def prune_layers(
    draft: Draft, count: int, by: Literal["block-influence", "last"], calibration: Sequence[Answer]
) -> Draft:
    """Return the draft without `count` of its layers; see layers_to_keep. The draft given is left as it was."""
    return Draft(keep_layers(draft.model, layers_to_keep(draft, count, by, calibration)), draft.head_token_ids)


def layers_to_keep(
    draft: Draft,
    count: int,
    by: Literal["acceptance", "block-influence", "last"],
    calibration: Sequence[Answer] = (),
    bench: Bench | None = None,
    k: int = 4,
    progress: Progress = SILENT,
) -> list[int]:
    """Return the layers that stay where `count` of them go, increasing; the first and the last always stay.

    Args:
        draft: Of at least `count` + 2 layers.
        count: Layers to cut, >= 1.
        by: acceptance cuts, one at a time, the layer whose loss costs the fewest mean_tokens_per_call; block-influence
            the one that changes its input least; last the layers just before the last one.
        calibration: Answers of the target on which block influence is measured.
        bench: What acceptance is measured on.
        k: Draft length at which it is measured.

    Raises:
        UserError: nothing would be left between the first and the last layer, or nothing to measure on.
    """
    num_layers = len(layer_stack(draft.model))
    if count > num_layers - 2:
        raise UserError(
            f"{count} of {num_layers} layers cannot be cut: the first and the last always stay, so that at most "
            f"{max(num_layers - 2, 0)} can go."
        )
    kept = list(range(num_layers))
    if by == "last":
        del kept[-1 - count : -1]
    elif by == "acceptance" and bench is None:
        raise UserError("Acceptance is measured on answers of the target, and none was given: collect a trace.")
    elif by == "block-influence" and not calibration:
        raise UserError("Block influence is measured on answers of the target, and none was given: collect a trace.")
    while len(kept) > num_layers - count:
        step = f"cut {num_layers - len(kept) + 1} of {count}"
        view = Draft(keep_layers(draft.model, kept, shared=list(draft.model.parameters())), draft.head_token_ids)
        if by == "acceptance" and bench is not None:
            probe = Probe(view, bench)
            inner = tracked(progress, step, range(1, len(kept) - 1), "layers")
            worth = [probe.report_without(layer).mean_tokens_per_call(k) for layer in inner]
            kept.pop(1 + max(range(len(worth)), key=worth.__getitem__))
        else:
            kept.pop(1 + int(block_influence(view.model, calibration, progress, step)[1:-1].argmin()))
    return kept


@torch.no_grad()
def block_influence(
    model: PreTrainedModel, answers: Sequence[Answer], progress: Progress = SILENT, what: str = "block influence"
) -> Float[Tensor, " layers"]:
    """Return for each layer 1 - the mean cosine between its input and its output, in [0, 2].

    The mean runs over the positions that predict an answer token. 0 is a layer that turns nothing.

    Source: Men et al. 2024, ShortGPT (arXiv 2403.03853), equation 1.
    """
    stack = layer_stack(model)
    cosines, num_positions = torch.zeros(len(stack)), sum(answer.num_tokens for answer in answers)

    def watch(index: int, start: int) -> torch.utils.hooks.RemovableHandle:
        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            before, after = inputs[0][0, start - 1 : -1].float(), output[0, start - 1 : -1].float()
            cosines[index] += cosine_similarity(before, after, dim=-1).sum().cpu()

        return stack[index].register_forward_hook(add)

    for answer in tracked(progress, what, answers, "answers"):
        handles = [watch(index, answer.start) for index in range(len(stack))]
        try:
            model.base_model(answer.token_ids[None].to(model.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
    return 1 - cosines / num_positions
