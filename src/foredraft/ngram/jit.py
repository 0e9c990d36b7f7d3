"""Compiles kernels with numba; where it is not installed they run as plain Python and give the same answers."""

import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

try:
    import numba
    from llvmlite import ir
    from numba.core import event
    from numba.core.cgutils import get_or_insert_function
    from numba.extending import intrinsic
except ImportError:
    numba = None  # type: ignore[assignment]

COMPILED = numba is not None and not numba.config.DISABLE_JIT
_Function = TypeVar("_Function", bound=Callable[..., Any])
_log = logging.getLogger(__name__)


def jit(function: _Function) -> _Function:
    """Return `function` compiled when first called; machine code is kept on disk for the next process."""
    if numba is None:
        return function
    bare = inspect.unwrap(function)  # without the shape checks that wrap every function while tests run
    return numba.njit(cache=True, nogil=True, error_model="numpy")(bare)  # type: ignore[return-value]


@jit
def signed(value: Any) -> int:
    """Return an integer of any type as a signed one of 64 bits: numba makes floats of mixed signs."""
    return np.int64(value)  # type: ignore[return-value]


@jit
def pair_hash(first: int, second: int) -> int:
    """Return a hash >= 0 of two integers in [0, 2**31). Its low 30 bits are well mixed; nothing overflows."""
    mixed = signed(first) * 0x2545F491 + signed(second) * 0x1B873593
    mixed ^= mixed >> 29
    return (mixed & 0x3FFFFFFF) * 0x2C1B3C6D >> 12


@jit
def prefetch(array: np.ndarray, index: int) -> None:
    """Have the processor fetch an entry that is read soon; nothing else happens, and any index will do."""
    if COMPILED:
        _prefetch(array.ctypes.data + index * array.itemsize)


if COMPILED:

    @intrinsic
    def _prefetch(_: Any, address: Any) -> Any:
        """Return what compiles to the processor's own instruction: to read, into all caches, data."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            fetch = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(fetch, [builder.inttoptr(arguments[0], pointer), number(0), number(3), number(1)])
            return context.get_dummy_value()

        return numba.types.void(address), generate


def _announce_compiling() -> None:
    """Have the log say once that compiling has begun: a kernel's first call takes seconds, later ones microseconds."""

    class Announcer(event.Listener):  # type: ignore[misc]
        said = False

        def on_start(self, event: Any) -> None:
            dispatcher = event.data.get("dispatcher")
            if not self.said and getattr(dispatcher, "__module__", "").startswith("foredraft."):
                self.said = True
                _log.info("Compiling the n-gram kernels (first use on this machine; kept on disk).")

        def on_end(self, event: Any) -> None: ...

    event.register("numba:compile", Announcer())


if COMPILED:
    _announce_compiling()
else:
    _log.warning("numba is not installed: n-gram drafters give the same answers about 100 times slower.")
