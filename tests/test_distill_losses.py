"""Losses: identities, bounds and limits, each on laws known in full."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foredraft.catalog import names, resolve
from foredraft.core.errors import UnknownNameError, UserError
from foredraft.distill.losses import (
    EventLaw,
    Loss,
    acceptance,
    forward_kl,
    hard_cross_entropy,
    jsd,
    lk_hybrid,
    neg_log_acceptance,
    read_loss,
    reverse_kl,
    soft_cross_entropy,
    total_variation,
    tvd_plus_plus,
    weighted_loss,
)
from tests.laws import POSITIONS, VOCAB, logprobs_of, random_law, seeded

LOSSES = sorted(names("losses"))
# A kink at the target itself: min(target, draft).
KINKED = {"tvd", "tvd_plus_plus", "lk_hybrid", "neg_log_acceptance"}
TEXTBOOK = EventLaw.full(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([0]))
TEXTBOOK_DRAFT = torch.tensor([[0.6, 0.3, 0.1, 1e-30]]).log()


def _random_logprobs(seed: int, scale: float = 1.0) -> Tensor:
    return logprobs_of(scale * torch.randn(POSITIONS, VOCAB, generator=seeded(seed)))


def _gradient(loss: Loss, law: EventLaw, logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(law, logprobs_of(logits)).sum(), logits)
    return gradient


def _entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_smallest_at_the_target_itself(name: str) -> None:
    law, loss = random_law(), resolve("losses", name)
    at_target = loss(law, law.probs.clamp(min=1e-30).log())
    least = {"soft_cross_entropy": _entropy(law.probs), "hard_cross_entropy": at_target}
    torch.testing.assert_close(at_target, least.get(name, torch.zeros(POSITIONS)), rtol=1e-4, atol=1e-5)
    for seed in range(5):
        assert loss(law, _random_logprobs(seed)).mean() > at_target.mean() + 0.05


@pytest.mark.parametrize("name", sorted(set(LOSSES) - KINKED))
def test_expected_gradient_vanishes_at_the_target(name: str) -> None:
    """Averaged over what the target may emit, nothing pulls a draft away that equals the target."""
    one, loss = random_law()[:1], resolve("losses", name)
    total = sum(
        float(one.probs[0, token])
        * _gradient(loss, EventLaw(one.rows, one.probs, torch.tensor([token])), one.probs[:, :-1].log())
        for token in range(VOCAB)
    )
    assert total.abs().max() < 1e-5


def test_losses_are_the_textbook_figures() -> None:
    def value(loss: Loss) -> float:
        return loss(TEXTBOOK, TEXTBOOK_DRAFT).item()

    assert value(acceptance) == pytest.approx(0.9)
    assert value(total_variation) == pytest.approx(0.1)
    assert value(total_variation) == pytest.approx(0.5 * (0.1 + 0.0 + 0.1))
    assert value(tvd_plus_plus) == pytest.approx(0.1)
    assert value(forward_kl) == pytest.approx(0.0475, abs=5e-5)
    assert value(reverse_kl) == pytest.approx(0.6 * math.log(1.2) + 0.1 * math.log(0.5), abs=1e-6)
    assert value(neg_log_acceptance) == pytest.approx(-math.log(0.9))
    assert value(hard_cross_entropy) == pytest.approx(-math.log(0.6))
    mix = (0.55, 0.3, 0.15)
    halves = [
        sum(p * math.log(p / m) for p, m in zip(law, mix, strict=True)) for law in ((0.5, 0.3, 0.2), (0.6, 0.3, 0.1))
    ]
    assert value(jsd) == pytest.approx(sum(halves) / 2, abs=1e-6)


def test_bounds_hold_even_for_laws_that_never_meet() -> None:
    law = EventLaw.full(torch.eye(4), torch.arange(4))
    apart = torch.full((4, 5), -1e30)
    apart[range(4), [1, 2, 3, 0]] = 0.0
    assert total_variation(law, apart).tolist() == [1.0] * 4
    assert tvd_plus_plus(law, apart).tolist() == [1.0] * 4
    assert bool(torch.isfinite(neg_log_acceptance(law, apart)).all())
    assert reverse_kl(law, apart).tolist() == pytest.approx([-math.log(1e-8)] * 4)
    assert jsd(law, apart).tolist() == pytest.approx([math.log(2.0)] * 4)
    for seed in range(5):
        logprobs = _random_logprobs(seed, scale=5.0)
        overlap, kl = acceptance(random_law(), logprobs), forward_kl(random_law(), logprobs)
        assert bool(((overlap >= 0.0) & (overlap <= 1.0)).all())
        assert bool((overlap >= 1.0 - (kl / 2).sqrt() - 1e-6).all())  # Pinsker


@pytest.mark.parametrize("beta", [0.01, 0.3, 0.5, 0.9])
def test_jsd_never_passes_the_binary_entropy_of_beta(beta: float) -> None:
    """A geometric mixture would: laws that are nearly disjoint come up to the bound and stay under it."""
    bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert bound <= math.log(2.0) + 1e-12
    for scale in (1.0, 10.0, 300.0):
        values = jsd(random_law(), _random_logprobs(0, scale), beta)
        assert bool(((values >= -1e-6) & (values <= bound + 1e-6)).all())
    one_hot = EventLaw.full(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert jsd(one_hot, torch.tensor([[-1e30, 0.0, -1e30]]), beta).item() == pytest.approx(bound, abs=1e-6)


@pytest.mark.parametrize("beta", [0.2, 0.5, 0.7])
def test_jsd_of_swapped_laws_is_that_of_the_opposite_beta(beta: float) -> None:
    left, right = random_law(0), random_law(1)
    ahead = jsd(left, right.probs.clamp(min=1e-30).log(), beta)
    back = jsd(right, left.probs.clamp(min=1e-30).log(), 1.0 - beta)
    torch.testing.assert_close(ahead, back, rtol=1e-4, atol=1e-6)


def test_jsd_rescaled_tends_to_both_kl_divergences_and_is_them_at_the_ends() -> None:
    law = random_law(dtype=torch.float64)
    logprobs = logprobs_of(torch.randn(POSITIONS, VOCAB, generator=seeded(3), dtype=torch.float64))
    small = 1e-6
    torch.testing.assert_close(jsd(law, logprobs, small) / small, forward_kl(law, logprobs), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(jsd(law, logprobs, 1 - small) / small, reverse_kl(law, logprobs), rtol=1e-3, atol=1e-4)
    assert torch.equal(jsd(law, logprobs, 0.0), forward_kl(law, logprobs))
    assert torch.equal(jsd(law, logprobs, 1.0), reverse_kl(law, logprobs))


def test_reverse_kl_is_kl_of_swapped_laws_and_charges_the_floor_for_what_the_target_never_says() -> None:
    left, right = random_law(0), random_law(1)
    swapped = forward_kl(right, left.probs.clamp(min=1e-30).log())
    torch.testing.assert_close(reverse_kl(left, right.probs.clamp(min=1e-30).log()), swapped, rtol=1e-4, atol=1e-5)
    cut = EventLaw.full(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    draft = torch.tensor([[math.log(0.9), math.log(0.1), -1e30]])
    for floor in (1e-8, 1e-4):
        expected = 0.9 * math.log(0.9) + 0.1 * math.log(0.1 / floor)
        assert reverse_kl(cut, draft, floor).item() == pytest.approx(expected, rel=1e-5)


def test_reverse_kl_lets_a_draft_choose_one_mode_where_forward_kl_demands_both() -> None:
    law = EventLaw.full(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([0]))
    one_mode, both_and_more = torch.tensor([[0.98, 0.01, 0.01]]).log(), torch.tensor([[0.35, 0.35, 0.3]]).log()
    assert forward_kl(law, logprobs_of(one_mode)) > forward_kl(law, logprobs_of(both_and_more))
    assert reverse_kl(law, logprobs_of(one_mode)) < reverse_kl(law, logprobs_of(both_and_more))


@pytest.mark.parametrize("loss", [total_variation, tvd_plus_plus, jsd])
def test_mass_that_the_draft_cannot_say_counts_as_an_event_of_the_targets_alone(loss: Loss) -> None:
    probs, draft = torch.tensor([[0.4, 0.3, 0.3]]), torch.tensor([[0.7, 0.3]])
    dense = EventLaw.full(probs, torch.tensor([0]))
    trimmed = EventLaw.full(probs[:, :2], torch.tensor([0]))
    whole = torch.cat([draft.log(), torch.full((1, 2), -1e30)], -1)
    torch.testing.assert_close(loss(trimmed, logprobs_of(draft.log())), loss(dense, whole))


def test_lower_ends_where_only_a_part_of_the_target_can_be_said() -> None:
    mass, within = 0.6, torch.tensor([[0.5, 0.5]])
    law = EventLaw.full(mass * within, torch.tensor([0]))
    best = logprobs_of(within.log())
    assert forward_kl(law, best).item() == pytest.approx(mass * math.log(mass))
    assert reverse_kl(law, best).item() == pytest.approx(-math.log(mass))
    assert total_variation(law, best).item() == pytest.approx(1.0 - mass)


def test_tvd_plus_plus_is_total_variation_with_its_gradient_over_the_rewards_deviation() -> None:
    law, logits = random_law(), torch.randn(POSITIONS, VOCAB, generator=seeded(2))
    draft = logits.softmax(-1)
    rewarded = (draft * (law.probs[:, :-1] > draft)).sum(-1, keepdim=True)
    # Source: the gradient of an expected reward, each reward centred and divided by its deviation.
    advantages = ((law.probs[:, :-1] > draft).float() - rewarded) / (rewarded * (1 - rewarded)).sqrt()
    policy_gradient = -draft * advantages
    gradient = _gradient(tvd_plus_plus, law, logits)
    torch.testing.assert_close(gradient, policy_gradient, rtol=1e-4, atol=1e-6)
    plain = _gradient(total_variation, law, logits)
    torch.testing.assert_close(gradient, plain / (rewarded * (1 - rewarded)).sqrt(), rtol=1e-4, atol=1e-6)
    assert bool((gradient.abs().sum(-1) <= 1.0 + 1e-5).all())
    logprobs = logprobs_of(logits)
    torch.testing.assert_close(tvd_plus_plus(law, logprobs), total_variation(law, logprobs))


def test_tvd_plus_plus_fades_with_the_root_where_total_variation_fades() -> None:
    law = EventLaw.full(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    for small in (1e-2, 1e-4):
        logits = torch.tensor([[math.log(small), math.log(1 - small)]])
        assert _gradient(total_variation, law, logits)[0, 0].item() == pytest.approx(-small, rel=0.02)
        assert _gradient(tvd_plus_plus, law, logits)[0, 0].item() == pytest.approx(-math.sqrt(small), rel=0.02)


def test_tvd_plus_plus_does_not_blow_rounding_up() -> None:
    law = random_law()
    assert _gradient(tvd_plus_plus, law, law.probs[:, :-1].log()).abs().sum(-1).max() <= 1.0
    nearly = law.probs[:, :-1].log() + 1e-6 * torch.randn(POSITIONS, VOCAB, generator=seeded())
    assert _gradient(tvd_plus_plus, law, nearly).abs().sum(-1).max() <= 1.0 + 1e-5


def test_lk_hybrid_tends_to_kl_far_away_and_to_total_variation_when_weights_fade() -> None:
    law = EventLaw.full(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    far, near = torch.tensor([[-40.0, 0.0, -1e30]]), torch.tensor([[math.log(0.9), math.log(0.1), -1e30]])
    assert lk_hybrid(law, far).item() == pytest.approx(forward_kl(law, far).item())
    weight = math.exp(-3 * 0.9)
    assert lk_hybrid(law, near).item() == pytest.approx(weight * -math.log(0.9) + (1 - weight) * 0.1)
    assert lk_hybrid(law, near, eta=0.0).item() == pytest.approx(forward_kl(law, near).item())
    assert lk_hybrid(law, near, eta=200.0).item() == pytest.approx(total_variation(law, near).item())


@pytest.mark.parametrize("temperature", [0.5, 2.0, 4.0])
def test_softening_is_kl_of_softened_logits_times_the_temperature_squared(temperature: float) -> None:
    target, draft = torch.randn(2, POSITIONS, VOCAB, generator=seeded())
    law = EventLaw.full(target.softmax(-1), torch.zeros(POSITIONS, dtype=torch.long))
    soft_target, soft_draft = (target / temperature).softmax(-1), (draft / temperature).log_softmax(-1)
    expected = temperature**2 * torch.nn.functional.kl_div(soft_draft, soft_target, reduction="none").sum(-1)
    torch.testing.assert_close(forward_kl(law, logprobs_of(draft), temperature), expected, rtol=1e-4, atol=1e-5)
    cross = -(temperature**2) * (soft_target * soft_draft).sum(-1)
    torch.testing.assert_close(soft_cross_entropy(law, logprobs_of(draft), temperature), cross, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_soft_cross_entropy_is_kl_and_the_targets_entropy_with_the_same_gradient(temperature: float) -> None:
    law, logits = random_law(), torch.randn(POSITIONS, VOCAB, generator=seeded(5))
    softened = (law.probs[:, :-1].log() / temperature).softmax(-1)
    kl = forward_kl(law, logprobs_of(logits), temperature)
    cross = soft_cross_entropy(law, logprobs_of(logits), temperature)
    torch.testing.assert_close(cross, kl + temperature**2 * _entropy(softened), rtol=1e-4, atol=1e-5)
    gradients = [
        _gradient(read_loss(f"{name}:temperature={temperature}"), law, logits)
        for name in ("forward_kl", "soft_cross_entropy")
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_hard_cross_entropy_is_soft_cross_entropy_on_average() -> None:
    one, logprobs = random_law()[:1], _random_logprobs(4)[:1]
    mean = sum(
        one.probs[0, token] * hard_cross_entropy(EventLaw(one.rows, one.probs, torch.tensor([token])), logprobs)
        for token in range(VOCAB)
    )
    torch.testing.assert_close(mean, soft_cross_entropy(one, logprobs))


def test_high_temperature_limit_is_half_the_distance_of_centred_logits() -> None:
    target, draft = torch.randn(2, POSITIONS, VOCAB, generator=seeded(), dtype=torch.float64)
    law = EventLaw.full(target.softmax(-1), torch.zeros(POSITIONS, dtype=torch.long))
    difference = target - draft
    expected = (difference - difference.mean(-1, keepdim=True)).square().sum(-1) / (2 * VOCAB)
    torch.testing.assert_close(forward_kl(law, logprobs_of(draft), 1000.0), expected, rtol=1e-2, atol=1e-4)
    values = [soft_cross_entropy(law, logprobs_of(draft), t) / t**2 for t in (1.0, 10.0, 1000.0)]
    gaps = [float((value - math.log(VOCAB)).abs().max()) for value in values]
    assert all(left > right for left, right in pairwise(gaps))
    assert gaps[-1] < 1e-5


def test_a_sum_of_losses_is_the_weighted_sum_and_softens_only_what_takes_a_temperature() -> None:
    law = random_law()
    logprobs = _random_logprobs(3)
    total = weighted_loss({"forward_kl": 0.7, "tvd": 0.3}, temperature=2.0)
    expected = 0.7 * forward_kl(law, logprobs, 2.0) + 0.3 * total_variation(law, logprobs)
    torch.testing.assert_close(total(law, logprobs), expected)


def test_a_loss_takes_options_in_its_spec() -> None:
    law, logprobs = random_law(), _random_logprobs(3)
    assert torch.equal(read_loss("jsd:beta=0.3")(law, logprobs), jsd(law, logprobs, 0.3))
    own = read_loss("soft_cross_entropy:temperature=3", temperature=2.0)
    assert torch.equal(own(law, logprobs), soft_cross_entropy(law, logprobs, 3.0))
    general = read_loss("soft_cross_entropy", temperature=2.0)
    assert torch.equal(general(law, logprobs), soft_cross_entropy(law, logprobs, 2.0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("jsd:alpha=0.3", "jsd:alpha=0.3: jsd takes beta, not 'alpha'"),
        ("jsd:beta=half", "jsd:beta=half: beta is a number, not 'half'"),
        ("jsd:beta=1.5", r"jsd: beta must lie in \[0, 1\], not 1.5"),
        ("jsd:beta=nan", r"jsd: beta must lie in \[0, 1\], not nan"),
        ("tvd:beta=1", "tvd takes no options, not 'beta'"),
        ("reverse_kl:floor=0", "reverse_kl: floor must lie between 0 and 1, not 0"),
        ("lk_hybrid:eta=-1", "lk_hybrid: eta must be at least 0, not -1"),
        ("forward_kl:temperature=0", "temperature that softens laws must be above 0, not 0"),
    ],
)
def test_an_option_that_a_loss_does_not_take_is_refused_before_anything_is_run(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_loss(spec)


def test_an_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown losse? 'foward_kl'.*forward_kl.*Did you mean 'forward_kl'"):
        weighted_loss({"foward_kl": 1.0}, temperature=1.0)
