"""A target whose weights are here, and whose answers a server writes that serves the same weights faster."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.errors import ModelError, VocabMismatchError
from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import Answer, Continuation, Target
from foredraft.models.target import LocalTarget

_PROBES = ("The three largest cities of the country are", "def add(a, b):\n    return")
_PROBE_TOKENS = 16
_SAME = (
    0.25  # nats; weights in 8 bits were seen to move a log-probability by a tenth of that, other weights by 1 and more
)


@final
class ServedTwin:
    """The local target's name and fingerprint, the server's answers. Implements core.protocols.Target."""

    def __init__(self, local: LocalTarget, server: Target) -> None:
        """Take two targets that say the same; see `of`."""
        self._local = local
        self._server = server

    @staticmethod
    def of(local: LocalTarget, server: Target) -> "ServedTwin":
        """Return the two as one, after the server has answered two short prompts as the local weights would.

        Raises:
            VocabMismatchError: the two cut text into other tokens.
            ModelError: the server's log-probabilities are those of another model.
        """
        if local.tokenizer_fingerprint != server.tokenizer_fingerprint:
            raise VocabMismatchError(
                f"The server of {server.name} has tokenizer {server.tokenizer_fingerprint}, {local.name} has "
                f"{local.tokenizer_fingerprint}: serve the target's own model."
            )
        gap = _mean_gap(local, server)
        if gap > _SAME:
            raise ModelError(
                f"The server of {server.name} does not serve {local.name}: its log-probabilities differ by {gap:.2f} "
                f"nats a token from those of the local weights, and rounding explains at most {_SAME}."
            )
        return ServedTwin(local, server)

    @property
    def name(self) -> str:
        return self._local.name

    @property
    def fingerprint(self) -> str:
        return self._local.fingerprint

    @property
    def dtype(self) -> str:
        """What the server computes in: the stored laws are its."""
        return self._server.dtype

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def max_context(self) -> int:
        return min(self._local.max_context, self._server.max_context)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._local.stop_ids

    @property
    def tokenizer(self) -> Any:
        return self._local.tokenizer

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._local.tokenizer_fingerprint

    def write(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        law: SamplingLaw,
        max_new_tokens: int,
        top: int,
        seeds: Sequence[int],
        on_tokens: Callable[[int], None],
    ) -> list[Continuation]:
        """Let the server answer; see RemoteTarget.write."""
        return self._server.write(prompts, law, max_new_tokens, top, seeds, on_tokens)


def _mean_gap(local: LocalTarget, server: Target) -> float:
    """Return the mean distance of the two's log-probabilities of tokens that the server drew, in nats."""
    prompts = [torch.tensor(local.tokenizer(text)["input_ids"]) for text in _PROBES]
    seeds = list(range(len(prompts)))
    said = server.write(prompts, SamplingLaw(), _PROBE_TOKENS, 0, seeds, _ignore)
    answers = [
        Answer(torch.cat([prompt, one.token_ids]), len(prompt)) for prompt, one in zip(prompts, said, strict=True)
    ]
    readings = local.read(answers, SamplingLaw(), 1, _ignore)
    gaps = [(reading.logprobs - one.logprobs).abs() for reading, one in zip(readings, said, strict=True)]
    return float(torch.cat(gaps).mean())


def _ignore(_: int) -> None:
    return None
