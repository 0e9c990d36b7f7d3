"""What a loss asks of the hidden states behind a head, without the law over all positions and rows."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.distill.losses.law import ABSENT, EventLaw, Laws, Loss
from foredraft.distill.losses.rejection import acceptance

# Logits held at once, 32 MB of them in float32.
_MOST_LOGITS = 2**23
_FEWEST_POSITIONS = 32
# Of a law that is whole, logits worked on at once: few enough to stay in a processor's cache.
_CACHED_LOGITS = 2**18
_LINE = 16
# Rows of a head of lower precision that are widened at once.
_WIDENED_ROWS = 2**11


@dataclass(frozen=True, slots=True)
class LossGradient:
    """Losses of some positions, and what they ask of the hidden states.

    Attributes:
        losses: One for each position.
        acceptance: sum min(target, draft) over events.
        hidden: Gradient of the sum of the losses.
        confidence: The target's largest probability of an event that is one token; empty where it was not asked.
    """

    losses: Float[Tensor, " positions"]
    acceptance: Float[Tensor, " positions"]
    hidden: Float[Tensor, "positions hidden"]
    confidence: Float[Tensor, " _"] = field(default_factory=lambda: torch.empty(0))

    def scaled(self, weights: Float[Tensor, " positions"]) -> "LossGradient":
        """Return the gradient of the weighted sum, and the weighted losses."""
        return replace(self, losses=weights * self.losses, hidden=weights[:, None] * self.hidden)


def loss_gradient(
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "rows hidden"],
    laws: Laws,
    loss: Loss,
    chunk: int = 256,
    block: int = 0,
) -> LossGradient:
    """Return the losses of the law softmax(hidden head^T), and their gradient by `hidden`; `head` gets none.

    Holds the logits of `chunk` positions and `block` rows at once, and nothing larger that the laws do not hold
    themselves. The loss and its derivative are taken over events only; of the other rows just their common log-sum-exp
    matters, so their gradient is the tail's times their share of it. Losses, reductions and the result are float32, or
    float64 where `hidden` is.

    Args:
        chunk: Most positions at once; fewer where the head is so tall that 32 MB of logits would not hold them.
        block: Rows at once; 0 for all that 32 MB hold. More than one block costs a second product with the head. Has no
            effect on laws that are whole, which are as wide as the head themselves.
    """
    return _walk(hidden, head, laws, loss, chunk, block, with_gradient=True)


def loss_values(
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "rows hidden"],
    laws: Laws,
    loss: Loss,
    chunk: int = 256,
    block: int = 0,
) -> Float[Tensor, " positions"]:
    """Return the losses alone, in half the time; arguments as of loss_gradient."""
    return _walk(hidden, head, laws, loss, chunk, block, with_gradient=False).losses


@torch.no_grad()
def _walk(
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "rows hidden"],
    laws: Laws,
    loss: Loss,
    chunk: int,
    block: int,
    with_gradient: bool,
) -> LossGradient:
    num_rows = head.shape[0]
    chunk = min(chunk, len(laws), max(_FEWEST_POSITIONS, _MOST_LOGITS // num_rows))
    block = min(block or max(1, _MOST_LOGITS // chunk), num_rows) if chunk else num_rows
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    result = LossGradient(
        hidden.new_empty(len(laws), dtype=dtype),
        hidden.new_empty(len(laws), dtype=dtype),
        hidden.new_zeros(hidden.shape, dtype=dtype),
        hidden.new_empty(len(laws), dtype=dtype),
    )
    by_rows, by_events = None, None
    for start in range(0, len(laws), chunk or 1):
        positions = slice(start, start + chunk)
        law = laws[positions]
        part = LossGradient(
            *(whole[positions] for whole in (result.losses, result.acceptance, result.hidden, result.confidence))
        )
        part.confidence.copy_(law.probs[:, : max(1, law.rows.shape[1])].amax(-1))
        if law.whole and law.rows.shape[1] == num_rows:
            by_rows = by_rows or _ByRows(head, chunk, dtype)
            by_rows.fill(part, hidden[positions], law, loss, with_gradient)
        else:
            by_events = by_events or _ByEvents(head, chunk, block, dtype)
            by_events.fill(part, hidden[positions], law, loss, with_gradient)
    return result


@final
class _ByEvents:
    """Fills in results of laws over events, a block of rows at a time, with one buffer for their logits."""

    def __init__(self, head: Float[Tensor, "rows hidden"], chunk: int, block: int, dtype: torch.dtype) -> None:
        self._head = head
        self._block = block
        self._logits = _buffer(head, chunk, block, dtype)

    def fill(
        self,
        part: LossGradient,
        hidden: Float[Tensor, "positions hidden"],
        law: EventLaw,
        loss: Loss,
        with_gradient: bool,
    ) -> None:
        size, dtype = len(law), self._logits.dtype
        top = torch.full(law.rows.shape, ABSENT, dtype=dtype, device=hidden.device)
        tail = torch.full((size, 1), ABSENT, dtype=dtype, device=hidden.device)
        for rows in self._blocks():
            found, weights, largest = self._read(hidden, law, rows)
            top = torch.maximum(top, found)
            tail = torch.logaddexp(tail, largest + weights.sum(-1, keepdim=True).log())
        tail = tail.clamp(min=ABSENT)

        events = torch.cat([top, tail], -1)
        law = replace(law, probs=law.probs.to(dtype).where(events > ABSENT, 0.0))
        with torch.enable_grad():
            draft_logprobs = events.requires_grad_().log_softmax(-1)
            losses = loss(law, draft_logprobs)
            (gradient,) = torch.autograd.grad(losses.sum(), events)
        part.losses.copy_(losses.detach())
        part.acceptance.copy_(acceptance(law, draft_logprobs.detach()))
        if not with_gradient:
            return
        for rows in self._blocks():
            if self._block < len(self._head):
                _, weights, largest = self._read(hidden, law, rows)
            weights.mul_(gradient[:, -1:] * (largest - tail).exp())
            weights.scatter_(1, self._columns(law, rows), gradient[:, :-1])
            _add_product(weights[:, : rows.stop - rows.start], self._head[rows], part.hidden)

    def _read(
        self, hidden: Float[Tensor, "positions hidden"], law: EventLaw, rows: slice
    ) -> tuple[Float[Tensor, "positions top"], Float[Tensor, "positions columns"], Float[Tensor, "positions 1"]]:
        """Return the logits of the events among `rows`, exp(logit - largest), of others, and the largest of those."""
        logits, columns, width = self._logits[: len(law)], self._columns(law, rows), rows.stop - rows.start
        _multiply(hidden, self._head[rows], logits[:, :width])
        logits[:, width:] = float("-inf")
        found = logits.gather(1, columns).clamp(min=ABSENT)
        logits.scatter_(1, columns, float("-inf"))
        largest = logits.amax(-1, keepdim=True).clamp(min=ABSENT)
        return found, logits.sub_(largest).exp_(), largest

    def _columns(self, law: EventLaw, rows: slice) -> Int[Tensor, "positions top"]:
        """Return the column of each event; the first one behind the block for those that are not among `rows`."""
        inside = (law.rows >= rows.start) & (law.rows < rows.stop)
        return torch.where(inside, law.rows - rows.start, self._block)

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, len(self._head), self._block):
            yield slice(start, min(start + self._block, len(self._head)))


@final
class _ByRows:
    """Fills in results of laws that are whole: nothing is gathered, and the loss sees few positions at a time."""

    def __init__(self, head: Float[Tensor, "rows hidden"], chunk: int, dtype: torch.dtype) -> None:
        self._head = head
        self._logits = _buffer(head, chunk, len(head), dtype)[:, : len(head) + 1]
        self._positions = max(1, _CACHED_LOGITS // len(head))

    def fill(
        self,
        part: LossGradient,
        hidden: Float[Tensor, "positions hidden"],
        law: EventLaw,
        loss: Loss,
        with_gradient: bool,
    ) -> None:
        logits = self._logits[: len(law)]
        _multiply(hidden, self._head, logits[:, :-1])
        logits[:, -1] = ABSENT
        for start in range(0, len(law), self._positions):
            some = slice(start, start + self._positions)
            part.losses[some], part.acceptance[some] = _differentiate(logits[some], law[some], loss)
        if with_gradient:
            _add_product(logits[:, :-1], self._head, part.hidden)


def _differentiate(
    logits: Float[Tensor, "positions events"], law: EventLaw, loss: Loss
) -> tuple[Float[Tensor, " positions"], Float[Tensor, " positions"]]:
    """Return losses and acceptance, and put the gradient in place of the logits."""
    law = replace(law, probs=law.probs.to(logits.dtype))
    draft_logprobs = logits.log_softmax(-1)
    with torch.enable_grad():
        losses = loss(law, draft_logprobs.requires_grad_())
        (gradient,) = torch.autograd.grad(losses.sum(), draft_logprobs)
    draft = draft_logprobs.detach().exp_()
    torch.addcmul(gradient, draft, gradient.sum(-1, keepdim=True), value=-1.0, out=logits)
    return losses.detach(), torch.minimum(law.probs, draft).sum(-1)


def _buffer(
    head: Float[Tensor, "rows hidden"], chunk: int, block: int, dtype: torch.dtype
) -> Float[Tensor, "chunk columns"]:
    """Return room for the logits of a block and at least one column more; products are fastest in lines of 64 bytes."""
    return head.new_empty(chunk, (block // _LINE + 1) * _LINE, dtype=dtype)


def _multiply(
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "rows hidden"],
    logits: Float[Tensor, "positions rows"],
) -> None:
    """Put hidden head^T into `logits`."""
    if hidden.dtype == head.dtype == logits.dtype:
        torch.mm(hidden, head.T, out=logits)
    elif hidden.device.type == "cpu":  # where products of low precision are slower, and rounded
        hidden = hidden.to(logits.dtype)
        for start in range(0, len(head), _WIDENED_ROWS):
            rows = slice(start, start + _WIDENED_ROWS)
            torch.mm(hidden, head[rows].to(logits.dtype).T, out=logits[:, rows])
    else:
        logits.copy_(hidden.to(head.dtype) @ head.T)


def _add_product(
    gradient: Float[Tensor, "positions rows"],
    head: Float[Tensor, "rows hidden"],
    hidden: Float[Tensor, "positions hidden"],
) -> None:
    """Add gradient head to `hidden`."""
    if gradient.dtype == head.dtype:
        hidden.addmm_(gradient, head)
    elif gradient.device.type == "cpu":
        for start in range(0, len(head), _WIDENED_ROWS):
            rows = slice(start, start + _WIDENED_ROWS)
            hidden.addmm_(gradient[:, rows], head[rows].to(gradient.dtype))
    else:
        hidden.add_(gradient.to(head.dtype) @ head)
