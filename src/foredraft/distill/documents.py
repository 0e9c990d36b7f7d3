"""General text to learn from, document by document, from files or a dataset."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from foredraft.core.digest import digest_of
from foredraft.core.errors import CorpusError
from foredraft.trace.adapters import unpacked
from foredraft.trace.prompts import dataset_rows, jsonl_rows


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus.

    Attributes:
        where: Its file and line, or its row in a dataset.
        text: Plain text; empty for a chat.
        messages: A chat, in the form that chat templates read; empty for plain text.
    """

    where: str
    text: str
    messages: tuple[Mapping[str, Any], ...] = ()

    @property
    def said(self) -> str:
        """Return everything that is said in it."""
        return self.text or "\n\n".join(str(message["content"]) for message in self.messages)


@runtime_checkable
class TextSource(Protocol):
    """Where documents come from: files, or a split of a dataset."""

    @property
    def files(self) -> Sequence[str]: ...

    @property
    def dataset(self) -> str: ...

    @property
    def split(self) -> str: ...


def read_documents(source: TextSource) -> list[Document]:
    """Return the documents of all files, or of the dataset, in order; see stream_documents."""
    return list(stream_documents(source))


def stream_documents(source: TextSource) -> Iterator[Document]:
    """Yield the documents of all files, or of the dataset, in order; one file at a time is held in memory.

    Raises:
        CorpusError: a file is missing, or there is no text.
        PromptError: a row is wrong; names the file and the line.
    """
    any_yet = False
    for document in _every(source):
        if document.said.strip():
            any_yet = True
            yield document
    if not any_yet:
        raise CorpusError(f"There is no text in {source.dataset or ', '.join(source.files)}.")


def _every(source: TextSource) -> Iterator[Document]:
    if source.dataset:
        for row, where in dataset_rows(source.dataset, source.split):
            yield _document(row, where)
    for name in source.files:
        yield from _of_file(name)


def documents_digest(documents: Sequence[Document]) -> str:
    """Return the identity of what is said, order included; names of files do not count."""
    return digest_of([[document.text, list(document.messages)] for document in documents])


def _of_file(name: str) -> Iterator[Document]:
    path = Path(name)
    if not path.is_file():
        raise CorpusError(f"There is no text file {name}.")
    data = unpacked(path.read_bytes(), name)
    if ".jsonl" in path.suffixes:
        for row, where in jsonl_rows(data, name):
            yield _document(row, where)
        return
    try:
        yield Document(name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{name} is no text in UTF-8 ({error}).") from error


def _document(row: Any, where: str) -> Document:
    """Read one row: text, messages, or a prompt with its reference."""
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return Document(where, row["text"])
        if _is_chat(row.get("messages")):
            return Document(where, "", tuple(row["messages"]))
        said = [row.get("prompt"), row.get("reference")]
        if all(isinstance(part, str) for part in said):
            roles = ("user", "assistant")
            return Document(where, "", tuple({"role": r, "content": c} for r, c in zip(roles, said, strict=True)))
    raise CorpusError(f"{where}: a row of text has text, messages, or prompt and reference, all of them texts.")


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
