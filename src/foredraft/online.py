"""Adapting a draft from the command line: from buffers, or from prompts that are answered on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import UserError
from foredraft.core.progress import SILENT, Progress
from foredraft.distill.adapt.text import Text
from foredraft.drafters import load_drafter
from foredraft.generation import Asked, answer
from foredraft.models.target import LocalTarget
from foredraft.settings import DecodeSettings
from foredraft.steps import AdaptStep
from foredraft.trace.buffer import Buffer, BufferFolder, MemoryBuffer, buffer_info
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace
from foredraft.trainings import adapt_draft, served_texts

_TOP = 64
_ASKED, _DECODING = Asked(), DecodeSettings()
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts that are answered with the draft before it adapts.

    Attributes:
        prompts: Empty to adapt from buffers alone.
        asked: What answers may be.
        decoding: How they are written.
        keeps_text: False keeps what was gathered in memory: no text and no token id is written anywhere.
    """

    prompts: Sequence[Prompt] = ()
    asked: Asked = _ASKED
    decoding: DecodeSettings = _DECODING
    keeps_text: bool = True


def open_buffer(target: LocalTarget, asked: Asked, folder: Path, megabytes: float) -> Buffer:
    """Return the buffer in a folder, for answers of `target` as they are asked for; new if nothing is there."""
    return BufferFolder.open(folder, buffer_info(target, asked.law, _top(target)), round(megabytes * MEGABYTE))


def adapt_online(
    draft: Path,
    target: LocalTarget,
    requests: Requests,
    megabytes: float,
    old: Sequence[Trace],
    guards: Sequence[Trace],
    step: AdaptStep,
    out: Path,
    progress: Progress = SILENT,
) -> DraftManifest:
    """Answer what is asked, if anything is, with the draft, and let it learn from that and from its buffers.

    Without text the adapted weights and the manifest's counts are all that is written; see adapt_draft for the rest.

    Raises:
        UserError: there is nothing to learn from, or a buffer is named where no text may be kept.
    """
    folders = [Path(folder) for folder in step.buffer]
    if not requests.keeps_text and folders:
        raise UserError("--no-text keeps what is served in memory only: leave out --buffer, which would hold it.")
    if not requests.prompts:
        if not folders:
            raise UserError("Give --buffer with what was gathered, or --prompts to be answered and learnt from.")
        return adapt_draft(draft, target, served_texts(folders, target), old, guards, step, out, progress)
    if requests.keeps_text and len(folders) != 1:
        raise UserError("Name one --buffer for the answers to --prompts to be kept in, or --no-text to keep none.")
    info = buffer_info(target, requests.asked.law, _top(target))
    buffer = (
        BufferFolder.open(folders[0], info, round(megabytes * MEGABYTE))
        if folders
        else MemoryBuffer(info, round(megabytes * MEGABYTE))
    )
    serve(draft, target, requests, buffer, progress)
    return adapt_draft(draft, target, [Text.served(buffer)], old, guards, step, out, progress)


def serve(draft: Path, target: LocalTarget, requests: Requests, buffer: Buffer, progress: Progress = SILENT) -> None:
    """Answer prompts by speculative decoding with a draft, into a buffer."""
    drafter = load_drafter(str(draft), target)
    written = answer(target, drafter, requests.prompts, requests.asked, requests.decoding, buffer)
    with progress.task(f"answering {requests.asked.law}", float(len(requests.prompts)), "prompts") as task:
        for one in written:
            task.advance()
            task.note(f"{one.mean_tokens_per_call:.2f} tokens per call")


def _top(target: LocalTarget) -> int:
    return min(_TOP, len(target.tokenizer))
