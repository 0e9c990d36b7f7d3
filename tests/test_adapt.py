"""Adapting: the objective is what it says, the guard keeps the better draft, a meta-learned start adapts faster."""

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from foredraft import online, trainings, verbs
from foredraft.checkpoint import read_manifest
from foredraft.cli import app
from foredraft.core.errors import TraceError, UserError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.adapt.learn import Adapted, adapt
from foredraft.distill.adapt.meta import meta_learn
from foredraft.distill.adapt.objective import Objective, original_loss
from foredraft.distill.adapt.text import Text, divide, groups_of
from foredraft.distill.data import Group
from foredraft.distill.init import init_from_target
from foredraft.distill.losses import forward_kl, lk_hybrid, total_variation, weighted_loss
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.generation import Asked
from foredraft.models.draft import Draft, load_draft
from foredraft.models.target import LocalTarget, load_target
from foredraft.recipe import load_recipe
from foredraft.steps import AdaptStep, DistillStep, InitStep, MetaStep
from foredraft.trace.prompts import Prompt
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace
from tests.distilling import held_out_acceptance, tiny_target, written_trace
from tests.tiny import tiny_model
from tests.traces import trace_row

FAST = {"learning_rate": 1e-2, "batch_tokens": 200, "minutes": 60.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return written_trace(tmp_path_factory.mktemp("served") / "t", tiny_model(), 40, SamplingLaw())


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return written_trace(tmp_path_factory.mktemp("old") / "t", tiny_model(), 16, GREEDY, prompt_seed=5)


def _start() -> Draft:
    return init_from_target(tiny_model(), range(1), torch.arange(0))


def _weights(draft: Draft) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in draft.model.named_parameters()}


def test_without_the_old_loss_adapting_is_distillation_on_the_buffer(served: Trace, old: Trace, tmp_path: Path) -> None:
    settings = AdaptStep(lambda_task=0.0, passes=2.0, **FAST)
    found = adapt(_start(), [Text.of(served)], [Text.of(old)], settings, forward_kl)
    step = DistillStep(
        tokens=2 * served.info.num_tokens, batch_tokens=200, learning_rate=1e-2, validation={"prompts": 0}
    )
    wanted = distill(_start(), [served], step, tiny_target(), tmp_path / "work")
    assert [point.loss for point in found.curve] == pytest.approx([point.loss for point in wanted.curve], rel=1e-4)
    for name, weight in _weights(wanted.draft).items():
        torch.testing.assert_close(_weights(found.draft)[name], weight, rtol=1e-3, atol=1e-4)


def _gradient(objective: Objective, new: list[Group], old: list[Group]) -> dict[str, torch.Tensor]:
    student = Student.of(_start())
    objective.backward(student, new, old)
    return {name: weight.grad.clone() for name, weight in student.weights.items() if weight.grad is not None}


def test_the_gradient_is_the_weighted_sum_of_the_two_losses_gradients(served: Trace, old: Trace) -> None:
    new_groups, old_groups = groups_of([Text.of(served)])[:5], groups_of([Text.of(old)])[:5]
    both = _gradient(Objective(forward_kl, total_variation, 0.5, 2.0), new_groups, old_groups)
    one = _gradient(Objective(forward_kl, forward_kl, 1.0, 0.0), new_groups, old_groups)
    other = _gradient(Objective(total_variation, forward_kl, 1.0, 0.0), old_groups, [])
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, 0.5 * one[name] + 2.0 * other[name], rtol=1e-4, atol=1e-6)


def test_the_old_loss_is_the_one_that_the_last_distillation_ended_with() -> None:
    first, last = DistillStep(loss={"tvd": 1.0}), DistillStep(loss={"tvd": 0.5}, finish="lk_hybrid")
    steps: list[dict[str, Any]] = [{"init": {}}, {"distill": first.model_dump()}, {"distill": last.model_dump()}]
    law, logprobs = _some_law()
    for known, name, loss in (
        (steps, "lk_hybrid", lk_hybrid),
        (steps[:2], "tvd", total_variation),
        ([], "forward_kl", forward_kl),
    ):
        found = original_loss(known)
        assert found[0] == name
        torch.testing.assert_close(found[1](law, logprobs), loss(law, logprobs))


def _some_law() -> tuple[Any, torch.Tensor]:
    from foredraft.distill.losses import EventLaw

    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3, 5, generator=generator).softmax(-1)
    return EventLaw.full(probs, torch.zeros(3, dtype=torch.long)), torch.rand(3, 6, generator=generator).log_softmax(-1)


