"""Drafts that start elsewhere: a sibling, another family in the target's tokens, random weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from foredraft import drafters, verbs
from foredraft.core.errors import ModelError, RecipeError, UserError, VocabMismatchError
from foredraft.distill.init.scratch import Plan, init_from_scratch, scratch_shape
from foredraft.distill.init.sibling import set_rows
from foredraft.distill.init.transplant import find_origins, transplant_vocabulary
from foredraft.distill.init.widths import Shape, Widths
from foredraft.models.draft import load_draft
from foredraft.models.layers import layer_stack
from foredraft.models.target import load_target
from foredraft.recipe import settings_from
from foredraft.steps import InitStep, Step
from tests.distilling import tiny_target, written_trace
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[5, 90, 17, 200, 33, 1, 64]])
FAMILIES = ("llama", "qwen2")


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


# --- scratch


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("widths", [Widths(), Widths(16, 2, 24), Widths(heads=8)])
def test_a_new_model_is_reproducible_by_its_seed_and_reloads(family: str, widths: Widths, tmp_path: Path) -> None:
    target = tiny_model(family=family)
    state = torch.random.get_rng_state()
    made, again, other = (
        init_from_scratch(target, Plan(2, widths), False, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(made), logits(again))
    assert not torch.equal(logits(made), logits(other))
    made.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reloaded) is type(target)
    assert reloaded.config.num_hidden_layers == 2
    assert torch.equal(logits(reloaded), logits(made))


def test_a_new_model_of_the_targets_width_takes_its_embeddings_and_head_unless_told() -> None:
    target = tiny_model(tied=False)
    made = init_from_scratch(target, Plan(1, Widths()), False, torch.Generator())
    assert made.get_input_embeddings().weight is target.get_input_embeddings().weight
    assert made.get_output_embeddings().weight is target.get_output_embeddings().weight
    own = init_from_scratch(target, Plan(1, Widths(hidden=64)), True, torch.Generator())
    assert own.get_input_embeddings().weight.shape == (272, 64)


def test_a_narrower_new_model_keeps_what_tells_the_targets_tokens_apart() -> None:
    target = tiny_model()
    planes = torch.linalg.qr(torch.randn(32, 16, generator=torch.Generator().manual_seed(0))).Q
    with torch.no_grad():
        table = target.get_input_embeddings().weight
        table.copy_(table @ planes @ planes.T)
    made = init_from_scratch(target, Plan(1, Widths(hidden=16)), False, torch.Generator())
    ours, theirs = (model.get_input_embeddings().weight.detach() for model in (made, target))
    torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=1e-3, atol=1e-3)
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (Widths(hidden=30), "hidden: 30 does not split into 4 heads of even size. Nearest: 24 or 32."),
        (Widths(heads=5), "hidden: 32 does not split into 5 heads of even size. Nearest: 30 or 40."),
    ],
)
def test_widths_without_whole_heads_are_refused(widths: Widths, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        scratch_shape(Shape(32, 4, 2, 8, 64), widths, False)
    assert message in str(caught.value)


def test_embeddings_wider_than_the_targets_are_refused() -> None:
    with pytest.raises(RecipeError, match="Set embeddings: random, or ask for less"):
        init_from_scratch(tiny_model(), Plan(1, Widths(hidden=64)), False, torch.Generator())


# --- sibling


@pytest.mark.parametrize("rows", [264, 272, 300])
def test_a_sibling_speaks_as_before_whatever_padding_its_embeddings_have(rows: int, tmp_path: Path) -> None:
    sibling = save_tiny(tmp_path / "sibling", num_layers=3, hidden=16, vocab_size=rows, seed=5)
    target = load_target(str(save_tiny(tmp_path / "target")), "float32")
    step = InitStep(source=str(sibling))
    verbs.refuse_impossible(Step(init=step), target)
    verbs.init_draft(target, [], step, tmp_path / "draft")
    draft, plain = load_draft(tmp_path / "draft", "float32").model, AutoModelForCausalLM.from_pretrained(sibling)
    assert draft.config.vocab_size == 272
    assert len(layer_stack(draft)) == 3
    torch.testing.assert_close(logits(draft)[..., :259], logits(plain)[..., :259])
    drafter = drafters.load_drafter(str(tmp_path / "draft"), target)
    assert drafter.vocab_size == 272


def test_rows_that_pad_get_no_more_than_their_share() -> None:
    model = tiny_model(vocab_size=200, tied=False)
    set_rows(model, 272)
    assert logits(model).softmax(-1)[..., 200:].max() <= 1 / 200


def test_a_sibling_can_be_cut_narrowed_healed_and_trimmed(tmp_path: Path) -> None:
    sibling = save_tiny(tmp_path / "sibling", num_layers=4, hidden=16, family="qwen2", seed=5)
    target = load_target(str(save_tiny(tmp_path / "target", num_layers=2, vocab_size=259)), "float32")
    trace = written_trace(tmp_path / "trace", target.model, 12)
    step = InitStep(source=str(sibling), layers="first-2", ffn=20, heal="linear", vocab=40)
    verbs.init_draft(target, [trace], step, tmp_path / "draft")
    draft = load_draft(tmp_path / "draft", "float32")
    assert (draft.model.config.intermediate_size, draft.model.config.num_hidden_layers) == (20, 2)
    assert len(draft.head_token_ids) == 40


def test_a_sibling_of_other_tokens_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other")
    swapped_tokenizer().save_pretrained(other)
    target = load_target(str(save_tiny(tmp_path / "target")), "float32")
    for refuse in (
        lambda step: verbs.refuse_impossible(Step(init=step), target),
        lambda step: verbs.init_draft(target, [], step, tmp_path / "draft"),
    ):
        with pytest.raises(VocabMismatchError, match=r"token 3 is .* here and '!' there. Set transplant: true"):
            refuse(InitStep(source=str(other)))
    verbs.init_draft(target, [], InitStep(source=str(other), transplant=True), tmp_path / "draft")
    drafters.load_drafter(str(tmp_path / "draft"), target)


# --- transplant


def swapped_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with tokens 3 and 4 exchanged."""
    return changed_tokenizer(lambda vocab: {**vocab, **dict(zip(named(vocab, 4, 3), (3, 4), strict=True))})


