"""Optimizers, clipping, divergence and trackers."""

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from torch import nn

from foredraft.core.errors import CheckpointError, MissingExtraError, NonFiniteError, UnknownNameError, UserError
from foredraft.core.law import SamplingLaw
from foredraft.distill import loop
from foredraft.distill import optimizer as optimizers
from foredraft.distill.divergence import DivergenceWatch
from foredraft.distill.init import init_from_target
from foredraft.distill.optimizer import Updater, clip_gradients
from foredraft.distill.student import Figures, Student
from foredraft.distill.train import Distilled, distill
from foredraft.models.draft import save_draft
from foredraft.models.made_for import blank_manifest
from foredraft.steps import DistillStep
from foredraft.trace.store import Trace
from foredraft.trainings import distill_draft
from tests.distilling import tiny_target, written_trace
from tests.tiny import tiny_model

SHORT = {"tokens": 3000, "batch_tokens": 200, "learning_rate": 1e-2, "validation": {"prompts": 0}}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = tmp_path_factory.mktemp("traces")
    return [written_trace(folder / "sampled", tiny_model(), 48, SamplingLaw())]


def _trained(traces: list[Trace], work: Path, **settings: object) -> Distilled:
    step = DistillStep(**{**SHORT, **settings})
    return distill(init_from_target(tiny_model(), [0]), traces, step, tiny_target(), work)


