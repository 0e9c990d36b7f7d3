"""Laws of fitting a draft to its target: padding rows never win, positions are the target's, fields are explicit."""

import json
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import CheckpointError, ModelError, VocabMismatchError
from foredraft.export.fit import complete_config, fit_rows, fitted_draft, name_old_tokenizer
from foredraft.export.reopen import refuse_changed_step, refuse_map_that_is_not_inverse
from foredraft.models.draft import Draft
from foredraft.models.target import LocalTarget, load_target
from tests.tiny import save_tiny, tiny_model

TOKENS = 259


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_can_never_win(tied: bool, dtype: torch.dtype) -> None:
    """Whatever the hidden state, even one at which all logits of tokens are negative."""
    model = tiny_model(num_layers=1, tied=tied).to(dtype)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight += 1.0
    before = model.get_output_embeddings().weight.detach().clone()
    (sentence,) = fit_rows(model, 400, TOKENS)
    assert "272 rows became 400" in sentence
    head = model.get_output_embeddings().weight
    assert head.shape == (400, 32)
    assert (head is model.get_input_embeddings().weight) == tied
    assert torch.equal(head[:272], before)
    states = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = torch.cat([states, -torch.ones(1, 32, dtype=dtype)]).float() @ head.float().T
    assert bool((logits[-1] < 0).all())
    assert bool((logits[:, 272:].amax(-1) < logits[:, :TOKENS].amax(-1)).all())
    assert model(torch.arange(8)[None]).logits.shape[-1] == model.config.vocab_size == 400


def test_a_padded_and_trimmed_model_is_what_it_was() -> None:
    model, same = (tiny_model(num_layers=1) for _ in range(2))
    fit_rows(model, 400, TOKENS)
    fit_rows(model, 272, TOKENS)
    text = torch.arange(3, 40)[None]
    assert torch.equal(model(text).logits, same(text).logits)
    assert fit_rows(model, 272, TOKENS) == []


def test_rows_of_tokens_are_never_cut_off_or_invented() -> None:
    with pytest.raises(VocabMismatchError, match="272 rows, 258 are asked for, and the tokenizer has 259 tokens"):
        fit_rows(tiny_model(num_layers=1), 258, TOKENS)
    with pytest.raises(VocabMismatchError, match="272 rows, 300 are asked for, and the tokenizer has 290 tokens"):
        fit_rows(tiny_model(num_layers=1), 300, 290)


def test_packed_rows_are_not_padded() -> None:
    model = tiny_model(num_layers=1, tied=False)
    model.lm_head = torch.nn.Bilinear(1, 1, 272)
    with pytest.raises(ModelError, match="pad the draft first, then round its head"):
        fit_rows(model, 400, TOKENS)


def test_a_shorter_context_is_raised_where_positions_are_the_targets(target: LocalTarget, tmp_path: Path) -> None:
    save_tiny(tmp_path / "short", num_layers=1)
    file = tmp_path / "short" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "max_position_embeddings": 64}))
    fitted = fitted_draft(tmp_path / "short", target)
    assert fitted.model.config.max_position_embeddings == 512
    assert "raised from 64 to the target's 512" in fitted.changes[0]
    other = {**config["rope_parameters"], "rope_theta": 77.0}
    file.write_text(json.dumps({**config, "max_position_embeddings": 64, "rope_parameters": other}))
    fitted = fitted_draft(tmp_path / "short", target)
    assert fitted.model.config.max_position_embeddings == 64
    assert "its positions are not the target's" in fitted.changes[0]


def test_config_says_what_readers_would_guess(tmp_path: Path) -> None:
    for tied in (True, False):
        model = tiny_model(num_layers=1, tied=tied)
        model.save_pretrained(tmp_path / str(tied))
        complete_config(tmp_path / str(tied), model)
        config = json.loads((tmp_path / str(tied) / "config.json").read_text())
        assert config["tie_word_embeddings"] is tied
        assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
        assert config["torch_dtype"] == config["dtype"] == "float32"
        assert (config["vocab_size"], config["max_position_embeddings"]) == (272, 512)
        refuse_changed_step(tmp_path / str(tied), Draft(model))


def test_a_tie_flag_that_is_wrong_is_set_right_by_the_weights(tmp_path: Path) -> None:
    model = tiny_model(num_layers=1, tied=False)
    model.save_pretrained(tmp_path)
    model.config.tie_word_embeddings = True
    complete_config(tmp_path, model)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_step_that_differs_after_writing_is_found(tmp_path: Path) -> None:
    model = tiny_model(num_layers=1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 0.1}))
    with pytest.raises(CheckpointError, match="one step from disk gives other logits"):
        refuse_changed_step(tmp_path, Draft(model))


def test_maps_of_a_reduced_vocabulary_must_be_inverse() -> None:
    kept = torch.tensor([2, 3, 7])
    d2t, t2d = kept - torch.arange(3), torch.zeros(9, dtype=torch.bool).index_fill(0, kept, True)
    refuse_map_that_is_not_inverse(d2t, t2d)
    for wrong in (torch.zeros(3, dtype=torch.long), d2t + 1, torch.tensor([2, 2, 99]), d2t[:2]):
        with pytest.raises(CheckpointError, match="not inverse: d2t names"):
            refuse_map_that_is_not_inverse(wrong, t2d)


def test_the_tokenizer_class_is_one_that_old_versions_know(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    for given, written in (("TokenizersBackend", "PreTrainedTokenizerFast"), ("Qwen2Tokenizer", "Qwen2Tokenizer")):
        file.write_text(json.dumps({"tokenizer_class": given, "kept": 1}))
        name_old_tokenizer(tmp_path)
        assert json.loads(file.read_text()) == {"tokenizer_class": written, "kept": 1}
