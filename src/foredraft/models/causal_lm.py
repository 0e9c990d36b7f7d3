"""A causal language model as drafter."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from foredraft.checkpoint import MANIFEST, read_manifest
from foredraft.core.errors import CapabilityError
from foredraft.core.law import SamplingLaw, law_probs, sample_index, token_logprobs
from foredraft.core.own_law import TARGETS_LAWS, OwnLaws
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.core.roofline import PassFacts
from foredraft.models.batch_session import BatchSession
from foredraft.models.draft import Draft, load_draft
from foredraft.models.head import Head
from foredraft.models.light.reading import LightBatchSession, LightTexts
from foredraft.models.light.session import LightSession
from foredraft.models.loading import max_context
from foredraft.models.passes import end_addresses, pass_facts, stored_weights
from foredraft.models.readers import readers_of
from foredraft.models.session import Session
from foredraft.models.timing import EqualTexts

_PASS_TOKENS = 4096
_HEAD_POSITIONS = 512


@final
class CausalLMDrafter:
    """Proposes by running a draft model forward, one token at a time.

    Laws are over the whole vocabulary: a token whose row the head lacks has probability 0.

    Attributes:
        vocab_size: Width of its laws, the target's; may differ from the draft's own columns by padding rows.
        own_laws: Which law to bind it to, by the target's.
    """

    def __init__(
        self,
        draft: Draft,
        law: SamplingLaw,
        vocab_size: int,
        kind: str = "causal-lm",
        own_laws: OwnLaws = TARGETS_LAWS,
    ) -> None:
        self.draft = draft
        self.law = law
        self.vocab_size = vocab_size
        self.kind = kind
        self.own_laws = own_laws
        self._head = Head(draft.model, draft.head_token_ids, num_tokens=vocab_size)
        self._readers = readers_of(draft.model)
        self._session = self._new_session()
        self._tokens, self._row_of = _token_maps(self._head, vocab_size)

    @property
    def max_context(self) -> int:
        """Tokens that it can read; behind a longer text it has no guess."""
        return max_context(self.draft.model)

    @property
    def num_parameters(self) -> int:
        weights = stored_weights(self.draft.model)
        table, head = end_addresses(self.draft.model)
        trimmed = len(self._head.token_ids) > 0
        skipped = (table | head) if trimmed else table - head
        total = sum(stored.parameters for address, stored in weights.items() if address not in skipped)
        return total + len(self._head.token_ids) * self.draft.model.get_input_embeddings().weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(stored.bytes for stored in stored_weights(self.draft.model).values()) + self._head.copied_bytes

    def bind(self, law: SamplingLaw) -> "CausalLMDrafter":
        """Return the same draft drawing from `law`, reading with a cache of its own."""
        twin = copy(self)
        twin.law, twin._session = law, self._new_session()
        return twin

    def texts(self, token_ids: Int[Tensor, "rows context"]) -> EqualTexts | LightTexts:
        """Return texts of equal length that the draft has read, to time its steps over a batch."""
        return self._readers.texts(self.draft.model, self._head, token_ids)

    @property
    def passes(self) -> PassFacts:
        """What one draft step moves and computes."""
        return pass_facts(self.draft.model, len(self._head.token_ids), self._head.copied_bytes)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        """Return k draft tokens, fewer where the draft's own context ends; none after an empty text."""
        k = self.most_tokens(context, k)
        if k == 0:
            return Proposal.empty(self.vocab_size)
        drawn = [self.draw(self._session.logits(context)[0], generator)]
        while len(drawn) < k:
            drawn.append(self.draw(self._session.append(context.new_tensor([drawn[-1].token_id]))[0], generator))
        return self.chain(drawn)

    def open_batch(self, num_texts: int) -> "CausalLMBatch":
        """Return the same draft at work on several texts."""
        return CausalLMBatch(self, self._readers.batch(self.draft.model, self._head, num_texts))

    def target_session(self) -> Session:
        """Return a cache that follows one text, with logits over the vocabulary, for a draft in a target's role.

        Raises:
            CapabilityError: the head is trimmed, so that some tokens have no logit, or a light net, which goes back
                in no text.
        """
        if len(self.draft.head_token_ids):
            raise CapabilityError(
                f"The draft computes {len(self.draft.head_token_ids)} of {self.vocab_size} rows of its head: it cannot "
                "check what another drafter says. Take its twin with the full head."
            )
        return Session(self.draft.model, self._head)

    def _new_session(self) -> Session | LightSession:
        return self._readers.session(self.draft.model, self._head)

    def most_tokens(self, context: Int[Tensor, " tokens"], k: int) -> int:
        """Return how many of k tokens can be drafted behind a context."""
        return max(min(k, self.max_context - len(context) + 1), 0) if len(context) else 0

    def draw(self, logits: Float[Tensor, " rows"], generator: torch.Generator) -> "Drawn":
        """Draw the next token from the draft's own law."""
        if self.law.is_greedy:
            return Drawn(int(self._tokens[int(logits.argmax())]), torch.empty(0))
        probs = law_probs(logits, self.law)
        row = sample_index(probs, float(torch.rand((), generator=generator, dtype=torch.float64)))
        return Drawn(int(self._tokens[row]), probs)

    def chain(self, drawn: Sequence["Drawn"]) -> Proposal:
        """Return the proposal of tokens drawn one after another."""
        token_ids = torch.tensor([one.token_id for one in drawn], dtype=torch.long)
        if self.law.is_greedy or not drawn:
            return Proposal.certain(token_ids, self.vocab_size)
        return Proposal.chain(token_ids, Laws.from_dense(self._over_vocabulary(torch.stack([o.probs for o in drawn]))))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        """Return what the draft gave to each answer's tokens, by position, from one pass over each answer."""
        probs: list[Tensor] = [torch.empty(0)] * len(answers)
        for group in _groups(answers):
            states = self._states([answers[index] for index in group])
            lengths = [len(state) for state in states]
            emitted = [_answer_ids(answers[index])[:length] for index, length in zip(group, lengths, strict=True)]
            scored = self._emitted_probs(torch.cat(states), torch.cat(emitted)).split(lengths)
            for index, part in zip(group, scored, strict=True):
                probs[index] = part
        return [_to_length(part, answer.num_tokens) for part, answer in zip(probs, answers, strict=True)]

    def laws(self, answers: Sequence[Answer]) -> Iterator[tuple[Int[Tensor, " some"], Float[Tensor, "some vocab"]]]:
        """Yield positions over all answers and the draft's law there; see LawGiver."""
        starts = [0, *accumulate(answer.num_tokens for answer in answers)]
        for group in _groups(answers):
            states = self._states([answers[index] for index in group])
            positions = [torch.arange(len(part)) + starts[index] for index, part in zip(group, states, strict=True)]
            for some, hidden in zip(
                torch.cat(positions).split(_HEAD_POSITIONS), torch.cat(states).split(_HEAD_POSITIONS), strict=True
            ):
                yield some, self._law_after(hidden)

    @torch.no_grad()
    def _law_after(self, states: Float[Tensor, "positions hidden"]) -> Float[Tensor, "positions vocab"]:
        return self._over_vocabulary(law_probs(self._head.logits(states), self.law)).cpu()

    @torch.no_grad()
    def _states(self, answers: Sequence[Answer]) -> list[Float[Tensor, "_ hidden"]]:
        """Return the final hidden states from which each answer's tokens are guessed."""
        texts = [answer.token_ids[:-1][: self.max_context] for answer in answers]
        # Padding on the right needs no mask: causal attention never looks at it.
        padded = pad_sequence(texts, batch_first=True).to(self.draft.model.device)
        hidden = self.draft.model.base_model(input_ids=padded, use_cache=False).last_hidden_state
        return [row[answer.start - 1 : len(text)] for row, answer, text in zip(hidden, answers, texts, strict=True)]

    @torch.no_grad()
    def _emitted_probs(
        self, states: Float[Tensor, "positions hidden"], token_ids: Int[Tensor, " positions"]
    ) -> Float[Tensor, " positions"]:
        rows = self._row_of[token_ids.to(self._row_of.device)]
        logprobs = [
            token_logprobs(self._head.logits(some_states), some_rows.clamp(min=0), self.law)
            for some_states, some_rows in zip(states.split(_HEAD_POSITIONS), rows.split(_HEAD_POSITIONS), strict=True)
        ]
        return torch.where(rows >= 0, torch.cat(logprobs).exp(), 0.0)

    def _over_vocabulary(self, probs: Float[Tensor, "k rows"]) -> Float[Tensor, "k vocab"]:
        wide = probs.new_zeros(len(probs), self.vocab_size)
        wide[:, self._tokens] = probs[:, : len(self._tokens)]
        return wide


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draft token with the law over the head's rows that it was drawn from; none under a greedy law."""

    token_id: int
    probs: Float[Tensor, " rows"]


