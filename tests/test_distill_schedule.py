"""Schedules: which loss a step has, in the simple form and as phases."""

import pytest
import torch

from foredraft.core.errors import RecipeError
from foredraft.distill.losses import forward_kl, jsd, lk_hybrid, total_variation
from foredraft.distill.schedule import Schedule
from foredraft.recipe import settings_from
from foredraft.steps import DistillStep
from tests.laws import logprobs_of, random_law, seeded

PHASES = [
    {"share": 0.5, "loss": {"forward_kl": 1.0}},
    {"share": 0.3, "loss": {"tvd": 0.5, "jsd:beta=0.3": 0.5}, "fade": 0.2},
    {"share": 0.2, "loss": {"lk_hybrid": 1.0}},
]


def _values(settings: DistillStep, share: float) -> torch.Tensor:
    law, logits = random_law(), torch.randn(24, 40, generator=seeded(3))
    return Schedule.of(settings).loss(share)(law, logprobs_of(logits))


def _expected(forward: float, middle: float, finish: float) -> torch.Tensor:
    law, logprobs = random_law(), logprobs_of(torch.randn(24, 40, generator=seeded(3)))
    between = 0.5 * total_variation(law, logprobs) + 0.5 * jsd(law, logprobs, 0.3)
    return forward * forward_kl(law, logprobs) + middle * between + finish * lk_hybrid(law, logprobs)


@pytest.mark.parametrize(
    ("share", "parts"),
    [
        (0.0, (1, 0, 0)),
        (0.4999, (1, 0, 0)),
        (0.5, (1, 0, 0)),
        (0.55, (0.75, 0.25, 0)),
        (0.65, (0.25, 0.75, 0)),
        (0.7, (0, 1, 0)),
        (0.7999, (0, 1, 0)),
        (0.81, (0, 0, 1)),
        (0.999, (0, 0, 1)),
    ],
)
def test_a_phase_fades_in_linearly_over_the_one_before(share: float, parts: tuple[float, float, float]) -> None:
    torch.testing.assert_close(_values(DistillStep(phases=PHASES), share), _expected(*parts), rtol=1e-4, atol=1e-5)


def test_loss_and_finish_are_the_simple_form_of_two_phases() -> None:
    simple = DistillStep(loss={"forward_kl": 1.0}, finish="lk_hybrid", finish_fraction=0.25)
    written_out = DistillStep(
        phases=[{"share": 0.75, "loss": {"forward_kl": 1.0}}, {"share": 0.25, "loss": {"lk_hybrid": 1.0}}]
    )
    for share in (0.0, 0.74, 0.75, 0.99):
        assert torch.equal(_values(simple, share), _values(written_out, share))
    assert torch.equal(_values(simple, 0.74), _expected(1, 0, 0))
    assert torch.equal(_values(simple, 0.75), _expected(0, 0, 1))
    schedule = Schedule.of(simple)
    assert (schedule.loss(0.0), schedule.loss(0.9)) == (schedule.main, schedule.finish)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_finish_may_be_everything_or_nothing(fraction: float) -> None:
    settings = DistillStep(finish="lk_hybrid", finish_fraction=fraction)
    for share in (0.0, 0.5, 0.99):
        assert torch.equal(_values(settings, share), _expected(1 - fraction, 0, fraction))


def test_the_default_is_forward_kl_to_the_end() -> None:
    for share in (0.0, 0.99):
        assert torch.equal(_values(DistillStep(), share), _expected(1, 0, 0))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases=[{share: 0.5, loss: {tvd: 1}}]", "shares of phases must add up to 1, not 0.5"),
        ("phases=[{share: 1, fade: 0.1, loss: {tvd: 1}}]", "the first phase has nothing to fade from"),
        ("phases=[{share: 0.5, loss: {tvd: 1}}, {share: 0.5, fade: 0.6, loss: {tvd: 1}}]", "fade 0.6 is longer than"),
        ("phases=[{share: 1, loss: {}}]", "phases.0.loss"),
    ],
)
def test_phases_that_make_no_training_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        settings_from(DistillStep, [override])


def test_phases_and_a_finish_exclude_each_other() -> None:
    with pytest.raises(RecipeError, match="phases take the place of loss, finish and finish_fraction"):
        settings_from(DistillStep, ["phases=[{share: 1, loss: {tvd: 1}}]", "finish=tvd"])


def test_options_of_losses_and_numbers_for_weights_are_read_from_a_recipe() -> None:
    settings = settings_from(
        DistillStep, ["loss={jsd:beta=0.3: 0.5}", "layer_matching=0.1", "attention_matching=0.05", "selective=0.4"]
    )
    assert settings.loss == {"jsd:beta=0.3": 0.5}
    assert settings.losses == ("jsd:beta=0.3",)
    assert (settings.layer_matching.weight, settings.layer_matching.until) == (0.1, 0.25)
    assert (settings.attention_matching.weight, settings.selective.share) == (0.05, 0.4)
    mapped = settings_from(DistillStep, ["layer_matching={weight: 0.1, layers: {0: 4, 5: 29}, distance: cosine}"])
    assert mapped.layer_matching.layers == {0: 4, 5: 29}
