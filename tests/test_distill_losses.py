"""Losses: identities, bounds and limits; and the same value and gradient from every form of the target's law."""

import math

import pytest
import torch
from torch import Tensor

from foredraft.catalog import names, resolve
from foredraft.core.errors import UnknownNameError
from foredraft.distill.losses import (
    UNSAYABLE,
    EventLaw,
    Loss,
    acceptance,
    forward_kl,
    hard_cross_entropy,
    loss_gradient,
    neg_log_acceptance,
    total_variation,
    weighted_loss,
)

LOSSES = sorted(names("losses"))
POSITIONS, VOCAB, HIDDEN = 24, 40, 16


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _law(seed: int = 0) -> EventLaw:
    logits = 2.0 * torch.randn(POSITIONS, VOCAB, generator=_generator(seed))
    probs = logits.softmax(-1)
    return EventLaw.full(probs, torch.multinomial(probs, 1, generator=_generator(seed)).squeeze(1))


def _hidden_and_head(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = _generator(seed)
    return torch.randn(POSITIONS, HIDDEN, generator=generator), 0.7 * torch.randn(VOCAB, HIDDEN, generator=generator)


def _top(law: EventLaw, top: int) -> EventLaw:
    """The `top` most probable tokens and the emitted one as events, all others as the tail."""
    probs = law.probs[:, :-1]
    rows = probs.scatter(1, law.emitted[:, None], 2.0).topk(top, -1).indices
    kept = probs.gather(1, rows)
    emitted = (rows == law.emitted[:, None]).nonzero()[:, 1]
    return EventLaw(rows, torch.cat([kept, (1.0 - kept.sum(-1, keepdim=True)).clamp(min=0.0)], -1), emitted)


def _reference(hidden: Tensor, head: Tensor, law: EventLaw, loss: Loss) -> tuple[Tensor, Tensor]:
    """Autograd through the whole [positions, vocab] law, the tail's rows added up."""
    hidden = hidden.clone().requires_grad_()
    probs = (hidden @ head.T).softmax(-1)
    tail = probs.scatter(1, law.rows, 0.0).sum(-1, keepdim=True)
    events = torch.cat([probs.gather(1, law.rows), tail], -1)
    losses = loss(law, events.clamp(min=1e-30).log())
    losses.sum().backward()
    return losses.detach(), hidden.grad


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_smallest_at_the_target_itself(name: str) -> None:
    law, loss = _law(), resolve("losses", name)
    logprobs = law.probs.clamp(min=1e-30).log().requires_grad_()
    at_target = loss(law, logprobs)
    if name != "hard_cross_entropy":
        assert at_target.abs().max() < 1e-5
    for seed in range(5):
        elsewhere = torch.nn.functional.pad(
            torch.randn(POSITIONS, VOCAB, generator=_generator(seed)), (0, 1), value=-1e30
        )
        assert loss(law, elsewhere.log_softmax(-1)).mean() > at_target.mean() + 0.05


@pytest.mark.parametrize("name", LOSSES)
def test_expected_gradient_vanishes_at_the_target(name: str) -> None:
    """Averaged over what the target may emit, nothing pulls a draft away that equals the target."""
    law, loss = _law(), resolve("losses", name)
    logits = law.probs[:1, :-1].log().requires_grad_()
    one = law[:1]
    total = sum(
        float(one.probs[0, token])
        * loss(
            EventLaw(one.rows, one.probs, torch.tensor([token])),
            torch.nn.functional.pad(logits.log_softmax(-1), (0, 1), value=-1e30),
        ).sum()
        for token in range(VOCAB)
    )
    (gradient,) = torch.autograd.grad(total, logits)
    if name not in ("tvd", "lk_hybrid", "neg_log_acceptance"):  # a kink there: min(target, draft)
        assert gradient.abs().max() < 1e-5


def test_acceptance_and_total_variation_are_the_textbook_figures() -> None:
    law = EventLaw.full(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([0]))
    draft = torch.tensor([[0.6, 0.3, 0.1, 1e-30]]).log()
    assert acceptance(law, draft).item() == pytest.approx(0.9)
    assert total_variation(law, draft).item() == pytest.approx(0.1)
    assert total_variation(law, draft).item() == pytest.approx(0.5 * (0.1 + 0.0 + 0.1))
    assert forward_kl(law, draft).item() == pytest.approx(0.0475, abs=5e-5)
    assert neg_log_acceptance(law, draft).item() == pytest.approx(-math.log(0.9))
    assert hard_cross_entropy(law, draft).item() == pytest.approx(-math.log(0.6))


def test_bounds_hold_even_for_laws_that_never_meet() -> None:
    law = EventLaw.full(torch.eye(4), torch.arange(4))
    apart = torch.full((4, 5), -1e30)
    apart[range(4), [1, 2, 3, 0]] = 0.0
    assert total_variation(law, apart).tolist() == [1.0] * 4
    assert bool(torch.isfinite(neg_log_acceptance(law, apart)).all())
    for seed in range(5):
        logprobs = (5.0 * torch.randn(POSITIONS, VOCAB + 1, generator=_generator(seed))).log_softmax(-1)
        overlap, kl = acceptance(_law(), logprobs), forward_kl(_law(), logprobs)
        assert bool(((overlap >= 0.0) & (overlap <= 1.0)).all())
        assert bool((overlap >= 1.0 - (kl / 2).sqrt() - 1e-6).all())  # Pinsker


def test_lk_hybrid_tends_to_kl_far_away_and_to_total_variation_when_weights_fade() -> None:
    law = EventLaw.full(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    far, near = torch.tensor([[-40.0, 0.0, -1e30]]), torch.tensor([[math.log(0.9), math.log(0.1), -1e30]])
    lk = resolve("losses", "lk_hybrid")
    assert lk(law, far).item() == pytest.approx(forward_kl(law, far).item())
    weight = math.exp(-3 * 0.9)
    assert lk(law, near).item() == pytest.approx(weight * -math.log(0.9) + (1 - weight) * 0.1)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 4.0])
