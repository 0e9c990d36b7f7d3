"""Laws of drafts with 8-bit weights: in this process, on disk, and in stock transformers."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.compress.prune import prune_layers
from foredraft.compress.quantize import quantize_int8, unit_sizes
from foredraft.compress.rounding import round_rows
from foredraft.core.errors import ModelError
from foredraft.core.law import GREEDY
from foredraft.core.protocols import Answer
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.compressed import is_compressed
from foredraft.models.draft import Draft
from foredraft.models.int8 import Int8Linear, body_linears
from foredraft.models.loading import load_model
from foredraft.models.packed import PackedLinear
from tests.rounded import CASES as MIXED_CASES
from tests.rounded import quantized, reference
from tests.tiny import tiny_model

TOKENS = torch.arange(3, 40)
CASES = [("llama", True, 16), ("llama", False, 16), ("qwen2", True, 16), ("llama", True, 8), ("qwen2", True, 8)]


def linear(bits: int = 16, inputs: int = 96, outputs: int = 64, bias: bool = False, seed: int = 0) -> Int8Linear:
    generator = torch.Generator().manual_seed(seed)
    weight, scale = round_rows(torch.randn(outputs, inputs, generator=generator))
    return Int8Linear(weight, scale, torch.randn(outputs, generator=generator) if bias else None, bits)


def rounded_activations(x: Tensor) -> Tensor:
    """Return what an 8-bit layer reads: each row in 256 steps over twice its largest entry."""
    step = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / step).round().clamp(-128, 127) * step


def dequantized(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Return a float32 copy that multiplies by weight * scale, written with nothing but torch."""
    reference = copy.deepcopy(model)
    for name, layer in [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Int8Linear)]:
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight.data = layer.weight.float() * layer.weight_scale.float()
        if layer.bias is not None:
            plain.bias.data = layer.bias.data
        if bits == 8:
            plain.register_forward_pre_hook(lambda _, args: (rounded_activations(args[0]),))
        reference.set_submodule(name, plain)
    return reference


