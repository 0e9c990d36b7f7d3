"""Logged answers: read again they give the trace of their writing; what the target cannot have said is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.core.errors import PromptError, TraceError, VocabMismatchError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.settings import PromptSource, TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.logged import LogChecks, LoggedTrace, collect_logged, read_log
from foredraft.trace.prompts import Prompt
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import LOGGED, Trace
from tests.traces import folder

CUT = SamplingLaw(0.7, top_k=20, top_p=0.9)
SETTINGS = TraceSettings(prompts=[PromptSource(file="-")], max_new_tokens=24, top=8, batch_size=5)
PROMPTS = [Prompt(f"p{i}", "d", ({"role": "user", "content": "sun owl " * (1 + i % 3) + str(i)},)) for i in range(12)]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return LocalTarget(load_causal_lm(str(tiny_target_folder), "float32"))


@pytest.fixture(scope="module")
def written(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[SamplingLaw, Trace]:
    """What the target wrote, by law."""
    root = tmp_path_factory.mktemp("written")
    return {law: collect(target, PROMPTS, SETTINGS, law, root / str(law)) for law in (GREEDY, SamplingLaw(), CUT)}


def entries(trace: Trace) -> list[dict[str, Any]]:
    """Return a log of a trace, with token ids, since the tiny model's words are no text."""
    content = {prompt.id: prompt.messages for prompt in PROMPTS}
    return [
        {"id": row.prompt_id, "messages": list(content[row.prompt_id]), "answer_ids": row.answer_ids.tolist()}
        for row in trace.rows()
    ]


def log_of(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_again(
    target: LocalTarget, rows: list[dict[str, Any]], law: SamplingLaw, tmp_path: Path, **options: Any
) -> LoggedTrace:
    log = log_of(tmp_path / "log.jsonl", rows)
    return collect_logged(target, read_log(log), SETTINGS, law, tmp_path / "t", **options)


def by_prompt(trace: Trace) -> dict[str, TraceRow]:
    return {row.prompt_id: row for row in trace.rows()}


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw(), CUT], ids=str)
def test_reading_an_answer_says_what_writing_it_said(
    target: LocalTarget, written: dict[SamplingLaw, Trace], tmp_path: Path, law: SamplingLaw
) -> None:
    found = read_again(target, entries(written[law]), law, tmp_path)
    assert found.trace.info.provenance == LOGGED
    assert (found.trace.info.law, found.trace.info.stored_law) == (law, written[law].info.stored_law)
    before, after = by_prompt(written[law]), by_prompt(found.trace)
    assert before.keys() == after.keys()
    for name, row in after.items():
        assert torch.equal(row.prompt_ids, before[name].prompt_ids)
        assert torch.equal(row.answer_ids, before[name].answer_ids)
        torch.testing.assert_close(row.logprobs, before[name].logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(row.top_logprobs.float(), before[name].top_logprobs.float(), atol=5e-3, rtol=5e-3)
        torch.testing.assert_close(row.tail_mass, before[name].tail_mass, atol=1e-4, rtol=0.0)
    assert (found.checks.near_ties, found.checks.answers) == (0, 12)
    assert not found.checks.is_suspicious


def test_a_stop_is_read_behind_answers_that_stopped(target: LocalTarget, tmp_path: Path) -> None:
    rows = [
        {"prompt": "x", "answer": "owl", "finish_reason": "stop"},
        {"prompt": "y", "answer": "owl", "finish_reason": "length"},
        {"prompt": "z", "answer": "owl"},
    ]
    found = read_again(target, rows, SamplingLaw(), tmp_path, near_tie=1e9)
    assert [row.answer_ids.tolist()[-1] == 2 for row in found.trace.rows()] == [True, False, False]
    assert {len(row.answer_ids) - (int(row.answer_ids[-1]) == 2) for row in found.trace.rows()} == {3}


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a", "prompt": "hi", "answer": "owl"},
        {"id": "a", "messages": [{"role": "user", "content": "hi"}], "answer": "owl"},
        {"id": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "owl"}]},
        {
            "custom_id": "a",
            "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
            "response": {"status_code": 200, "body": {"choices": [{"message": {"content": "owl"}}]}},
        },
        {
            "id": "a",
            "request": {"messages": [{"role": "user", "content": "hi"}]},
            "response": {"choices": [{"message": {"role": "assistant", "content": "owl"}}]},
        },
        {"custom_id": "a", "response": {"body": {"choices": [{"text": "owl"}]}}},
    ],
)
def test_every_form_of_a_log_is_read(tmp_path: Path, row: dict[str, Any]) -> None:
    prompts = [Prompt("a", "unlabelled", ({"role": "user", "content": "hi"},))]
    (answer,) = read_log(log_of(tmp_path / "log.jsonl", [row]), prompts)
    assert (answer.id, answer.text, answer.prompt) == ("a", "owl", prompts[0])


