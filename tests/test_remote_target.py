"""A target behind a server: its words are the law's words, whatever the network does, and bad words are refused."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.core.errors import CapabilityError, ServerError, TraceError, UserError, VocabMismatchError
from foredraft.core.law import GREEDY, SamplingLaw, law_logprobs
from foredraft.core.protocols import Target
from foredraft.models.remote.client import Patience
from foredraft.models.remote.target import RemoteTarget, connect
from foredraft.settings import PromptSource, TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt, render
from foredraft.trace.store import open_trace
from tests.fake_server import FakeServer, Reply, serving
from tests.markov import MarkovTarget
from tests.tiny import tiny_tokenizer
from tests.traces import folder

CUT = SamplingLaw(0.7, top_k=20, top_p=0.9)
LAWS = (GREEDY, SamplingLaw(), CUT)
QUICK = Patience(attempts=4, first_wait=0.001, longest_wait=0.3, timeout=5.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer and no weights."""
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"vocab_size": 272, "eos_token_id": 2}')
    return str(path)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer(MarkovTarget())) as running:
        yield running


def settings(**changes: object) -> TraceSettings:
    values = {"prompts": [PromptSource(file="-")], "max_new_tokens": 12, "top": 8, "batch_size": 3, "seed": 5}
    return TraceSettings.model_validate({**values, **changes})


def some_prompts(count: int = 8) -> list[Prompt]:
    return [Prompt(f"p{i}", "d", ({"role": "user", "content": "ab" * (1 + i * 5 % 7)},)) for i in range(count)]


def open_target(server: FakeServer, model: str, **options: Any) -> RemoteTarget:
    return connect(server.address + "/v1", model, patience=QUICK, **options)


