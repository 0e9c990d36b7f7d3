"""Prompts: every form is read, every fault is named with its place, and the template gets what the row says."""

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import PromptError
from foredraft.settings import SHIPPED_PROMPTS, PromptSource
from foredraft.trace.near import near_duplicates
from foredraft.trace.prompts import NO_DOMAIN, Prompt, ignores_settings, prompts_digest, read_prompts, render
from tests.tiny import tiny_tokenizer

TALKATIVE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% if enable_thinking %}THINK\n{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'boss' %}{{ raise_exception('No bosses here') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write(path: Path, *rows: Any) -> PromptSource:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return PromptSource(file=str(path))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_every_form_is_read(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Yes?"},
        user("Why?"),
    ]
    tools, kwargs = [{"type": "function", "function": {"name": "f"}}], {"enable_thinking": False}
    source = write(
        tmp_path / "p.jsonl",
        {"id": "one", "domain": "math", "prompt": "1 + 1?"},
        {"id": 2, "turns": ["Hello", "And then?"], "reference": ["ignored"]},
        "",
        {"id": "three", "messages": chat, "tools": tools, "chat_template_kwargs": kwargs},
    )
    assert read_prompts(source) == [
        Prompt("one", "math", (user("1 + 1?"),)),
        Prompt("2", NO_DOMAIN, (user("Hello"),), ("And then?",)),
        Prompt("three", NO_DOMAIN, tuple(chat), (), tuple(tools), kwargs),
    ]


def test_text_is_all_that_is_said_but_for_the_system() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]}
    prompt = Prompt(
        "p", "d", ({"role": "system", "content": "s"}, user("a"), {"role": "tool", "content": "t"}, parts), ("z",)
    )
    assert prompt.text == "a\n\nt\n\nlook\n\nz"
    assert prompt.num_turns == 2


