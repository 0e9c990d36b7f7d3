"""Laws of training a draft with its rounding in place, and of what is written after it."""

from pathlib import Path

import pytest
import torch

from foredraft import searching
from foredraft.compress.gptq import GptqRounder
from foredraft.compress.in_training import RoundingLinear, with_rounding, without_rounding
from foredraft.compress.plan import unit_formats
from foredraft.compress.probe import Bench, measure
from foredraft.compress.quantize import quantize, round_to_nearest
from foredraft.distill.train import distill
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.made_for import blank_manifest
from foredraft.models.target import LocalTarget, load_target
from foredraft.models.units import search_units
from foredraft.steps import CompressStep, DistillStep
from foredraft.trace.store import Trace
from tests.test_compress_gptq import answers
from tests.test_compress_probe import made_trace
from tests.tiny import save_tiny, tiny_model

TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LocalTarget, Trace]:
    root = tmp_path_factory.mktemp("healing")
    target = load_target(str(save_tiny(root / "target", num_layers=5)), "float32")
    save_draft(Draft(tiny_model()), root / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    facts = {"tokenizer_fingerprint": target.tokenizer_fingerprint, "target_fingerprint": target.fingerprint}
    return root / "draft", target, made_trace(root / "trace", **facts)


@torch.no_grad()
@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_a_draft_that_learns_nothing_is_the_rounded_draft(method: str) -> None:
    model = tiny_model()
    formats = unit_formats(model, search_units(model), {"layers.1.*": 16, "layers.2.*": 8, "*": 4}, 32)
    rounder = GptqRounder(model, answers()) if method == "gptq" else round_to_nearest
    student, scales = with_rounding(Draft(model), formats, rounder)
    plain, as_trained = without_rounding(student, scales)
    rounder = GptqRounder(model, answers()) if method == "gptq" else round_to_nearest
    expected = quantize(Draft(model), formats, rounder).model.state_dict()
    found = quantize(plain, formats, as_trained).model.state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    logits = quantize(plain, {name: one for name, one in formats.items() if one.bits == 4}, as_trained).model(TOKENS)
    part = {name: one for name, one in formats.items() if one.bits == 4}
    in_training = with_rounding(
        Draft(model), part, GptqRounder(model, answers()) if method == "gptq" else round_to_nearest
    )
    assert torch.allclose(in_training[0].model(TOKENS).logits, logits.logits, atol=1e-4) or method == "gptq"


def test_gradients_reach_the_plain_weights_and_the_rest_of_the_draft_is_left_alone() -> None:
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    formats = unit_formats(model, search_units(model), {"layers.0.*": 4, "head": 4}, 32)
    student, _ = with_rounding(Draft(model), formats, round_to_nearest)
    rounding = [module for module in student.model.modules() if isinstance(module, RoundingLinear)]
    assert len(rounding) == 7
    student.model(TOKENS).logits.square().sum().backward()
    assert all(float(module.weight.grad.abs().sum()) > 0 for module in rounding)
    assert student.model.lm_head.weight.grad is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_training_moves_integers_and_the_written_draft_is_what_was_trained(workshop: tuple, tmp_path: Path) -> None:
    source, target, trace = workshop
    draft = load_draft(source, "float32")
    formats = unit_formats(draft.model, search_units(draft.model), 4, 32)
    student, scales = with_rounding(draft, formats, round_to_nearest)
    step = DistillStep(tokens=300, batch_tokens=30, learning_rate=5e-3)
    trained = distill(student, [trace], step, target, tmp_path / "work")
    plain, as_trained = without_rounding(trained.draft, scales)
    written = quantize(plain, formats, as_trained)
    with torch.no_grad():
        expected = trained.draft.model(TOKENS).logits
        assert torch.allclose(written.model(TOKENS).logits, expected, atol=1e-4)
        assert not torch.allclose(quantize(draft, formats).model(TOKENS).logits, expected, atol=1e-2)


@pytest.mark.slow
def test_the_search_heals_what_it_chose_and_says_what_that_bought(workshop: tuple, tmp_path: Path) -> None:
    source, target, trace = workshop
    heal = {"tokens": 600, "learning_rate": 2e-3, "batch_tokens": 30}
    small = {"tries": 1, "chunk": 16, "gradients": 2, "answers": 6, "num_draft_tokens": 2, "share": 0.5, "heal": heal}
    step = CompressStep(**small, megabytes=0.03, moves=["layers", "bits"], method="gptq")
    found = searching.compress_draft(source, target, [trace], step, tmp_path / "out")
    before, cut, healed = found["stages"]
    assert [stage["stage"] for stage in found["stages"]] == ["before the cut", "after it", "healed"]
    assert healed["expected_acceptance"] > cut["expected_acceptance"]
    assert before["acceptance_change"] == [0.0, 0.0, 0.0]
    on = Bench.of(list(trace.rows(tops=False)), trace.info.law, trace.info.vocab_size, (1, 2))
    again = measure(load_draft(tmp_path / "out", "float32"), on)
    assert again.expected_acceptance == pytest.approx(healed["expected_acceptance"], abs=1e-6)
    assert not list(tmp_path.glob(".out*"))