def letters_only(server: FakeServer) -> None:
    """Let the target say nothing but ASCII letters and the end, so that text alone tells its tokens."""
    tokenizer = server.target.tokenizer
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    others = torch.ones(len(tokenizer), dtype=torch.bool)
    others[[*letters, 2]] = False
    server.target.logits[:, others] = float("-inf")


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_row_is_what_the_law_says(tmp_path: Path, model: str, law: SamplingLaw, kind: str) -> None:
    with serving(FakeServer(MarkovTarget(), kind=kind)) as server:
        target, prompts = open_target(server, model), some_prompts()
        assert isinstance(target, Target)
        assert (target.vocab_size, target.max_context, target.stop_ids) == (272, 512, (2,))
        trace = collect(target, prompts, settings(), law, tmp_path / "t")
    assert trace.info.complete
    assert (trace.info.target, trace.info.law) == ("served", law)
    by_id = {prompt.id: prompt for prompt in prompts}
    for row in trace.rows():
        assert torch.equal(row.prompt_ids, render(by_id[row.prompt_id], target.tokenizer))
        assert (row.finish_reason == "stop") == (row.answer_ids[-1] == 2)
        logits = server.target.logits[torch.cat((row.prompt_ids[-1:], row.answer_ids[:-1]))]
        emitted = law_logprobs(logits, law).gather(1, row.answer_ids[:, None]).squeeze(1)
        torch.testing.assert_close(row.logprobs, emitted, atol=1e-5, rtol=1e-5)
        stored = law_logprobs(logits, trace.info.stored_law)
        torch.testing.assert_close(row.top_logprobs.float(), stored.gather(1, row.top_ids.long()), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(row.tail_mass, 1.0 - stored.topk(8).values.exp().sum(1), atol=1e-4, rtol=0.0)
        assert all(len(set(ids)) == 8 for ids in row.top_ids.tolist())


def test_a_request_says_its_whole_law(tmp_path: Path, model: str, server: FakeServer) -> None:
    collect(open_target(server, model), some_prompts(), settings(), CUT, tmp_path / "t")
    asked = [body for body in server.bodies if body["max_tokens"] == 12]
    assert len({body["seed"] for body in asked}) == len(asked) == 8
    for body in asked:
        assert (body["temperature"], body["top_k"], body["top_p"], body["logprobs"]) == (0.7, 20, 0.9, 8)
        assert (body["min_p"], body["repetition_penalty"], body["presence_penalty"]) == (0.0, 1.0, 0.0)
        assert isinstance(body["prompt"], list)
    collect(open_target(server, model), some_prompts(1), settings(), GREEDY, tmp_path / "g")
    assert (server.bodies[-1]["temperature"], server.bodies[-1]["top_k"], server.bodies[-1]["top_p"]) == (0.0, 0, 1.0)


def test_llama_cpp_draws_the_temperature_first(tmp_path: Path, model: str) -> None:
    with serving(FakeServer(MarkovTarget(), kind="llamacpp")) as server:
        collect(open_target(server, model), some_prompts(1), settings(), CUT, tmp_path / "t")
    assert server.bodies[-1]["samplers"] == ["temperature", "top_k", "top_p"]
    assert server.bodies[-1]["post_sampling_probs"] is True


def test_prompts_go_as_text_where_ids_are_refused(tmp_path: Path, model: str) -> None:
    with serving(FakeServer(MarkovTarget(), takes_ids=False)) as server:
        trace = collect(open_target(server, model), some_prompts(), settings(), SamplingLaw(), tmp_path / "t")
    assert server.bodies[-1]["prompt"].endswith("<|im_start|>assistant\n")
    assert trace.info.num_rows == 8


@pytest.mark.parametrize("fault", [503, 500, (429, "0.01"), (429, "Mon, 01 Jan 2024 00:00:00 GMT"), "drop", "cut"])
def test_a_failed_request_is_tried_again(tmp_path: Path, model: str, server: FakeServer, fault: Any) -> None:
    calm = collect(open_target(server, model), some_prompts(), settings(), SamplingLaw(), tmp_path / "calm")
    before = len(server.bodies)
    server.faults = deque([fault] * 3)
    target = open_target(server, model, in_flight=1)
    assert folder(collect(target, some_prompts(), settings(), SamplingLaw(), tmp_path / "t").path) == folder(calm.path)
    assert len(server.bodies) - before == 1 + 8 + 3


def test_retry_after_is_waited_for(tmp_path: Path, model: str, server: FakeServer) -> None:
    assert QUICK.wait(0, retry_after=0.2) == 0.2
    assert QUICK.wait(0, retry_after=900.0) == 0.3
    assert QUICK.wait(1, retry_after=0.0) <= 0.002
    assert QUICK.wait(30, retry_after=0.0) == 0.3


def test_a_server_that_keeps_failing_ends_the_run_and_loses_nothing(
    tmp_path: Path, model: str, server: FakeServer
) -> None:
    calm = collect(open_target(server, model), some_prompts(), settings(), SamplingLaw(), tmp_path / "calm")
    target = open_target(server, model, in_flight=1)
    server.spoil = _fail_after(server, answers=4)
    with pytest.raises(
        ServerError, match=r"http://127.0.0.1:\d+/v1/completions failed 4 times, at last with status 503"
    ):
        collect(target, some_prompts(), settings(), SamplingLaw(), tmp_path / "t")
    kept = open_trace(tmp_path / "t").info
    assert len(kept.shards) == 1
    # Behind another port, as after a restart.
    with serving(FakeServer(MarkovTarget())) as restarted:
        target = open_target(restarted, model)
        assert folder(collect(target, some_prompts(), settings(), SamplingLaw(), tmp_path / "t").path) == folder(
            calm.path
        )
        assert len(restarted.bodies) == 1 + 8 - kept.num_rows


def _fail_after(server: FakeServer, answers: int) -> Callable[[Reply], Reply]:
    left = [answers]

    def spoil(reply: Reply) -> Reply:
        left[0] -= 1
        if left[0] == 0:
            server.faults = deque([503] * 100)
        return reply

    return spoil


def test_requests_run_together_up_to_the_limit(tmp_path: Path, model: str) -> None:
    with serving(FakeServer(MarkovTarget(), pause=0.02)) as server:
        target = open_target(server, model, in_flight=3)
        collect(target, some_prompts(9), settings(batch_size=9), GREEDY, tmp_path / "t")
    assert server.most_running == 3


def test_an_address_without_a_server_is_named(model: str) -> None:
    with pytest.raises(ServerError, match=r"http://127.0.0.1:1/v1/models failed 2 times.*Is the server up"):
        connect("http://127.0.0.1:1", model, patience=Patience(attempts=2, first_wait=0.001))


def spoiled(change: Callable[[Reply], None]) -> Callable[[Reply], Reply]:
    """Return a spoiler that changes the choice of answers; probes of one token pass."""

    def spoil(reply: Reply) -> Reply:
        (choice,) = reply["choices"]
        if reply["usage"]["completion_tokens"] > 1:
            change(choice)
        return reply

    return spoil


def _drop(choice: Reply) -> None:
    choice["logprobs"] = None


def _fewer(choice: Reply) -> None:
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        choice["logprobs"][name].pop()


def _null(choice: Reply) -> None:
    choice["logprobs"]["token_logprobs"][0] = None


def _fewer_tops(choice: Reply) -> None:
    choice["logprobs"]["top_logprobs"] = [dict([*tops.items()][:2]) for tops in choice["logprobs"]["top_logprobs"]]


def _other_text(choice: Reply) -> None:
    choice["text"] = "something else"


def _other_ids(choice: Reply) -> None:
    choice["token_ids"] = [(token_id + 1) % 250 for token_id in choice["token_ids"]]


def _filtered(choice: Reply) -> None:
    choice["finish_reason"] = "content_filter"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_drop, CapabilityError, r"gave no log-probabilities\. Switch them on"),
        (_fewer, CapabilityError, r"gave \d+ log-probabilities for \d+ tokens"),
        (_null, CapabilityError, r"gave \d+ log-probabilities for \d+ tokens"),
        (_fewer_tops, CapabilityError, r"gave 2 of 8 log-probabilities asked for.*--top 2"),
        (_other_text, VocabMismatchError, r"gives the text 'something else' for tokens that the tokenizer reads as"),
        (_other_ids, VocabMismatchError, r"lists other tokens than it gives log-probabilities for"),
        (_filtered, CapabilityError, r"for the reason 'content_filter'"),
    ],
)
def test_answers_that_cannot_be_scored_are_refused(
    tmp_path: Path,
    model: str,
    server: FakeServer,
    change: Callable[[Reply], None],
    error: type[UserError],
    message: str,
) -> None:
    target = open_target(server, model)
    server.spoil = spoiled(change)
    with pytest.raises(error, match=message):
        collect(target, some_prompts(), settings(), SamplingLaw(), tmp_path / "t")
    assert not open_trace(tmp_path / "t").info.shards