def test_softening_is_kl_of_softened_logits_times_the_temperature_squared(temperature: float) -> None:
    target, draft = torch.randn(2, POSITIONS, VOCAB, generator=_generator())
    law = EventLaw.full(target.softmax(-1), torch.zeros(POSITIONS, dtype=torch.long))
    soft_target, soft_draft = (target / temperature).softmax(-1), (draft / temperature).log_softmax(-1)
    expected = temperature**2 * torch.nn.functional.kl_div(soft_draft, soft_target, reduction="none").sum(-1)
    padded = torch.nn.functional.pad(draft, (0, 1), value=-1e30).log_softmax(-1)
    torch.testing.assert_close(forward_kl(law, padded, temperature), expected, rtol=1e-4, atol=1e-5)


def test_high_temperature_limit_is_half_the_distance_of_centred_logits() -> None:
    target, draft = torch.randn(2, POSITIONS, VOCAB, generator=_generator(), dtype=torch.float64)
    law = EventLaw.full(target.softmax(-1), torch.zeros(POSITIONS, dtype=torch.long))
    padded = torch.nn.functional.pad(draft, (0, 1), value=-1e30).log_softmax(-1)
    difference = target - draft
    expected = (difference - difference.mean(-1, keepdim=True)).square().sum(-1) / (2 * VOCAB)
    torch.testing.assert_close(forward_kl(law, padded, 1000.0), expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("top", [1, 7, VOCAB])
def test_chunked_loss_and_gradient_equal_autograd(name: str, top: int) -> None:
    hidden, head = _hidden_and_head()
    law, loss = _top(_law(), top), resolve("losses", name)
    losses, gradient = _reference(hidden, head, law, loss)
    for chunk in (1, 5, POSITIONS, 1000):
        result = loss_gradient(hidden, head, law, loss, chunk)
        torch.testing.assert_close(result.losses, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.hidden, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_cached_top_of_the_whole_vocabulary_is_the_full_law(name: str) -> None:
    hidden, head = _hidden_and_head()
    loss = resolve("losses", name)
    full, cached = (loss_gradient(hidden, head, law, loss) for law in (_law(), _top(_law(), VOCAB)))
    torch.testing.assert_close(cached.losses, full.losses)
    torch.testing.assert_close(cached.hidden, full.hidden, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cached.acceptance, full.acceptance)


@pytest.mark.parametrize("name", ["forward_kl", "tvd"])
def test_distances_over_events_grow_with_the_events_to_the_full_distance(name: str) -> None:
    hidden, head = _hidden_and_head()
    loss = resolve("losses", name)
    values = [loss_gradient(hidden, head, _top(_law(), top), loss).losses for top in (1, 2, 4, 8, 16)]
    full = loss_gradient(hidden, head, _law(), loss).losses
    for coarse, fine in zip(values, [*values[1:], full], strict=True):
        assert bool((coarse <= fine + 1e-5).all())


def test_mass_on_tokens_that_the_draft_cannot_say_is_rejected_and_not_renormalised() -> None:
    hidden, head = _hidden_and_head()
    law = _law()
    kept = torch.arange(0, VOCAB, 2)
    rows = torch.where(law.rows % 2 == 0, law.rows // 2, UNSAYABLE)
    trimmed = EventLaw(rows, law.probs, law.emitted)
    result = loss_gradient(hidden, head[kept], trimmed, resolve("losses", "tvd"))
    draft = (hidden @ head[kept].T).softmax(-1)
    overlap = torch.minimum(law.probs[:, kept], draft).sum(-1)
    torch.testing.assert_close(result.acceptance, overlap)
    torch.testing.assert_close(result.losses, 1.0 - overlap)
    said = law.emitted % 2 == 0
    hard = loss_gradient(hidden, head[kept], trimmed, hard_cross_entropy)
    expected = -draft.log().gather(1, (law.emitted // 2)[:, None]).squeeze(1)
    torch.testing.assert_close(hard.losses, torch.where(said, expected, 0.0))
    assert bool((hard.hidden[~said] == 0.0).all())
    for name in LOSSES:
        assert bool(torch.isfinite(loss_gradient(hidden, head[kept], trimmed, resolve("losses", name)).hidden).all())


def test_a_position_whose_every_event_is_unsayable_stays_finite() -> None:
    hidden, head = _hidden_and_head()
    law = _top(_law(), 4)
    law = EventLaw(torch.full_like(law.rows, UNSAYABLE), law.probs, law.emitted)
    for name in LOSSES:
        result = loss_gradient(hidden, head, law, resolve("losses", name))
        assert bool(torch.isfinite(result.losses).all())
        assert bool(torch.isfinite(result.hidden).all())


def test_a_sum_of_losses_is_the_weighted_sum_and_softens_only_what_takes_a_temperature() -> None:
    law = _law()
    logprobs = torch.randn(POSITIONS, VOCAB + 1, generator=_generator(3)).log_softmax(-1)
    total = weighted_loss({"forward_kl": 0.7, "tvd": 0.3}, temperature=2.0)
    expected = 0.7 * forward_kl(law, logprobs, 2.0) + 0.3 * total_variation(law, logprobs)
    torch.testing.assert_close(total(law, logprobs), expected)


def test_an_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown losse? 'foward_kl'.*forward_kl.*Did you mean 'forward_kl'"):
        weighted_loss({"foward_kl": 1.0}, temperature=1.0)