def test_answers_of_one_prompt_share_it(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "answer": text} for text in ("owl", "fog")]
    one, two = read_log(log_of(tmp_path / "log.jsonl", rows))
    assert one.prompt.id == two.prompt.id
    assert one.id != two.id


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no answers"),
        ([{"prompt": "hi", "answer": ""}], "log.jsonl:1: the answer is empty"),
        ([{"prompt": "hi"}], "log.jsonl:1: there is no answer"),
        ([{"id": "q", "answer": "owl"}], "log.jsonl:1: there is no prompt, and no --prompts with the id 'q'"),
        ([{"prompt": "hi", "answer": "owl"}] * 2, "log.jsonl:2: answer .* was given before, in .*:1"),
        ([{"id": 1, "prompt": "a", "answer": "b"}, {"id": 1, "prompt": "c", "answer": "d"}], "'1' was given before"),
        ([{"prompt": "hi", "choices": [{"text": "a"}, {"text": "b"}]}], "one answer, not several choices"),
        ([{"prompt": "hi", "answer": {"tool": 1}}], "the answer is no text"),
        ([{"prompt": "hi", "answer": "owl", "answer_ids": ["a"]}], "answer_ids are whole numbers"),
        (["owl"], "log.jsonl:1: a row must be an object"),
    ],
)
def test_rows_that_say_nothing_are_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_log(log_of(tmp_path / "log.jsonl", rows))


def test_tokens_of_another_text_are_refused(target: LocalTarget, tmp_path: Path) -> None:
    ids = target.tokenizer("owl", add_special_tokens=False)["input_ids"]
    with pytest.raises(VocabMismatchError, match=r"answer_ids spell 'owl', the answer is 'fog'"):
        read_again(target, [{"prompt": "hi", "answer": "fog", "answer_ids": ids}], SamplingLaw(), tmp_path)
    with pytest.raises(VocabMismatchError, match=r"answer_ids hold 5000, .* has 272 tokens"):
        read_again(target, [{"prompt": "hi", "answer": "owl", "answer_ids": [5000]}], SamplingLaw(), tmp_path)
    with pytest.raises(PromptError, match=r"take \d+ tokens, tiny-target reads 512"):
        read_again(target, [{"prompt": "hi", "answer": "owl" * 300}], SamplingLaw(), tmp_path)


def test_greedy_text_that_the_target_would_not_write_is_refused(
    target: LocalTarget, written: dict[SamplingLaw, Trace], tmp_path: Path
) -> None:
    with pytest.raises(
        TraceError, match=r"log.jsonl:\d+: token \d+ .* is none that tiny-target emits under T=0: it lies"
    ):
        read_again(target, entries(written[SamplingLaw()]), GREEDY, tmp_path)
    with pytest.raises(TraceError, match=r"emits under T=0.7 top-k=20 top-p=0.9"):
        read_again(target, entries(written[SamplingLaw()]), CUT, tmp_path)


