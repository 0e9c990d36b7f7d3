"""Trees of draft tokens: several guesses for one position, verified in one target call.

Siblings are tested in turn; each test uses what the failed ones before it left of the target's law (recursive
rejection, MATHS 7). Where siblings are drawn without replacement, each one's law is the draft's without its elder
siblings, renormalised.
"""

import heapq
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import CapabilityError, UserError
from foredraft.core.law import GREEDY, SamplingLaw, sample_index
from foredraft.core.proposal import ROOT, Laws, Proposal
from foredraft.core.protocols import Answer, Drafter, EmittedProbs, TreeGrower
from foredraft.decoding.rules import Uniform, acceptance_probability, residual

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TreeVerdict:
    """What became of a tree.

    Attributes:
        path: Indices of the accepted tokens, from the root down.
        next_token: The token after them: from the residual, or the bonus below a leaf.
        examined: Levels at which a token was tested.
    """

    path: tuple[int, ...]
    next_token: int
    examined: int


def verify_tree(target_probs: Float[Tensor, "positions vocab"], proposal: Proposal, uniform: Uniform) -> TreeVerdict:
    """Walk down a tree as long as one of the children is accepted; a chain is the case of one child each.

    Args:
        target_probs: The target's processed law after the context (row 0) and after each draft token i (row i + 1).
        proposal: Its laws are those that the tokens were drawn from, given their elder siblings.
        uniform: Returns a fresh uniform in [0, 1) at each call.

    Source: Chen et al. 2024 (arXiv 2402.12374), Algorithm 2; Jeon et al. 2024 (arXiv 2402.14160).
    """
    path: list[int] = []
    at, examined = ROOT, 0
    while True:
        law = target_probs[at + 1]
        children = [index for index, parent in enumerate(proposal.parents) if parent == at]
        examined += bool(children)
        for index in children:
            token_id = int(proposal.token_ids[index])
            if uniform() < acceptance_probability(law, proposal, index, token_id):
                at = index
                path.append(index)
                break
            rest = residual(law, proposal.laws.probs(index, token_id))
            law = rest / rest.sum()
        else:
            return TreeVerdict(tuple(path), sample_index(law, uniform()), examined)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree grows: the most probable open node first, until the budget is used up.

    Attributes:
        max_nodes: Draft tokens in all.
        width: Children of the context.
        width_decay: What the width is multiplied by at each level; at least one child remains.
        min_relative: A node whose path is less probable than this share of its best sibling's gets no children.
    """

    max_nodes: int = 16
    width: int = 4
    width_decay: float = 0.5
    min_relative: float = 0.0

    def __post_init__(self) -> None:
        if self.max_nodes < 1 or self.width < 1:
            raise UserError(f"A tree needs a node and a child, not {self.max_nodes} and {self.width}.")
        if not (0.0 < self.width_decay <= 1.0 and 0.0 <= self.min_relative <= 1.0):
            raise UserError("width_decay must lie in (0, 1] and min_relative in [0, 1].")

    def children(self, depth: int) -> int:
        """Return how many children a node at `depth` gets; the context has depth 0."""
        return max(1, round(self.width * self.width_decay**depth))

    def num_nodes(self, depth: int) -> int:
        """Return how many nodes a tree of `depth` levels has at most."""
        level, nodes = 1, 0
        for above in range(depth):
            level *= self.children(above)
            nodes += level
            if nodes >= self.max_nodes:
                return self.max_nodes
        return nodes


@final
class TreeDrafter:
    """Grows trees from the laws of another drafter, or lets it grow them if it can; then only the budget counts.

    A greedy law gives the most probable children (one-hot guesses); any other law draws them without replacement.
    Which node gets children depends on tokens already in the tree and on the shape; no drawn token is thrown away.
    """

    kind = "tree"

    def __init__(self, drafter: Drafter, shape: TreeShape, draws: bool = True) -> None:
        """Grow trees of `shape`; without `draws` the most probable children stay, whatever law is bound."""
        self.draws = draws
        self.drafter = drafter if draws else drafter.bind(GREEDY)
        self.shape = shape
        self._source = self.drafter.bind(SamplingLaw()) if self.law.is_greedy else self.drafter

    @property
    def law(self) -> SamplingLaw:
        return self.drafter.law

    @property
    def vocab_size(self) -> int:
        return self.drafter.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.drafter.num_parameters

    @property
    def num_bytes(self) -> int:
        return self.drafter.num_bytes

    def bind(self, law: SamplingLaw) -> "TreeDrafter":
        return TreeDrafter(self.drafter.bind(law), self.shape, self.draws)

    def num_nodes(self, k: int) -> int:
        return self.shape.max_nodes if isinstance(self.drafter, TreeGrower) else self.shape.num_nodes(k)

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        """Return a tree of depth k at most."""
        if isinstance(self.drafter, TreeGrower):
            return self.drafter.propose_tree(context, k, self.shape.max_nodes)
        return self._grown(context, k, generator)

    def _grown(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        tokens: list[int] = []
        laws: list[Tensor] = []
        parents: list[int] = []
        open_nodes: list[tuple[float, int, int]] = [(0.0, ROOT, 0)]  # minus log-probability of the path, node, depth
        while open_nodes and len(tokens) < self.shape.max_nodes:
            surprise, node, depth = heapq.heappop(open_nodes)
            path = _path(node, parents)
            text = torch.cat([context, torch.tensor([tokens[index] for index in path]).to(context)])
            step = self._source.propose(text, 1, generator)
            if depth == k or len(step) == 0:
                continue
            law = step.laws.probs(0, int(step.token_ids[0]))
            room = min(self.shape.children(depth), self.shape.max_nodes - len(tokens))
            born = self._children(law, room, generator)
            best = max(float(law[token_id]) for token_id, _ in born)
            for token_id, child_law in born:
                tokens.append(token_id)
                laws.append(child_law)
                parents.append(node)
                chance = float(law[token_id])
                if chance > 0.0 and chance >= self.shape.min_relative * best:
                    heapq.heappush(open_nodes, (surprise - math.log(chance), len(tokens) - 1, depth + 1))
        token_ids = torch.tensor(tokens, dtype=torch.long).to(context)
        one_hot = self.law.is_greedy or not tokens
        rows = Laws.one_hot(len(tokens), self.vocab_size) if one_hot else Laws.from_dense(torch.stack(laws))
        return Proposal(token_ids, rows, tuple(parents))

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        """Return, by block start, whether the emitted token was among the children; grows one tree a position.

        Raises:
            CapabilityError: the tree is sampled: only literal decoding scores it (MATHS 4).
        """
        if not self.law.is_greedy:
            raise CapabilityError(
                "A drawn tree cannot be replayed: what its siblings leave depends on tokens that were not emitted. "
                "Decode with it literally (foredraft generate), or score the tree of the most probable children."
            )
        return [self._replayed(answer, k) for answer in answers]

    def _replayed(self, answer: Answer, k: int) -> EmittedProbs:
        probs, guessed = torch.zeros(answer.num_tokens, k), torch.zeros(answer.num_tokens, k, dtype=torch.bool)
        for start in range(answer.num_tokens):
            end = answer.start + start
            tree, node = self.propose(answer.token_ids[:end], k, torch.Generator()), ROOT
            for offset in range(min(k, answer.num_tokens - start)):
                children = [index for index, parent in enumerate(tree.parents) if parent == node]
                guessed[start, offset] = bool(children)
                found = [index for index in children if tree.token_ids[index] == answer.token_ids[end + offset]]
                if not found:
                    break
                probs[start, offset], node = 1.0, found[0]
        return EmittedProbs(probs, guessed)

    def _children(
        self, law: Float[Tensor, " vocab"], count: int, generator: torch.Generator
    ) -> list[tuple[int, Float[Tensor, " vocab"]]]:
        if self.law.is_greedy:
            best = law.topk(min(count, int((law > 0).sum()))).indices.tolist()
            return [(token_id, law) for token_id in best]
        born = []
        for _ in range(count):
            if not bool((law > 0).any()):
                break
            law = law / law.sum()
            token_id = sample_index(law, float(torch.rand((), generator=generator, dtype=torch.float64)))
            born.append((token_id, law))
            law = law.index_fill(0, torch.tensor([token_id], device=law.device), 0.0)
        return born


def tree(
    drafter: Drafter,
    load: Callable[[str], Drafter],
    max_nodes: int = 16,
    width: int = 4,
    width_decay: float = 0.5,
    min_relative: float = 0.0,
    drawn: bool = False,
) -> TreeDrafter:
    """Return what `+tree:...` makes of a drafter; `drawn` draws the children instead of taking the most probable."""
    shape = TreeShape(max_nodes, width, width_decay, min_relative)
    if isinstance(drafter, TreeGrower) and (shape != TreeShape(max_nodes) or drawn):
        _log.warning("%s grows its trees itself: only max_nodes has an effect on them.", drafter.kind)
    return TreeDrafter(drafter, shape, drawn)


def _path(node: int, parents: Sequence[int]) -> list[int]:
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
