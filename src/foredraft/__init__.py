"""foredraft makes, shrinks, measures and chooses draft models for speculative decoding.

The functions here do what the command line's verbs do; everything heavy is imported on first use.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("foredraft")
except PackageNotFoundError:
    __version__ = "0+source"

_PUBLIC = {
    "load_target": "foredraft.models.target:load_target",
    "load_drafter": "foredraft.drafters:load_drafter",
    "open_trace": "foredraft.trace.store:open_trace",
    "generate": "foredraft.generation:generate",
    "evaluate": "foredraft.pool:evaluate_drafters",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module, attribute = _PUBLIC[name].split(":")
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