@final
class CausalLMBatch:
    """A draft model at work on several texts: each of its steps is one pass for all of them."""

    def __init__(self, drafter: CausalLMDrafter, session: BatchSession | LightBatchSession) -> None:
        self._drafter = drafter
        self._session = session

    def propose(
        self,
        contexts: Mapping[int, Int[Tensor, " _"]],
        ks: Mapping[int, int],
        generators: Sequence[torch.Generator],
    ) -> dict[int, Proposal]:
        most = {number: self._drafter.most_tokens(context, ks[number]) for number, context in contexts.items()}
        drawn: dict[int, list[Drawn]] = {number: [] for number in contexts}
        texts = {number: context for number, context in contexts.items() if most[number]}
        while texts:
            logits = self._session.logits(texts, dict.fromkeys(texts, 1))
            for number in list(texts):
                one = self._drafter.draw(logits[number][0], generators[number])
                drawn[number].append(one)
                texts[number] = torch.cat([texts[number], texts[number].new_tensor([one.token_id])])
                if len(drawn[number]) == most[number]:
                    del texts[number]
        return {number: self._drafter.chain(tokens) for number, tokens in drawn.items()}

    def drop(self, number: int) -> None:
        self._session.drop(number)


def load_causal_lm_drafter(path: Path, dtype: str = "auto") -> CausalLMDrafter:
    """Read a draft folder, or that of an ordinary transformers model, as a drafter under its own law.

    Raises:
        ModelError: the folder is no causal language model.
        CheckpointError: its manifest or its list of head rows cannot be read.
    """
    draft = load_draft(path, dtype)
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        own_laws = OwnLaws.from_json(manifest.options.get("own_laws", {}))
        return CausalLMDrafter(draft, manifest.law, manifest.vocab_size, own_laws=own_laws)
    return CausalLMDrafter(draft, SamplingLaw(), Head(draft.model).num_columns)


