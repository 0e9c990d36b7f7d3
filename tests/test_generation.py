"""Answering in words: every way of drafting, files that can be interrupted, ends as transformers sees them."""

import json
from pathlib import Path

import pytest
import torch

from foredraft import generate as public_generate
from foredraft.core.errors import CapabilityError, OutputError, UnknownNameError, UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.drafters import load_drafter
from foredraft.generation import Asked, Generated, answer, answer_file, as_prompt
from foredraft.models.target import LocalTarget, load_target
from foredraft.settings import DecodeSettings
from foredraft.trace.prompts import Prompt

ASKED = Asked(max_new_tokens=12)


@pytest.fixture(scope="module")
def target(shallow_target_folder: Path) -> LocalTarget:
    return load_target(str(shallow_target_folder), "float32")


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{number}", "none", ({"role": "user", "content": text},)) for number, text in enumerate(texts)]


def only(target: LocalTarget, spec: str, asked: Asked = ASKED, **settings: object) -> Generated:
    drafter = load_drafter(spec, target) if spec else None
    (found,) = answer(target, drafter, prompts("The cat"), asked, DecodeSettings(**settings))
    return found


@pytest.mark.parametrize(
    ("wrap", "settings"),
    [
        ("", {}),
        ("", {"rule": "block"}),
        ("", {"length": "window", "fallback_after": 1, "pause": 2}),
        ("", {"length": "marginal", "target_growth": 0.1}),
        ("+tree:max_nodes=6,width=2", {"k": 3}),
        ("+confident:threshold=0.1", {}),
        ("+confident:threshold=0.1+tree:max_nodes=4", {}),
        ("+cascade:middle=DRAFT,inner_k=2", {}),
    ],
)
def test_every_way_of_drafting_gives_the_plain_greedy_text(
    wrap: str, settings: dict[str, object], target: LocalTarget, tiny_draft_folder: Path
) -> None:
    plain = only(target, "")
    found = only(target, f"{tiny_draft_folder}{wrap.replace('DRAFT', str(tiny_draft_folder))}", **settings)
    assert (found.text, found.tokens) == (plain.text, plain.tokens)
    assert plain.target_calls == plain.tokens


def test_a_drawn_tree_draws_and_a_deterministic_one_does_not(target: LocalTarget, tiny_draft_folder: Path) -> None:
    for drawn in (True, False):
        drafter = load_drafter(f"{tiny_draft_folder}+tree:drawn={str(drawn).lower()}", target).bind(SamplingLaw())
        proposal = drafter.propose(torch.tensor([5, 6, 7]), 3, torch.Generator().manual_seed(0))
        assert proposal.laws.is_one_hot(0) is not drawn


@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        ("+tree:nodes=3", UserError, "tree takes max_nodes, width, width_decay, min_relative, drawn, not 'nodes'"),
        ("+tree:max_nodes=0", UserError, "A tree needs a node"),
        ("+confident:threshold=2", UserError, "lie in"),
        ("+tree:max_nodes=many", UserError, "max_nodes is a whole number, not 'many'"),
        ("+cascade", UserError, "needs middle"),
        ("+cascade:middle=prompt-lookup", CapabilityError, "no language model"),
        ("+treee", UnknownNameError, "Unknown drafter"),
    ],
)
def test_ways_that_do_not_exist_are_refused(
    wrap: str, error: type[Exception], message: str, target: LocalTarget, tiny_draft_folder: Path
) -> None:
    with pytest.raises(error, match=message):
        load_drafter(f"prompt-lookup{wrap}" if wrap == "+treee" else f"{tiny_draft_folder}{wrap}", target)


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw()], ids=str)
def test_an_answer_does_not_depend_on_the_batch(law: SamplingLaw, target: LocalTarget, tiny_draft_folder: Path) -> None:
    drafter, asked = load_drafter(str(tiny_draft_folder), target), Asked(law, 10)
    many = prompts("one", "another prompt", "a third", "four", "five")
    texts = [
        [one.text for one in answer(target, drafter, many, asked, DecodeSettings(batch_size=size))] for size in (1, 3)
    ]
    assert texts[0] == texts[1]
    if not law.is_greedy:
        assert len(set(texts[0])) == len(many)


def test_stop_strings_end_an_answer_where_transformers_ends_it(target: LocalTarget, tiny_draft_folder: Path) -> None:
    free = only(target, "").text
    stop = next(letter for letter in free[2:] if letter.isascii())  # the words of a tiny model are mostly no text
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "The cat"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    wanted = target.model.generate(
        **ids, max_new_tokens=12, do_sample=False, stop_strings=[stop], tokenizer=target.tokenizer,
        suppress_tokens=list(range(len(target.tokenizer), target.vocab_size)),
    )  # fmt: skip
    for spec in ("", str(tiny_draft_folder)):
        found = only(target, spec, Asked(max_new_tokens=12, stop=(stop,)))
        assert found.finish_reason == "stop"
        assert found.tokens == wanted.shape[1] - ids["input_ids"].shape[1]
        assert stop in found.text
        assert len(found.text) < len(free)


def test_raw_text_goes_on_without_the_chat_template(target: LocalTarget) -> None:
    ids = target.tokenizer("The cat", return_tensors="pt")
    wanted = target.model.generate(
        **ids, max_new_tokens=6, do_sample=False, suppress_tokens=list(range(len(target.tokenizer), target.vocab_size))
    )[0, ids["input_ids"].shape[1] :]
    found = only(target, "", Asked(max_new_tokens=6, is_raw=True))
    assert found.text == target.tokenizer.decode(wanted, skip_special_tokens=True)
    assert found.text != only(target, "", Asked(max_new_tokens=6)).text


def test_an_interrupted_file_of_answers_goes_on(target: LocalTarget, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    some = prompts("one", "two", "three")
    assert answer_file(target, None, some, ASKED, DecodeSettings(batch_size=2), whole) == 3
    lines = whole.read_text().splitlines(keepends=True)
    parts.write_text(lines[0] + lines[1][:9])
    assert answer_file(target, None, some, ASKED, DecodeSettings(), parts) == 2
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (whole, parts)]
    assert [[(row["id"], row["answer"]) for row in file] for file in rows[:1]] == [
        [(row["id"], row["answer"]) for row in file] for file in rows[1:]
    ]
    assert answer_file(target, None, some, ASKED, DecodeSettings(), parts) == 0


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"id": "p0", "key": "other"}\n', '{"id": 3}\n'])
def test_a_file_of_something_else_is_left_alone(content: str, target: LocalTarget, tmp_path: Path) -> None:
    out = tmp_path / "mine.txt"
    out.write_text(content)
    with pytest.raises(OutputError, match="name another file"):
        answer_file(target, None, prompts("one"), ASKED, DecodeSettings(), out)
    assert out.read_text() == content


def test_answers_to_other_prompts_are_refused(target: LocalTarget, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    answer_file(target, None, prompts("one", "two"), ASKED, DecodeSettings(), out)
    with pytest.raises(OutputError, match="'p1'"):
        answer_file(target, None, prompts("one"), ASKED, DecodeSettings(), out)
    with pytest.raises(OutputError, match="another target or law"):
        answer_file(target, None, prompts("one", "two"), Asked(SamplingLaw(), 12), DecodeSettings(), out)


def test_the_public_function_answers_one_prompt(target: LocalTarget) -> None:
    (wanted,) = answer(target, None, [as_prompt("The cat")], Asked(max_new_tokens=5), DecodeSettings())
    assert public_generate(target, None, "The cat", max_new_tokens=5).text == wanted.text
