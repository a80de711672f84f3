"""Choose the inner loops: machine code, or plain Python while another process compiles it."""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

LAST_INDEX_FILE = "annealing.anneal-*.nbi"
"""File name pattern of the index of `anneal`, the last file that numba writes."""


_compiling_elsewhere = threading.Event()


def kernel_loops() -> Any:
    """Return the module with the inner loops: compiled, or plain Python while they compile."""
    return _plain_kernel() if is_plain_python() else _compiled_kernel()


def is_plain_python() -> bool:
    """Return whether the inner loops run in plain Python while another process compiles them.

    Plain Python is a hundred times slower.
    """
    return _compiling_elsewhere.is_set() and not is_compiled()


def use_plain_python() -> None:
    """Use plain Python until another process has written the machine code."""
    _compiling_elsewhere.set()


def is_compiled() -> bool:
    """Return whether the machine code is loaded, or stored and no older than the source."""
    kernel = _compiled_kernel()
    if kernel.anneal.signatures or not can_store_machine_code():
        return bool(kernel.anneal.signatures)
    changed = _time_of_sources()
    return any(path.stat().st_mtime >= changed for path in _last_index_files())


def mark_as_compiled() -> None:
    """Date the machine code on disk no earlier than its source, as `is_compiled` requires.

    Only to be called once the kernel is loaded, so that the machine code fits the source. Does
    nothing where the files cannot be changed.
    """
    # Machine code is identified by the content of the source. If a checkout writes the same source
    # again, numba does not rewrite the machine code, which would then seem to be too old.
    changed = _time_of_sources()
    with contextlib.suppress(OSError):  # a folder that may only be read
        for path in _last_index_files():
            if path.stat().st_mtime < changed:
                os.utime(path, (changed, changed))


def _time_of_sources() -> float:
    """Return the time of the latest change of a file of the kernel."""
    return float(max(path.stat().st_mtime for path in _compiled_kernel().SOURCES))


def _last_index_files() -> Iterator[Path]:
    kernel = _compiled_kernel()
    return (
        Path(kernel.anneal.stats.cache_path).glob(LAST_INDEX_FILE)
        if can_store_machine_code()
        else iter(())
    )


def can_store_machine_code() -> bool:
    """Return whether numba has a folder to which it can write machine code."""
    return bool(_compiled_kernel().anneal.stats.cache_path)


@cache
def _compiled_kernel() -> Any:
    from slipstream.planner import kernel  # numba takes a third of a second to load

    return kernel


@cache
def _plain_kernel() -> ModuleType:
    # The same files once more, under a name by which numba does not compile them.
    spec = importlib.util.spec_from_file_location(
        "slipstream.planner.plain_kernel", _compiled_kernel().__file__
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its files import each other
    spec.loader.exec_module(module)
    return module
