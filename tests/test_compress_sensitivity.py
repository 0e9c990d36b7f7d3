"""Laws of what hangs on each unit of a draft."""

import math
from pathlib import Path

import pytest
import torch

from foredraft.compress.probe import Probe, measure
from foredraft.compress.quantize import quantize
from foredraft.compress.sensitivity import probe_rounded, probed, rank_correlation, sensitivities
from foredraft.core.errors import UserError
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.units import search_units
from tests.test_compress_probe import bench, figures, made_trace
from tests.tiny import tiny_model

INT4 = WeightFormat(4, 32)


@pytest.mark.parametrize("head", [torch.empty(0, dtype=torch.long), torch.arange(0, 272, 2)], ids=["full", "trimmed"])
def test_figures_are_those_of_gradients_taken_by_hand(head: torch.Tensor, tmp_path: Path) -> None:
    """One unit of two matrices, two answers; of a trimmed head, what it can say counts."""
    model, rows = tiny_model(num_layers=2), bench(made_trace(tmp_path / "trace")).rows[:2]
    answers = [row.answer() for row in rows]
    found = {one.unit: one for one in sensitivities(Draft(model, head), answers, INT4)}
    unit = next(one for one in search_units(model) if one.name == "layers.1.gate_up")
    weights = [model.get_submodule(module).weight for module in unit.modules]
    rounded = quantize(Draft(model), {unit.name: INT4}).model
    errors = [
        rounded.get_submodule(module).unpacked(torch.float32) - weight.detach()
        for module, weight in zip(unit.modules, weights, strict=True)
    ]

    def loss(answer: object) -> torch.Tensor:
        logits = model(answer.token_ids[None]).logits[0, answer.start - 1 : -1]
        emitted = answer.token_ids[answer.start :]
        if len(head):
            even = emitted % 2 == 0
            logits, emitted = logits[even][:, ::2], emitted[even] // 2
        return logits.log_softmax(-1).gather(-1, emitted[:, None]).sum()

    gradients = [torch.autograd.grad(loss(answer), weights) for answer in answers]
    summed = [one + two for one, two in zip(*gradients, strict=True)]
    norm = math.sqrt(sum(float(g.square().sum()) for g in summed))
    size = math.sqrt(sum(float(w.detach().square().sum()) for w in weights))
    fisher = sum(float((g * e).square().sum()) for pair in gradients for g, e in zip(pair, errors, strict=True))
    first = abs(sum(float((g * e).sum()) for g, e in zip(summed, errors, strict=True)))
    here = found[unit.name]
    assert here.grad_over_weight == pytest.approx(norm / size, rel=1e-4)
    assert here.fisher == pytest.approx(fisher, rel=1e-4)
    assert here.first_order == pytest.approx(first, rel=1e-3)
    assert {one.name for one in search_units(model)} - set(found) == {"embedding"}
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_a_unit_that_rounding_leaves_alone_has_no_error(tmp_path: Path) -> None:
    model, rows = tiny_model(num_layers=2), bench(made_trace(tmp_path / "trace")).rows[:2]
    with torch.no_grad():
        weight = model.model.layers[0].mlp.down_proj.weight
        weight.copy_((torch.arange(weight.numel()).view_as(weight) % 250 - 125) / 256)
        weight[:, 0] = 127 / 256
    found = {one.unit: one for one in sensitivities(Draft(model), [row.answer() for row in rows], WeightFormat(8, 0))}
    exact = found.pop("layers.0.down")
    assert (exact.fisher, exact.first_order) == (0.0, 0.0)
    assert exact.grad_over_weight > 0.0
    assert min(one.fisher for one in found.values()) > 0.0


def test_a_probe_of_a_unit_equals_measuring_the_draft_rounded_there(tmp_path: Path) -> None:
    on, draft = bench(made_trace(tmp_path / "trace")), Draft(tiny_model(num_layers=3))
    probe = Probe(draft, on)
    before = {name: weight.clone() for name, weight in draft.model.state_dict().items()}
    for unit in search_units(draft.model)[1:]:
        rounded = figures(probe_rounded(draft, probe, unit, INT4))
        assert rounded == pytest.approx(figures(measure(quantize(draft, {unit.name: INT4}), on)), abs=1e-5), unit.name
    assert all(torch.equal(weight, before[name]) for name, weight in draft.model.state_dict().items())
    assert draft.model.lm_head.weight is draft.model.model.embed_tokens.weight


def test_the_units_that_rank_highest_are_probed(tmp_path: Path) -> None:
    on, draft = bench(made_trace(tmp_path / "trace")), Draft(tiny_model(num_layers=3))
    found = sensitivities(draft, [row.answer() for row in on.rows[:2]], INT4)
    probes, passes = probed(draft, on, found, INT4, most=3, k=2)
    chosen = {one.unit for one in probes if not math.isnan(one.measured)}
    assert chosen == {one.unit for one in sorted(found, key=lambda one: -one.fisher)[:3]}
    assert 0.0 <= passes <= 3.0
    assert [one.to_json()["measured"] is None for one in probes].count(False) == 3


def test_rank_correlation_counts_order_alone() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 20.0, 300.0, 4000.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, -1.0]) == pytest.approx(-1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]) == 0.0
    assert rank_correlation([1.0, 1.0, 2.0], [3.0, 3.0, 9.0]) == pytest.approx(1.0)
    assert rank_correlation([], []) == rank_correlation([1.0], [2.0]) == 0.0


def test_it_needs_answers() -> None:
    with pytest.raises(UserError, match="collect a trace"):
        sensitivities(Draft(tiny_model()), [], INT4)
