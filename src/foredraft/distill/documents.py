"""General text to learn from, document by document, from files or a dataset."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.core.digest import digest_of
from foredraft.core.errors import CorpusError
from foredraft.steps import TextSettings
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


def read_documents(settings: TextSettings) -> list[Document]:
    """Return the documents of all files, or of the dataset, in order.

    Raises:
        CorpusError: a file is missing, or there is no text.
        PromptError: a row is wrong; names the file and the line.
    """
    if settings.dataset:
        documents = [_document(row, where) for row, where in dataset_rows(settings.dataset, settings.split)]
    else:
        documents = [document for name in settings.files for document in _of_file(name)]
    documents = [document for document in documents if document.said.strip()]
    if not documents:
        raise CorpusError(f"There is no text in {settings.dataset or ', '.join(settings.files)}.")
    return documents


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