def test_draft_tokens_that_llama_cpp_gives_no_figures_for_are_refused(tmp_path: Path, model: str) -> None:
    def accepted(choice: Reply) -> None:
        choice["logprobs"]["content"][1] |= {"prob": 1.0, "top_probs": []}

    def accepted_greedily(choice: Reply) -> None:
        choice["logprobs"]["content"][1] |= {"logprob": 0.0, "top_logprobs": []}

    with serving(FakeServer(MarkovTarget(), kind="llamacpp", spoil=spoiled(accepted))) as server:
        with pytest.raises(CapabilityError, match=r"log-probabilities for \d+ .*llama.cpp has none for draft tokens"):
            collect(open_target(server, model), some_prompts(), settings(), SamplingLaw(), tmp_path / "t")
        # Greedy text needs none.
        server.spoil = spoiled(accepted_greedily)
        collect(open_target(server, model), some_prompts(), settings(top=0), GREEDY, tmp_path / "g")


def test_a_server_that_does_not_decode_greedily_is_refused(tmp_path: Path, model: str, server: FakeServer) -> None:
    target, complete = open_target(server, model), server.complete
    server.complete = lambda body: complete({**body, "temperature": 1.0})  # type: ignore[method-assign]
    with pytest.raises(CapabilityError, match=r"asked for greedy answers, and token \d+ has log-probability"):
        collect(target, some_prompts(), settings(), GREEDY, tmp_path / "t")


@pytest.mark.parametrize("law", [SamplingLaw(0.7), SamplingLaw(top_k=5), SamplingLaw(top_p=0.9)], ids=str)
def test_raw_log_probabilities_are_refused_where_they_are_not_the_laws(
    tmp_path: Path, model: str, law: SamplingLaw
) -> None:
    with serving(FakeServer(MarkovTarget(), processed=False)) as server:
        target = open_target(server, model)
        with pytest.raises(CapabilityError, match=r"before temperature, top-k and top-p.*processed_logprobs"):
            collect(target, some_prompts(), settings(), law, tmp_path / "t")
        for same in (GREEDY, SamplingLaw()):
            assert collect(target, some_prompts(), settings(), same, tmp_path / str(same)).info.complete


def test_too_many_alternatives_are_refused_with_the_remedy(tmp_path: Path, model: str, server: FakeServer) -> None:
    with pytest.raises(CapabilityError, match=r"greater than max allowed: 20.*\n.*--top, 64 now"):
        collect(open_target(server, model), some_prompts(), settings(top=64), GREEDY, tmp_path / "t")


