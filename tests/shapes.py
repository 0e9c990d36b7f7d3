"""Checks the annotations of foredraft while tests run: types, dtypes, and axes of one name that must be equal.

What jaxtyping's own plugin does with beartype, at a fraction of the time: a function is prepared when it is called
first, its arguments are checked once, before it, and what it returns once, behind it.
"""

import ast
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import isclass
from types import CodeType, ModuleType
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped


class WrongArgument(TypeError):
    """An argument is not what the annotation says."""


class WrongResult(TypeError):
    """A result is not what the annotation says."""


_ERRORS = BeartypeConf(violation_param_type=WrongArgument, violation_return_type=WrongResult)
_AXES = jaxtyped("context")
_NAME = "__checked__"


def check_annotations(package: str) -> None:
    """Check the functions and dataclasses of a package that is yet to be imported."""
    sys.meta_path.insert(0, _Finder(package))


def checked(thing: Any) -> Any:
    """Return a function that checks each call, or a class whose fields are checked where it is a dataclass."""
    if not isclass(thing):
        return _checked(thing)
    if is_dataclass(thing) and "__init__" in vars(thing):
        thing.__init__ = _checked(thing.__init__)
    return thing


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    checks: Callable[..., Any] | None = None

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        nonlocal checks
        if checks is None:
            checks = beartype(conf=_ERRORS)(_without_unknown_names(function))
        with _AXES:
            return checks(*arguments, **keywords)

    return wrapper


def _without_unknown_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take away the annotations that name what is imported for type checkers alone."""
    known = {}
    for name, annotation in function.__annotations__.items():
        with suppress(NameError):
            known[name] = eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
    function.__annotations__ = known
    return function


class _Finder:
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> ModuleSpec | None:
        if not f"{name}.".startswith(f"{self._package}."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Return the module with every function and class decorated; kept nowhere, so that no other run finds it."""
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                decorator = ast.copy_location(ast.Name(_NAME, ast.Load()), node)
                # A function is checked below its decorators, a class above what makes it a dataclass.
                node.decorator_list.insert(0 if isinstance(node, ast.ClassDef) else len(node.decorator_list), decorator)
        return compile(tree, self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_NAME] = checked
        super().exec_module(module)
