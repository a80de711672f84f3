"""How functions of the kernel are compiled: by numba, to run without the interpreter's lock, kept on disk if possible.

numba keeps machine code by source file, and does not notice that a function of another file has changed.
`planner.search.compiled` does: it removes what is kept when any source of the kernel differs.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def jit(function: Function) -> Function:
    """A function that is compiled when it is first called, for the types it is called with."""
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # neither the installation nor the user has a folder that can be written
        return cast(Function, njit(nogil=True)(function))
