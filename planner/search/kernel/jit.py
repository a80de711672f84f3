"""How functions of the kernel are compiled: by numba, to run without the interpreter's lock, kept on disk if possible.

numba keeps machine code by source file, and does not notice that a function of another file has changed.
`planner.search.compiled` does: it removes what is kept when any source of the kernel differs.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def jit(function: Function) -> Function:
    """A function that is compiled when it is first called, for the types it is called with."""
    return _compiled(function, {})


def borrowing(function: Function) -> Function:
    """The same for a function that makes no arrays and sets no slices of them, and is called by compiled ones only.

    Its arrays are its caller's while it runs. Else numba counts references to every array of a tuple at every call,
    which is a third to a half of the time of annealing.
    """
    return _compiled(function, BORROWED)


def inlined(function: Function) -> Function:
    """The same for one that does little: to pass its arguments would take longer than what it does."""
    return _compiled(function, {"forceinline": True, **BORROWED})


BORROWED: Mapping[str, Any] = {"_nrt": False}
"""Without numba's runtime, which counts references. The option has no public name."""


def _compiled(function: Function, options: Mapping[str, Any]) -> Function:
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # neither the installation nor the user has a folder that can be written
        made = njit(nogil=True, **options)(function)
    return cast(Function, made)