@pytest.mark.slow
def test_rehearsal_keeps_what_would_be_forgotten(tmp_path: Path) -> None:
    """The target changes its mind about the new prompts only: without rehearsal the draft follows it everywhere."""
    other = written_trace(tmp_path / "other", tiny_model(seed=3), 24, SamplingLaw(), prompt_seed=1)
    known = written_trace(tmp_path / "known", tiny_model(), 48, SamplingLaw(), prompt_seed=2)
    check = written_trace(tmp_path / "check", tiny_model(), 12, SamplingLaw(), prompt_seed=3)
    start = distill(_start(), [known], DistillStep(tokens=3000, batch_tokens=200, learning_rate=1e-2), tiny_target(),
                    tmp_path / "work").draft  # fmt: skip
    worth = {}
    for weight in (0.0, 3.0):
        settings = AdaptStep(lambda_task=weight, passes=4.0, **FAST)
        found = adapt(start, [Text.of(other)], [Text.of(known)], settings, forward_kl)
        worth[weight] = held_out_acceptance(found.draft, tiny_model(), [check])
    assert worth[3.0] > worth[0.0] + 0.02


def test_steps_and_minutes_bound_the_training(served: Trace) -> None:
    text = [Text.of(served)]
    assert len(adapt(_start(), text, [], AdaptStep(steps=3, **FAST), forward_kl).curve) == 3
    settings = AdaptStep(**{**FAST, "minutes": 1e-9})
    found = adapt(_start(), text, [], settings, forward_kl)
    assert found.curve == ()
    assert all(torch.equal(weight, _weights(_start())[name]) for name, weight in _weights(found.draft).items())


