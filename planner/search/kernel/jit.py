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
    return _compiled(function, inline=False)


def inlined(function: Function) -> Function:
    """A function that gets many arrays and does little: to pass them would take longer than what it does."""
    return _compiled(function, inline=True)


def _compiled(function: Function, *, inline: bool) -> Function:
    try:
        made = njit(cache=True, nogil=True, forceinline=inline)(function)
    except RuntimeError:  # neither the installation nor the user has a folder that can be written
        made = njit(nogil=True, forceinline=inline)(function)
    return cast(Function, made)