def _weights(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layer.matrix": (8, 4), "layer.scale": (8,), "norm": (4,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def _step(updater: Updater) -> None:
    """Step towards zero."""
    for weight in updater.weights.values():
        weight.grad = weight.detach().clone()
    updater.step(0.1)


def test_an_optimizer_goes_on_exactly_from_its_state() -> None:
    whole = Updater("adamw", _weights(), 0.01)
    for _ in range(3):
        _step(whole)
    state = whole.state()
    stored = {f"weight.{key}": value.detach().clone() for key, value in whole.weights.items()}
    for _ in range(2):
        _step(whole)
    weights = _weights(1)
    resumed = Updater("adamw", weights, 0.01)
    for key, weight in weights.items():
        weight.data.copy_(stored[f"weight.{key}"])
    resumed.restore(stored | state | {f"best.{key}": value for key, value in weights.items()})
    for _ in range(2):
        _step(resumed)
    assert all(torch.equal(weights[key], whole.weights[key]) for key in weights)
    assert set(resumed.state()) == set(whole.state())


def test_steps_along_the_gradient_of_the_norm_make_weights_smaller() -> None:
    updater = Updater("adamw", _weights(), 0.0)
    before = {key: float(weight.detach().norm()) for key, weight in updater.weights.items()}
    for _ in range(3):
        _step(updater)
    assert all(float(weight.detach().norm()) < before[key] for key, weight in updater.weights.items())
    assert {key.split(".")[0] for key in updater.state() if key.endswith(".norm")} == {"step", "exp_avg", "exp_avg_sq"}


def test_numbers_in_an_optimizers_state_stay_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes keeps them."""

    class Counting(torch.optim.SGD):
        def step(self, *_: object) -> None:
            super().step()
            for group in self.param_groups:
                for weight in group["params"]:
                    self.state[weight]["step"] = self.state[weight].get("step", 0) + 1

    monkeypatch.setattr(optimizers, "_make", lambda name, weights, decay: Counting(weights, lr=0.1))
    updater = Updater("adamw-8bit", _weights(), 0.0)
    _step(updater)
    other = Updater("adamw-8bit", _weights(), 0.0)
    other.restore(updater.state())
    _step(other)
    assert other.state()["step#.norm"].tolist() == 2


def test_eight_bits_ask_for_a_gpu_and_for_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs an NVIDIA GPU, and the draft is on the processor: use adamw"):
        Updater("adamw-8bit", _weights(), 0.0)

    class OnGpu(nn.Parameter):
        device = torch.device("cuda")

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r'pip install "foredraft\[quantize\]"'):
        Updater("adamw-8bit", {"w": OnGpu(torch.ones(2, 2))}, 0.0)
    made = ModuleType("bitsandbytes.optim")
    made.AdamW8bit = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", made)
    updater = Updater("adamw-8bit", {"w": OnGpu(torch.ones(2, 2))}, 0.25)
    (group,) = updater._optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.95), 0.25)


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    weights = list(_weights().values())
    for weight in weights:
        weight.grad = 3.0 * torch.ones_like(weight)
    norm = clip_gradients(weights, 1.0)
    assert norm == pytest.approx(3.0 * (32 + 8 + 4) ** 0.5)
    assert sum(float(weight.grad.square().sum()) for weight in weights) == pytest.approx(1.0, rel=1e-4)
    assert clip_gradients(weights, 5.0) == pytest.approx(1.0, rel=1e-4)
    assert sum(float(weight.grad.square().sum()) for weight in weights) == pytest.approx(1.0, rel=1e-4)


def test_only_losses_that_stay_high_have_diverged() -> None:
    watch = DivergenceWatch(2.0, 3)
    calm = [1.0, 9.0, 1.0, 1.0, 1.0, 2.5, 1.0, 0.1, 1.0]
    assert not any(watch.has_diverged(loss) for loss in calm)
    assert [watch.has_diverged(loss) for loss in (2.5, 2.5, 2.5)] == [False, False, True]
    assert watch.is_suspicious
    watch.look_again()
    assert [watch.has_diverged(loss) for loss in (2.5, 2.5, 1.0, 2.5)] == [False] * 4
    watch.start_over()
    assert not any(watch.has_diverged(9.0) for _ in range(9))
    never = DivergenceWatch(0.0, 1)
    assert not any(never.has_diverged(loss) for loss in (1.0, 1e9, 1e9))


def test_a_loss_that_runs_away_is_taken_back_to_before_it_did(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, calls = Student.backward, iter(range(100))

    def backward(self: Student, *arguments: object) -> Figures:
        figures = original(self, *arguments)
        return Figures(9.0, figures.acceptance) if 8 <= next(calls) < 11 else figures

    monkeypatch.setattr(loop, "_POSITIONS_BETWEEN_POINTS", 400)
    monkeypatch.setattr(Student, "backward", backward)
    with caplog.at_level(logging.WARNING):
        result = _trained(traces, tmp_path / "work", divergence_steps=3)
    (rollback,) = result.rollbacks
    assert (rollback.step, rollback.to_step, rollback.rate_factor, rollback.reason) == (10, 8, 0.5, "too high")
    assert "The loss of step 10 was too high: back to the weights of step 8" in caplog.text
    monkeypatch.setattr(Student, "backward", lambda self, *_: Figures(1.0 if next(calls) < 40 else 9.0, 0.5))
    with pytest.raises(NonFiniteError, match="a loss that is too high in 11 steps"):
        _trained(traces, tmp_path / "hopeless", divergence_steps=1, tokens=9000, finish_fraction=0.0)


class StubTracker(GeneralTracker):
    """Keeps what it is told."""

    name = "stub"
    requires_logging_directory = False
    told: list

    def __init__(self, run_name: str) -> None:
        super().__init__(_blank=True)
        self.told = StubTracker.told = [run_name]

    @property
    def tracker(self) -> list:
        return self.told

    def store_init_configuration(self, values: dict) -> None:
        self.told.append(values)

    def log(self, values: dict, step: int | None = None, **_: object) -> None:
        self.told.append((step, values))

    def finish(self) -> None:
        self.told.append("finished")


def test_a_tracker_gets_settings_and_the_figures_of_every_step(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "stub", StubTracker)
    result = _trained(traces, tmp_path / "work", track="stub", tokens=800, validation={"every": 400})
    name, settings, *figures, end = StubTracker.told
    assert (name, settings["tokens"], end) == ("foredraft", 800, "finished")
    steps = [(step, values) for step, values in figures if "loss" in values]
    assert [values["loss"] for _, values in steps] == [point.loss for point in result.curve]
    replays = [(step, values["mean_tokens_per_call"]) for step, values in figures if "loss" not in values]
    assert replays == [(seen.step, seen.mean_tokens_per_call) for seen in result.validations]


def test_trackers_that_are_not_there_are_named(traces: list[Trace], tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown tracker 'tensorbord'\. Known: .*Did you mean 'tensorboard'"):
        _trained(traces, tmp_path / "work", track="tensorbord")
    with pytest.raises(MissingExtraError, match="track: swanlab needs a package .*: pip install swanlab"):
        _trained(traces, tmp_path / "work", track="swanlab")


def test_a_draft_folder_that_is_half_there_is_refused_with_a_remedy(traces: list[Trace], tmp_path: Path) -> None:
    target = tiny_target()
    folder = tmp_path / "draft"
    save_draft(init_from_target(target.model, [0]), folder, blank_manifest(target, "causal-lm"), target.tokenizer)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model.safetensors: the draft is only half there. Delete the"):
        distill_draft(folder, target, traces, DistillStep(**SHORT), tmp_path / "out")