def _token_maps(head: Head, vocab_size: int) -> tuple[Int[Tensor, " kept"], Int[Tensor, " vocab"]]:
    """Return the token of each row of the head, and the row of each token, -1 where there is none."""
    columns = torch.arange(min(head.num_columns, vocab_size), device=head.token_ids.device)
    tokens = head.token_ids if len(head.token_ids) else columns
    row_of = torch.full((vocab_size,), -1, device=tokens.device)
    row_of[tokens] = torch.arange(len(tokens), device=tokens.device)
    return tokens, row_of


def _groups(answers: Sequence[Answer]) -> Iterator[list[int]]:
    """Yield indices of answers of similar length, about _PASS_TOKENS tokens with padding at a time."""
    group: list[int] = []
    for index in sorted(range(len(answers)), key=lambda index: len(answers[index].token_ids)):
        if group and (len(group) + 1) * len(answers[index].token_ids) > _PASS_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _answer_ids(answer: Answer) -> Int[Tensor, " answer"]:
    return answer.token_ids[answer.start :]


def _to_length(probs: Float[Tensor, " guessed"], length: int) -> EmittedProbs:
    """Return the figures of an answer, without a guess where the draft's context had ended."""
    guessed = torch.arange(length) < len(probs)
    return EmittedProbs(functional.pad(probs.cpu(), (0, length - len(probs))), guessed)
