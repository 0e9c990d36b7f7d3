"""Training: it teaches, it resumes exactly, and it survives what is not finite."""

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from foredraft.core.errors import CheckpointError, ModelError, NonFiniteError, TraceError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill import loop
from foredraft.distill.data import event_law, read_groups, rows_of_tokens
from foredraft.distill.init import init_from_target
from foredraft.distill.losses import forward_kl
from foredraft.distill.resume import forget_points
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Student
from foredraft.distill.train import Distilled, distill
from foredraft.models.draft import Draft
from foredraft.steps import DistillStep
from foredraft.trace.store import Trace
from tests.distilling import held_out_acceptance, tiny_target, written_trace
from tests.tiny import tiny_model

# Held-out prompts have their own tests: tests/test_distill_validation.py.
SHORT = {"tokens": 4000, "batch_tokens": 200, "learning_rate": 1e-2, "validation": {"prompts": 0}}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = tmp_path_factory.mktemp("traces")
    return [
        written_trace(folder / "greedy", tiny_model(), 48, GREEDY),
        written_trace(folder / "sampled", tiny_model(), 48, SamplingLaw(), seed=1),
    ]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    return [
        written_trace(tmp_path_factory.mktemp("eval") / "t", tiny_model(), 16, SamplingLaw(), seed=2, prompt_seed=9)
    ]


def _first_layers(kept: torch.Tensor | None = None, count: int = 1) -> Draft:
    head = torch.arange(0) if kept is None else kept
    return init_from_target(tiny_model(), range(count), head)


def _trained(traces: list[Trace], work: Path, draft: Draft | None = None, **settings: object) -> Distilled:
    step = DistillStep(**{**SHORT, **settings})
    return distill(draft or _first_layers(), traces, step, tiny_target(), work)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"finish": "lk_hybrid"},
        {"loss": {"forward_kl": 0.7, "hard_cross_entropy": 0.3}, "temperature": 2.0},
        {"layer_matching": 0.5},
    ],
    ids=["forward-kl", "lk-finish", "mixed-soft", "matched"],
)
def test_training_lowers_the_loss_and_raises_acceptance_on_held_out_text(
    settings: dict[str, object], traces: list[Trace], held_out: list[Trace], tmp_path: Path
) -> None:
    result = _trained(traces, tmp_path / "work", **settings)
    before = held_out_acceptance(_first_layers(), tiny_model(), held_out)
    after = held_out_acceptance(result.draft, tiny_model(), held_out)
    assert after > before + 0.03
    assert result.curve[-1].acceptance > result.curve[0].acceptance + 0.01
    if "finish" not in settings:
        assert result.curve[-1].loss < 0.9 * result.curve[0].loss
    assert result.training_tokens >= 4000
    assert result.rollbacks == ()


def test_a_trimmed_draft_learns_and_keeps_the_targets_embeddings_and_head(
    traces: list[Trace], held_out: list[Trace], tmp_path: Path
) -> None:
    kept = torch.arange(0, 259, 2)
    draft = _first_layers(kept)
    before = {name: value.clone() for name, value in draft.model.state_dict().items()}
    result = _trained(traces, tmp_path / "work", draft)
    assert torch.equal(result.draft.head_token_ids, kept)
    assert (
        held_out_acceptance(result.draft, tiny_model(), held_out)
        > held_out_acceptance(draft, tiny_model(), held_out) + 0.02
    )
    assert all(torch.equal(value, before[name]) for name, value in draft.model.state_dict().items())
    after = result.draft.model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name], before[name])
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    assert "model.norm.weight" in changed
    assert len(changed) == len(after) - 2


def test_the_draft_comes_back_in_the_dtype_it_came_in(traces: list[Trace], tmp_path: Path) -> None:
    draft = Draft(copy.deepcopy(_first_layers().model).bfloat16())
    result = _trained(traces, tmp_path / "work", draft, tokens=400)
    assert result.draft.model.dtype == draft.model.dtype == torch.bfloat16
    assert torch.equal(result.draft.model.get_input_embeddings().weight, draft.model.get_input_embeddings().weight)


