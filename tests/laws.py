"""Random laws over a small vocabulary, and hidden states and heads to be judged by them."""

import torch
from torch import Tensor

from foredraft.distill.losses import EventLaw

POSITIONS, VOCAB, HIDDEN = 24, 40, 16


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)


def random_law(seed: int = 0, dtype: torch.dtype = torch.float32) -> EventLaw:
    """Return a law known in full, and what it emitted."""
    probs = (2.0 * torch.randn(POSITIONS, VOCAB, generator=seeded(seed), dtype=dtype)).softmax(-1)
    return EventLaw.full(probs, torch.multinomial(probs, 1, generator=seeded(seed)).squeeze(1))


def hidden_and_head(seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return hidden states [POSITIONS, HIDDEN] and a head [VOCAB, HIDDEN]."""
    generator = seeded(seed)
    hidden = torch.randn(POSITIONS, HIDDEN, generator=generator, dtype=dtype)
    return hidden, 0.7 * torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)


def top_of(law: EventLaw, top: int) -> EventLaw:
    """Return the law with the `top` most probable tokens and the emitted one as events, all others as the tail."""
    probs = law.probs[:, :-1]
    rows = probs.scatter(1, law.emitted[:, None], 2.0).topk(top, -1).indices
    kept = probs.gather(1, rows)
    emitted = (rows == law.emitted[:, None]).nonzero()[:, 1]
    return EventLaw(rows, torch.cat([kept, (1.0 - kept.sum(-1, keepdim=True)).clamp(min=0.0)], -1), emitted)


def logprobs_of(logits: Tensor) -> Tensor:
    """Return the log-probabilities of every row, and of an empty tail behind them."""
    return torch.nn.functional.pad(logits, (0, 1), value=-1e30).log_softmax(-1)
