"""Prompts: what the target is asked, read from JSONL, a dataset, or the set that the package carries."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor

from foredraft.core.digest import digest_of
from foredraft.core.errors import PromptError
from foredraft.settings import SHIPPED_PROMPTS, PromptSource
from foredraft.trace.adapters import adapted, unpacked

NO_DOMAIN = "unlabelled"

_FORMS = ("prompt", "messages", "turns")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a target is asked, in one turn or several.

    Attributes:
        id: Unique in its source.
        domain: Label that reports group by.
        messages: The chat up to the first answer, in the form that chat templates read; ends with a user or tool.
        later_turns: What the user says after each answer, to be answered in turn.
        tools: Function descriptions, handed to the chat template as they are.
        chat_template_kwargs: Further variables of the chat template, such as enable_thinking.
    """

    id: str
    domain: str
    messages: tuple[Mapping[str, Any], ...]
    later_turns: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """Answers that it asks for."""
        return 1 + len(self.later_turns)

    @property
    def text(self) -> str:
        """What tells it from other prompts: all that is said in it, system messages left out."""
        said = [_text_of(message) for message in self.messages if message["role"] != "system"]
        return "\n\n".join([*said, *self.later_turns])


def read_prompts(source: PromptSource) -> list[Prompt]:
    """Return the prompts of one source that lie in its domains, in file order.

    Raises:
        PromptError: the source is missing or empty, or a row is wrong; names the file and the line.
    """
    if source.dataset:
        name, rows = source.dataset, dataset_rows(source.dataset, source.split)
    elif source.file == SHIPPED_PROMPTS:
        name, rows = source.file, jsonl_rows(files("foredraft").joinpath("data/prompts.jsonl").read_bytes(), "shipped")
    else:
        name, rows = source.file, jsonl_rows(unpacked(file_bytes(Path(source.file)), source.file), source.file)
    prompts = _with_own_ids((parse_prompt(row, where), where) for row, where in rows)
    if not prompts:
        raise PromptError(f"{name} holds no prompts.")
    domains = {prompt.domain for prompt in prompts}
    if unknown := [domain for domain in source.domains if domain not in domains]:
        raise PromptError(f"{name} has no domain {unknown[0]!r}; it has: {', '.join(sorted(domains))}.")
    return [prompt for prompt in prompts if not source.domains or prompt.domain in source.domains]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return the identity of a list of prompts, order included."""
    return digest_of([asdict(prompt) for prompt in prompts])


def render(prompt: Prompt, tokenizer: Any, answers: Sequence[str] = ()) -> Int[Tensor, " tokens"]:
    """Return the token ids that the target continues after `answers` of earlier turns.

    A tokenizer with a chat template gets the messages, tools and template variables; one without gets
    what was said, as plain text.

    Raises:
        PromptError: the template refuses the prompt.
    """
    messages = list(prompt.messages)
    for answer, turn in zip(answers, prompt.later_turns, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    if tokenizer.chat_template is None:
        token_ids = tokenizer("\n\n".join(_text_of(message) for message in messages))["input_ids"]
        return torch.tensor(token_ids, dtype=torch.long)
    try:
        token_ids = tokenizer.apply_chat_template(
            messages,
            tools=list(prompt.tools) or None,
            add_generation_prompt=True,
            return_dict=False,
            **prompt.chat_template_kwargs,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise PromptError(f"The chat template refuses prompt {prompt.id!r}: {' '.join(str(error).split())}.") from error
    return torch.tensor(token_ids, dtype=torch.long)


def ignores_settings(prompt: Prompt, tokenizer: Any) -> bool:
    """Return whether the prompt carries tools or template variables that change nothing of what the target reads."""
    if not (prompt.tools or prompt.chat_template_kwargs):
        return False
    bare = replace(prompt, tools=(), chat_template_kwargs={})
    return torch.equal(render(prompt, tokenizer), render(bare, tokenizer))


def file_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise PromptError(f"There is no prompt file {path}.")
    return path.read_bytes()


def jsonl_rows(data: bytes, name: str) -> Iterator[tuple[Any, str]]:
    """Yield each row with its place, such as prompts.jsonl:12."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        where = f"{name}:{number}"
        try:
            text = line.decode("utf-8").strip()
            if text:
                yield json.loads(text), where
        except ValueError as error:
            raise PromptError(f"{where}: no JSON object in UTF-8 ({error}).") from error