def test_gradients_of_a_step_do_not_depend_on_how_it_is_packed(traces: list[Trace]) -> None:
    schedule = Schedule.of(DistillStep())
    groups = read_groups(traces)[:10]
    results = []
    for size in (1, 100, 10_000):
        student = Student.of(_first_layers(), DistillStep(pack_tokens=size))
        figures = student.backward(groups, schedule.loss(0.0))
        results.append((figures, {name: weight.grad for name, weight in student.weights.items()}))
    for figures, gradients in results[1:]:
        assert figures.loss == pytest.approx(results[0][0].loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][1][name], rtol=1e-3, atol=1e-6)


def test_gradient_of_a_step_is_that_of_plain_autograd(traces: list[Trace]) -> None:
    """The whole law, one unpacked text after the other behind its constant prompt, nothing written by hand."""
    groups = read_groups(traces)[:4]
    draft = _first_layers()
    student = Student.of(draft)
    student.backward(groups, Schedule.of(DistillStep()).loss(0.0))
    model = copy.deepcopy(draft.model)
    losses = []
    for row in (example.row for group in groups for example in group):
        law = event_law(row, rows_of_tokens(torch.arange(0), 272))
        ids, start, cache = row.answer().token_ids[None, :-1], len(row.prompt_ids) - 1, DynamicCache()
        with torch.no_grad():
            model(ids[:, :start], cache=cache)
        probs = model(ids[:, start:], cache=cache).logits[0].softmax(-1)
        tail = probs.scatter(1, law.rows, 0.0).sum(-1, keepdim=True)
        losses.append(forward_kl(law, torch.cat([probs.gather(1, law.rows), tail], -1).log()))
    torch.cat(losses).mean().backward()
    reference = dict(model.named_parameters())
    for name, weight in student.weights.items():
        torch.testing.assert_close(weight.grad, reference[name].grad, rtol=1e-3, atol=1e-6)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(traces: list[Trace], tmp_path: Path) -> None:
    states = [
        _trained(traces, tmp_path / name, tokens=1200, seed=seed).draft.model.state_dict()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


_KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
from foredraft.distill import loop, train as training
from foredraft.steps import DistillStep
from foredraft.trace.store import open_trace
from tests.distilling import tiny_target
from tests.test_distill_train import RESUMED, _first_layers

loop._POSITIONS_BETWEEN_POINTS = 1600
folder = Path(sys.argv[1])

def train(work, out):
    traces = [open_trace(Path(sys.argv[2]))]
    result = training.distill(_first_layers(), traces, DistillStep(**RESUMED), tiny_target(), work)
    save_file({name: value.clone() for name, value in result.draft.model.state_dict().items()}, out)

def points_written():
    file = folder / "killed" / "resume.safetensors"
    return file.stat().st_ino if file.exists() else 0

train(folder / "whole", folder / "whole.safetensors")
kills, delays = 0, random.Random(0)
while True:
    before, child = points_written(), os.fork()
    if child == 0:
        train(folder / "killed", folder / "killed.safetensors")
        os._exit(0)
    # The first one dies before it wrote anything; the others some moments after a point, or while they write.
    while kills and points_written() == before and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(delays.uniform(0.0, 0.05))
    if (folder / "killed.safetensors").exists():
        break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills += 1
print("kills", kills)
"""
RESUMED = {
    **SHORT,
    "tokens": 4800,
    "checkpoint_every": 1e-9,
    "layer_matching": 0.1,
    "finish": "lk_hybrid",
    "validation": {"every": 800},
}


@pytest.mark.slow
def test_a_training_killed_again_and_again_ends_with_the_same_bytes(traces: list[Trace], tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLER, str(tmp_path), str(traces[1].path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 2
    whole, killed = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    forget_points(tmp_path / "killed")
    assert not (tmp_path / "killed").exists()


def test_a_finished_training_is_not_repeated(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _trained(traces, tmp_path / "work", tokens=600)
    monkeypatch.setattr(Student, "backward", _fail)
    again = _trained(traces, tmp_path / "work", tokens=600)
    assert again.curve == first.curve
    left, right = first.draft.model.state_dict(), again.draft.model.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def _fail(*_: object) -> None:
    raise AssertionError("a finished training ran again")


def test_points_of_another_training_are_refused(traces: list[Trace], tmp_path: Path) -> None:
    _trained(traces, tmp_path / "work", tokens=400)
    with pytest.raises(CheckpointError, match=r"belongs to training .* of another draft, trace or settings"):
        _trained(traces, tmp_path / "work", tokens=800)
    (tmp_path / "work" / "resume.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"cannot be read .* Delete it to train from the start"):
        _trained(traces, tmp_path / "work", tokens=400)


def _poisoned(at: int, poison: Callable[[Student], None]) -> Callable[..., object]:
    """Student.backward that poisons the student before call number `at`."""
    original, calls = Student.backward, iter(range(10**6))

    def backward(self: Student, *arguments: object) -> object:
        if next(calls) == at:
            poison(self)
        return original(self, *arguments)

    return backward


def _poison_weights(student: Student) -> None:
    next(iter(student.weights.values())).data.fill_(float("nan"))


def test_weights_that_turn_nan_are_rolled_back_and_reported(
    traces: list[Trace],
    held_out: list[Trace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loop, "_POSITIONS_BETWEEN_POINTS", 1600)
    monkeypatch.setattr(Student, "backward", _poisoned(13, _poison_weights))
    with caplog.at_level(logging.WARNING):
        result = _trained(traces, tmp_path / "work")
    (rollback,) = result.rollbacks
    assert (rollback.step, rollback.to_step, rollback.rate_factor) == (13, 8, 0.5)
    assert "The loss of step 13 was not finite: back to the weights of step 8, learning rate times 0.5" in caplog.text
    assert all(bool(torch.isfinite(weight).all()) for weight in result.draft.model.state_dict().values())
    assert held_out_acceptance(result.draft, tiny_model(), held_out) > held_out_acceptance(
        _first_layers(), tiny_model(), held_out
    )
    rates = [point.learning_rate for point in result.curve]
    assert rates[13] < 0.55 * rates[12]


def test_a_loss_that_stays_nan_stops_with_an_error(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Student.backward

    def always(self: Student, *arguments: object) -> object:
        _poison_weights(self)
        return original(self, *arguments)

    monkeypatch.setattr(Student, "backward", always)
    with pytest.raises(NonFiniteError, match=r"no finite loss in 11 steps, the last one step 10.*Lower learning_rate"):
        _trained(traces, tmp_path / "work")
    with pytest.raises(NonFiniteError, match="no finite loss in 2 steps"):
        _trained(traces, tmp_path / "short", tokens=400)


def test_traces_of_another_target_or_tokenizer_are_refused(tmp_path: Path) -> None:
    for name, changes in (
        ("target", {"target_fingerprint": "e" * 16}),
        ("tokenizer", {"tokenizer_fingerprint": "e" * 16}),
    ):
        trace = written_trace(tmp_path / name, tiny_model(), 2, **changes)
        with pytest.raises(TraceError, match=r"e{16}"):
            _trained([trace], tmp_path / "work")


def test_a_draft_without_weights_to_train_is_refused(traces: list[Trace], tmp_path: Path) -> None:
    model = copy.deepcopy(_first_layers().model)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.detach()
            del module.weight
            module.register_buffer("weight", weight)
    with pytest.raises(ModelError, match="no weight matrix that can be trained: distil it before it is quantized"):
        _trained(traces, tmp_path / "work", Draft(model))


def test_a_head_that_is_more_than_a_matrix_is_refused(traces: list[Trace], tmp_path: Path) -> None:
    model = copy.deepcopy(_first_layers().model)
    model.config.final_logit_softcapping = 3.0
    with pytest.raises(ModelError, match="head of LlamaForCausalLM is more than a matrix"):
        _trained(traces, tmp_path / "work", Draft(model))


def test_the_schedule_warms_up_and_falls_to_zero() -> None:
    schedule = Schedule.of(DistillStep(learning_rate=1.0, warmup=0.1, finish="tvd", finish_fraction=0.25))
    rates = [schedule.learning_rate(step / 100, 1 / 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    assert all(left > right for left, right in pairwise(rates[10:]))
    assert 0.0 < rates[-1] < 1e-3


def test_a_temperature_without_effect_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Schedule.of(DistillStep(loss={"tvd": 1.0}, temperature=2.0))
    assert "temperature 2 has no effect" in caplog.text
