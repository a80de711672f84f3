"""Compile functions with numba, anew whenever a file of the kernel has changed."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.py")))
"""All files of the kernel."""
STAMP = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()
"""Digest of all files of the kernel; another one makes numba compile anew.

numba itself looks only at the file of a function, and would miss a change to another file's
function that it calls.
"""


def jit(function: Function) -> Function:
    """Compile a function at its first call, for the types of its arguments."""
    return _compile_with(function, {})


def jit_borrowing(function: Function) -> Function:
    """Compile a function that uses its caller's arrays without counting references.

    The function must allocate no arrays, assign to no slices of arrays, and be called by compiled
    functions only. Counting references to every array of a tuple at every call takes a third to a
    half of the time of annealing.
    """
    return _compile_with(function, BORROWED)


def jit_inlined(function: Function) -> Function:
    """Compile a small function into each of its callers, where a call would take longer.

    The limits of `jit_borrowing` hold.
    """
    return _compile_with(function, {"forceinline": True, **BORROWED})


BORROWED: Mapping[str, Any] = {"_nrt": False}
"""Option, without a public name, to compile without numba's runtime."""


def _compile_with(function: Function, options: Mapping[str, Any]) -> Function:
    """Compile a function with options of numba, unless the kernel is plain Python."""
    if __name__ != "slipstream.planner.kernel.compiling":
        return function
    # With the digest in place of the file's own stamp, stored code is used only if no file of the
    # kernel has changed.
    try:
        compiled = njit(cache=True, nogil=True, **options)(function)
        if hasattr(compiled, "_cache"):  # not if NUMBA_DISABLE_JIT is set
            compiled._cache._cache_file._source_stamp = STAMP  # numba has no public name for it
    except RuntimeError:  # neither the installation nor the user has a folder that can be written
        compiled = njit(nogil=True, **options)(function)
    return cast(Function, compiled)
