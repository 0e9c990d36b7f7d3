"""Narrower drafts: what goes first, what stays as it was, and which widths a configuration can say."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from foredraft.core.errors import ModelError, RecipeError, UserError
from foredraft.core.protocols import Answer
from foredraft.distill.init.width import Importance, narrow
from foredraft.distill.init.widths import Shape, Widths, narrowed_shape
from foredraft.models.calibration import Batch, calibration_batches, watch
from foredraft.models.layers import layer_stack
from tests.tiny import tiny_model

TOKENS = torch.tensor([[5, 90, 17, 200, 33, 1, 64]])
FAMILIES = ("llama", "qwen2")
SMOLLM2 = Shape(576, 9, 3, 64, 1536)


def batches(count: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return calibration_batches(
        [Answer(torch.randint(0, 259, (14 + n % 5,), generator=generator), 6) for n in range(count)]
    )


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("widths", [Widths(), Widths(32, 4, 64)])
def test_narrowing_by_nothing_is_the_identity(family: str, widths: Widths) -> None:
    model = tiny_model(family=family)
    narrowed = narrow(model, widths, batches())
    torch.testing.assert_close(logits(narrowed.model), logits(model), rtol=0.0, atol=0.0)
    assert narrowed.channels.tolist() == list(range(32))
    assert narrowed.model.get_input_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "widths", [Widths(hidden=24, heads=2, ffn=40), Widths(heads=2), Widths(hidden=20), Widths(ffn=8)]
)
def test_a_narrow_draft_reloads_in_stock_transformers_with_equal_logits(
    family: str, tied: bool, widths: Widths, tmp_path: Path
) -> None:
    model = tiny_model(family=family, tied=tied, num_layers=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    narrowed = narrow(model, widths, batches()).model
    narrowed.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = reloaded.config
    assert type(reloaded) is type(model)
    assert (config.hidden_size, config.num_attention_heads) == (widths.hidden or 32, widths.heads or 4)
    assert (config.intermediate_size, config.num_key_value_heads) == (widths.ffn or 64, (widths.heads or 4) // 2)
    torch.testing.assert_close(logits(reloaded), logits(narrowed), rtol=0.0, atol=0.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (narrowed.get_output_embeddings().weight is narrowed.get_input_embeddings().weight) is tied


def test_what_is_silent_goes_first_and_nothing_is_lost_with_it() -> None:
    model = tiny_model(num_layers=2)
    silence_ffn(model, 1, [3, 50])
    silence_ffn(model, 0, [10, 11])
    for layer in layer_stack(model):
        layer.self_attn.o_proj.weight.data[:, :16] = 0.0  # what the first key-value group adds
    narrowed = narrow(model, Widths(ffn=62, heads=2), batches()).model
    torch.testing.assert_close(logits(narrowed), logits(model), rtol=1e-4, atol=1e-5)
    kept = layer_stack(narrowed)[1].mlp.gate_proj.weight
    expected = layer_stack(model)[1].mlp.gate_proj.weight[[n for n in range(64) if n not in (3, 50)]]
    assert torch.equal(kept, expected)


def silence_ffn(model: LlamaForCausalLM, layer: int, channels: list[int]) -> None:
    layer_stack(model)[layer].mlp.up_proj.weight.data[channels] = 0.0


def test_hidden_channels_that_carry_nothing_go_and_the_norms_make_up_for_them() -> None:
    model = tiny_model(num_layers=2)
    mute = [4, 9, 21, 30]
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data[mute] = 0.0
        elif name.endswith("embed_tokens.weight"):
            weight.data[:, mute] = 0.0
    narrowed = narrow(model, Widths(hidden=28), batches())
    assert sorted({*range(32)} - {*narrowed.channels.tolist()}) == mute
    torch.testing.assert_close(logits(narrowed.model), logits(model), rtol=1e-3, atol=1e-3)


def test_importance_is_what_a_part_adds_to_the_residual_stream() -> None:
    model = tiny_model(num_layers=1)
    text = batches(2)
    layer, seen = layer_stack(model)[0], []
    for batch in text:
        watch(model, batch, {layer.mlp.down_proj: lambda features, _: seen.append(features)})
    features = torch.cat(seen)
    assert len(features) == sum(int(batch.read.sum()) for batch in text)
    added = features[:, 7, None] * layer.mlp.down_proj.weight[:, 7].double()
    expected = added.square().sum(-1).mean().sqrt()
    torch.testing.assert_close(Importance(model, text).ffn[0, 7], expected.detach())


def test_watching_leaves_no_hook_behind_even_when_the_pass_fails() -> None:
    model = tiny_model(num_layers=1)

    def fail(_: torch.Tensor, __: torch.Tensor) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        watch(model, batches(1)[0], {layer_stack(model)[0]: fail})
    assert not layer_stack(model)[0]._forward_hooks


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (Widths(heads=4), "heads: 4 breaks the grouping, 3 attention heads to a key-value head. Nearest: 3 or 6."),
        (Widths(heads=1), "Nearest: 3."),
        (Widths(hidden=500), "Nearest hidden for 9 heads: 495 or 504; nearest heads for hidden 500: none."),
        (Widths(hidden=384), "Nearest hidden for 9 heads: 378 or 387; nearest heads for hidden 384: 6."),
        (Widths(hidden=600), "hidden: 600 is more than the 576"),
        (Widths(heads=12), "heads: 12 is more than the 9"),
        (Widths(ffn=2000), "ffn: 2000 is more than the 1536"),
    ],
)
def test_widths_that_no_configuration_can_say_are_refused_with_the_nearest(widths: Widths, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        narrowed_shape(SMOLLM2, widths)
    assert message in str(caught.value)


@pytest.mark.parametrize("widths", [Widths(384, 6), Widths(378), Widths(heads=3, ffn=1), Widths(9), Widths(12, 3)])
def test_widths_that_keep_groups_whole_are_taken(widths: Widths) -> None:
    shape = narrowed_shape(SMOLLM2, widths)
    assert (shape.group, shape.head_dim) == (3, 64)


def test_models_of_another_make_are_refused() -> None:
    model = tiny_model(num_layers=1)
    layer_stack(model)[0].mlp.extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="is not built as Llama and Qwen2 are"):
        narrow(model, Widths(ffn=8), batches(1))


def test_nothing_to_measure_on_is_refused() -> None:
    with pytest.raises(UserError, match="collect a trace"):
        calibration_batches([Answer(torch.arange(5), 5)])