def stock(folder: Path) -> PreTrainedModel:
    """Return what transformers makes of a folder by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not [module for module in model.modules() if type(module).__module__.startswith("foredraft")]
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKENS[None]).logits


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_rounding_is_off_by_half_a_step_at_most(scale: float) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * scale
    weight[3], weight[4, 1:] = 0.0, 0.0
    integers, scales = round_rows(weight)
    assert (integers.dtype, scales.dtype, scales.shape) == (torch.int8, torch.bfloat16, (40, 1))
    assert integers.abs().max() <= 127
    error = (integers.double() * scales.double() - weight.double()).abs()
    assert (error <= scales.double() * 0.5001).all()
    assert error[3].max() == 0
    assert integers[[0, 1, 2, 4]].abs().amax(-1).tolist() == [127, 127, 127, 127]


def test_integers_times_a_bfloat16_number_are_rounded_to_themselves() -> None:
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(-127, 128, (400, 64), generator=generator)
    integers[:, 7] = 127
    scales = torch.rand(400, 1, generator=generator).bfloat16()
    again, same = round_rows(integers * scales.float())
    assert torch.equal(again.long(), integers)
    assert torch.equal(same, scales)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 50])
def test_a_layer_equals_its_dequantised_reference_within_bfloat16(rows: int, bias: bool, bits: int) -> None:
    layer = linear(bits, bias=bias)
    x = torch.randn(2, rows, 96, generator=torch.Generator().manual_seed(rows))
    inputs = (rounded_activations(x) if bits == 8 else x).double()
    exact = inputs @ (layer.weight.double() * layer.weight_scale.double()).T
    size = inputs.abs() @ (layer.weight.double() * layer.weight_scale.double()).abs().T
    result = layer(x)
    assert (result.shape, result.dtype) == ((2, rows, 64), torch.float32)
    error = (result.double() - exact - (layer.bias.double() if bias else 0.0)).abs()
    assert (error <= exact.abs() * 2**-8 + size * (1e-6 if bits == 8 else 2**-9)).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_one_row_and_many_rows_give_the_same_bits(bits: int) -> None:
    """The two ways to multiply must not be two laws: replay reads many rows, propose reads one."""
    layer = linear(bits, inputs=576, outputs=192)
    x = torch.randn(40, 576, generator=torch.Generator().manual_seed(3))
    together, alone = layer(x), torch.cat([layer(row[None]) for row in x])
    if bits == 8:
        assert torch.equal(together, alone)
    assert (together != alone).float().mean() < 0.002
    assert torch.allclose(together, alone, rtol=2**-7, atol=1e-5)


def test_a_row_of_zeros_gives_zero() -> None:
    for bits in (8, 16):
        assert torch.equal(linear(bits)(torch.zeros(3, 96)), torch.zeros(3, 64))


@pytest.mark.parametrize(("family", "tied", "bits"), CASES)
def test_a_quantized_draft_holds_integers_and_keeps_the_rest(family: str, tied: bool, bits: int) -> None:
    draft = Draft(tiny_model(family=family, tied=tied), torch.tensor([0, 1, 2, 30]))
    before = logits(draft.model)
    quantized = quantize_int8(draft, bits)
    assert torch.equal(logits(draft.model), before)
    assert quantized.head_token_ids.tolist() == [0, 1, 2, 30]
    assert not body_linears(quantized.model)
    for name, layer in body_linears(draft.model).items():
        twin = quantized.model.get_submodule(name)
        assert twin.weight.dtype == torch.int8
        assert (
            twin.weight.float() * twin.weight_scale.float() - layer.weight
        ).abs().max() <= twin.weight_scale.max() / 2
    assert (quantized.model.lm_head.weight is quantized.model.model.embed_tokens.weight) == tied
    assert quantized.model.lm_head.weight is draft.model.lm_head.weight
    assert quantized.model.model.embed_tokens.weight is draft.model.model.embed_tokens.weight
    held = sum(weight.numel() * weight.element_size() for weight in quantized.model.parameters())
    body = sum(layer.weight.numel() for layer in body_linears(draft.model).values())
    full = sum(weight.numel() * weight.element_size() for weight in draft.model.parameters())
    scales = 2 * sum(layer.out_features for layer in body_linears(draft.model).values())
    assert held == full - 3 * body + scales


@pytest.mark.parametrize("bits", [8, 16])
def test_a_quantized_model_follows_its_dequantised_reference(bits: int) -> None:
    smooth = tiny_model()
    with torch.no_grad():
        for layer in body_linears(smooth).values():
            layer.weight.mul_(0.2)
    model = quantize_int8(Draft(smooth), bits).model
    reference = logits(dequantized(model, bits))
    assert (logits(model) - reference).std() < 0.005 * reference.std()


@pytest.fixture(scope="module")
def every_folder(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One quantized draft a case."""
    made = [tmp_path_factory.mktemp("int8") / "-".join(map(str, case)) for case in CASES]
    for folder, (family, tied, bits) in zip(made, CASES, strict=True):
        quantize_int8(Draft(tiny_model(family=family, tied=tied)), bits).model.save_pretrained(folder)
    mixed = [tmp_path_factory.mktemp("mixed") / str(index) for index in range(len(MIXED_CASES))]
    for folder, case in zip(mixed, MIXED_CASES, strict=True):
        quantized(*case).model.save_pretrained(folder)
    return made + mixed


@pytest.fixture(scope="module")
def folders(every_folder: list[Path]) -> list[Path]:
    return every_folder[: len(CASES)]


@pytest.fixture(scope="module")
def mixed_folders(every_folder: list[Path]) -> list[Path]:
    return every_folder[len(CASES) :]


def test_stock_transformers_computes_what_the_integers_of_mixed_formats_stand_for(mixed_folders: list[Path]) -> None:
    for folder, case in zip(mixed_folders, MIXED_CASES, strict=True):
        assert torch.allclose(logits(stock(folder)), logits(reference(*case)), atol=1e-4), case


def test_saving_and_loading_mixed_formats_is_the_identity(mixed_folders: list[Path]) -> None:
    for folder, case in zip(mixed_folders, MIXED_CASES, strict=True):
        loaded, made = load_model(folder, "float32"), quantized(*case).model
        assert torch.equal(logits(loaded), logits(made)), case
        assert unit_sizes(loaded) == unit_sizes(made)
        tied = loaded.lm_head is not None and not isinstance(loaded.lm_head, PackedLinear)
        assert not tied or loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_stock_transformers_computes_the_dequantised_reference(folders: list[Path]) -> None:
    for folder, (family, tied, bits) in zip(folders, CASES, strict=True):
        model = quantize_int8(Draft(tiny_model(family=family, tied=tied)), bits).model
        loaded = stock(folder)
        assert loaded.get_submodule("model.layers.0.mlp.up_proj").weight.dtype == torch.int8
        assert torch.allclose(logits(loaded), logits(dequantized(model, bits)), atol=2e-5), folder.name
        assert (logits(loaded) - logits(tiny_model(family=family, tied=tied))).abs().max() > 0.01, folder.name


