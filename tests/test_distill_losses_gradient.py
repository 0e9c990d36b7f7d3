"""Gradients of losses: the same from every form of the target's law, and never held over positions and rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft.catalog import names
from foredraft.distill.losses import (
    UNSAYABLE,
    EventLaw,
    Laws,
    Loss,
    hard_cross_entropy,
    loss_gradient,
    loss_values,
    read_loss,
)
from tests.laws import HIDDEN, POSITIONS, VOCAB, hidden_and_head, random_law, seeded, top_of

LOSSES = sorted({*names("losses"), "jsd:beta=0.2", "soft_cross_entropy:temperature=2", "forward_kl:temperature=3"})


def _reference(hidden: Tensor, head: Tensor, law: EventLaw, loss: Loss) -> tuple[Tensor, Tensor]:
    """Autograd through the whole [positions, vocab] law, the tail's rows added up."""
    hidden = hidden.clone().requires_grad_()
    probs = (hidden @ head.T).softmax(-1)
    tail = probs.scatter(1, law.rows, 0.0).sum(-1, keepdim=True)
    events = torch.cat([probs.gather(1, law.rows), tail], -1)
    said = events > 0
    law = replace(law, probs=law.probs.where(said, 0.0))
    losses = loss(law, events.where(said, 1.0).log().where(said, -1e30))
    losses.sum().backward()
    return losses.detach(), hidden.grad


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("top", [1, 7])
def test_every_chunk_and_block_gives_the_loss_and_gradient_of_plain_autograd(name: str, top: int) -> None:
    hidden, head = hidden_and_head(dtype=torch.float64)
    law, loss = top_of(random_law(dtype=torch.float64), top), read_loss(name)
    losses, gradient = _reference(hidden, head, law, loss)
    for chunk, block in ((5, 17), (POSITIONS, 0), (1000, 39)):
        result = loss_gradient(hidden, head, law, loss, chunk, block)
        torch.testing.assert_close(result.losses, losses, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(result.hidden, gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_a_whole_law_in_one_chunk_in_many_and_as_a_cached_top_is_one_law(name: str) -> None:
    """The whole law takes a path of its own; a top of the whole vocabulary the path of events, in shuffled order."""
    hidden, head = hidden_and_head()
    loss, law = read_loss(name), random_law()
    full = loss_gradient(hidden, head, law, loss)
    others = [
        loss_gradient(hidden, head, replace(law, whole=False), loss),
        loss_gradient(hidden, head, top_of(law, VOCAB), loss),
        loss_gradient(hidden, head, top_of(law, VOCAB), loss, chunk=5, block=7),
        loss_gradient(hidden, head, law, loss, chunk=7),
    ]
    for other in others:
        torch.testing.assert_close(other.losses, full.losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.hidden, full.hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.acceptance, full.acceptance)


@pytest.mark.parametrize("name", LOSSES)
def test_a_whole_law_gives_the_loss_and_gradient_of_plain_autograd(name: str) -> None:
    hidden, head = hidden_and_head(dtype=torch.float64)
    law, loss = random_law(dtype=torch.float64), read_loss(name)
    losses, gradient = _reference(hidden, head, law, loss)
    for chunk in (5, 1000):
        result = loss_gradient(hidden, head, law, loss, chunk)
        torch.testing.assert_close(result.losses, losses, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(result.hidden, gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "name", sorted(set(LOSSES) - {"lk_hybrid", "tvd_plus_plus"})
)  # parts of those are held constant
@pytest.mark.parametrize("top", [3, VOCAB])
def test_gradients_are_the_slopes_of_the_losses(name: str, top: int) -> None:
    hidden, head = hidden_and_head(dtype=torch.float64)
    law, loss = top_of(random_law(dtype=torch.float64), top), read_loss(name)
    direction = torch.randn(hidden.shape, generator=seeded(7), dtype=torch.float64)
    step = 1e-6
    ahead, back = (loss_gradient(hidden + sign * step * direction, head, law, loss).losses for sign in (1, -1))
    expected = (loss_gradient(hidden, head, law, loss).hidden * direction).sum(-1)
    torch.testing.assert_close((ahead - back) / (2 * step), expected, rtol=1e-5, atol=1e-7)


@dataclass(frozen=True, slots=True)
class _MadeWhenAsked:
    """Laws that exist only while some of them are read."""

    law: EventLaw
    asked: list[slice]

    def __len__(self) -> int:
        return len(self.law)

    def __getitem__(self, positions: slice) -> EventLaw:
        self.asked.append(positions)
        return self.law[positions]

    def to(self, device: torch.device) -> "_MadeWhenAsked":
        return self


def test_laws_may_be_made_when_they_are_asked_for() -> None:
    hidden, head = hidden_and_head()
    laws = _MadeWhenAsked(top_of(random_law(), 5), [])
    assert isinstance(laws, Laws)
    live, stored = (loss_gradient(hidden, head, some, read_loss("tvd"), 10) for some in (laws, laws.law))
    assert torch.equal(live.hidden, stored.hidden)
    assert laws.asked == [slice(0, 10), slice(10, 20), slice(20, 30)]


@pytest.mark.parametrize("top", [7, 0])
def test_low_precision_states_and_heads_are_reduced_in_float32(top: int) -> None:
    hidden, head = (tensor.bfloat16() for tensor in hidden_and_head())
    law = top_of(random_law(), top) if top else random_law()
    low = loss_gradient(hidden, head, law, read_loss("forward_kl"), block=9)
    wide = loss_gradient(hidden.float(), head.float(), law, read_loss("forward_kl"))
    assert low.losses.dtype == low.hidden.dtype == torch.float32
    torch.testing.assert_close(low.losses, wide.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(low.hidden, wide.hidden, rtol=1e-4, atol=1e-5)


def test_values_alone_are_those_of_the_gradient_and_confidence_is_the_targets_largest_probability() -> None:
    hidden, head = hidden_and_head()
    for law in (random_law(), top_of(random_law(), 5)):
        result = loss_gradient(hidden, head, law, read_loss("jsd"), 7)
        assert torch.equal(loss_values(hidden, head, law, read_loss("jsd"), 7), result.losses)
        torch.testing.assert_close(result.confidence, random_law().probs.amax(-1), rtol=0.0, atol=0.0)
        scaled = result.scaled(torch.full((POSITIONS,), 2.0))
        assert torch.equal(scaled.hidden, 2.0 * result.hidden)
        assert torch.equal(scaled.losses, 2.0 * result.losses)


def test_a_law_without_events_asks_for_nothing() -> None:
    hidden, head = hidden_and_head()
    law = EventLaw(torch.empty(POSITIONS, 0).long(), torch.ones(POSITIONS, 1), torch.zeros(POSITIONS).long())
    result = loss_gradient(hidden, head, law, read_loss("forward_kl"))
    assert result.losses.abs().max() < 1e-6
    assert result.hidden.abs().max() < 1e-5


def test_no_positions_give_no_losses() -> None:
    hidden, head = hidden_and_head()
    for law in (random_law()[:0], top_of(random_law(), 3)[:0]):
        result = loss_gradient(hidden[:0], head, law, read_loss("forward_kl"))
        assert (result.losses.shape, result.hidden.shape) == ((0,), (0, HIDDEN))


class _LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that is made in it, backward passes included and `given` left out."""

    def __init__(self, given: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.elements = 0
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = made if isinstance(made, tuple | list) else [made]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._given:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def _largest(call: Callable[..., object], hidden: Tensor, head: Tensor, *arguments: object) -> int:
    with _LargestTensor((hidden, head)) as mode:
        call(hidden, head, *arguments)
    return mode.elements


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in LOSSES), ("lk_hybrid", torch.bfloat16)], ids=str
)
def test_nothing_as_large_as_positions_times_rows_is_ever_made(name: str, dtype: torch.dtype) -> None:
    positions, rows, chunk, block, top = 45, 900, 15, 300, 8
    hidden, head = torch.randn(positions, 4, generator=seeded()).to(dtype), torch.randn(rows, 4, generator=seeded(1))
    head = head.to(dtype)
    events = torch.stack([torch.randperm(rows, generator=seeded(2))[:top] for _ in range(positions)])
    probs = torch.rand(positions, top + 1, generator=seeded(3))
    law = EventLaw(events, probs / probs.sum(-1, keepdim=True), torch.zeros(positions, dtype=torch.long))
    loss = read_loss(name)
    plain = _largest(_reference, hidden.float(), head.float(), law, loss)
    assert plain == positions * rows
    by_chunk = _largest(loss_gradient, hidden, head, law, loss, chunk)
    assert chunk * rows <= by_chunk <= chunk * (rows + 16)
    by_block = _largest(loss_gradient, hidden, head, law, loss, chunk, block)
    assert chunk * block <= by_block <= chunk * (block + 16)


def test_tall_heads_get_shorter_chunks_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.distill.losses.gradient._MOST_LOGITS", 20_000)
    positions, rows = 100, 400
    hidden, head = torch.randn(positions, 4, generator=seeded()), torch.randn(rows, 4, generator=seeded(1))
    law = EventLaw(torch.zeros(positions, 1).long(), torch.full((positions, 2), 0.5), torch.zeros(positions).long())
    for taller in (rows, 4 * rows):  # 50 positions of all rows, then 32 of a part of them
        some = _largest(loss_gradient, hidden, head.repeat(taller // rows, 1), law, read_loss("tvd"))
        assert some <= 50 * (rows + 16)


@pytest.mark.parametrize("name", ["forward_kl", "tvd"])
def test_distances_over_events_grow_with_the_events_to_the_full_distance(name: str) -> None:
    hidden, head = hidden_and_head()
    loss = read_loss(name)
    values = [loss_gradient(hidden, head, top_of(random_law(), top), loss).losses for top in (1, 2, 4, 8, 16)]
    full = loss_gradient(hidden, head, random_law(), loss).losses
    for coarse, fine in zip(values, [*values[1:], full], strict=True):
        assert bool((coarse <= fine + 1e-5).all())


def test_mass_on_tokens_that_the_draft_cannot_say_is_rejected_and_not_renormalised() -> None:
    hidden, head = hidden_and_head()
    law = random_law()
    kept = torch.arange(0, VOCAB, 2)
    rows = torch.where(law.rows % 2 == 0, law.rows // 2, UNSAYABLE)
    trimmed = EventLaw(rows, law.probs, law.emitted)
    result = loss_gradient(hidden, head[kept], trimmed, read_loss("tvd"))
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
        assert bool(torch.isfinite(loss_gradient(hidden, head[kept], trimmed, read_loss(name)).hidden).all())


def test_a_position_whose_every_event_is_unsayable_stays_finite() -> None:
    hidden, head = hidden_and_head()
    law = top_of(random_law(), 4)
    law = EventLaw(torch.full_like(law.rows, UNSAYABLE), law.probs, law.emitted)
    for name in LOSSES:
        result = loss_gradient(hidden, head, law, read_loss(name))
        assert bool(torch.isfinite(result.losses).all())
        assert bool(torch.isfinite(result.hidden).all())