def test_near_ties_are_kept_and_counted(target: LocalTarget, written: dict[SamplingLaw, Trace], tmp_path: Path) -> None:
    rows = entries(written[GREEDY])
    second = by_prompt(written[GREEDY])[rows[0]["id"]].top_ids[-1, 1]
    rows[0]["answer_ids"][-1] = int(second)
    found = read_again(target, rows, GREEDY, tmp_path, near_tie=50.0)
    assert found.checks.near_ties == 1
    assert "1 of" in found.checks.sentence
    assert all(torch.equal(row.logprobs, torch.zeros(len(row.logprobs))) for row in found.trace.rows())
    log = read_log(tmp_path / "log.jsonl")
    with pytest.raises(TraceError, match=r"1 of 5 answers up to there hold such tokens"):
        collect_logged(target, log, SETTINGS, GREEDY, tmp_path / "u", near_tie=0.0)


def test_a_token_just_outside_a_cut_has_a_probability(
    target: LocalTarget, written: dict[SamplingLaw, Trace], tmp_path: Path
) -> None:
    found = read_again(target, entries(written[SamplingLaw()]), SamplingLaw(top_k=3), tmp_path, near_tie=1e9)
    assert found.checks.near_ties > 0
    for row in found.trace.rows():
        assert bool(row.logprobs.isfinite().all())


@pytest.mark.parametrize(("stated", "sign"), [(SamplingLaw(2.0), 1), (SamplingLaw(0.5), -1)])
def test_text_of_another_temperature_is_warned_of(
    target: LocalTarget,
    written: dict[SamplingLaw, Trace],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stated: SamplingLaw,
    sign: int,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = read_again(target, entries(written[SamplingLaw()]), stated, tmp_path)
    assert sign * found.checks.score > 5
    assert found.checks.is_suspicious
    assert "hardly written under this law" in caplog.text


def test_the_score_is_a_standard_normal_for_text_of_its_law(
    target: LocalTarget, written: dict[SamplingLaw, Trace], tmp_path: Path
) -> None:
    scores = []
    for number, row in enumerate(entries(written[SamplingLaw()])):
        (tmp_path / str(number)).mkdir()
        scores.append(read_again(target, [row], SamplingLaw(), tmp_path / str(number)).checks.score)
    assert max(map(abs, scores)) < 4
    assert 0.3 < torch.tensor(scores).std() < 2.0


def test_a_killed_reading_goes_on_where_it_was(
    target: LocalTarget, written: dict[SamplingLaw, Trace], tmp_path: Path
) -> None:
    rows = entries(written[SamplingLaw()])
    whole = read_again(target, rows, SamplingLaw(), tmp_path)

    class Dying:
        """Reads two shards."""

        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def read(self, *arguments: Any) -> Any:
            Dying.calls += 1
            if Dying.calls == 3:
                raise KeyboardInterrupt
            return target.read(*arguments)

    answers = read_log(tmp_path / "log.jsonl")
    with pytest.raises(KeyboardInterrupt):
        collect_logged(Dying(), answers, SETTINGS, SamplingLaw(), tmp_path / "u")
    resumed = collect_logged(target, answers, SETTINGS, SamplingLaw(), tmp_path / "u")
    assert folder(resumed.trace.path) == folder(whole.trace.path)
    assert resumed.checks.answers == 2
    with pytest.raises(TraceError, match=r"u holds a trace with"):
        collect(target, PROMPTS, SETTINGS, SamplingLaw(), tmp_path / "u")


def test_checks_add_up() -> None:
    one = LogChecks(tokens=3, near_ties=1, surprise=2.0, variance=1.0, answers=1)
    two = LogChecks(tokens=4, respelled=1, surprise=1.0, variance=8.0, answers=1, outside=1)
    assert one + two == LogChecks(7, 1, 1, 3.0, 9.0, 2, 1)
    assert (one + two).score == 1.0