def test_no_alternatives_are_kept_where_none_are_asked_for(tmp_path: Path, model: str, server: FakeServer) -> None:
    trace = collect(open_target(server, model), some_prompts(), settings(top=0), SamplingLaw(), tmp_path / "t")
    for row in trace.rows():
        assert row.top_ids.shape == row.top_logprobs.shape == (len(row.answer_ids), 0)
        assert row.tail_mass.tolist() == [1.0] * len(row.answer_ids)


def test_a_server_without_ids_is_read_by_its_text(tmp_path: Path, model: str) -> None:
    with serving(FakeServer(MarkovTarget(), kind="other")) as server:
        letters_only(server)
        target = open_target(server, model)
        trace = collect(target, some_prompts(), settings(top=0), SamplingLaw(), tmp_path / "t")
        for row in trace.rows():
            logits = server.target.logits[torch.cat((row.prompt_ids[-1:], row.answer_ids[:-1]))]
            emitted = law_logprobs(logits, SamplingLaw()).gather(1, row.answer_ids[:, None]).squeeze(1)
            torch.testing.assert_close(row.logprobs, emitted, atol=1e-5, rtol=1e-5)
        with pytest.raises(CapabilityError, match=r"names alternative tokens by text only.*--top 0"):
            collect(target, some_prompts(), settings(), SamplingLaw(), tmp_path / "u")

        def other_cut(choice: Reply) -> None:
            tokens = choice["logprobs"]["tokens"]
            tokens[0], tokens[1] = tokens[0] + tokens[1], ""

        server.spoil = spoiled(other_cut)
        with pytest.raises(VocabMismatchError, match=r"gives no token ids, and its \d+ tokens are not the \d+"):
            collect(target, some_prompts(), settings(top=0), SamplingLaw(), tmp_path / "v")


def test_another_tokenizer_is_refused_at_once(tmp_path: Path, server: FakeServer) -> None:
    tiny_tokenizer(("dust", "tabs")).save_pretrained(tmp_path)
    other = tiny_tokenizer()
    other.add_tokens(["Ünïcode"])
    other.save_pretrained(tmp_path)
    with pytest.raises(VocabMismatchError, match=r"cuts .* into \[.*\], the tokenizer into .*--tokenizer"):
        connect(server.address, str(tmp_path), patience=QUICK)


def test_a_prompt_that_the_server_reads_differently_is_refused(tmp_path: Path, model: str, server: FakeServer) -> None:
    target = open_target(server, model)
    server.spoil = lambda reply: {**reply, "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    with pytest.raises(VocabMismatchError, match=r"read 3 tokens of a prompt of \d+"):
        collect(target, some_prompts(), settings(), GREEDY, tmp_path / "t")


def test_the_model_must_be_one_that_is_served(model: str, server: FakeServer) -> None:
    with pytest.raises(UserError, match=r"does not serve 'mine'; it serves: served"):
        open_target(server, model, served_model="mine")
    server.models = ("one", "two")
    with pytest.raises(UserError, match=r"serves several models; name one \(--model\): one, two"):
        open_target(server, model)
    assert open_target(server, model, served_model="two").name == "two"
    with pytest.raises(UserError, match=r"name the tokenizer of its model"):
        connect(server.address, "", patience=QUICK)


def test_a_key_is_sent_and_its_lack_is_named(model: str, monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    server.key = "secret"
    monkeypatch.delenv("FOREDRAFT_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"wants a key \(status 401\).*FOREDRAFT_API_KEY"):
        open_target(server, model)
    monkeypatch.setenv("FOREDRAFT_API_KEY", "secret")
    assert open_target(server, model).name == "served"


def test_something_else_behind_the_address_is_named(model: str, server: FakeServer) -> None:
    server.spoil = lambda reply: {"hello": "world"}
    with pytest.raises(CapabilityError, match=r"answers, but not as an OpenAI-compatible completion"):
        open_target(server, model)


def test_the_fingerprint_sees_the_model_and_not_the_address(model: str, tmp_path: Path) -> None:
    fingerprints = []
    for names in (("served",), ("served",), ("other",)):
        with serving(FakeServer(MarkovTarget(), models=names)) as server:
            fingerprints.append(open_target(server, model).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    with serving(FakeServer(MarkovTarget(), models=("served",))) as server:
        collect(open_target(server, model), some_prompts(), settings(), GREEDY, tmp_path / "t")
    with serving(FakeServer(MarkovTarget(), models=("other",))) as server:
        target = open_target(server, model)
        with pytest.raises(TraceError, match=r"holds a trace with target served, asked for is other"):
            collect(target, some_prompts(), settings(), GREEDY, tmp_path / "t")
