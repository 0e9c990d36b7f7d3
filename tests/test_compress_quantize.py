"""Laws of drafts whose search units have formats of their own: in this process."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.compress.plan import unit_formats
from foredraft.compress.quantize import quantize, unit_sizes
from foredraft.compress.rounding import product, round_groups, round_rows
from foredraft.core.bits import checked_plan
from foredraft.core.errors import ForedraftError, ModelError, RecipeError
from foredraft.core.law import GREEDY
from foredraft.core.protocols import Answer
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.packed import PackedLinear
from foredraft.models.passes import pass_facts
from foredraft.models.units import search_units
from tests.rounded import CASES, MIXED, quantized, reference
from tests.tiny import tiny_model

TOKENS = torch.arange(3, 40)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKENS[None]).logits


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_rounding_a_group_is_off_by_half_a_step_at_most(bits: int, group: int, size: float) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * size
    weight[3], weight[4, 1:] = 0.0, 0.0
    integers, scale = round_groups(weight, bits, group)
    assert (integers.dtype, scale.dtype, scale.shape) == (torch.int8, torch.bfloat16, (40, 64 // group))
    assert -(2 ** (bits - 1)) <= integers.min() <= integers.max() <= 2 ** (bits - 1) - 1
    wide = scale.double().repeat_interleave(group, 1)
    error = (integers.double() * wide - weight.double()).abs()
    assert (error <= wide * 0.5001).all()
    assert error[3].max() == 0


def test_finer_groups_and_more_bits_err_less() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    errors = [
        float((product(*round_groups(weight, bits, group)) - weight).square().mean())
        for bits, group in ((4, 128), (4, 32), (4, 8), (8, 128), (8, 8))
    ]
    assert errors == sorted(errors, reverse=True)
    assert float((product(*round_rows(weight)) - weight).square().mean()) < errors[2]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [32, 96, 40])
def test_packing_and_unpacking_is_the_identity(bits: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (24, inputs), generator=generator, dtype=torch.int8)
    scale = torch.rand(24, inputs // 8, generator=generator).bfloat16()
    layer = PackedLinear.of(integers, scale, None, bits)
    assert torch.equal(layer.unpacked(torch.float32), product(integers, scale))
    assert layer.weight_packed.numel() * 32 == 24 * (inputs + -inputs % (32 // bits)) * bits
    x = torch.randn(2, 5, inputs, generator=generator)
    assert torch.allclose(layer(x), x @ product(integers, scale).T, atol=1e-4)


@pytest.mark.parametrize(("family", "tied", "bits"), CASES)
def test_a_quantized_draft_computes_what_its_integers_stand_for(family: str, tied: bool, bits: object) -> None:
    """Layers of 8 bits and a row also round what they read, to bfloat16: the plans here are compared where none has."""
    draft = Draft(tiny_model(family=family, tied=tied))
    before = logits(draft.model)
    result = quantized(family, tied, bits)
    assert torch.equal(logits(draft.model), before)
    expected = logits(reference(family, tied, bits))
    exact = not any(chosen == 8 for chosen in (bits.values() if isinstance(bits, dict) else [bits]))
    assert torch.allclose(logits(result.model), expected, atol=1e-4 if exact else 0.3)
    assert (expected - before).abs().max() > 0.05


def test_a_rounded_head_is_untied_and_the_embedding_stays() -> None:
    model = tiny_model(tied=True)
    result = quantize(Draft(model), {"head": WeightFormat(4, 32)}).model
    assert isinstance(result.lm_head, PackedLinear)
    assert result.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert not result.config.tie_word_embeddings
    assert model.config.tie_word_embeddings
    kept = quantize(Draft(model), {"layers.0.down": WeightFormat(4, 32)}).model
    assert kept.lm_head.weight is kept.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert kept.config.tie_word_embeddings


def test_the_first_pattern_that_matches_decides() -> None:
    model = tiny_model()
    found = unit_formats(model, search_units(model), MIXED, 32)
    assert not any(name.startswith("layers.0.") for name in found)
    assert found["layers.1.qkv"] == WeightFormat(8, 0)
    assert found["layers.1.down"] == WeightFormat(8, 16)
    assert found["layers.2.down"] == found["layers.3.gate_up"] == found["head"] == WeightFormat(4, 32)
    swapped = dict(reversed(MIXED.items()))
    assert unit_formats(model, search_units(model), swapped, 32)["layers.1.qkv"] == WeightFormat(4, 32)


def test_the_chapters_rule_is_a_preset() -> None:
    model = tiny_model(num_layers=6)
    found = unit_formats(model, search_units(model), "chapter", 32)
    assert {unit.name for unit in search_units(model)} - set(found) == {"embedding", "head"}
    assert [found[f"layers.{layer}.o"].bits for layer in range(6)] == [4, 4, 8, 8, 4, 4]


def test_bytes_are_those_of_the_stored_tensors(tmp_path: Path) -> None:
    model = quantized("llama", True, MIXED).model
    model.save_pretrained(tmp_path)
    held = sum(weight.numel() * weight.element_size() for weight in load_file(tmp_path / "model.safetensors").values())
    norms = sum(weight.numel() * 4 for name, weight in model.named_parameters() if "norm" in name)
    sizes = {size.unit: size for size in unit_sizes(model)}
    assert sum(size.bytes for size in sizes.values()) + norms == held
    # 64 inputs in 32 rows: 4 bits each, two bytes of scale for every 32 of them; the shape takes 16 bytes.
    assert sizes["layers.2.down"].bytes == 32 * 64 // 2 + 32 * 2 * 2 + 16
    assert (sizes["layers.2.down"].format, sizes["embedding"].format) == ("int4-g32", "float32")
    drafter = CausalLMDrafter(Draft(model), GREEDY, 272)
    plain = CausalLMDrafter(Draft(tiny_model(tied=False)), GREEDY, 272)
    assert drafter.num_bytes == held
    scales = sum(weight.numel() for name, weight in model.named_parameters() if name.endswith("weight_scale"))
    rows = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if name.endswith("weight_scale") and sizes[unit_of(name)].format == "int8"
    )
    assert scales > rows > 0
    assert drafter.num_parameters == plain.num_parameters + rows
    assert pass_facts(model).weight_bytes == held - 272 * 32 * 4


def unit_of(name: str) -> str:
    if "layers" not in name:
        return "head"
    part = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
    return f"layers.{name.split('.')[2]}.{part[name.split('.')[4].removesuffix('_proj')]}"


def test_replay_sees_the_tokens_that_propose_guesses() -> None:
    drafter = CausalLMDrafter(quantized("llama", True, MIXED), GREEDY, 272)
    text = torch.randint(3, 259, (24,), generator=torch.Generator().manual_seed(2))
    for start in range(8, 24, 2):
        text[start] = int(drafter.propose(text[:start], 1, torch.Generator()).token_ids)
    guesses = [int(drafter.propose(text[:n], 1, torch.Generator()).token_ids) for n in range(8, 24)]
    (emitted,) = drafter.replay([Answer(text, start=8)], 1)
    assert emitted.probs.tolist() == [float(guess == token) for guess, token in zip(guesses, text[8:], strict=True)]
    assert 0 < emitted.probs.sum() < 16


def bad(bits: object, group: int = 32) -> ForedraftError:
    model = tiny_model()
    with pytest.raises(RecipeError) as caught:
        unit_formats(model, search_units(model), bits, group)
    return caught.value


def test_plans_that_cannot_be_are_refused_with_what_can() -> None:
    assert "'layers.*.qvk' matches no unit. Units are embedding, layers.0.qkv .. layers.3.down, head" in str(
        bad({"layers.*.qvk": 4})
    )
    assert "embedding stays in 16 bits" in str(bad({"embedding": 4}))
    assert "5 is not known. Known: 4, 8, 16" in str(bad({"head": 5}))
    assert "'4/x' is not known" in str(bad({"head": "4/x"}))
    assert "48 does not divide the 32 inputs of layers.0.qkv. Groups that do: 16, 32" in str(bad(4, group=48))
    assert "4 bits need a group" in str(bad(4, group=0))
    assert "'chapters' is not known" in str(bad("chapters"))
    assert "'²' is not known" in str(bad("²"))
    with pytest.raises(ValueError, match=r"\['layers.*', 4\] is not known. Patterns stand with their bits"):
        checked_plan(["layers.*", 4])


def test_a_draft_is_rounded_once_and_a_trimmed_head_stays() -> None:
    with pytest.raises(ModelError, match=r"quantized already.*take its parent"):
        quantize(quantized("llama", True, 4), {"head": WeightFormat(4, 32)})
    with pytest.raises(ModelError, match=r"computes 3 rows of its head.*leave the head out"):
        quantize(Draft(tiny_model(), torch.tensor([1, 2, 9])), {"head": WeightFormat(4, 32)})


def test_a_wildcard_leaves_the_embedding_alone() -> None:
    model = copy.deepcopy(tiny_model())
    assert "embedding" not in unit_formats(model, search_units(model), {"*": 4}, 32)
