"""Few rows are multiplied another way, and the products are the same."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from foredraft.models import few_rows
from foredraft.models.few_rows import FewRowsLinear, few_rows_linear
from foredraft.models.loading import load_model


@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (1, 5, 24), (3, 3, 24), (10, 24), (0, 24), (24,)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wide", [7, 60])
def test_products_are_those_of_linear(
    shape: tuple[int, ...], biased: bool, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "get_num_threads", lambda: 2)
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(*shape, generator=generator), torch.randn(wide, 24, generator=generator)
    bias = torch.randn(wide, generator=generator) if biased else None
    product = few_rows_linear(rows, weight, bias)
    torch.testing.assert_close(product, functional.linear(rows, weight, bias))
    assert product.is_contiguous()


@pytest.mark.parametrize(
    ("rows", "wide", "threads", "is_few"),
    [(1, 3, 2, False), (1, 8, 1, False), (1, 8, 2, True), (2, 3, 1, True), (9, 3, 2, True), (10, 3, 2, False)],
)
def test_only_a_few_rows_take_the_other_way(
    rows: int, wide: int, threads: int, is_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "get_num_threads", lambda: threads)
    taken: list[int] = []
    linear = functional.linear
    monkeypatch.setattr(few_rows.functional, "linear", lambda *args: (taken.append(len(args[0])), linear(*args))[1])
    few_rows_linear(torch.ones(rows, 4), torch.ones(wide, 4))
    assert taken == ([] if is_few else [rows])


def test_other_types_and_gradients_are_left_as_they_were() -> None:
    rows, weight = torch.randn(3, 8).double(), torch.randn(5, 8).double().requires_grad_()
    few_rows_linear(rows, weight).sum().backward()
    torch.testing.assert_close(weight.grad, rows.sum(0).expand(5, 8))
    narrow, wide = torch.randn(3, 8), torch.randn(5, 8, requires_grad=True)
    few_rows_linear(narrow, wide).sum().backward()
    torch.testing.assert_close(wide.grad, narrow.sum(0).expand(5, 8))


def test_a_loaded_model_keeps_its_weights_and_their_names(tiny_target_folder: Path) -> None:
    model = load_model(tiny_target_folder, "float32")
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert linears
    assert all(type(module) is FewRowsLinear for module in linears)
    assert "model.layers.0.mlp.up_proj.weight" in model.state_dict()
