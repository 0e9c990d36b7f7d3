"""What draft and target steps cost over a batch of requests, each behind a context of the same length."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.acceptance.cost import Costs, Seconds, in_rounds
from foredraft.core.law import SamplingLaw, law_probs, sample_indices
from foredraft.core.progress import SILENT, Progress
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Drafter
from foredraft.decoding.rules import verify_chain
from foredraft.decoding.speculative import uniforms

_SEED = 0


@runtime_checkable
class Texts(Protocol):
    """Texts that were read, and can be gone on with from the same point again and again."""

    def again(self) -> None: ...

    def logits(self, token_ids: Int[Tensor, "rows new"]) -> Float[Tensor, "rows new columns"]: ...


@runtime_checkable
class Batched(Protocol):
    """A target or drafter whose steps over a batch can be timed."""

    def texts(self, token_ids: Int[Tensor, "rows context"]) -> Texts: ...


@runtime_checkable
class BatchedTarget(Batched, Protocol):
    @property
    def vocab_size(self) -> int: ...


def measure_batch(
    target: BatchedTarget,
    drafters: Mapping[str, Drafter],
    text: Int[Tensor, " tokens"],
    law: SamplingLaw,
    ks: Sequence[int],
    rows: int,
    single: Costs,
    repeats: int,
    progress: Progress = SILENT,
) -> Costs:
    """Time target steps of 1 .. max(ks) + 1 tokens of each of `rows` requests, and blocks of the shortest and longest.

    Interleaved in rounds as at batch size 1, contexts staying as long as they are. Verification is that of the engine:
    laws and draws of each request in turn. Drafters without a model run request by request: `rows` times what a
    request of its own takes.

    Args:
        drafters: Bound to the laws they draw from.
        text: Context of every request.
        single: Costs at batch size 1.
    """
    contexts = text[None].expand(rows, -1)
    lengths = sorted({min(ks), max(ks)})
    clocks: dict[Any, Callable[[int], None]] = _target_clocks(target, contexts, law, max(ks) + 1)
    for name, drafter in drafters.items():
        if isinstance(drafter, Batched):
            clocks |= _draft_clocks(name, drafter.texts(contexts), drafter.law, text, rows, lengths)
    measured = in_rounds(clocks, repeats, f"timing {law}, {rows} requests", progress)
    blocks = {
        name: {
            k: measured[name, k]
            if (name, k) in measured
            else _scaled(Seconds.of([single.draft_seconds(name, k)]), rows)
            for k in lengths
        }
        for name in drafters
    }
    steps = tuple(measured[width] for width in range(1, max(ks) + 2))
    reading = {name: _scaled(one, rows) for name, one in single.reading.items()}
    overhead, plain_overhead = _scaled(single.overhead, rows), _scaled(single.plain_overhead, rows)
    return Costs(steps, blocks, overhead, plain_overhead, reading=reading)


def _target_clocks(
    target: BatchedTarget, contexts: Int[Tensor, "rows context"], law: SamplingLaw, widest: int
) -> dict[Any, Callable[[int], None]]:
    texts, uniform = target.texts(contexts), uniforms(torch.Generator().manual_seed(_SEED))

    def step(width: int) -> Callable[[int], None]:
        new = contexts[:, -width:]
        guess = Proposal.certain(new[0, 1:], target.vocab_size)

        def run(number: int) -> None:
            texts.again()
            for logits in texts.logits(new):
                verify_chain(law_probs(logits, law), guess, uniform)

        return run

    return {width: step(width) for width in range(1, widest + 1)}


def _draft_clocks(
    name: str, texts: Texts, law: SamplingLaw, text: Int[Tensor, " tokens"], rows: int, lengths: Sequence[int]
) -> dict[Any, Callable[[int], None]]:
    generator = torch.Generator().manual_seed(_SEED)

    def block(k: int) -> Callable[[int], None]:
        def run(number: int) -> None:
            texts.again()
            # The last draft token of a block and the token after it have not been read yet.
            new = text[-2:].expand(rows, -1)
            for _ in range(k):
                drawn = _drawn(texts.logits(new)[:, -1], law, generator)
                new = text[drawn % len(text)][:, None]

        return run

    return {(name, k): block(k) for k in lengths}


def _drawn(logits: Float[Tensor, "rows columns"], law: SamplingLaw, generator: torch.Generator) -> Int[Tensor, " rows"]:
    if law.is_greedy:
        return logits.argmax(-1).cpu()
    uniform = torch.rand(len(logits), generator=generator, dtype=torch.float64)
    return sample_indices(law_probs(logits, law), uniform.to(logits.device)).cpu()


def _scaled(seconds: Seconds, factor: int) -> Seconds:
    return Seconds(seconds.median * factor, seconds.low * factor, seconds.high * factor)