def named(vocab: dict[str, int], *ids: int) -> list[str]:
    return [token for index in ids for token, number in vocab.items() if number == index]


def changed_tokenizer(change: Callable[[dict[str, int]], dict[str, int]]) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["model"]["vocab"] = change(rules["model"]["vocab"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = tokenizer.chat_template
    return fast


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a vocabulary of another make: blanks are low lines, bytes are spelled <0x..>, other special tokens."""
    pieces = ["<pad>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz▁", "se", "sea"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("s", "e"), ("se", "a")],
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


@pytest.mark.parametrize("tied", [True, False])
def test_transplanting_onto_the_same_tokenizer_is_the_identity(tied: bool) -> None:
    model, reference = tiny_model(tied=tied, family="qwen2"), tiny_model(tied=tied, family="qwen2")
    origins = transplant_vocabulary(model, tiny_tokenizer(), tiny_tokenizer(), 272)
    assert origins.copied == 259
    assert torch.equal(logits(model)[..., :259], logits(reference)[..., :259])


def test_tokens_that_changed_places_are_found_by_what_they_spell() -> None:
    model, reference = tiny_model(), tiny_model()
    transplant_vocabulary(model, swapped_tokenizer(), tiny_tokenizer(), 272)
    rows, before = (one.get_input_embeddings().weight for one in (model, reference))
    assert torch.equal(rows[[3, 4]], before[[4, 3]])
    assert torch.equal(rows[5:259], before[5:259])


def test_each_token_is_copied_composed_or_mapped_by_its_role() -> None:
    there, here = piece_tokenizer(), tiny_tokenizer(extra=("sea", "Ġsea", "seas"))
    origins = find_origins(there, here, 272)
    ids, own = here.get_vocab(), there.get_vocab()
    assert list(origins.pieces[ids["sea"]]) == [own["sea"]]
    assert list(origins.pieces[ids["Ġsea"]]) == [own["▁"], own["sea"]]
    assert list(origins.pieces[ids["seas"]]) == [own["sea"], own["s"]]
    assert list(origins.pieces[ids["<|im_end|>"]]) == [own["</s>"]]
    assert list(origins.pieces[ids["<|endoftext|>"]]) == [own["<pad>"]]
    assert list(origins.pieces[ids["Ċ"]]) == [own["<0x0A>"]]
    assert list(origins.pieces[ids["Ġ"]]) == [own["▁"]]
    assert list(origins.pieces[270]) == []
    everything = {*range(len(here))}
    assert {index for index in range(272) if origins.pieces[index]} == everything


def test_a_composed_row_is_the_mean_of_its_pieces_and_padding_the_mean_of_all() -> None:
    model, before = tiny_model(vocab_size=300, tied=False), tiny_model(vocab_size=300, tied=False)
    here, there = tiny_tokenizer(extra=("Ġsea",)), piece_tokenizer()
    transplant_vocabulary(model, there, here, 280)
    own = there.get_vocab()
    for matrix, was in (
        (model.get_input_embeddings().weight, before.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, before.get_output_embeddings().weight),
    ):
        assert matrix.shape[0] == 280
        torch.testing.assert_close(matrix[here.get_vocab()["Ġsea"]], was[[own["▁"], own["sea"]]].mean(0))
        torch.testing.assert_close(matrix[279], was[: len(there)].mean(0))
    assert (model.config.vocab_size, model.config.eos_token_id) == (280, here.eos_token_id)


def test_a_transplanted_draft_reloads_in_stock_transformers_and_speaks_the_targets_tokens(tmp_path: Path) -> None:
    donor = tiny_model(num_layers=2, hidden=16, vocab_size=300)
    donor.save_pretrained(tmp_path / "donor")
    piece_tokenizer().save_pretrained(tmp_path / "donor")
    target = load_target(str(save_tiny(tmp_path / "target")), "float32")
    step = InitStep(source=str(tmp_path / "donor"), transplant=True)
    verbs.init_draft(target, [], step, tmp_path / "draft")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    draft = load_draft(tmp_path / "draft", "float32").model
    torch.testing.assert_close(logits(stock), logits(draft))
    assert stock.config.vocab_size == 272
    assert drafters.load_drafter(str(tmp_path / "draft"), target).vocab_size == 272


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transplant": True}, "transplant is about another model"),
        ({"from": "scratch", "heal": "linear"}, "random weights have nothing to heal"),
        ({"seed": 3}, "embeddings and seed are about random weights"),
        ({"share_rank": 4, "ffn": 8}, "factors are shared with layers of the target at its own width"),
        ({"heal": "cubic"}, "'none' or 'linear'"),
        ({"hidden": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        settings_from(InitStep, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (InitStep(layers="first-9"), RecipeError, "the target has 4"),
        (InitStep(layers="all", heal="linear"), RecipeError, "nothing to repair"),
        (InitStep(heads=1, layers="all"), RecipeError, "breaks the grouping"),
        (InitStep(hidden=30, layers="all"), RecipeError, "Nearest hidden for 4 heads: 28 or 32"),
        (InitStep(source="scratch", layers="all", hidden=30), RecipeError, "heads of even size"),
        (InitStep(source="scratch", layers="all", hidden=64), RecipeError, "Set embeddings: random"),
        (InitStep(source="./no/such/model"), ModelError, "There is no folder ./no/such/model"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is(
    step: InitStep, error: type[UserError], message: str
) -> None:
    with pytest.raises(error, match=message):
        verbs.refuse_impossible(Step(init=step), tiny_target())


def test_another_model_keeps_all_its_layers_unless_told() -> None:
    assert InitStep().layers == InitStep(source="scratch").layers == "first-6"
    assert InitStep(source="some/model").layers == settings_from(InitStep, ["from=some/model"]).layers == "all"
    assert InitStep(source="some/model", layers="first-2").layers == "first-2"


def test_steps_that_measure_read_the_trace_and_others_need_none(tmp_path: Path) -> None:
    assert [verbs.learns(Step(init=InitStep(**given))) for given in ({"ffn": 8}, {"heal": "linear"}, {"vocab": 9})] == [
        True
    ] * 3
    assert not any(
        verbs.learns(Step(init=InitStep(**given))) for given in ({}, {"share_rank": 4}, {"source": "scratch", "ffn": 8})
    )
    with pytest.raises(UserError, match="collect a trace"):
        verbs.init_draft(tiny_target(), [], InitStep(layers="first-2", heal="linear"), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
