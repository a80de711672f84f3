"""Machine code of `planner.search.kernel`: made once per installation, in the background, and kept on disk by numba.

Compiling takes some ten seconds, more than a plan may. So whoever plans first starts a process that does it, and plans
without until it is there.
"""

import hashlib
import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


def annealing() -> ModuleType | None:
    """The compiled `planner.search.kernel.annealing`, or None while it is being compiled."""
    return _compiled("annealing")


def listing() -> ModuleType | None:
    """The compiled `planner.search.kernel.list_scheduler`, or None while it is being compiled."""
    return _compiled("list_scheduler")


def _compiled(name: str) -> ModuleType | None:
    if marker().exists():
        return _module(name)
    _compile_in_background()
    return None


@cache
def marker() -> Path:
    """A file that is there when all of the kernel is compiled: for these sources, this numba and this processor.

    By content, not by date: copies of an installation have new dates, and numba takes its code for them, too.
    """
    import numba
    from llvmlite import binding

    known = hashlib.sha256(f"{sys.version} {numba.__version__} {binding.get_host_cpu_name()}".encode())
    for name in ("annealing", "list_scheduler", "start_times"):
        known.update(Path(str(_module(name).__file__)).read_bytes())
    return Path(_module("annealing").anneal.stats.cache_path) / f"compiled-{known.hexdigest()[:16]}"


@cache
def _module(name: str) -> ModuleType:
    """Imported late: numba alone takes a third of a second."""
    return importlib.import_module(f"planner.search.kernel.{name}")


@cache
def _compile_in_background() -> "subprocess.Popen[bytes]":
    """Start it once per process. It outlives its caller: the next one finds its work done."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, "-m", "planner.search.kernel.compile"],
                            env={**os.environ, "PYTHONPATH": path},
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            start_new_session=True)
