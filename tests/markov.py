"""A target whose law is known: each token depends on the one before it, and on nothing else."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foredraft.core.digest import digest_of
from foredraft.core.law import SamplingLaw, law_logprobs, law_probs, sample_index
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
        return [
            self._continue(prompt, law, max_new_tokens, top, seed, on_tokens)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def _continue(
        self, prompt: Tensor, law: SamplingLaw, most: int, top: int, seed: int, on_tokens: Callable[[int], None]
    ) -> Continuation:
        generator = torch.Generator().manual_seed(seed)
        tokens = [int(prompt[-1])]
        while len(tokens) <= most and (len(tokens) == 1 or tokens[-1] not in self.stop_ids):
            uniform = float(torch.rand((), generator=generator))
            tokens.append(sample_index(law_probs(self.logits[tokens[-1]], law), uniform))
            on_tokens(1)
        answer, logits = torch.tensor(tokens[1:]), self.logits[tokens[:-1]]
        emitted = law_logprobs(logits, law).gather(1, answer[:, None]).squeeze(1)
        stored = law_logprobs(logits, SamplingLaw() if law.is_greedy else law)
        top_logprobs, top_ids = stored.topk(min(top, self.vocab_size), dim=1)
        tail = (1.0 - top_logprobs.exp().sum(1)).clamp(0.0, 1.0)
        reason = "stop" if tokens[-1] in self.stop_ids else "length"
        return Continuation(answer, emitted, top_ids, top_logprobs, tail, reason)
