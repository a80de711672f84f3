"""The inner loops (`planner.kernel`): machine code, or plain Python while another process compiles that."""

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

MADE_LAST = "kernel.anneal-*.nbi"
"""What numba writes when it has compiled annealing, and so all else."""


_compiled_beside = threading.Event()


def loops() -> Any:
    """The module to call."""
    return _plain() if plain() else _machine_code()


def plain() -> bool:
    """Whether another process still compiles. Plain Python makes the same list schedules, a hundred times slower."""
    return _compiled_beside.is_set() and not is_compiled()


def go_on_in_plain_python() -> None:
    """Until machine code is kept, which another process makes."""
    _compiled_beside.set()


def is_compiled() -> bool:
    """Whether plans need not wait for the compiler: what is compiled last is newer than the source, or loaded here."""
    kernel = _machine_code()
    if kernel.anneal.signatures or not keeps_machine_code():
        return bool(kernel.anneal.signatures)
    changed = Path(kernel.__file__).stat().st_mtime
    return any(path.stat().st_mtime >= changed for path in _made_last())


def note_compiled() -> None:
    """What was just loaded or compiled is of the source as it is.

    numba knows its machine code by what the source says. So it writes none anew where a checkout has written the same
    source again, and the machine code would seem to be older.
    """
    changed = Path(_machine_code().__file__).stat().st_mtime
    with contextlib.suppress(OSError):  # a folder that may only be read
        for path in _made_last():
            if path.stat().st_mtime < changed:
                os.utime(path, (changed, changed))


def _made_last() -> Iterator[Path]:
    kernel = _machine_code()
    return Path(kernel.anneal.stats.cache_path).glob(MADE_LAST) if keeps_machine_code() else iter(())


def keeps_machine_code() -> bool:
    """Whether there is a folder to write it to."""
    return bool(_machine_code().anneal.stats.cache_path)


@cache
def _machine_code() -> Any:
    from slipstream.planner import kernel  # numba takes a third of a second to load

    return kernel


@cache
def _plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slipstream.planner.plain_kernel", _machine_code().__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