def test_saving_and_loading_is_the_identity(folders: list[Path]) -> None:
    for folder, (family, tied, bits) in zip(folders, CASES, strict=True):
        model, loaded = (
            quantize_int8(Draft(tiny_model(family=family, tied=tied)), bits).model,
            load_model(folder, "float32"),
        )
        assert torch.equal(logits(loaded), logits(model)), folder.name
        assert not body_linears(loaded)
        assert not loaded.training
        assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_tied_weights_are_stored_once(folders: list[Path]) -> None:
    for folder, (_, tied, _) in zip(folders, CASES, strict=True):
        names = set(load_file(folder / "model.safetensors"))
        assert ("lm_head.weight" in names) == (not tied), folder.name
        assert "lm_head.weight_scale" not in names


def test_a_pruned_quantized_draft_still_decodes_with_its_cache() -> None:
    model = prune_layers(quantize_int8(Draft(tiny_model(num_layers=5)), 16), 2, "last", []).model
    with_cache, without = (
        model.generate(TOKENS[None, :9], max_new_tokens=20, do_sample=False, use_cache=cached, eos_token_id=None)
        for cached in (True, False)
    )
    assert with_cache.tolist() == without.tolist()


@pytest.mark.parametrize("bits", [8, 16])
def test_replay_sees_the_tokens_that_propose_guesses(bits: int) -> None:
    drafter = CausalLMDrafter(quantize_int8(Draft(tiny_model()), bits), GREEDY, 272)
    text = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(2))
    guesses = [int(drafter.propose(text[:n], 1, torch.Generator()).token_ids) for n in range(5, 40)]
    text[5::2] = torch.tensor(guesses[::2])
    guesses = [int(drafter.propose(text[:n], 1, torch.Generator()).token_ids) for n in range(5, 40)]
    (emitted,) = drafter.replay([Answer(text, start=5)], 1)
    assert emitted.probs.tolist() == [float(guess == token) for guess, token in zip(guesses, text[5:], strict=True)]
    assert 0 < emitted.probs.sum() < 35


def test_a_quantized_draft_is_not_quantized_again() -> None:
    with pytest.raises(ModelError, match=r"quantized already.*take its parent"):
        quantize_int8(quantize_int8(Draft(tiny_model()), 16), 16)


def test_a_model_without_linear_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=16))
    with pytest.raises(ModelError, match="no linear layers"):
        quantize_int8(Draft(model), 16)


@pytest.mark.parametrize("fault", ["lacks model.layers.1.mlp.up_proj.weight", "holds model.extra"])
def test_a_file_that_does_not_match_its_configuration_is_refused(
    folders: list[Path], fault: str, tmp_path: Path
) -> None:
    verb, _, name = fault.partition(" ")
    tensors = load_file(folders[0] / "model.safetensors")
    if verb == "lacks":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=f"model.safetensors {fault}"):
        load_model(tmp_path, "float32")


def test_folders_that_name_all_linear_layers_still_load(folders: list[Path], tmp_path: Path) -> None:
    """As version 0.1.0 wrote them before units had formats of their own."""
    shutil.copytree(folders[0], tmp_path / "old")
    config = json.loads((folders[0] / "config.json").read_text())
    plan = config["quantization_config"]
    group = plan["config_groups"].pop("int8")
    plan |= {"config_groups": {"body": group | {"targets": ["Linear"]}}, "ignore": ["lm_head"]}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert is_compressed(tmp_path / "old")
    assert torch.equal(logits(load_model(tmp_path / "old", "float32")), logits(load_model(folders[0], "float32")))


def test_only_our_own_layout_is_read_as_integers(folders: list[Path], tiny_target_folder: Path, tmp_path: Path) -> None:
    assert is_compressed(folders[0])
    assert not is_compressed(tiny_target_folder)
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"]["config_groups"]["int8"]["weights"]["num_bits"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not is_compressed(tmp_path)
