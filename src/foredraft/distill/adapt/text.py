"""Answers in memory, from a buffer or a trace, and their division into those that teach and those that score."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from foredraft.core.digest import digest_of
from foredraft.core.errors import TraceError
from foredraft.core.law import SamplingLaw
from foredraft.distill.data import Example, Group
from foredraft.trace.buffer import Buffer, Gathered, read_gathered
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace, TraceInfo


@dataclass(frozen=True, slots=True)
class Text:
    """Answers of one target under one law.

    Attributes:
        law: What they were drawn from.
        temperature: Of the law that is stored with them.
        rows: None of them empty.
        examined, accepted: Draft tokens tested while they were served, and those taken over; 0 where nobody looked.
    """

    law: SamplingLaw
    temperature: float
    rows: tuple[TraceRow, ...]
    examined: int = 0
    accepted: int = 0

    @staticmethod
    def of(trace: Trace, most: int = 0) -> "Text":
        """Return the answers of a trace, or `most` of them, drawn by the hash of their ids."""
        found = read_gathered(trace)
        chosen = nsmallest(most, found, key=lambda one: digest_of(one.row.id)) if most else list(found)
        return _text(trace.info, chosen)

    @staticmethod
    def served(buffer: Buffer) -> "Text":
        """Return what a buffer holds now."""
        return _text(buffer.info, list(buffer.gathered()))

    @property
    def num_tokens(self) -> int:
        """Answer tokens."""
        return sum(len(row.answer_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Division:
    """Texts of prompts that teach, and texts of other prompts that only score."""

    learn: tuple[Text, ...]
    held_out: tuple[Text, ...]


def divide(texts: Sequence[Text], share: float, seed: int) -> Division:
    """Hold out a share of the prompts, one at least, with all their answers; depends on the ids and the seed only.

    Raises:
        TraceError: there are fewer than two prompts.
    """
    prompts = sorted({row.prompt_id for text in texts for row in text.rows}, key=lambda one: digest_of([seed, one]))
    if len(prompts) < 2:
        raise TraceError(
            f"{len(prompts)} prompts are too few to learn from and to check on others: gather more answers first."
        )
    held = set(prompts[: min(len(prompts) - 1, max(1, round(share * len(prompts))))])
    return Division(_kept(texts, set(prompts) - held), _kept(texts, held))


def groups_of(texts: Sequence[Text]) -> list[Group]:
    """Return all answers grouped by prompt, in the order in which prompts first appear."""
    groups: dict[str, list[Example]] = {}
    for text in texts:
        for row in text.rows:
            groups.setdefault(row.prompt_id, []).append(Example(row, text.temperature))
    return [tuple(examples) for examples in groups.values()]


def _text(info: TraceInfo, found: Sequence[Gathered]) -> Text:
    rows = tuple(one.row for one in found if len(one.row.answer_ids))
    examined, accepted = sum(one.examined for one in found), sum(one.accepted for one in found)
    return Text(info.law, info.stored_law.temperature, rows, examined, accepted)


def _kept(texts: Sequence[Text], prompts: set[str]) -> tuple[Text, ...]:
    return tuple(replace(text, rows=tuple(row for row in text.rows if row.prompt_id in prompts)) for text in texts)
