"""Replay on held-out prompts: who is held out, what is measured, which weights are kept, and when training stops."""

import logging
from pathlib import Path

import pytest
import torch

from foredraft.acceptance.evaluate import score
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.processes import Processes
from foredraft.distill.data import Group, read_groups
from foredraft.distill.init import init_from_target
from foredraft.distill.optimizer import Updater
from foredraft.distill.student import Student
from foredraft.distill.train import Distilled, distill
from foredraft.distill.validation import Validated, Validation, best_of, hold_out
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft
from foredraft.steps import DistillStep, ValidationSettings
from foredraft.trace.store import Trace
from tests.distilling import tiny_target, written_trace
from tests.tiny import tiny_model
from tests.traces import build_trace, trace_row


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = tmp_path_factory.mktemp("traces")
    return [
        written_trace(folder / "greedy", tiny_model(), 48, GREEDY),
        written_trace(folder / "sampled", tiny_model(), 48, SamplingLaw(), seed=1),
    ]


def _draft() -> Draft:
    return init_from_target(tiny_model(), [0])


def _trained(traces: list[Trace], work: Path, **settings: object) -> Distilled:
    step = DistillStep(**{"tokens": 3000, "batch_tokens": 200, "learning_rate": 1e-2, **settings})
    return distill(_draft(), traces, step, tiny_target(), work)


def _ids(groups: list[Group]) -> set[str]:
    return {group[0].row.prompt_id for group in groups}


def test_held_out_prompts_are_a_tenth_balanced_and_the_same_in_any_order(tmp_path: Path) -> None:
    rows = [trace_row(str(index), [1], [3], domain="ab"[index % 4 == 0]) for index in range(80)]
    groups = read_groups([build_trace(tmp_path / "t", rows)])
    learnt, held = hold_out(groups, 16, seed=0)
    assert len(held) == 8
    assert _ids(learnt) | _ids(held) == _ids(groups)
    assert not _ids(learnt) & _ids(held)
    assert sorted(group[0].row.domain for group in held) == list("aaaabbbb")
    assert _ids(hold_out(groups[::-1], 16, seed=0)[1]) == _ids(held)
    assert _ids(hold_out(groups, 16, seed=1)[1]) != _ids(held)
    assert len(hold_out(groups, 5, seed=0)[1]) == 5
    assert hold_out(groups, 0, seed=0) == (groups, [])
    assert hold_out(groups[:39], 16, seed=0) == (groups[:39], [])


def test_held_out_prompts_are_never_trained_on(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    original = Student.backward

    def watched(self: Student, groups: tuple[Group, ...], *arguments: object) -> object:
        seen.update(_ids(list(groups)))
        return original(self, groups, *arguments)

    monkeypatch.setattr(Student, "backward", watched)
    _trained(traces, tmp_path / "work")
    groups = read_groups(traces)
    assert seen == _ids(groups) - _ids(hold_out(groups, 16, seed=0)[1])


def test_a_replay_is_the_score_of_the_same_answers(traces: list[Trace], tmp_path: Path) -> None:
    groups = read_groups(traces)
    validation = Validation(traces, groups, ValidationSettings(num_draft_tokens=3), 1000)
    tokens_per_call, acceptance = validation.replay(_draft(), Processes())
    drafter = CausalLMDrafter(_draft(), SamplingLaw(), 272)
    prompts = [prompt for trace in traces for prompt in score("draft", drafter, trace, [3]).prompts]
    tokens = sum(prompt.tokens for prompt in prompts)
    assert tokens_per_call == pytest.approx(tokens / sum(float(prompt.counts.calls[0]) for prompt in prompts))
    assert acceptance == pytest.approx(sum(prompt.accepted_sum for prompt in prompts) / tokens)


def test_the_draft_is_the_one_with_the_most_tokens_per_call(
    traces: list[Trace], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        result = _trained(traces, tmp_path / "work", learning_rate=0.3, validation={"every": 600, "patience": 0})
    seen = result.validations
    assert seen[0].step == 0
    assert [one.positions for one in seen] == [0, 600, 1200, 1800, 2400, 3000]
    assert seen[-1].mean_tokens_per_call < best_of(seen).mean_tokens_per_call
    validation = Validation(traces, hold_out(read_groups(traces), 16, 0)[1], ValidationSettings(), 3000)
    assert validation.replay(result.draft, Processes())[0] == best_of(seen).mean_tokens_per_call
    assert best_of(seen).step or "The draft is kept as it was" in caplog.text
    replayed = [entry for entry in result.entries() if "mean_tokens_per_call" in entry]
    assert [entry["mean_tokens_per_call"] for entry in replayed] == [one.mean_tokens_per_call for one in seen[1:]]


def test_training_stops_after_replays_without_a_gain(traces: list[Trace], tmp_path: Path) -> None:
    settings = {"learning_rate": 0.3, "validation": {"every": 400, "patience": 2}}
    result = _trained(traces, tmp_path / "work", **settings)
    assert result.training_tokens < 3000
    assert result.validations[-3] == best_of(result.validations)
    again = _trained(traces, tmp_path / "work", **settings)
    assert (again.curve, again.validations) == (result.curve, result.validations)
    left, right = result.draft.model.state_dict(), again.draft.model.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_weights_that_turn_nan_before_a_replay_are_rolled_back(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Updater.step, iter(range(100))

    def step(self: Updater, learning_rate: float) -> None:
        original(self, learning_rate)
        if next(calls) in (4, 9):
            next(iter(self.weights.values())).data.fill_(float("nan"))

    monkeypatch.setattr(Updater, "step", step)
    result = _trained(traces, tmp_path / "work", tokens=1800, validation={"every": 200})
    assert [rollback.step for rollback in result.rollbacks] == [5]
    assert [seen.step for seen in result.validations] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert all(bool(torch.isfinite(weight).all()) for weight in result.draft.model.state_dict().values())


def test_patience_counts_replays_behind_the_best(traces: list[Trace]) -> None:
    validation = Validation(traces, [], ValidationSettings(patience=2), 1000)
    values = [Validated(step, step, 0.0, worth, 0.0) for step, worth in enumerate((1.0, 1.3, 1.2, 1.3, 1.4))]
    assert [validation.has_given_up(values[:count]) for count in range(6)] == [False] * 4 + [True, False]
    patient = Validation(traces, [], ValidationSettings(patience=0), 1000)
    assert not patient.has_given_up(values[:4])


def test_replays_take_a_small_share_of_the_time(traces: list[Trace]) -> None:
    held = hold_out(read_groups(traces), 16, 0)[1]
    size = sum(len(example.row.answer_ids) for group in held for example in group)
    for tokens in (1000, 100_000):
        validation = Validation(traces, held, ValidationSettings(), tokens)
        ends = range(0, tokens + 1, 10)
        times = sum(validation.is_due(before, before + 10, before + 10 >= tokens) for before in ends[:-1])
        assert 1 <= times <= 20
        assert (times - 1) * size <= 0.1 * tokens


def test_the_note_shows_speed_loss_acceptance_and_tokens_per_call(traces: list[Trace], tmp_path: Path) -> None:
    result = []

    class Spy:
        def task(self, *_: object) -> "Spy":
            return self

        def __enter__(self) -> "Spy":
            return self

        def __exit__(self, *_: object) -> None: ...

        def advance(self, amount: float = 1) -> None: ...

        def note(self, text: str) -> None:
            result.append(text)

    distill(_draft(), traces, DistillStep(tokens=400), tiny_target(), tmp_path / "work", Spy())
    assert all(word in result[-1] for word in ("positions/s", "loss 0.", "acceptance 0.", "tokens per call"))
