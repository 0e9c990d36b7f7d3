"""Collecting: the rows are the target's own words, whatever the batches, the kills and the order."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import NonFiniteError, OutputError, PromptError, TraceError
from foredraft.core.law import GREEDY, SamplingLaw, law_logprobs
from foredraft.core.protocols import Continuation, Target
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.settings import PromptSource, TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt, render
from foredraft.trace.rows import TraceRow
from tests.markov import MarkovTarget
from tests.traces import folder

LAWS = (GREEDY, SamplingLaw(), SamplingLaw(0.7, top_k=20, top_p=0.9))


def settings(**changes: object) -> TraceSettings:
    values = {"prompts": [PromptSource(file="-")], "max_new_tokens": 12, "top": 8, "batch_size": 3, "seed": 5}
    return TraceSettings.model_validate({**values, **changes})


def ask(name: str, *turns: str, domain: str = "d") -> Prompt:
    return Prompt(name, domain, ({"role": "user", "content": turns[0]},), turns[1:])


def some_prompts(count: int = 8) -> list[Prompt]:
    return [ask(f"p{index}", "ab" * (1 + index * 5 % 7), domain=f"d{index % 3}") for index in range(count)]


def by_id(rows: Iterator[TraceRow]) -> dict[str, TraceRow]:
    return {row.id: row for row in rows}


def test_the_fake_target_keeps_the_protocol() -> None:
    assert isinstance(MarkovTarget(), Target)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_row_is_what_the_law_says(tmp_path: Path, law: SamplingLaw) -> None:
    target, prompts = MarkovTarget(), some_prompts()
    trace = collect(target, prompts, settings(), law, tmp_path / "t")
    assert trace.info.complete
    assert (trace.info.law, trace.info.stored_law) == (law, SamplingLaw() if law.is_greedy else law)
    assert sorted(row.prompt_id for row in trace.rows()) == sorted(prompt.id for prompt in prompts)
    for row in trace.rows():
        prompt = next(prompt for prompt in prompts if prompt.id == row.prompt_id)
        assert row.domain == prompt.domain
        assert torch.equal(row.prompt_ids, render(prompt, target.tokenizer))
        assert (row.finish_reason == "stop") == (row.answer_ids[-1] == 2)
        assert row.finish_reason == "stop" or len(row.answer_ids) == 12
        logits = target.logits[torch.cat((row.prompt_ids[-1:], row.answer_ids[:-1]))]
        emitted = law_logprobs(logits, law).gather(1, row.answer_ids[:, None]).squeeze(1)
        assert torch.equal(row.logprobs, emitted)
        stored = law_logprobs(logits, trace.info.stored_law)
        torch.testing.assert_close(row.top_logprobs.float(), stored.gather(1, row.top_ids.long()), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(row.tail_mass, 1.0 - stored.topk(8).values.exp().sum(1), atol=1e-5, rtol=0.0)


def test_a_greedy_trace_is_the_argmax_chain(tmp_path: Path) -> None:
    target = MarkovTarget()
    for row in collect(target, some_prompts(), settings(), GREEDY, tmp_path / "t").rows():
        before = torch.cat((row.prompt_ids[-1:], row.answer_ids[:-1]))
        assert torch.equal(target.logits[before].argmax(1), row.answer_ids)
        assert torch.equal(row.logprobs, torch.zeros(len(row.answer_ids)))


def test_answers_depend_on_neither_batch_nor_order(tmp_path: Path) -> None:
    prompts = [*some_prompts(), ask("talk", "hello", "and then?")]
    one = by_id(collect(MarkovTarget(), prompts, settings(), SamplingLaw(), tmp_path / "a").rows())
    two = by_id(collect(MarkovTarget(), prompts[::-1], settings(batch_size=100), SamplingLaw(), tmp_path / "b").rows())
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].answer_ids, two[name].answer_ids) for name in one)


def test_seed_law_and_prompt_each_change_the_draws(tmp_path: Path) -> None:
    prompts = [ask("p", "same"), ask("q", "same")]
    draws = [
        tuple(row.answer_ids.tolist())
        for number, (seed, law) in enumerate([(0, SamplingLaw()), (1, SamplingLaw()), (0, SamplingLaw(1.0, top_k=258))])
        for row in collect(MarkovTarget(), prompts, settings(seed=seed), law, tmp_path / str(number)).rows()
    ]
    assert len(set(draws)) == len(draws) == 6


def test_shards_are_slices_of_like_length(tmp_path: Path) -> None:
    target = MarkovTarget()
    trace = collect(target, some_prompts(9), settings(), GREEDY, tmp_path / "t")
    assert [len(call) for call in target.calls] == [3, 3, 3]
    spans = sorted((min(map(len, call)), max(map(len, call))) for call in target.calls)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    assert [shard.rows for shard in trace.info.shards] == [3, 3, 3]


def test_turns_are_answered_one_after_another(tmp_path: Path) -> None:
    target = MarkovTarget()
    prompts = [ask("talk", "one", "two", "three"), ask("chat", "uno", "due"), ask("single", "x")]
    trace = collect(target, prompts, settings(batch_size=8), SamplingLaw(), tmp_path / "t")
    assert [len(call) for call in target.calls] == [3, 2, 1]
    rows = by_id(trace.rows())
    assert set(rows) == {"talk#1", "talk#2", "talk#3", "chat#1", "chat#2", "single#1"}
    assert {row.prompt_id for row in rows.values()} == {"talk", "chat", "single"}
    said = []
    for turn in range(3):
        row = rows[f"talk#{turn + 1}"]
        assert torch.equal(row.prompt_ids, render(prompts[0], target.tokenizer, said))
        answer = row.answer_ids.tolist()
        said.append(target.tokenizer.decode(answer, skip_special_tokens=True))
    text = target.tokenizer.decode(rows["talk#3"].prompt_ids)
    assert "two" in text
    assert "three" in text
    assert text.count("<|im_start|>assistant") == 3


def test_a_conversation_that_outgrows_the_context_ends(tmp_path: Path) -> None:
    prompts = [ask("talk", "one", "two", "three")]
    target = MarkovTarget()
    bare = len(render(prompts[0], target.tokenizer, ["", ""]))
    target = MarkovTarget(max_context=bare + 3 * 12)
    target.logits[:, 2] = -100.0
    target.logits[:, 200:] = 10.0
    rows = list(collect(target, prompts, settings(), SamplingLaw(), tmp_path / "t").rows())
    assert 1 <= len(rows) < 3
    assert all(len(row.prompt_ids) + len(row.answer_ids) <= target.max_context for row in rows)


def test_progress_adds_up_to_its_total(tmp_path: Path) -> None:
    bars = []

    class Bar:
        def __init__(self, total: float, done: float) -> None:
            self.total, self.done, self.notes = total, done, []

        def advance(self, amount: float = 1.0) -> None:
            self.done += amount

        def note(self, text: str) -> None:
            self.notes.append(text)

    class Bars:
        @contextmanager
        def task(self, what: str, total: float, unit: str, done: float = 0.0) -> Iterator[Bar]:
            assert (what, unit) == ("collecting T=1", "tokens")
            bars.append(Bar(total, done))
            yield bars[-1]

    collect(MarkovTarget(), some_prompts(), settings(), SamplingLaw(), tmp_path / "t", Bars())
    collect(MarkovTarget(), some_prompts(), settings(), SamplingLaw(), tmp_path / "t", Bars())
    assert [bar.done for bar in bars] == [bar.total for bar in bars] == [8 * 12, 8 * 12]
    assert bars[0].notes[-1].endswith(" tokens/s")
    assert not bars[1].notes


def test_a_complete_trace_is_not_collected_again(tmp_path: Path) -> None:
    collect(MarkovTarget(), some_prompts(), settings(), GREEDY, tmp_path / "t")
    before, target = folder(tmp_path / "t"), MarkovTarget()
    assert collect(target, some_prompts(), settings(), GREEDY, tmp_path / "t").info.complete
    assert not target.calls
    assert folder(tmp_path / "t") == before


def test_bad_prompts_are_refused_before_any_decoding(tmp_path: Path) -> None:
    target = MarkovTarget(max_context=60)

    def refused(prompts: list[Prompt], message: str) -> None:
        with pytest.raises(PromptError, match=message):
            collect(target, prompts, settings(), GREEDY, tmp_path / "t")

    refused([], "There are no prompts")
    refused([ask("a", "x"), ask("a", "y")], "Two prompts have the id 'a'")
    refused([ask("a", "x"), ask("long", "y" * 40)], r"'long' takes \d+ tokens and 1 x 12 .* reads 60\. Leave it out")
    refused([ask("talk", "y", "z")], r"'talk' takes \d+ tokens and 2 x 12 for answers")
    bare = MarkovTarget()
    bare.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="'a' has no tokens"):
        collect(bare, [ask("a", "")], settings(), GREEDY, tmp_path / "t")
    assert not target.calls
    assert not (tmp_path / "t").exists()


def test_the_longest_prompt_that_fits_is_answered(tmp_path: Path) -> None:
    prompt = ask("p", "y" * 40)
    length = len(render(prompt, MarkovTarget().tokenizer))
    target = MarkovTarget(max_context=length + 12)
    assert collect(target, [prompt], settings(), GREEDY, tmp_path / "t").info.num_rows == 1


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    collect(MarkovTarget(), some_prompts(), settings(), GREEDY, tmp_path / "t")
    before = folder(tmp_path / "t")
    with pytest.raises(TraceError, match="law T=0, asked for is T=1"):
        collect(MarkovTarget(), some_prompts(), settings(), SamplingLaw(), tmp_path / "t")
    with pytest.raises(TraceError, match="prompts digest"):
        collect(MarkovTarget(), some_prompts(7), settings(), GREEDY, tmp_path / "t")
    with pytest.raises(TraceError, match="target fingerprint"):
        collect(MarkovTarget(seed=1), some_prompts(), settings(), GREEDY, tmp_path / "t")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="never overwritten"):
        collect(MarkovTarget(), some_prompts(), settings(), GREEDY, tmp_path / "mine")
    assert folder(tmp_path / "t") == before


def test_non_finite_log_probabilities_are_named(tmp_path: Path) -> None:
    class Broken(MarkovTarget):
        def write(self, *arguments: object) -> list[Continuation]:
            answers = super().write(*arguments)
            answers[1].logprobs[0] = float("nan")
            return answers

    with pytest.raises(NonFiniteError, match=r"token 0 of the answer to prompt 'b'"):
        collect(Broken(), [ask("a", "x"), ask("b", "yy"), ask("c", "zzz")], settings(), SamplingLaw(), tmp_path / "t")


def test_settings_that_the_template_ignores_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompt = Prompt("p", "d", ({"role": "user", "content": "x"},), tools=({"name": "f"},))
    with caplog.at_level(logging.WARNING):
        collect(MarkovTarget(), [prompt, ask("q", "y")], settings(), GREEDY, tmp_path / "t")
    assert "1 prompts, 'p' first, carry tools" in caplog.text


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_real_model_gives_what_teacher_forcing_gives(
    tmp_path: Path, tiny_target_folder: Path, law: SamplingLaw
) -> None:
    target = LocalTarget(load_causal_lm(str(tiny_target_folder), dtype="float32"))
    num_tokens = len(target.tokenizer)
    trace = collect(target, [*some_prompts(), ask("talk", "hello", "and then?")], settings(), law, tmp_path / "t")
    assert trace.info.dtype == "float32"
    for row in trace.rows():
        text = row.answer().token_ids
        with torch.no_grad():
            logits = target.model(text[None, :-1]).logits[0, row.answer().start - 1 :, :num_tokens]
        emitted = law_logprobs(logits, law).gather(1, row.answer_ids[:, None]).squeeze(1)
        stored = law_logprobs(logits, trace.info.stored_law).gather(1, row.top_ids.long())
        torch.testing.assert_close(row.logprobs, emitted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(row.top_logprobs.float(), stored, atol=5e-3, rtol=2e-3)
        assert int(row.top_ids.max()) < num_tokens
