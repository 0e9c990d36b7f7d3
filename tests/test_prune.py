"""Laws of cutting layers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.compress.prune import block_influence, prune_layers
from foredraft.core.errors import UserError
from foredraft.core.protocols import Answer
from foredraft.models.draft import Draft
from foredraft.models.layers import layer_stack
from tests.tiny import tiny_model

FAMILIES = ("llama", "qwen2")
TOKENS = torch.arange(3, 60)


def answers(count: int = 3) -> list[Answer]:
    generator = torch.Generator().manual_seed(5)
    return [Answer(torch.randint(3, 259, (20 + n,), generator=generator), start=6 + n) for n in range(count)]


def skip_layers(model: torch.nn.Module, skipped: set[int]) -> None:
    """Make layers of a model hand on what they read."""

    def hand_on(hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden

    for index in skipped:
        layer_stack(model)[index].forward = hand_on


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_a_layer_equals_replacing_it_by_the_identity(family: str) -> None:
    draft, reference = (Draft(tiny_model(num_layers=5, family=family)) for _ in range(2))
    influence = block_influence(draft.model, answers())
    pruned = prune_layers(draft, 1, "block-influence", answers())
    skip_layers(reference.model, {1 + int(influence[1:-1].argmin())})
    assert torch.equal(
        pruned.model(TOKENS[None], use_cache=False).logits, reference.model(TOKENS[None], use_cache=False).logits
    )


def test_last_cuts_the_layers_before_the_last_one() -> None:
    draft, reference = (Draft(tiny_model(num_layers=6)) for _ in range(2))
    skip_layers(reference.model, {3, 4})
    pruned = prune_layers(draft, 2, "last", [])
    assert torch.equal(
        pruned.model(TOKENS[None], use_cache=False).logits, reference.model(TOKENS[None], use_cache=False).logits
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_model_decodes_the_same_with_and_without_its_cache(family: str) -> None:
    pruned = prune_layers(Draft(tiny_model(num_layers=5, family=family)), 2, "block-influence", answers()).model
    with_cache, without = (
        pruned.generate(TOKENS[None, :9], max_new_tokens=24, do_sample=False, use_cache=cached, eos_token_id=None)
        for cached in (True, False)
    )
    assert with_cache.tolist() == without.tolist()
    cache = pruned(TOKENS[None], use_cache=True).past_key_values
    assert len(cache) == 3
    assert [cache.get_seq_length(layer) for layer in range(3)] == [len(TOKENS)] * 3


@pytest.mark.parametrize("by", ["block-influence", "last"])
def test_the_first_and_the_last_layer_stay(by: str) -> None:
    draft = Draft(tiny_model(num_layers=4))
    for idle in (0, 3):
        quieten(layer_stack(draft.model)[idle])
    assert block_influence(draft.model, answers())[[0, 3]].max() < 1e-6
    pruned = prune_layers(draft, 2, by, answers())
    kept, original = layer_stack(pruned.model), layer_stack(draft.model)
    for left, right in zip(kept, (original[0], original[3]), strict=True):
        assert all(
            torch.equal(ours, theirs) for ours, theirs in zip(left.parameters(), right.parameters(), strict=True)
        )


def quieten(layer: torch.nn.Module) -> None:
    """Make a layer add nothing to what it reads."""
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def test_block_influence_cuts_the_layer_that_does_nothing() -> None:
    draft = Draft(tiny_model(num_layers=6))
    quieten(layer_stack(draft.model)[3])
    influence = block_influence(draft.model, answers())
    assert influence[3] < 1e-6
    assert (influence[[1, 2, 4]] > 1e-3).all()
    assert ((influence >= 0) & (influence <= 2)).all()
    pruned = prune_layers(draft, 1, "block-influence", answers())
    assert torch.equal(pruned.model(TOKENS[None]).logits, draft.model(TOKENS[None]).logits)


def test_block_influence_adds_up_over_answers() -> None:
    model = tiny_model(num_layers=4)
    whole = block_influence(model, answers())
    weights = [answer.num_tokens for answer in answers()]
    parts = [block_influence(model, [answer]) * weight for answer, weight in zip(answers(), weights, strict=True)]
    assert torch.allclose(whole, torch.stack(parts).sum(0) / sum(weights), atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_model_reloads_in_stock_transformers(family: str, tmp_path: Path) -> None:
    pruned = prune_layers(Draft(tiny_model(num_layers=5, family=family)), 2, "last", []).model
    pruned.save_pretrained(tmp_path / "pruned")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned").eval()
    assert reloaded.config.num_hidden_layers == 3
    assert torch.equal(reloaded(TOKENS[None]).logits, pruned(TOKENS[None]).logits)


def test_the_draft_given_is_left_as_it_was() -> None:
    draft = Draft(tiny_model(num_layers=4), torch.tensor([0, 1, 2, 40]))
    before = draft.model(TOKENS[None]).logits
    pruned = prune_layers(draft, 1, "block-influence", answers())
    with torch.no_grad():
        for parameter in pruned.model.parameters():
            parameter.zero_()
    assert torch.equal(draft.model(TOKENS[None]).logits, before)
    assert pruned.head_token_ids.tolist() == [0, 1, 2, 40]
    assert pruned.model.get_output_embeddings().weight is pruned.model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("num_layers", "count", "message"),
    [(4, 3, "3 of 4 layers cannot be cut.*at most 2 can go"), (1, 1, "1 of 1 layers cannot be cut.*at most 0 can go")],
)
@pytest.mark.parametrize("by", ["block-influence", "last"])
def test_a_count_that_leaves_nothing_is_refused(by: str, num_layers: int, count: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prune_layers(Draft(tiny_model(num_layers=num_layers)), count, by, answers())


def test_block_influence_needs_answers() -> None:
    with pytest.raises(UserError, match="collect a trace"):
        prune_layers(Draft(tiny_model()), 1, "block-influence", [])
