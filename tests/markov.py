"""A target whose law is known: each token depends on the one before it, and on nothing else."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foredraft.core.digest import digest_of
from foredraft.core.law import SamplingLaw, law_logprobs, sample_index
from foredraft.core.protocols import Continuation
from tests.tiny import tiny_tokenizer


class MarkovTarget:
    """Implements the protocol Target over the tokens of `tiny_tokenizer`."""

    name = "markov"
    dtype = "float32"
    stop_ids = (2,)

    def __init__(self, seed: int = 0, max_context: int = 512, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.max_context = max_context
        self.vocab_size = len(self.tokenizer)
        self.fingerprint = digest_of(["markov", seed])
        self.tokenizer_fingerprint = digest_of(self.tokenizer.get_vocab())
        self.calls: list[list[list[int]]] = []
        generator = torch.Generator().manual_seed(seed)
        self.logits: Float[Tensor, "vocab vocab"] = 3.0 * torch.randn(
            self.vocab_size, self.vocab_size, generator=generator
        )
        self.logits[:, 2] += 3.0

    def write(
        self,
        prompts: Sequence[Int[Tensor, " tokens"]],
        law: SamplingLaw,
        max_new_tokens: int,
        top: int,
        seeds: Sequence[int],
        on_tokens: Callable[[int], None],
    ) -> list[Continuation]:
        self.calls.append([prompt.tolist() for prompt in prompts])
        own = law_logprobs(self.logits, law)
        stored = law_logprobs(self.logits, SamplingLaw() if law.is_greedy else law)
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            generator = torch.Generator().manual_seed(seed)
            tokens = [int(prompt[-1])]
            while len(tokens) <= max_new_tokens and (len(tokens) == 1 or tokens[-1] not in self.stop_ids):
                uniform = float(torch.rand((), generator=generator))
                tokens.append(sample_index(own[tokens[-1]].exp(), uniform))
                on_tokens(1)
            answers.append(self._continuation(tokens, own, stored, top))
        return answers

    def _continuation(self, tokens: list[int], own: Tensor, stored: Tensor, top: int) -> Continuation:
        before, answer = torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])
        top_logprobs, top_ids = stored[before].topk(min(top, self.vocab_size), dim=1)
        tail = (1.0 - top_logprobs.exp().sum(1)).clamp(0.0, 1.0)
        reason = "stop" if tokens[-1] in self.stop_ids else "length"
        return Continuation(answer, own[before, answer], top_ids, top_logprobs, tail, reason)