def test_a_step_that_is_not_finite_ends_the_adaptation_with_the_weights_of_before(
    served: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(law: Any, logprobs: torch.Tensor) -> torch.Tensor:
        return forward_kl(law, logprobs) * float("nan")

    found = adapt(_start(), [Text.of(served)], [Text.of(served)], AdaptStep(**FAST), broken)
    assert found.curve == ()
    assert "Step 0 of the adaptation was not finite" in caplog.text
    assert all(torch.equal(weight, _weights(_start())[name]) for name, weight in _weights(found.draft).items())


def test_a_prompt_teaches_or_scores_never_both(served: Trace, old: Trace) -> None:
    texts = [Text.of(served), Text.of(old), Text.of(served)]
    parts = divide(texts, 0.25, 0)
    prompts = [{row.prompt_id for text in part for row in text.rows} for part in (parts.learn, parts.held_out)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 56
    assert len(prompts[1]) == 14
    with pytest.raises(TraceError, match="1 prompts are too few"):
        divide([replace(texts[0], rows=texts[0].rows[:1])], 0.5, 0)


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


@pytest.fixture(scope="module")
def draft_folder(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft") / "prefix"
    verbs.init_draft(target, [], InitStep(layers="first-1"), out)
    return out


def _served_by(target: LocalTarget, path: Path, num_answers: int = 30, writer: PreTrainedModel | None = None) -> Trace:
    return written_trace(
        path,
        writer or target.model,
        num_answers,
        SamplingLaw(),
        target_fingerprint=target.fingerprint,
        tokenizer_fingerprint=target.tokenizer_fingerprint,
    )


def test_a_better_draft_takes_the_place_of_the_old_one(target: LocalTarget, draft_folder: Path, tmp_path: Path) -> None:
    trace = _served_by(target, tmp_path / "served")
    step = AdaptStep(buffer=[str(trace.path)], passes=6.0, lambda_task=0.0, **FAST)
    manifest = trainings.adapt_draft(draft_folder, target, trainings.served_texts(step.buffer, target), [], [], step,
                                 tmp_path / "out")  # fmt: skip
    found = manifest.options["adapted"]
    assert (found["kept"], found["reason"], found["answers"], found["old_domains"]) == ("new", "", 30, None)
    change = found["held_out"]["mean_tokens_per_call"]
    assert change["after"] > change["before"]
    assert change["difference"] == pytest.approx(change["after"] - change["before"])
    assert [next(iter(step)) for step in manifest.steps] == ["init", "adapt"]
    assert manifest.curve[-1]["positions"] == manifest.training_tokens > 0
    assert read_manifest(tmp_path / "out").digest == manifest.digest


@pytest.mark.parametrize("worse_on", ["held-out answers of the buffer", "held-out answers of the old domains"])
def test_the_guard_keeps_the_old_draft_where_the_new_one_is_worse(
    worse_on: str, target: LocalTarget, draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = _served_by(target, tmp_path / "served")
    result, guards = copy.deepcopy(load_draft(draft_folder, "float32")), []
    with torch.no_grad():
        result.model.base_model.norm.weight.neg_()
    if worse_on == "held-out answers of the old domains":  # what the old draft itself would say
        result = Draft(target.model)
        guards = [_served_by(target, tmp_path / "guard", 12, load_draft(draft_folder, "float32").model)]
    monkeypatch.setattr(trainings, "adapt", lambda *_: Adapted(result, ()))
    step = AdaptStep(lambda_task=0.0)
    manifest = trainings.adapt_draft(draft_folder, target, [Text.of(trace)], [], guards, step, tmp_path / "out")
    found = manifest.options["adapted"]
    assert found["kept"] == "old"
    assert f"on {worse_on} tokens per call at k=4 changed by -" in found["reason"]
    for name, weight in _weights(load_draft(draft_folder)).items():
        assert torch.equal(_weights(load_draft(tmp_path / "out"))[name], weight)
    assert [next(iter(step)) for step in manifest.steps] == ["init"]


def test_a_weight_for_old_answers_without_any_warns(
    target: LocalTarget, draft_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = _served_by(target, tmp_path / "served", 6)
    with caplog.at_level(logging.WARNING):
        trainings.adapt_draft(draft_folder, target, [Text.of(trace)], [], [], AdaptStep(steps=1), tmp_path / "out")
    assert "lambda_task 1 has no effect" in caplog.text


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{n}", "new", ({"role": "user", "content": f"secret{n} words"},)) for n in range(count)]


def _written(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_without_text_nothing_but_weights_and_counts_is_written(
    target: LocalTarget, draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[TraceRow] = []
    real = trainings.divide
    monkeypatch.setattr(
        trainings, "divide", lambda texts, *rest: (rows.extend(texts[0].rows), real(texts, *rest))[1]
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    requests = online.Requests(_prompts(6), Asked(max_new_tokens=8), keeps_text=False)
    step = AdaptStep(lambda_task=0.0, **FAST)
    online.adapt_online(draft_folder, target, requests, 1.0, [], [], step, tmp_path / "out")
    assert len(rows) == 6
    known = {file.name for file in draft_folder.iterdir()}
    assert {file.name for file in _written(tmp_path)} == known
    manifest = (tmp_path / "out" / "foredraft.json").read_text()
    for row in rows:
        assert row.prompt_id not in manifest
        for ids in (row.prompt_ids, row.answer_ids):
            for start in range(len(ids) - 2):
                some = ids[start : start + 3].tolist()
                assert not any(json.dumps(some, indent=indent)[1:-1].strip() in manifest for indent in (None, 1))
    for file, data in _written(tmp_path).items():
        if file.suffix != ".safetensors" and "tokenizer" not in file.name:
            assert b"secret" not in data
    assert json.loads(manifest)["options"]["adapted"]["answers"] == 6


def test_with_text_the_answers_stay_in_the_buffer(target: LocalTarget, draft_folder: Path, tmp_path: Path) -> None:
    step = AdaptStep(lambda_task=0.0, buffer=[str(tmp_path / "buffer")], **FAST)
    requests = online.Requests(_prompts(4), Asked(max_new_tokens=8))
    online.adapt_online(draft_folder, target, requests, 1.0, [], [], step, tmp_path / "out")
    (text,) = trainings.served_texts(step.buffer, target)
    assert len(text.rows) == 4
    assert text.examined > 0


@pytest.mark.parametrize(
    ("buffers", "keeps_text", "count", "message"),
    [
        (["a"], False, 2, "--no-text keeps what is served in memory only: leave out --buffer"),
        ([], True, 0, "Give --buffer with what was gathered, or --prompts"),
        ([], True, 2, "Name one --buffer for the answers"),
        (["a", "b"], True, 2, "Name one --buffer for the answers"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    buffers: list[str], keeps_text: bool, count: int, message: str, target: LocalTarget, tmp_path: Path
) -> None:
    requests = online.Requests(_prompts(count), keeps_text=keeps_text)
    with pytest.raises(UserError, match=message):
        online.adapt_online(tmp_path, target, requests, 1.0, [], [], AdaptStep(buffer=buffers), tmp_path / "out")


CIRCLE, ASKED = 6, 4


def _task(shift: int, draws: int, seed: int) -> Text:
    """One domain of planted answers: a random token x of a circle, then x + shift, ASKED times over."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(draws):
        first = torch.randint(0, CIRCLE, (ASKED,), generator=generator)
        token_ids = 10 + torch.stack([first, (first + shift) % CIRCLE], 1).flatten()
        law = torch.zeros(2 * ASKED - 1, 272)
        law[1::2, 10 : 10 + CIRCLE] = 1 / CIRCLE
        law[0::2] = 0.02 / 271
        law[torch.arange(0, 2 * ASKED - 1, 2), token_ids[1::2]] = 0.98
        ids = token_ids.tolist()
        rows.append(
            trace_row(f"{shift}-{seed}-{number}", [5, ids[0]], ids[1:], law, 16, f"shift {shift}", greedy=False)
        )
    return Text(SamplingLaw(), 1.0, tuple(rows))


def _after_few_steps(draft: Draft, shift: int) -> float:
    """Return the loss on unseen answers of one task after five steps on others of it."""
    settings = AdaptStep(passes=1.0, batch_tokens=28, learning_rate=1e-2, warmup=0.0, minutes=60.0)
    adapted = adapt(draft, [_task(shift, 20, 100)], [], settings, forward_kl)
    assert len(adapted.curve) == 5
    student = Student.of(adapted.draft)
    return student.backward(groups_of([_task(shift, 40, 200)]), weighted_loss({"forward_kl": 1.0}, 1.0)).loss


@pytest.mark.slow
def test_a_meta_learned_start_adapts_faster_than_plain_training_of_equally_many_steps() -> None:
    tasks, start = [_task(shift, 30, 0) for shift in (0, 1, 2, 3)], Draft(tiny_model(num_layers=1, seed=7))
    settings = MetaStep(outer_steps=15, inner_steps=5, inner_rate=1e-2, batch_tokens=28, outer_rate=1.0)
    plain_settings = AdaptStep(
        passes=1000.0, steps=15 * 5, learning_rate=1e-2, batch_tokens=28, lambda_task=0.0, minutes=60.0
    )
    starts = {
        "none": start,
        "plain": adapt(start, tasks, [], plain_settings, forward_kl).draft,
        "reptile": meta_learn(start, tasks, settings).draft,
    }
    losses = {name: _after_few_steps(draft, 4) for name, draft in starts.items()}
    assert losses["plain"] < losses["none"] - 0.3
    assert losses["reptile"] < losses["plain"] - 0.3


def test_fomaml_goes_the_way_of_the_one_step_behind_the_inner_ones() -> None:
    tasks, start = [_task(shift, 20, 0) for shift in (1, 2)], _start()

    def moved(algorithm: str, inner_steps: int) -> dict[str, torch.Tensor]:
        settings = MetaStep(
            algorithm=algorithm,
            outer_steps=1,
            inner_steps=inner_steps,
            batch_tokens=14,
            outer_rate=1.0,
            inner_rate=0.01,
        )
        return _weights(meta_learn(start, tasks, settings).draft)

    short, long, found = moved("reptile", 2), moved("reptile", 3), moved("fomaml", 2)
    for name, weight in _weights(start).items():
        torch.testing.assert_close(found[name] - weight, long[name] - short[name], rtol=1e-4, atol=1e-6)
    assert not all(torch.equal(found[name], weight) for name, weight in _weights(start).items())


def test_meta_learning_needs_domains() -> None:
    with pytest.raises(TraceError, match="over domains, and the answers are of 1: shift 3"):
        meta_learn(_start(), [_task(3, 4, 0)], MetaStep(outer_steps=1))


def test_meta_learning_repeats_bit_for_bit_and_leaves_its_start_alone() -> None:
    tasks, start = [_task(shift, 20, 0) for shift in (1, 2)], _start()
    before = {name: weight.clone() for name, weight in _weights(start).items()}
    settings = MetaStep(outer_steps=3, inner_steps=2, batch_tokens=10)
    first, again = (meta_learn(start, tasks, settings).draft for _ in range(2))
    assert all(torch.equal(_weights(first)[name], _weights(again)[name]) for name in before)
    assert all(torch.equal(_weights(start)[name], before[name]) for name in before)
    assert not all(torch.equal(_weights(first)[name], before[name]) for name in before)


def test_the_command_adapts_and_says_which_draft_was_kept(
    target: LocalTarget, draft_folder: Path, tmp_path: Path
) -> None:
    served = _served_by(target, tmp_path / "served", 12)
    command = ["adapt", str(draft_folder), "--target", str(target.path), "--dtype", "float32", "--buffer",
               str(served.path), "--trace", str(served.path), "--set", "steps=1", "--set", "learning_rate=1e-9",
               "--json", "--out", str(tmp_path / "out")]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["kept"] in ("old", "new")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    meta = ["adapt", str(draft_folder), "--target", str(target.path), "--meta", "--buffer", "x", "--out", "y"]
    assert isinstance(CliRunner().invoke(app, meta).exception, UserError)


def test_recipes_take_both_steps(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "target: {model: m}\ntrace: {prompts: [{file: shipped}]}\ncandidates:\n  a:\n    - init: {layers: first-1}\n"
        "    - meta: {algorithm: reptile, inner_steps: 8, outer_rate: 0.3}\n"
        "    - adapt: {buffer: [served], minutes: 2}\n"
    )
    steps = load_recipe(file).candidates["a"]
    assert [step.verb for step in steps] == ["init", "meta", "adapt"]
    assert all(map(verbs.learns, steps[1:]))
