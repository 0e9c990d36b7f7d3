"""General text in training: documents cut into windows, each of which is read alone.

What the target says of a window is asked live, or kept on disk in the form of a trace: read once, for all
candidates and epochs, as much of it as was ever asked for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.digest import digest_of
from foredraft.core.errors import CorpusError
from foredraft.core.law import SamplingLaw
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Reading
from foredraft.distill.data import Example, Group
from foredraft.distill.documents import Document, documents_digest, read_documents
from foredraft.distill.leaks import without_leaks
from foredraft.models.target import LocalTarget
from foredraft.steps import TextSettings
from foredraft.trace.prompts import Prompt
from foredraft.trace.rows import TraceRow, unread
from foredraft.trace.store import TEXT, Trace, TraceInfo, TraceWriter

_SHARD_WINDOWS = 32


@dataclass(frozen=True, slots=True)
class Texts:
    """Windows of text to train on, and the identity of what they were made from."""

    groups: tuple[Group, ...] = ()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of a document; the first one is context, the others are scored."""

    id: str
    document: str
    token_ids: Int[Tensor, " tokens"]

    def row(self, said: Reading | None = None) -> TraceRow:
        """Return the window as a row, with what a target said of it; without, it stores no law."""
        answer_ids = self.token_ids[1:]
        return TraceRow.of(
            said or unread(answer_ids),
            id=self.id,
            prompt_id=self.document,
            domain=TEXT,
            prompt_ids=self.token_ids[:1],
            answer_ids=answer_ids,
            finish_reason="length",
        )


def gather_texts(
    target: LocalTarget,
    settings: TextSettings,
    law: SamplingLaw,
    positions: int,
    folder: Path,
    prompts: Sequence[Prompt] = (),
    progress: Progress = SILENT,
) -> Texts:
    """Return windows with at least so many positions, or all there are, in an order drawn by the seed.

    Args:
        law: What is taught where the settings name no law.
        positions: What a training asks for; settings.tokens is the most.
        folder: Where what the target says is kept, under an identity of corpus, target, law and cut.
        prompts: What drafts are scored on; must not be in the text.

    Raises:
        CorpusError: there is no text, or evaluation prompts are in it.
        TraceError: what was kept has been changed.
    """
    documents = without_leaks(read_documents(settings), prompts, settings.leaks == "drop")
    law = (settings.law.law() if settings.law else law).stored
    positions = min(positions, settings.tokens) if settings.tokens else positions
    info = _info(target, law, documents, settings)
    if settings.laws == "cached":
        path = folder / digest_of(asdict(info))[:8]
        trace = keep_texts(target, documents, settings, info, positions, path, progress)
        return Texts(_groups(trace.rows(), law, is_live=False), trace.digest)
    windows = cut(documents, target.tokenizer, settings)
    rows: list[TraceRow] = []
    # As many as there are in the shards of what would be kept.
    for start in range(0, len(windows), _SHARD_WINDOWS):
        if sum(len(row.answer_ids) for row in rows) < positions:
            rows += [window.row() for window in windows[start : start + _SHARD_WINDOWS]]
    return Texts(_groups(rows, law, is_live=True), digest_of([asdict(info), len(rows)]))


def cut(documents: Sequence[Document], tokenizer: Any, settings: TextSettings) -> list[Window]:
    """Return the windows of all documents in an order drawn by the seed. None crosses a document's end.

    Where the tokenizer begins texts with a token of its own, every window begins with it.

    Raises:
        CorpusError: no document has two tokens.
    """
    windows = []
    for number, document in enumerate(documents):
        token_ids, begin = _tokens(document, tokenizer)
        size = settings.max_tokens - len(begin)
        for start in range(0, len(token_ids), size):
            ids = torch.tensor([*begin, *token_ids[start : start + size]], dtype=torch.long)
            if len(ids) > 1 + len(begin):
                windows.append(Window(f"{number}#{start}", str(number), ids))
    if not windows:
        raise CorpusError(f"No document of {len(documents)} has two tokens, such as {documents[0].where}.")
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(settings.seed))
    return [windows[index] for index in order.tolist()]


def keep_texts(
    target: LocalTarget,
    documents: Sequence[Document],
    settings: TextSettings,
    info: TraceInfo,
    positions: int,
    path: Path,
    progress: Progress = SILENT,
) -> Trace:
    """Return the first shards of the text that hold so many positions, or all; read by the target where they lack.

    A call that was killed goes on behind the last whole shard. What is returned does not depend on how much more
    was read for others.

    Raises:
        TraceError: `path` holds another text, or was changed.
    """
    writer = TraceWriter.open(path, info)
    if writer.info.num_tokens < positions and not writer.info.complete:
        windows = cut(documents, target.tokenizer, settings)
        done = float(writer.info.num_tokens)
        with progress.task(f"reading text {info.law}", max(float(positions), done), "positions", done) as task:
            for start in range(writer.info.num_rows, len(windows), _SHARD_WINDOWS):
                part = windows[start : start + _SHARD_WINDOWS]
                said = target.read([window.row().answer() for window in part], info.law, settings.top, task.advance)
                writer.append([window.row(reading) for window, reading in zip(part, said, strict=True)])
                if writer.info.num_tokens >= positions:
                    break
            if writer.info.num_rows == len(windows):
                writer.finish()
    shards, found = [], 0
    for shard in writer.info.shards:
        if found < positions:
            shards.append(shard)
            found += shard.tokens
    return Trace(path, replace(writer.info, shards=tuple(shards), complete=False))


def _groups(rows: Iterable[TraceRow], law: SamplingLaw, is_live: bool) -> tuple[Group, ...]:
    return tuple((Example.under(law, row, is_targets=False, is_live=is_live),) for row in rows)


def _info(target: LocalTarget, law: SamplingLaw, documents: Sequence[Document], settings: TextSettings) -> TraceInfo:
    return TraceInfo.of(
        target,
        law,
        settings.top,
        _SHARD_WINDOWS,
        max_new_tokens=settings.max_tokens,
        seed=settings.seed,
        prompts_digest=documents_digest(documents),
        provenance=TEXT,
    )


def _tokens(document: Document, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a document, and those that each of its windows begins with."""
    if document.messages and tokenizer.chat_template is not None:
        return list(tokenizer.apply_chat_template(list(document.messages), return_dict=False)), []
    token_ids = list(tokenizer(document.said, verbose=False)["input_ids"])
    begin = token_ids[:1] if tokenizer.bos_token_id is not None and token_ids[:1] == [tokenizer.bos_token_id] else []
    return token_ids[len(begin) :], begin
