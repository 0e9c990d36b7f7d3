"""Text laid out so that nothing is padded or computed twice, and prompts cost no gradient.

A group of answers becomes a tree of tokens: texts that begin alike share their beginning, and a token attends
to its own ancestors only. The tree is cut in two. Its *stem*, the tokens before the first position that is
scored, is read without a gradient: keys and values of the prompt are constants of a step. Its *branches*, the
scored positions and all that follows them, are trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.law import SamplingLaw
from foredraft.distill.data import Example, Group, trained_law
from foredraft.distill.losses import UNSAYABLE, EventLaw
from foredraft.models.head import NO_IDS

# Stands for the token that the target emitted where it emitted none.
NOT_WRITTEN = -1


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the trees of several groups, side by side in one row.

    Attributes:
        token_ids, position_ids: Of every token.
        lengths: Tokens of each group, in order; may be 0.
        masks: For each group 0 where its tokens attend and -inf elsewhere; the columns are its stem and, in a row of
            branches, its branches behind that.
    """

    token_ids: Int[Tensor, " tokens"]
    position_ids: Int[Tensor, " tokens"]
    lengths: tuple[int, ...]
    masks: tuple[Float[Tensor, "..."], ...]

    def to(self, device: torch.device) -> "Row":
        """Return the row on another device."""
        masks = tuple(mask.to(device) for mask in self.masks)
        return Row(self.token_ids.to(device), self.position_ids.to(device), self.lengths, masks)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Pack:
    """Groups in two rows.

    Attributes:
        stems, branches: The two parts of their trees.
        read: Tokens of the branches whose hidden states guess the answer tokens, position by position.
        temperatures: Of the law that is taught at each of those positions.
        law: The target's law there, as far as it is stored.
        emitted_ids: The token that the target emitted there, or NOT_WRITTEN.
        laws: The laws that are taught.
        law_of: Which of them, by position.
    """

    stems: Row
    branches: Row
    read: Int[Tensor, " positions"]
    temperatures: Float[Tensor, " positions"]
    law: EventLaw
    emitted_ids: Int[Tensor, " positions"] = NO_IDS
    laws: tuple[SamplingLaw, ...] = (SamplingLaw(),)
    law_of: Int[Tensor, " positions"] = NO_IDS

    def to(self, device: torch.device) -> "Pack":
        """Return the pack on another device."""
        return Pack(
            self.stems.to(device),
            self.branches.to(device),
            self.read.to(device),
            self.temperatures.to(device),
            self.law.to(device),
            self.emitted_ids.to(device),
            self.laws,
            self.law_of.to(device),
        )


def pack(groups: Sequence[Group], row_of_token: Int[Tensor, " vocab"]) -> Pack:
    """Lay groups side by side; `row_of_token` gives the head's row of each token, or UNSAYABLE."""
    stems, branches, read = [], [], []
    start = 0
    for group in groups:
        tree = _Tree()
        for example in group:
            row, first = example.row, int(example.scored.min()) if len(example.scored) else 0
            tree.add(torch.cat([row.prompt_ids, row.answer_ids[:-1]]), len(row.prompt_ids) - 1 + first)
        stem, branch, nodes = tree.cut()
        stems.append(stem)
        branches.append(branch)
        read += [start + _scored(example, own) for example, own in zip(group, nodes, strict=True)]
        start += len(branch)
    examples = [example for group in groups for example in group]
    laws = list(dict.fromkeys(example.law for example in examples))
    counts = torch.tensor([len(positions) for positions in read])
    return Pack(
        _side_by_side(stems),
        _side_by_side(branches),
        torch.cat(read),
        torch.tensor([example.temperature for example in examples]).repeat_interleave(counts),
        _joined([trained_law(example, row_of_token) for example in examples]),
        torch.cat([_emitted(example) for example in examples]),
        tuple(laws),
        torch.tensor([laws.index(example.law) for example in examples]).repeat_interleave(counts),
    )


