"""Drafts cut out of the target: the layers that were asked for, its own embeddings, and a plain checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.core.errors import RecipeError
from foredraft.distill.init import init_from_target, parse_layers, rank_tokens
from foredraft.models.layers import keep_layers, layer_stack
from tests.tiny import tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[5, 90, 17, 200, 33, 1, 64]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("first-6", (0, 1, 2, 3, 4, 5)),
        ("last-2", (28, 29)),
        ("every-5", (0, 5, 10, 15, 20, 25)),
        ("first-4+last-2", (0, 1, 2, 3, 28, 29)),
        ("0,1,2,28,29", (0, 1, 2, 28, 29)),
        (" 29 , 0 ", (0, 29)),
        ("first-30", tuple(range(30))),
    ],
)
def test_layers_are_read_as_they_are_written(text: str, expected: tuple[int, ...]) -> None:
    assert parse_layers(text, 30) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first-31", "first-31 asks for 31 layers; the target has 30"),
        ("first-0", "first-0 asks for 0 layers"),
        ("last-40", "last-40 asks for 40 layers; the target has 30"),
        ("every-0", "every-0 needs a step from 1 to the target's 30 layers"),
        ("0,30", "there is no layer 30; the target has 30, numbered from 0"),
        ("first-3+2", "names layer 2 twice, of a target with 30 layers"),
        ("middle-3", "'middle-3' is no layer of a target: write first-6"),
        ("", "'' is no layer of a target"),
        ("-1", "'-1' is no layer of a target"),
    ],
)
def test_layers_that_the_target_lacks_are_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_layers(text, 30)
    assert message in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_all_layers_are_the_target_itself(family: str, tied: bool) -> None:
    target = tiny_model(family=family, tied=tied)
    draft = init_from_target(target, range(4))
    torch.testing.assert_close(draft.model(TOKENS).logits, target(TOKENS).logits, rtol=0.0, atol=0.0)
    assert len(draft.head_token_ids) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_draft_reloads_in_stock_transformers_with_equal_logits(family: str, tmp_path: Path) -> None:
    target = tiny_model(family=family)
    draft = init_from_target(target, (0, 3), torch.tensor([0, 1, 2, 7]))
    draft.model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reloaded) is type(target)
    assert reloaded.config.num_hidden_layers == 2
    torch.testing.assert_close(reloaded(TOKENS).logits, draft.model(TOKENS).logits, rtol=0.0, atol=0.0)
    continued = [
        model.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0) for model in (reloaded, draft.model)
    ]
    assert continued[0].tolist() == continued[1].tolist()


def test_kept_layers_run_in_the_order_given() -> None:
    target = tiny_model()
    draft = init_from_target(target, (3, 1)).model
    for here, there in zip(layer_stack(draft), (3, 1), strict=True):
        weights = layer_stack(target)[there].state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in here.state_dict().items())
    assert [layer.self_attn.layer_idx for layer in layer_stack(draft)] == [0, 1]


def test_the_target_keeps_its_layers_and_shares_only_embeddings_and_head() -> None:
    target = tiny_model(tied=False)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    draft = init_from_target(target, (0, 2)).model
    assert draft.get_input_embeddings().weight is target.get_input_embeddings().weight
    assert draft.get_output_embeddings().weight is target.get_output_embeddings().weight
    with torch.no_grad():
        for weight in layer_stack(draft).parameters():
            weight.zero_()
    assert target.config.num_hidden_layers == 4
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_tied_weights_stay_tied() -> None:
    model = init_from_target(tiny_model(tied=True), (0,)).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("layers", [(), (4,), (0, -1)])
def test_a_cut_that_leaves_nothing_or_names_a_missing_layer_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(RecipeError, match="the model has layers 0 to 3"):
        keep_layers(tiny_model(), layers)


def test_a_trimmed_head_keeps_the_most_frequent_tokens_and_all_special_ones() -> None:
    answers = [np.array([200, 200, 100, 50, 100, 200], dtype=np.int32), np.array([50, 7], dtype=np.int32)]
    kept = rank_tokens(answers, tiny_tokenizer(extra=("<tool>",)), 6)
    assert kept.tolist() == [0, 1, 2, 50, 100, 200]
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    assert rank_tokens(answers, tokenizer, 6).tolist() == [0, 1, 2, 50, 200, 259]


@pytest.mark.parametrize("rows", [1, 4, 30, 258, 259, 5000])
def test_a_trimmed_head_is_never_smaller_than_asked_and_holds_no_padding(rows: int) -> None:
    kept = rank_tokens([np.array([200, 200, 9], dtype=np.int32)], tiny_tokenizer(), rows)
    assert len(kept) == min(max(rows, 3), 259)
    assert set(range(3)) <= set(kept.tolist())
    assert bool((kept.diff() > 0).all())
    assert int(kept.max()) < 259


def test_no_rows_asked_for_keeps_the_whole_head() -> None:
    assert len(rank_tokens([np.array([1], dtype=np.int32)], tiny_tokenizer(), 0)) == 0