def dataset_rows(name: str, split: str) -> Iterator[tuple[Any, str]]:
    """Yield each row with its place. A dataset fills absent fields with null; they are taken out again."""
    from datasets import load_dataset  # takes a second to import, which a prompt file need not pay

    try:
        dataset = load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise PromptError(f"The dataset {name} cannot be read: {' '.join(str(error).split())}") from error
    for number, row in enumerate(dataset, start=1):
        yield _without_nulls(row), f"{name}, row {number}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def parse_prompt(row: Any, where: str) -> Prompt:
    """Check one row; its id is empty where it has none."""
    row = adapted(row, where)
    _require(isinstance(row, dict), where, "a row must be an object with prompt, messages or turns")
    given = [form for form in _FORMS if form in row]
    _require(
        len(given) == 1, where, f"a row has exactly one of {', '.join(_FORMS)}, not {' and '.join(given) or 'none'}"
    )
    identity, domain = row.get("id", ""), row.get("domain", NO_DOMAIN)
    _require(isinstance(identity, str | int), where, f"id must be a text or a number, not {identity!r}")
    _require(isinstance(domain, str) and bool(domain), where, f"domain must be a text, not {domain!r}")
    tools, kwargs = row.get("tools", []), row.get("chat_template_kwargs", {})
    _require(_is_list_of(tools, dict), where, "tools must be a list of objects")
    _require(isinstance(kwargs, dict), where, "chat_template_kwargs must be an object")
    messages, later = _messages(row, where)
    return Prompt(str(identity), domain, messages, later, tuple(tools), kwargs)


def _messages(row: dict[str, Any], where: str) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Return the chat up to the first answer, and the user's later turns."""
    if "messages" in row:
        messages = row["messages"]
        _require(_is_list_of(messages, dict) and bool(messages), where, "messages must be a list of objects, not empty")
        for message in messages:
            _require(isinstance(message.get("role"), str), where, "every message has a role")
            said = isinstance(message.get("content"), str | list) or "tool_calls" in message
            _require(said, where, f"the message of the {message['role']} has no content")
        last = messages[-1]["role"]
        _require(last not in ("assistant", "system"), where, f"messages must end with the user, not with the {last}")
        _require(bool(_text_of(messages[-1]).strip()), where, "the last message is empty")
        return tuple(messages), ()
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    _require(_is_list_of(turns, str) and bool(turns), where, "prompt is a text, turns a list of texts, not empty")
    _require(all(turn.strip() for turn in turns), where, "the prompt is empty")
    return ({"role": "user", "content": turns[0]},), tuple(turns[1:])


def _with_own_ids(prompts: Iterable[tuple[Prompt, str]]) -> list[Prompt]:
    """Give prompts without an id one that depends on what they say; refuse an id that was given twice."""
    kept: dict[str, Prompt] = {}
    repeats: Counter[str] = Counter()
    for prompt, where in prompts:
        content = content_digest(prompt, where)
        repeats[content] += not prompt.id
        identity = prompt.id or (content if repeats[content] == 1 else f"{content}-{repeats[content]}")
        _require(identity not in kept, where, f"the id {identity!r} was given before; ids must differ")
        kept[identity] = replace(prompt, id=identity)
    return list(kept.values())


def content_digest(prompt: Prompt, where: str) -> str:
    try:
        return digest_of(asdict(prompt))
    except ValueError as error:
        raise PromptError(f"{where}: the row holds half a character or NaN ({error}).") from error


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(part, kind) for part in value)


def _require(holds: bool, where: str, fault: str) -> None:
    if not holds:
        raise PromptError(f"{where}: {fault}.")
