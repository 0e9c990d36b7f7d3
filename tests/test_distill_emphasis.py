"""What tokens weigh: weights are what they say, average 1 over an answer, and do not depend on the packing."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import ModelError, TraceError, UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.data import read_groups, rows_of_tokens
from foredraft.distill.emphasis import Emphasis, decay, reach, read_position_weights
from foredraft.distill.init import init_from_target
from foredraft.distill.limits import require_laws
from foredraft.distill.losses import LossGradient, forward_kl
from foredraft.distill.packing import pack
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.models.draft import Draft
from foredraft.steps import DistillStep
from foredraft.trace.store import Trace
from tests.distilling import held_out_acceptance, tiny_target, written_trace
from tests.laws import seeded
from tests.tiny import tiny_model

SPECS = ["decay:rate=0.9", "confidence:power=2", "reach:k=3"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return written_trace(tmp_path_factory.mktemp("trace") / "t", tiny_model(), 16, SamplingLaw())


def _draft(kept: Tensor | None = None) -> Draft:
    return init_from_target(tiny_model(), range(1), torch.arange(0) if kept is None else kept)


def _target_calls(accepted: list[float], k: int) -> float:
    """Formula sheet, section 4, word for word: s_{t+n+1} += s_t prod a (1 - a), s_{t+k+1} += s_t prod a."""
    starts = [1.0] + [0.0] * (len(accepted) + k + 1)
    for t in range(len(accepted)):
        reached = starts[t]
        for n in range(k):
            chance = accepted[t + n] if t + n < len(accepted) else 1.0
            starts[t + n + 1] += reached * (1.0 - chance)
            reached *= chance
        starts[t + k + 1] += reached
    return sum(starts[: len(accepted)])


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_reach_is_the_target_calls_that_acceptance_saves(k: int) -> None:
    accepted = torch.rand(12, generator=seeded(), dtype=torch.float64)
    weights = reach(accepted, accepted, k)
    for t in range(12):
        ahead, back = accepted.clone(), accepted.clone()
        ahead[t] += 1e-6
        back[t] -= 1e-6
        slope = (_target_calls(ahead.tolist(), k) - _target_calls(back.tolist(), k)) / 2e-6
        assert float(weights[t]) == pytest.approx(-slope, abs=1e-7)
    assert float(weights[-1]) == 0.0
    assert bool((weights >= 0.0).all())


def test_decay_falls_from_the_answers_start() -> None:
    assert decay(torch.ones(4), torch.ones(4), 0.5).tolist() == [1.0, 0.5, 0.25, 0.125]


def _result(lengths: list[int]) -> LossGradient:
    size = sum(lengths)
    losses, accepted, sure = torch.rand(3, size, generator=seeded(1))
    return LossGradient(losses, accepted, torch.randn(size, 5, generator=seeded(2)), sure)


@pytest.mark.parametrize("spec", ["", *SPECS])
def test_weights_average_one_over_each_answer_and_scale_loss_and_gradient_alike(spec: str) -> None:
    lengths = [7, 1, 12]
    result = _result(lengths)
    weighed = Emphasis(read_position_weights(spec)).weigh(result, lengths, torch.empty(0))
    weights = weighed.losses / result.losses
    assert [float(part.mean()) for part in weights.split(lengths)] == pytest.approx([1.0] * 3)
    torch.testing.assert_close(weighed.hidden, weights[:, None] * result.hidden)
    assert torch.equal(weighed.acceptance, result.acceptance)
    if spec.startswith("confidence"):
        first = result.confidence[:7] ** 2
        torch.testing.assert_close(weights[:7], first / first.mean())


def test_weights_by_confidence_are_refused_where_it_is_not_known() -> None:
    result = replace(_result([3]), confidence=torch.empty(0))
    with pytest.raises(UserError, match="position_weights: confidence is not known here"):
        Emphasis(read_position_weights("confidence")).weigh(result, [3], torch.empty(0))
    assert len(Emphasis(read_position_weights("reach")).weigh(result, [3], torch.empty(0)).losses) == 3


@pytest.mark.parametrize("share", [0.4, 0.05])
def test_selection_keeps_the_largest_gaps_of_each_answer(share: float) -> None:
    lengths = [7, 1, 12]
    result, reference = _result(lengths), torch.rand(20, generator=seeded(9))
    emphasis = Emphasis(read_position_weights(""), share)
    weights = emphasis.weigh(result, lengths, reference).losses / result.losses
    gaps = (result.losses - reference).split(lengths)
    for part, gap in zip(weights.split(lengths), gaps, strict=True):
        kept = math.ceil(share * len(gap))
        assert sorted(part.nonzero()[:, 0].tolist()) == sorted(gap.argsort(descending=True)[:kept].tolist())
        assert float(part.mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("settings", [*({"position_weights": spec} for spec in SPECS), {"selective": 0.4}], ids=str)
def test_a_weighed_step_does_not_depend_on_how_it_is_packed(settings: dict[str, object], trace: Trace) -> None:
    groups, results = read_groups([trace])[:5], []
    for size in (1, 10_000):
        student = Student.of(_draft(), DistillStep(pack_tokens=size))
        student.weights["model.norm.weight"].data.mul_(1.1)  # away from the reference
        emphasis = Emphasis.of(DistillStep(**settings), _draft())
        figures = student.backward(groups, forward_kl, emphasis=emphasis)
        results.append((figures.loss, {name: weight.grad for name, weight in student.weights.items()}))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-3, atol=1e-6)
    plain = Student.of(_draft())
    plain.weights["model.norm.weight"].data.mul_(1.1)
    assert plain.backward(groups, forward_kl).loss != pytest.approx(results[0][0], rel=1e-3)


def test_the_reference_is_the_draft_as_it_was_before_training(trace: Trace) -> None:
    draft, groups = _draft(), read_groups([trace])[:3]
    emphasis = Emphasis.of(DistillStep(selective=0.5), draft)
    packed = pack(groups, rows_of_tokens(torch.arange(0), 272))
    losses = emphasis.reference_losses(packed, packed.law, forward_kl)
    figures = Student.of(draft).backward(groups, forward_kl)
    assert figures.loss == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.parametrize("settings", [{"position_weights": "reach:k=4"}, {"selective": 0.4}], ids=str)
def test_training_with_weighed_tokens_raises_acceptance(
    settings: dict[str, object], trace: Trace, tmp_path: Path
) -> None:
    step = DistillStep(tokens=2000, batch_tokens=160, learning_rate=1e-2, **settings)
    result = distill(_draft(), [trace], step, tiny_target(), tmp_path / "work")
    before = held_out_acceptance(_draft(), tiny_model(), [trace])
    assert held_out_acceptance(result.draft, tiny_model(), [trace]) > before + 0.03


def test_a_reference_with_another_head_is_refused() -> None:
    step = DistillStep(selective=0.4)
    assert Emphasis.of(DistillStep(), _draft()) is None
    with pytest.raises(ModelError, match="reference draft of selective tokens computes other rows"):
        Emphasis.of(step, _draft()).reference.of(_draft(torch.arange(0, 259, 2)), _draft())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("recency", "Unknown position_weights 'recency'. Known: decay, confidence, reach"),
        ("decay:k=4", "decay takes rate, not 'k'"),
        ("decay:rate=1.5", "rate must lie between 0 and 1"),
        ("reach:k=many", "k is a whole number, not 'many'"),
    ],
)
def test_weights_that_are_not_known_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_position_weights(spec)


def test_a_trace_without_probable_tokens_allows_hard_labels_only(tmp_path: Path) -> None:
    bare = written_trace(tmp_path / "bare", tiny_model(), 12, GREEDY, top=0)
    with pytest.raises(
        TraceError, match=r"\(top 0\), and forward_kl needs them. It allows hard_cross_entropy; for .*jsd"
    ):
        distill(_draft(), [bare], DistillStep(), tiny_target(), tmp_path / "work")
    with pytest.raises(TraceError, match="forward_kl, lk_hybrid need them"):
        require_laws(["forward_kl:temperature=2", "lk_hybrid", "hard_cross_entropy"], [bare])
    step = DistillStep(loss={"hard_cross_entropy": 1.0}, tokens=2000, batch_tokens=120, learning_rate=1e-2)
    result = distill(_draft(), [bare], step, tiny_target(), tmp_path / "work")
    assert result.curve[-1].loss < 0.9 * result.curve[0].loss


def test_a_large_tail_warns_for_losses_of_acceptance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flat = written_trace(tmp_path / "flat", tiny_model(), 4, SamplingLaw(), top=1)
    with caplog.at_level(logging.WARNING):
        require_laws(["forward_kl", "jsd:beta=0.3"], [flat])
        assert not caplog.text
        require_laws(["lk_hybrid"], [flat])
    assert "keeps 1 tokens of each law" in caplog.text
    assert "lk_hybrid cannot tell how much of it the draft gets right" in caplog.text
    caplog.clear()
    wide = written_trace(tmp_path / "wide", tiny_model(), 4, SamplingLaw(), top=272)
    require_laws(["lk_hybrid"], [wide])
    assert not caplog.text
