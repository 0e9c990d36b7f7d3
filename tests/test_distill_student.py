"""What learns in a student, and how it is computed: precision, checkpointing, low-rank updates, learned embeddings."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.core.errors import RecipeError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.data import Group, event_law, read_groups, rows_of_tokens
from foredraft.distill.init import init_from_target
from foredraft.distill.learned_head import learned_head_losses
from foredraft.distill.losses import forward_kl, loss_gradient
from foredraft.distill.schedule import Schedule
from foredraft.distill.student import Figures, Student
from foredraft.distill.train import Distilled, distill
from foredraft.models.draft import Draft
from foredraft.steps import DistillStep
from foredraft.trace.store import Trace
from tests.distilling import held_out_acceptance, tiny_target, written_trace
from tests.tiny import tiny_model

SHORT = {"tokens": 3000, "batch_tokens": 200, "learning_rate": 1e-2, "validation": {"prompts": 0}}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = tmp_path_factory.mktemp("traces")
    return [
        written_trace(folder / "greedy", tiny_model(), 24, GREEDY),
        written_trace(folder / "sampled", tiny_model(), 24, SamplingLaw(), seed=1),
    ]


@pytest.fixture(scope="module")
def groups(traces: list[Trace]) -> list[Group]:
    return read_groups(traces)[:6]


def _draft(kept: torch.Tensor | None = None, tied: bool = True) -> Draft:
    return init_from_target(tiny_model(tied=tied), [0, 1], torch.arange(0) if kept is None else kept)


def _trained(traces: list[Trace], work: Path, **settings: object) -> Distilled:
    return distill(_draft(), traces, DistillStep(**{**SHORT, **settings}), tiny_target(), work)


def _gradient(groups: list[Group], draft: Draft | None = None, **settings: object) -> tuple[Figures, dict]:
    step = DistillStep(**settings)
    student = Student.of(draft or _draft(), step)
    figures = student.backward(groups, Schedule.of(step).loss(0.0))
    return figures, {name: weight.grad.clone() for name, weight in student.weights.items()}


def test_checkpointing_changes_neither_figures_nor_gradients(groups: list[Group]) -> None:
    figures, gradients = _gradient(groups)
    again, same = _gradient(groups, gradient_checkpointing=True)
    assert again == figures
    assert all(torch.equal(same[name], gradient) for name, gradient in gradients.items())


def test_checkpointing_computes_every_layer_twice(groups: list[Group]) -> None:
    step = DistillStep(gradient_checkpointing=True)
    calls = []
    student = Student.of(_draft(), step)
    attention = student.model.model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    student.backward(groups, Schedule.of(step).loss(0.0))
    assert calls.count(True) == 2 * calls.count(False)


def test_bfloat16_keeps_float32_weights_and_comes_near_their_gradient(groups: list[Group]) -> None:
    figures, gradients = _gradient(groups)
    rough, close = _gradient(groups, precision="bfloat16")
    assert rough.loss == pytest.approx(figures.loss, rel=0.02)
    assert rough != figures
    for name, gradient in gradients.items():
        assert close[name].dtype == torch.float32
        assert float((close[name] - gradient).norm() / gradient.norm()) < 0.05


def test_low_rank_updates_leave_the_base_alone_and_are_merged(traces: list[Trace], tmp_path: Path) -> None:
    draft = _draft()
    before = {name: value.clone() for name, value in draft.model.state_dict().items()}
    student = Student.of(draft, DistillStep(lora={"rank": 4}))
    assert all(".lora_" in name for name in student.weights)
    assert sum(weight.numel() for weight in student.weights.values()) < 0.6 * sum(map(torch.numel, before.values()))
    result = _trained(traces, tmp_path / "work", lora={"rank": 4})
    after = result.draft.model.state_dict()
    assert sorted(after) == sorted(before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "proj" in name}
    update = after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    singular = torch.linalg.svdvals(update)
    assert float(singular[4]) < 1e-5 * float(singular[0])
    assert held_out_acceptance(result.draft, tiny_model(), traces) > held_out_acceptance(draft, tiny_model(), traces)
    result.draft.model.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    token_ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(stock(token_ids).logits, result.draft.model(token_ids).logits)


def test_low_rank_updates_start_at_zero_and_depend_on_the_seed_alone() -> None:
    students = [Student.of(_draft(), DistillStep(lora={"rank": 2}, seed=seed)) for seed in (0, 0, 1)]
    token_ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(students[0].model(token_ids).logits, _draft().model(token_ids).logits)
    first, again, other = ({name: weight.detach() for name, weight in one.weights.items()} for one in students)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


def test_unknown_matrices_for_low_rank_updates_are_named() -> None:
    with pytest.raises(
        RecipeError, match=r"lora.modules: qkv is no matrix of LlamaForCausalLM, which has down_proj, .*"
    ):
        Student.of(_draft(), DistillStep(lora={"rank": 2, "modules": ["qkv", "q_proj"]}))
    student = Student.of(_draft(), DistillStep(lora={"rank": 2, "modules": ["q_proj"]}))
    assert all("q_proj" in name for name in student.weights)


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_of_all_weights_is_that_of_plain_autograd(groups: list[Group], tied: bool) -> None:
    """Prompts of one token, so that no position is read as a constant stem but the last prompt token itself."""
    short = [
        tuple(replace(one, row=replace(one.row, prompt_ids=one.row.prompt_ids[:1])) for one in group)
        for group in groups
    ]
    draft = _draft(tied=tied)
    _, gradients = _gradient(short, draft, train="all")
    model = copy.deepcopy(draft.model)
    losses = []
    for row in (example.row for group in short for example in group):
        law = event_law(row, rows_of_tokens(torch.arange(0), 272))
        probs = model(row.answer().token_ids[None, :-1]).logits[0].softmax(-1)
        tail = probs.scatter(1, law.rows, 0.0).sum(-1, keepdim=True)
        losses.append(forward_kl(law, torch.cat([probs.gather(1, law.rows), tail], -1).log()))
    torch.cat(losses).mean().backward()
    reference = dict(model.named_parameters())
    assert sorted(gradients) == sorted(reference)
    assert len([name for name in gradients if "embed" in name or "lm_head" in name]) == (1 if tied else 2)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference[name].grad, rtol=1e-3, atol=1e-6)


def test_a_head_that_learns_has_the_losses_of_one_that_does_not(groups: list[Group]) -> None:
    law = event_law(groups[0][0].row, rows_of_tokens(torch.arange(0), 272))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(law), 8, generator=generator)
    head = torch.randn(272, 8, generator=generator).requires_grad_()
    expected = loss_gradient(hidden, head.detach(), law, forward_kl)
    for chunk in (3, 256):
        found = learned_head_losses(hidden, head, law, forward_kl, 1.0, chunk)
        torch.testing.assert_close(found.losses, expected.losses)
        torch.testing.assert_close(found.acceptance, expected.acceptance)
        torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-4, atol=1e-6)


def test_training_all_moves_embeddings_of_the_draft_and_not_of_the_target(traces: list[Trace], tmp_path: Path) -> None:
    target = tiny_model()
    draft = init_from_target(target, [0])
    before = target.get_input_embeddings().weight.detach().clone()
    step = DistillStep(**SHORT, train="all")
    result = distill(draft, traces, step, tiny_target(), tmp_path / "work")
    assert torch.equal(target.get_input_embeddings().weight, before)
    assert not torch.equal(result.draft.model.get_input_embeddings().weight, before)
    assert result.curve[-1].loss < 0.9 * result.curve[0].loss


def test_a_trimmed_head_does_not_learn_and_low_rank_updates_are_of_the_body() -> None:
    with pytest.raises(RecipeError, match=r"would move the 64 rows .* Keep the head whole"):
        Student.of(_draft(torch.arange(64)), DistillStep(train="all"))
    with pytest.raises(RecipeError, match="lora trains updates of the body's matrices only"):
        Student.of(_draft(), DistillStep(train="all", lora={"rank": 2}))
