"""Compile functions with numba: three decorators, and the stamp by which numba knows that a file has changed."""

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
"""Digest of these files. numba stores machine code by the content of one file, so that a function that calls another
file's would stay as it was when that changes."""


def jit(function: Function) -> Function:
    """Compile a function at its first call, for the types of its arguments."""
    return _compile_with(function, {})


def jit_borrowing(function: Function) -> Function:
    """Compile a function that allocates no arrays, assigns to no slices of arrays, and is called by compiled functions
    only.

    It uses its caller's arrays without counting references. Otherwise numba would count references to every array of a
    tuple at every call, which is a third to a half of the time of annealing.
    """
    return _compile_with(function, BORROWED)


def jit_inlined(function: Function) -> Function:
    """Compile a small function that is inlined into its callers: passing its arguments would take longer than what it
    does."""
    return _compile_with(function, {"forceinline": True, **BORROWED})


BORROWED: Mapping[str, Any] = {"_nrt": False}
"""Option that compiles without numba's runtime, which counts references. It has no public name."""


def _compile_with(function: Function, options: Mapping[str, Any]) -> Function:
    """Compile a function with these options of numba, or return it as it is if the kernel was imported as plain
    Python."""
    if __name__ != "slipstream.planner.kernel.compiling":
        return function
    try:
        compiled = njit(cache=True, nogil=True, **options)(function)
        compiled._cache._cache_file._source_stamp = STAMP  # numba has no public name for it
    except RuntimeError:  # neither the installation nor the user has a folder that can be written
        compiled = njit(nogil=True, **options)(function)
    return cast(Function, compiled)
