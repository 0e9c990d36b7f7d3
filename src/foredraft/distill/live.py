"""The target's law read while training, not from a trace: its body over the same pack, its head slice by slice."""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from foredraft.core.law import law_probs
from foredraft.distill.data import Group
from foredraft.distill.losses import UNSAYABLE, EventLaw
from foredraft.distill.packed import run_body
from foredraft.distill.packing import NOT_WRITTEN, Pack
from foredraft.models.head import Head


@final
class LiveTarget:
    """A target that is asked at each step. It never gets a gradient."""

    def __init__(self, model: PreTrainedModel, num_tokens: int, row_of_token: Int[Tensor, " vocab"]) -> None:
        """Keep what is asked for.

        Args:
            model: The target.
            num_tokens: Tokens of its tokenizer; further rows of its head are padding and never emitted.
            row_of_token: The row of the draft's head for each token, or UNSAYABLE.
        """
        self._model = model
        self._head = Head(model, num_tokens=num_tokens)
        missing = self._head.num_columns - len(row_of_token)
        self._row_of_token = pad(row_of_token, (0, max(missing, 0)), value=UNSAYABLE)

    @torch.no_grad()
    def laws(self, pack: Pack) -> "LiveLaws":
        """Return the target's laws where a pack is read. One pass over the pack now, the head when they are asked for.

        Raises:
            ModelError: the target cannot be run on packed text.
        """
        here = pack.to(self._model.device)
        hidden = run_body(self._model, here).last_hidden_state[0, here.read]
        return LiveLaws(hidden, self._head, here, self._row_of_token.to(hidden.device), pack.read.device)


@final
class LiveLaws:
    """Laws of a target at some positions, over every row of a draft's head; no tail.

    Mass on tokens without a row is left out, so that what is there sums to less than 1: it counts as rejected.
    Holds hidden states; [positions, vocab] of the slice that is asked for, and only while it is.
    """

    def __init__(
        self,
        hidden: Float[Tensor, "positions hidden"],
        head: Head,
        pack: Pack,
        row_of_token: Int[Tensor, " vocab"],
        device: torch.device,
    ) -> None:
        """Ask `head` about states of the target where `pack` is read; laws are given out on `device`."""
        self._hidden = hidden
        self._head = head
        self._pack = pack
        self._row_of_token = row_of_token
        self._token_ids = (row_of_token != UNSAYABLE).nonzero().flatten()
        self._device = device

    def to(self, device: torch.device) -> "LiveLaws":
        """Return the same laws, given out on another device."""
        return LiveLaws(self._hidden, self._head, self._pack, self._row_of_token, device)

    def __len__(self) -> int:
        return len(self._hidden)

    @torch.no_grad()
    def __getitem__(self, positions: slice) -> EventLaw:
        """Return the law over all rows at some positions; an emitted token without a row is the (empty) tail."""
        probs = self._probs(positions)
        emitted = self._pack.emitted_ids[positions]
        rows = self._row_of_token[emitted.where(emitted != NOT_WRITTEN, probs.argmax(-1))]
        token_ids, num_rows = self._token_ids, len(self._token_ids)
        token_ids = token_ids[token_ids < probs.shape[1]]
        kept = probs if len(token_ids) == probs.shape[1] else probs[:, token_ids]
        kept = pad(kept, (0, num_rows - kept.shape[1]))
        return EventLaw.full(kept, rows.where(rows != UNSAYABLE, num_rows)).to(self._device)

    def _probs(self, positions: slice) -> Float[Tensor, "positions vocab"]:
        logits = self._head.logits(self._hidden[positions])
        if len(self._pack.laws) == 1:
            return law_probs(logits, self._pack.laws[0])
        law_of, probs = self._pack.law_of[positions], torch.empty_like(logits)
        for number, law in enumerate(self._pack.laws):
            chosen = law_of == number
            probs[chosen] = law_probs(logits[chosen], law)
        return probs


def is_live(group: Group) -> bool:
    """Return whether a group's laws must be asked for."""
    return any(example.is_live for example in group)


def by_source(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the groups whose laws are stored, then those whose laws must be asked for; nothing where there are none."""
    for live in (False, True):
        if part := [group for group in groups if is_live(group) == live]:
            yield part
