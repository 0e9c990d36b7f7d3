"""Closed-form healing: exact where a matrix can do it, never worse than the cut, and nothing else changes."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.core.protocols import Answer
from foredraft.distill.init.heal import heal_linear
from foredraft.distill.init.width import narrow
from foredraft.distill.init.widths import Widths
from foredraft.models.calibration import Batch, calibration_batches
from foredraft.models.layers import keep_layers, layer_stack
from tests.tiny import tiny_model

TOKENS = torch.tensor([[5, 90, 17, 200, 33, 1, 64]])


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return calibration_batches([Answer(torch.randint(3, 259, (24,), generator=generator), 4) for _ in range(count)])


def relative_error(draft: PreTrainedModel, target: PreTrainedModel, text: list[Batch]) -> float:
    """Return the mean squared difference of the states before the final norm / the target's mean square."""
    errors = []
    for batch in text:
        states: list[Tensor] = []
        for model in (draft, target):
            handle = layer_stack(model)[-1].register_forward_hook(
                lambda _, __, output, into=states: into.append(output)
            )
            with torch.no_grad():
                model.base_model(batch.token_ids, use_cache=False)
            handle.remove()
        here, there = (state[batch.read] for state in states)
        errors.append((here - there).square().mean(-1) / there.square().mean(-1))
    return float(torch.cat(errors).mean())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_a_matrix_can_repair_is_repaired_whole(family: str) -> None:
    """The layer before the cut was broken in its last matrix, the layer behind it adds nothing."""
    target = tiny_model(num_layers=3, family=family)
    for linear in (layer_stack(target)[2].mlp.down_proj, layer_stack(target)[2].self_attn.o_proj):
        linear.weight.data.zero_()
    draft = keep_layers(target, (0, 1))
    broken = layer_stack(draft)[1].mlp.down_proj.weight
    broken.data += 0.1 * torch.randn(broken.shape, generator=torch.Generator().manual_seed(0))
    (repair,) = heal_linear(draft, target, (0, 1), batches(80))
    assert (repair.layer, repair.depth) == (1, 3)
    assert repair.error_before > 0.01
    assert repair.error_after < 1e-6
    torch.testing.assert_close(draft(TOKENS).logits, target(TOKENS).logits, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("layers", "healed"),
    [((0, 1), [(1, 4)]), ((0, 3), [(0, 3), (1, 4)]), ((0, 2), [(0, 2), (1, 4)]), ((0, 1, 2, 3), [])],
)
def test_every_cut_is_healed_and_text_not_seen_comes_nearer(
    layers: tuple[int, ...], healed: list[tuple[int, int]]
) -> None:
    target = tiny_model()
    draft, cut = keep_layers(target, layers), keep_layers(target, layers)
    repairs = heal_linear(draft, target, layers, batches(60))
    assert [(repair.layer, repair.depth) for repair in repairs] == healed
    assert all(repair.error_after < repair.error_before for repair in repairs)
    before, after = relative_error(cut, target, batches(10, 1)), relative_error(draft, target, batches(10, 1))
    assert after < 0.98 * before if healed else after == before == 0.0


def test_only_last_matrices_from_the_first_cut_on_change_and_never_the_target() -> None:
    target = tiny_model()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    draft = keep_layers(target, (0, 1, 3))
    was = {name: value.clone() for name, value in draft.state_dict().items()}
    heal_linear(draft, target, (0, 1, 3), batches(20))
    changed = [name for name, value in draft.state_dict().items() if not torch.equal(value, was[name])]
    assert changed == ["model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"]
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


@pytest.mark.parametrize("texts", [1, 4])
def test_a_little_text_does_not_make_it_worse(texts: int) -> None:
    target = tiny_model()
    draft = keep_layers(target, (0, 1))
    cut = relative_error(draft, target, batches(10, 1))
    heal_linear(draft, target, (0, 1), batches(texts))
    assert relative_error(draft, target, batches(10, 1)) < 1.02 * cut


def test_a_narrowed_draft_is_healed_in_every_layer_towards_the_channels_it_kept() -> None:
    target = tiny_model()
    text = batches(24)
    narrowed = narrow(target, Widths(ffn=40, hidden=28), text)
    repairs = heal_linear(narrowed.model, target, range(4), text, every_layer=True, channels=narrowed.channels)
    assert [repair.depth for repair in repairs] == [1, 2, 3, 4]
    assert all(repair.error_after < repair.error_before for repair in repairs)


def test_healing_is_reproducible() -> None:
    target = tiny_model()
    weights = []
    for _ in range(2):
        draft = keep_layers(target, (0, 3))
        heal_linear(draft, target, (0, 3), batches(10))
        weights.append(layer_stack(draft)[0].mlp.down_proj.weight)
    assert torch.equal(*weights)


def test_a_healed_draft_reloads_in_stock_transformers_with_equal_logits(tmp_path: object) -> None:
    target = tiny_model(family="qwen2")
    draft = keep_layers(target, (0, 3))
    heal_linear(draft, target, (0, 3), batches(10))
    draft.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(reloaded(TOKENS).logits, draft(TOKENS).logits, rtol=0.0, atol=0.0)


def test_layers_whose_last_matrix_is_not_added_as_it_is_are_refused() -> None:
    target = tiny_model()
    draft = keep_layers(target, [0, 3])
    layer_stack(draft)[1].post_feedforward_layernorm = torch.nn.Identity()  # as Gemma has it
    with pytest.raises(ModelError, match="do not end in a matrix mlp.down_proj .* set heal: none"):
        heal_linear(draft, target, [0, 3], batches(2))
