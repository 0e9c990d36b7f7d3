"""Laws of the checks that run with every test: what an annotation says is refused when it does not hold."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from foredraft.models.few_rows import few_rows_linear
from tests.shapes import WrongArgument, WrongResult, check_annotations

SOURCE = """
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

calls = []


def longer(x: Float[Tensor, " n"], y: Float[Tensor, " n"], by: int = 0) -> Float[Tensor, " n"]:
    calls.append(by)
    return x.repeat(1 + by)


def twice(x: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
    return longer(x.repeat(2), x.repeat(2))


def nested() -> Callable[[object], object]:
    def inner(x: Int[Tensor, " n"]) -> None: ...

    return inner


@dataclass(frozen=True, slots=True)
class Pair:
    left: Float[Tensor, " n"]
    right: Float[Tensor, " n"]

    def at(self, index: int) -> "Pair":
        return Pair(self.left[:index], self.right[:index]) if index else 0

    @staticmethod
    def of(x: Float[Tensor, "2 n"]) -> "Pair":
        return Pair(x[0], x[1])
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "annotated.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "annotated", raising=False)
    check_annotations("annotated")
    return importlib.import_module("annotated")


def test_arguments_are_checked_before_the_call_and_results_behind_it(made_up: ModuleType) -> None:
    assert len(made_up.longer(torch.ones(3), torch.ones(3))) == 3
    made_up.calls.clear()
    for wrong in (torch.ones(2), torch.ones(3, dtype=torch.long), torch.ones(3, 1), [1.0] * 3):
        with pytest.raises(WrongArgument):
            made_up.longer(torch.ones(3), wrong)
    assert made_up.calls == []
    with pytest.raises(WrongResult):
        made_up.longer(torch.ones(3), torch.ones(3), by=1)
    assert made_up.calls == [1]


def test_an_axis_has_one_length_a_call(made_up: ModuleType) -> None:
    assert len(made_up.twice(torch.ones(3))) == 6
    assert len(made_up.twice(torch.ones(4))) == 8


def test_functions_in_functions_are_checked(made_up: ModuleType) -> None:
    with pytest.raises(WrongArgument):
        made_up.nested()(torch.ones(3))


def test_dataclasses_and_their_methods_are_checked(made_up: ModuleType) -> None:
    pair = made_up.Pair.of(torch.ones(2, 3))
    with pytest.raises(WrongArgument):
        made_up.Pair(torch.ones(2), torch.ones(3))
    with pytest.raises(WrongArgument):
        made_up.Pair.of(torch.ones(3, 3))
    assert len(pair.at(2).left) == 2
    with pytest.raises(WrongResult):
        pair.at(0)


def test_the_whole_package_is_checked() -> None:
    with pytest.raises(WrongArgument):
        few_rows_linear(torch.ones(2, 3), torch.ones(4, 5))