def _scored(example: Example, nodes: Int[Tensor, " nodes"]) -> Int[Tensor, " scored"]:
    """Return the nodes that are trained on, of those from the first one on."""
    return nodes[example.scored - example.scored.min()] if len(example.scored) else nodes


def _emitted(example: Example) -> Int[Tensor, " scored"]:
    token_ids = example.row.answer_ids[example.positions]
    return token_ids if example.is_targets else torch.full_like(token_ids, NOT_WRITTEN)


@final
class _Tree:
    """Token sequences that share their common beginnings. Nodes are numbered as they are added."""

    def __init__(self) -> None:
        self._token_ids = NO_IDS
        self._position_ids = NO_IDS
        self._paths: list[Tensor] = []
        self._starts: list[int] = []

    def add(self, token_ids: Int[Tensor, " tokens"], start: int) -> None:
        """Add one sequence whose positions from `start` on are scored."""
        shared = max((self._shared(path, token_ids) for path in self._paths), key=len, default=NO_IDS)
        fresh = torch.arange(len(token_ids) - len(shared)) + len(self._token_ids)
        self._token_ids = torch.cat([self._token_ids, token_ids[len(shared) :]])
        self._position_ids = torch.cat([self._position_ids, torch.arange(len(shared), len(token_ids))])
        self._paths.append(torch.cat([shared, fresh]))
        self._starts.append(start)

    def cut(self) -> tuple[Row, Row, list[Tensor]]:
        """Return the stem, the branches, and for each sequence the branch tokens that are scored."""
        trained, mask = self._trained(), self._mask()
        order = trained.int().argsort(stable=True)
        size = int((~trained).sum())
        mask = mask[order][:, order]
        stem, branches = order[:size], order[size:]
        places = order.argsort() - size
        return (
            Row(self._token_ids[stem], self._position_ids[stem], (size,), (mask[:size, :size],)),
            Row(self._token_ids[branches], self._position_ids[branches], (len(branches),), (mask[size:],)),
            [places[path[start:]] for path, start in zip(self._paths, self._starts, strict=True)],
        )

    def _trained(self) -> Bool[Tensor, " nodes"]:
        """Whether a node is scored or has an ancestor that is."""
        scored = torch.zeros(len(self._token_ids), dtype=torch.int)
        for path, start in zip(self._paths, self._starts, strict=True):
            scored[path[start:]] = 1
        for path in self._paths:
            scored[path] = scored[path].cummax(0).values
        return scored.bool()

    def _mask(self) -> Float[Tensor, "nodes nodes"]:
        mask = torch.full((len(self._token_ids), len(self._token_ids)), float("-inf"))
        for path in self._paths:
            mask[path[:, None], path] = torch.full((len(path), len(path)), float("-inf")).triu(1)
        return mask

    def _shared(self, path: Int[Tensor, " nodes"], token_ids: Int[Tensor, " tokens"]) -> Int[Tensor, " shared"]:
        length = min(len(path), len(token_ids))
        same = (self._token_ids[path[:length]] == token_ids[:length]).int().cumprod(0)
        return path[: int(same.sum())]


def _side_by_side(rows: Sequence[Row]) -> Row:
    return Row(
        torch.cat([row.token_ids for row in rows]),
        torch.cat([row.position_ids for row in rows]),
        sum((row.lengths for row in rows), ()),
        sum((row.masks for row in rows), ()),
    )


def _joined(laws: Sequence[EventLaw]) -> EventLaw:
    width = max(law.rows.shape[1] for law in laws)
    wide = [_widened(law, width) for law in laws]
    return EventLaw(
        torch.cat([law.rows for law in wide]),
        torch.cat([law.probs for law in wide]),
        torch.cat([law.emitted for law in wide]),
    )


def _widened(law: EventLaw, width: int) -> EventLaw:
    missing = width - law.rows.shape[1]
    if not missing:
        return law
    rows = torch.nn.functional.pad(law.rows, (0, missing), value=UNSAYABLE)
    probs = torch.cat([law.probs[:, :-1], law.probs.new_zeros(len(law), missing), law.probs[:, -1:]], -1)
    return replace(law, rows=rows, probs=probs)