def test_ids_depend_on_content_and_stay_apart(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a", "domain": "x"}]
    ids = [prompt.id for prompt in read_prompts(write(tmp_path / "p.jsonl", *rows))]
    assert len(set(ids)) == 4
    assert ids[2] == f"{ids[0]}-2"
    assert [prompt.id for prompt in read_prompts(write(tmp_path / "q.jsonl", rows[1], rows[0]))] == [ids[1], ids[0]]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("{", "no JSON object in UTF-8"),
        ('"text"', "a row must be an object"),
        ({}, "exactly one of prompt, messages, turns, not none"),
        ({"prompt": "a", "turns": ["a"]}, "not prompt and turns"),
        ({"text": "a"}, "exactly one of"),
        ({"prompt": 3}, "prompt is a text"),
        ({"prompt": None}, "prompt is a text"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"turns": []}, "turns a list of texts, not empty"),
        ({"turns": "abc"}, "turns a list of texts"),
        ({"turns": ["a", ""]}, "the prompt is empty"),
        ({"messages": []}, "messages must be a list of objects, not empty"),
        ({"messages": ["a"]}, "messages must be a list of objects"),
        ({"messages": [{"content": "a"}]}, "every message has a role"),
        ({"messages": [{"role": "user"}]}, "the message of the user has no content"),
        ({"messages": [user("")]}, "the last message is empty"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "end with the user, not with the assistant"),
        ({"prompt": "a", "id": ["x"]}, "id must be a text or a number"),
        ({"prompt": "a", "id": "first"}, "the id 'first' was given before"),
        ({"prompt": "a", "domain": ""}, "domain must be a text"),
        ({"prompt": "a", "tools": {"name": "f"}}, "tools must be a list of objects"),
        ({"prompt": "a", "chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        ('{"prompt": "half \\ud83d"}', "half a character"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, fault: str) -> None:
    source = write(tmp_path / "p.jsonl", {"id": "first", "prompt": "fine"}, "", row)
    with pytest.raises(PromptError) as error:
        read_prompts(source)
    assert str(error.value).startswith(f"{tmp_path / 'p.jsonl'}:3: ")
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_empty_and_undecodable_files(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"There is no prompt file .*none\.jsonl"):
        read_prompts(PromptSource(file=str(tmp_path / "none.jsonl")))
    with pytest.raises(PromptError, match="There is no prompt file"):
        read_prompts(PromptSource(file=str(tmp_path)))
    for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        with pytest.raises(PromptError, match=r"empty\.jsonl holds no prompts"):
            read_prompts(PromptSource(file=str(tmp_path / "empty.jsonl")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\r\n{"prompt": "caf\xe9"}\r\n')
    with pytest.raises(PromptError, match=r"latin\.jsonl:2: no JSON object in UTF-8"):
        read_prompts(PromptSource(file=str(tmp_path / "latin.jsonl")))


def test_a_mark_of_byte_order_and_line_separators_inside_texts_are_read(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False)
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + row.encode() + b"\r\n" + row.encode())
    assert [prompt.text for prompt in read_prompts(PromptSource(file=str(tmp_path / "p.jsonl")))] == [
        "one\u2028two"
    ] * 2


def test_domains_filter_and_must_exist(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", *({"prompt": f"{d}", "domain": d} for d in "abcab"))
    source = PromptSource(file=str(tmp_path / "p.jsonl"), domains=["a", "c"])
    assert [prompt.domain for prompt in read_prompts(source)] == ["a", "c", "a"]
    with pytest.raises(PromptError, match="no domain 'z'; it has: a, b, c"):
        read_prompts(PromptSource(file=str(tmp_path / "p.jsonl"), domains=["a", "z"]))


def test_a_folder_that_datasets_reads_gives_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = (
        {"id": "a", "domain": "x", "prompt": "hello"},
        {"id": "b", "domain": "x", "messages": [user("hi")], "tools": [{"name": "f", "strict": True}, {"name": "g"}]},
    )
    by_file = read_prompts(write(folder / "p.jsonl", *rows))
    assert read_prompts(PromptSource(dataset=str(folder))) == by_file
    with pytest.raises(PromptError, match='cannot be read: Unknown split "nope"'):
        read_prompts(PromptSource(dataset=str(folder), split="nope"))
    with pytest.raises(PromptError, match=r"The dataset .*nowhere cannot be read"):
        read_prompts(PromptSource(dataset=str(tmp_path / "nowhere")))


def test_the_digest_depends_on_content_and_order() -> None:
    one, two = Prompt("1", "d", (user("a"),)), Prompt("2", "d", (user("b"),))
    digests = {
        prompts_digest(prompts)
        for prompts in ([one], [one, two], [two, one], [Prompt("1", "d", (user("a"),), tools=({"name": "f"},))])
    }
    assert len(digests) == 4


def test_the_template_gets_messages_turns_tools_and_variables() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TALKATIVE
    prompt = Prompt("p", "d", (user("hi"),), ("go on",), ({"name": "f"},), {"enable_thinking": True})
    text = tokenizer.decode(render(prompt, tokenizer, ["hello"]))
    assert text == 'TOOLS [{"name": "f"}]\nTHINK\nuser: hi\nassistant: hello\nuser: go on\nassistant:'
    assert tokenizer.decode(render(Prompt("p", "d", (user("hi"),)), tokenizer)) == "user: hi\nassistant:"


def test_a_template_that_refuses_is_a_prompt_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TALKATIVE
    with pytest.raises(PromptError, match="The chat template refuses prompt 'p': No bosses here"):
        render(Prompt("p", "d", ({"role": "boss", "content": "now"},)), tokenizer)


def test_without_a_template_the_text_itself_is_read() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    prompt = Prompt("p", "d", (user("Once upon"),), ("and",))
    assert tokenizer.decode(render(prompt, tokenizer)) == "Once upon"
    assert tokenizer.decode(render(prompt, tokenizer, ["a time"])) == "Once upon\n\na time\n\nand"


def test_settings_that_change_nothing_are_noticed() -> None:
    plain, talkative = tiny_tokenizer(), tiny_tokenizer()
    talkative.chat_template = TALKATIVE
    for prompt in (
        Prompt("p", "d", (user("hi"),), tools=({"name": "f"},)),
        Prompt("p", "d", (user("hi"),), chat_template_kwargs={"enable_thinking": True}),
    ):
        assert ignores_settings(prompt, plain)
        assert not ignores_settings(prompt, talkative)
    assert not ignores_settings(Prompt("p", "d", (user("hi"),)), plain)


def test_the_shipped_set_is_varied_short_free_to_use_and_without_repeats() -> None:
    prompts = read_prompts(PromptSource(file=SHIPPED_PROMPTS))
    by_domain = Counter(prompt.domain for prompt in prompts)
    assert len(prompts) >= 590
    assert len(by_domain) == 6
    assert min(by_domain.values()) >= 0.7 * max(by_domain.values())
    assert max(len(prompt.text) for prompt in prompts) < 1000
    assert len(set(near_duplicates([prompt.text for prompt in prompts]))) == len(prompts)
    data = files("foredraft").joinpath("data")
    rows = [json.loads(line) for line in data.joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["license"] for row in rows} == {"Apache-2.0", "MIT", "CC-BY-4.0"}
    notice = data.joinpath("NOTICE").read_text(encoding="utf-8")
    for row in rows:
        assert row["source"].split()[0].rsplit("/", 1)[-1].removeprefix("pypi:") in notice
