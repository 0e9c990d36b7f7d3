"""A target that runs in this process: what it says, a batch of prompts at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.errors import NonFiniteError, PromptError
from foredraft.core.law import SamplingLaw, law_logprobs, sample_indices
from foredraft.core.protocols import Answer, Continuation, Reading
from foredraft.core.roofline import PassFacts
from foredraft.models.batch import Batch
from foredraft.models.batch_session import BatchSession
from foredraft.models.head import Head
from foredraft.models.loading import LoadedModel, load_causal_lm, max_context
from foredraft.models.passes import pass_facts
from foredraft.models.session import Session
from foredraft.models.teacher import Teacher
from foredraft.models.timing import EqualTexts

_CACHE_BYTES = 2 << 30


def load_target(source: str, dtype: str = "auto", trust_remote_code: bool = False, adapter: str = "") -> "LocalTarget":
    """Load a target from a folder, a .gguf file or a hub id, with a LoRA adapter if named; see load_causal_lm."""
    return LocalTarget(load_causal_lm(source, dtype, trust_remote_code, adapter))


@final
class LocalTarget:
    """A causal language model and its tokenizer. Rows of its head behind the last token are never emitted."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._head = Head(loaded.model, num_tokens=len(loaded.tokenizer))

    @property
    def model(self) -> PreTrainedModel:
        return self._loaded.model

    @property
    def name(self) -> str:
        return self._loaded.name

    @property
    def path(self) -> Path:
        """Folder or GGUF file that it was read from; empty for one made in memory."""
        return self._loaded.path

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def fingerprint(self) -> str:
        return self._loaded.fingerprint

    @property
    def tokenizer(self) -> Any:
        return self._loaded.tokenizer

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._loaded.tokenizer_fingerprint

    @property
    def vocab_size(self) -> int:
        return self._head.num_columns

    @property
    def max_context(self) -> int:
        return max_context(self.model)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        config = self.model.generation_config
        ids = config.eos_token_id if config is not None else self.tokenizer.eos_token_id
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def session(self) -> Session:
        """Return a new cache that follows one text; its logits are -inf for rows that are no tokens."""
        return Session(self.model, self._head)

    def batch_session(self, num_texts: int) -> BatchSession:
        """Return new caches that follow several texts; see `session`."""
        return BatchSession(self.model, self._head, num_texts)

    def texts(self, token_ids: Int[Tensor, "rows context"]) -> EqualTexts:
        """Return texts of equal length that the target has read, to time its steps over a batch."""
        return EqualTexts(self.model, self._head, token_ids)

    @property
    def passes(self) -> PassFacts:
        """What one pass moves and computes."""
        return pass_facts(self.model)

    @torch.no_grad()
    def write(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        law: SamplingLaw,
        max_new_tokens: int,
        top: int,
        seeds: Sequence[int],
        on_tokens: Callable[[int], None],
    ) -> list[Continuation]:
        """Answer a batch of prompts, one seed each; the same call gives the same answers.

        A row draws from a generator of its own, so that its answer does not depend on the rest of the
        batch (but for rounding). The stored law is the sampling law, or the plain one when that is greedy.

        Args:
            on_tokens: Told after each pass how many tokens it wrote.

        Raises:
            PromptError: a prompt is empty, or leaves no room in the context.
            NonFiniteError: the logits are NaN or infinite; names the prompt and the position.
        """
        self._check(prompts, max_new_tokens)
        if not prompts or max_new_tokens == 0:
            return [_nothing() for _ in prompts]
        parts = -(-len(prompts) // self._most_rows(max(map(len, prompts)) + max_new_tokens))
        most = -(-len(prompts) // parts)  # Parts of one size: a small last one would be as many passes as a large one.
        written: list[Continuation] = []
        for start in range(0, len(prompts), most):
            part = slice(start, start + most)
            written += self._write(prompts[part], law, max_new_tokens, top, seeds[part], on_tokens, start)
        return written

    def _most_rows(self, tokens: int) -> int:
        """Return how many texts of so many tokens are written at once: their caches stay below _CACHE_BYTES."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        row = 2 * config.num_hidden_layers * heads * dim * tokens * self.model.dtype.itemsize
        return max(1, _CACHE_BYTES // row)

    def _write(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        law: SamplingLaw,
        max_new_tokens: int,
        top: int,
        seeds: Sequence[int],
        on_tokens: Callable[[int], None],
        first: int,
    ) -> list[Continuation]:
        """Answer prompts that fit into memory together; `first` is the number of the first one."""
        batch = Batch(self.model, prompts, max_new_tokens)
        uniforms = torch.stack([_uniforms(seed, max_new_tokens) for seed in seeds])
        record = _Record.empty(len(prompts), max_new_tokens, min(top, len(self.tokenizer)))
        stored = law.stored
        stops = torch.tensor(self.stop_ids, dtype=torch.long, device=self.model.device)
        hidden = batch.read_prompts()
        for step in range(max_new_tokens):
            logits = self._head.logits(hidden)
            logprobs = law_logprobs(logits, stored)
            best = logprobs.topk(max(record.top, 1), dim=-1)
            _refuse_non_finite(best.values[:, 0], batch, step, first)
            if law.is_greedy:
                token_ids, emitted = logits.argmax(-1), torch.zeros(len(batch.live))
            else:
                token_ids = sample_indices(logprobs.exp(), uniforms[batch.live, step])
                emitted = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
            kept = (best.indices[:, : record.top], best.values[:, : record.top])
            record.keep(batch.live, step, token_ids, emitted, *kept)
            on_tokens(len(batch.live))
            token_ids = batch.drop(torch.isin(token_ids, stops), token_ids)
            if not batch.live or step == max_new_tokens - 1:
                break
            hidden = batch.read(token_ids)
        return record.continuations(self.stop_ids)

    def read(
        self, answers: Sequence[Answer], law: SamplingLaw, top: int, on_tokens: Callable[[int], None]
    ) -> list[Reading]:
        """Return what it says of answers that were written before; see core.protocols.Reading.

        Args:
            on_tokens: Told after each answer how many tokens were read.
        """
        return Teacher(self.model, self._head, len(self.tokenizer)).read(answers, law, top, on_tokens)

    def _check(self, prompts: Sequence[Int[Tensor, " _"]], max_new_tokens: int) -> None:
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise PromptError(f"Prompt {index} is empty: a target needs at least one token to go on from.")
            if len(prompt) + max_new_tokens > self.max_context:
                raise PromptError(
                    f"Prompt {index} has {len(prompt)} tokens; with {max_new_tokens} new ones that is more than the "
                    f"{self.max_context} that {self.name} reads. Shorten it, or ask for fewer tokens."
                )


@dataclass(frozen=True, slots=True)
class _Record:
    """What was written and said, by prompt and step; filled in place."""

    token_ids: Int[Tensor, "prompts steps"]
    logprobs: Float[Tensor, "prompts steps"]
    top_ids: Int[Tensor, "prompts steps top"]
    top_logprobs: Float[Tensor, "prompts steps top"]
    lengths: Int[Tensor, " prompts"]

    @property
    def top(self) -> int:
        return self.top_ids.shape[-1]

    @staticmethod
    def empty(prompts: int, steps: int, top: int) -> "_Record":
        return _Record(
            torch.zeros(prompts, steps, dtype=torch.long),
            torch.zeros(prompts, steps),
            torch.zeros(prompts, steps, top, dtype=torch.long),
            torch.zeros(prompts, steps, top),
            torch.zeros(prompts, dtype=torch.long),
        )

    def keep(
        self,
        rows: list[int],
        step: int,
        token_ids: Int[Tensor, " rows"],
        emitted: Float[Tensor, " rows"],
        top_ids: Int[Tensor, "rows top"],
        top_logprobs: Float[Tensor, "rows top"],
    ) -> None:
        self.token_ids[rows, step], self.logprobs[rows, step] = token_ids.cpu(), emitted.cpu()
        self.top_ids[rows, step], self.top_logprobs[rows, step] = top_ids.cpu(), top_logprobs.cpu()
        self.lengths[rows] = step + 1

    def continuations(self, stop_ids: tuple[int, ...]) -> list[Continuation]:
        return [self._continuation(row, int(length), stop_ids) for row, length in enumerate(self.lengths)]

    def _continuation(self, row: int, length: int, stop_ids: tuple[int, ...]) -> Continuation:
        top_logprobs = self.top_logprobs[row, :length].clone()
        return Continuation(
            token_ids=self.token_ids[row, :length].clone(),
            logprobs=self.logprobs[row, :length].clone(),
            top_ids=self.top_ids[row, :length].clone(),
            top_logprobs=top_logprobs,
            tail_mass=(1.0 - top_logprobs.exp().sum(-1)).clamp(0.0, 1.0),
            finish_reason="stop" if int(self.token_ids[row, length - 1]) in stop_ids else "length",
        )


def _uniforms(seed: int, steps: int) -> Float[Tensor, " steps"]:
    return torch.rand(steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _nothing() -> Continuation:
    ids, figures = torch.empty(0, dtype=torch.long), torch.empty(0)
    return Continuation(ids, figures, ids.reshape(0, 0), figures.reshape(0, 0), figures, "length")


def _refuse_non_finite(largest: Float[Tensor, " rows"], batch: Batch, step: int, first: int) -> None:
    """Normalised log-probabilities have a finite largest entry unless a logit was NaN or +infinity."""
    broken = (~largest.isfinite()).nonzero().flatten()
    if len(broken):
        prompt = batch.live[int(broken[0])]
        raise NonFiniteError(
            f"The target's logits are NaN or infinite for prompt {first + prompt} at position "
            f"{batch.prompt_lengths[prompt] + step} (token {step} of its answer). Try dtype float32."
        )
