"""What a CPU cannot show: the same figures on a CUDA device. Run with -m gpu where there is one."""

from pathlib import Path

import pytest
import torch

from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.data import read_groups
from foredraft.distill.init import init_from_target
from foredraft.distill.losses import forward_kl, jsd, lk_hybrid, loss_gradient
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.models.loading import load_model, model_device
from foredraft.steps import DistillStep
from tests.distilling import tiny_target, written_trace
from tests.laws import hidden_and_head, random_law, top_of
from tests.tiny import save_tiny, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def test_models_are_loaded_onto_the_gpu(tmp_path: Path) -> None:
    model = load_model(save_tiny(tmp_path / "model"))
    assert model.device == model_device() == torch.device("cuda", 0)


@pytest.mark.parametrize("loss", [forward_kl, jsd, lk_hybrid])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_the_cpu(loss: object, dtype: torch.dtype) -> None:
    hidden, head = hidden_and_head()
    law = top_of(random_law(), 12)
    here = loss_gradient(hidden.to(dtype), head.to(dtype), law, loss)
    there = loss_gradient(hidden.to(CUDA, dtype), head.to(CUDA, dtype), law.to(CUDA), loss)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(there.losses.cpu(), here.losses, **tolerance)
    torch.testing.assert_close(there.hidden.cpu(), here.hidden, **tolerance)


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16"}, {"optimizer": "adamw-8bit"}, {"laws": "live"}])
def test_training_on_the_gpu_lowers_the_loss(settings: dict[str, str], tmp_path: Path) -> None:
    target = tiny_target(tiny_model().to(CUDA))
    traces = [written_trace(tmp_path / str(law), tiny_model(), 40, law) for law in (GREEDY, SamplingLaw())]
    step = DistillStep.model_validate({"tokens": 6000, "batch_tokens": 200, "learning_rate": 1e-2, **settings})
    curve = distill(init_from_target(target.model, [0]), traces, step, target, tmp_path / "work").curve
    assert curve[-1].loss < 0.8 * curve[0].loss


def test_a_step_on_the_gpu_has_the_cpu_s_gradient(tmp_path: Path) -> None:
    groups = read_groups([written_trace(tmp_path / "trace", tiny_model(), 6)])
    here, there = (Student.of(init_from_target(tiny_model().to(device), [0, 2])) for device in ("cpu", CUDA))
    for student in (here, there):
        student.backward(groups, forward_kl)
    for name, weight in here.weights.items():
        torch.testing.assert_close(there.weights[name].grad.cpu(), weight.grad, rtol=1e-3, atol=1e-5)
