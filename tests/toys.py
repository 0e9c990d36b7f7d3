"""Toy targets and drafters whose laws are tables: small enough to enumerate, fast enough to sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.law import GREEDY, SamplingLaw, law_probs, sample_index
from foredraft.core.proposal import Laws, Proposal
from foredraft.core.protocols import Answer, EmittedProbs


@dataclass(frozen=True, slots=True)
class MarkovSession:
    """A target session: logits depend on the last `order` tokens; the context must be that long."""

    table: Float[Tensor, "contexts vocab"]
    order: int = 1

    def logits(self, token_ids: Int[Tensor, " tokens"], last: int) -> Float[Tensor, "last vocab"]:
        rows = [_row(token_ids[:end], self.order, self.table.shape[1]) for end in _ends(token_ids, last)]
        return self.table[rows]

    def tree_logits(
        self, token_ids: Int[Tensor, " tokens"], nodes: Int[Tensor, " nodes"], parents: tuple[int, ...]
    ) -> Float[Tensor, "positions vocab"]:
        texts = [token_ids.tolist()]
        for token_id, parent in zip(nodes.tolist(), parents, strict=True):
            texts.append([*texts[parent + 1], token_id])
        return self.table[[_row(text, self.order, self.table.shape[1]) for text in texts]]

    def keep(self, path: tuple[int, ...]) -> None: ...


@dataclass(frozen=True, slots=True)
class MarkovDrafter:
    """A drafter whose law depends on the last `order` tokens. Draws from `uniform`, or from the generator."""

    table: Float[Tensor, "contexts vocab"]
    law: SamplingLaw = SamplingLaw()
    order: int = 1
    uniform: Callable[[], float] | None = None
    kind: str = "markov"
    num_parameters: int = 0
    num_bytes: int = 0

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    def bind(self, law: SamplingLaw) -> "MarkovDrafter":
        return replace(self, law=law)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        uniform = self.uniform or (lambda: float(torch.rand((), generator=generator, dtype=torch.float64)))
        token_ids, rows = context.tolist(), []
        for _ in range(k):
            row = _row(token_ids, self.order, self.vocab_size)
            rows.append(law_probs(self.table[row], self.law))
            token_ids.append(sample_index(rows[-1], uniform()))
        drawn = torch.tensor(token_ids[len(context) :], dtype=torch.long)
        if self.law.is_greedy:
            return Proposal.certain(drawn, self.vocab_size)
        return Proposal.chain(drawn, Laws.from_dense(torch.stack(rows)) if rows else Laws.one_hot(0, self.vocab_size))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        replayed = []
        for answer in answers:
            ends = range(answer.start, len(answer.token_ids))
            rows = [_row(answer.token_ids[:end], self.order, self.vocab_size) for end in ends]
            probs = law_probs(self.table[rows], self.law)
            given = probs.gather(-1, answer.token_ids[answer.start :, None]).squeeze(-1)
            replayed.append(EmittedProbs(given, torch.ones(len(given), dtype=torch.bool)))
        return replayed


@dataclass(frozen=True, slots=True)
class Lookup:
    """A deterministic drafter that copies what followed the latest earlier occurrence of the last token."""

    vocab_size: int
    law: SamplingLaw = GREEDY
    kind: str = "lookup"
    num_parameters: int = 0
    num_bytes: int = 0

    def bind(self, law: SamplingLaw) -> "Lookup":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        return Proposal.certain(torch.tensor(self._copied(context.tolist(), k), dtype=torch.long), self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        replayed = []
        for answer in answers:
            text = answer.token_ids.tolist()
            probs, guessed = torch.zeros(answer.num_tokens, k), torch.zeros(answer.num_tokens, k, dtype=torch.bool)
            for t, end in enumerate(range(answer.start, len(text))):
                for i, guess in enumerate(self._copied(text[:end], min(k, len(text) - end))):
                    probs[t, i], guessed[t, i] = float(guess == text[end + i]), True
            replayed.append(EmittedProbs(probs, guessed))
        return replayed

    @staticmethod
    def _copied(context: list[int], k: int) -> list[int]:
        for index in range(len(context) - 2, -1, -1):
            if context[index] == context[-1]:
                return context[index + 1 : index + 1 + k]
        return []


def sequence_law(
    session: MarkovSession,
    prompt: Int[Tensor, " tokens"],
    law: SamplingLaw,
    length: int,
    stop_ids: tuple[int, ...] = (),
) -> dict[tuple[int, ...], float]:
    """Return the probability of every answer of plain decoding, by multiplication."""
    answers = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for answer, mass in answers.items():
            if answer and answer[-1] in stop_ids:
                longer[answer] = longer.get(answer, 0.0) + mass
                continue
            context = torch.cat([prompt, torch.tensor(answer, dtype=torch.long)])
            for token_id, prob in enumerate(law_probs(session.logits(context, 1), law)[0].tolist()):
                if prob > 0.0:
                    longer[(*answer, token_id)] = mass * prob
        answers = longer
    return answers


def _ends(token_ids: Int[Tensor, " tokens"], last: int) -> range:
    return range(len(token_ids) - last + 1, len(token_ids) + 1)


def _row(token_ids: Sequence[int] | Int[Tensor, " tokens"], order: int, vocab_size: int) -> int:
    row = 0
    for token_id in token_ids[len(token_ids) - order :]:
        row = row * vocab_size + int(token_id)
    return row
