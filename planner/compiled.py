"""Machine code of `planner.kernel`: made once per installation, in the background, and kept on disk by numba.

Compiling takes some ten seconds, more than a plan may. So whoever plans first starts a process that does it, and plans
without until it is there.
"""

import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ENTRIES = {"annealing": "anneal", "listing": "latest"}
"""The modules of the kernel, and of each a function that is compiled after the others."""


def annealing() -> ModuleType | None:
    """The compiled `planner.kernel.annealing`, or None while it is being compiled."""
    return _compiled("annealing")


def listing() -> ModuleType | None:
    """The compiled `planner.kernel.listing`, or None while it is being compiled."""
    return _compiled("listing")


def _compiled(name: str) -> ModuleType | None:
    module = _module(name)
    if _is_compiled(module, ENTRIES[name]):
        return module
    _compile_in_background()
    return None


@cache
def _module(name: str) -> ModuleType:
    """Imported late: numba alone takes a third of a second."""
    return importlib.import_module(f"planner.kernel.{name}")


def _is_compiled(module: ModuleType, entry: str) -> bool:
    """Whether numba has code on disk that is newer than the source."""
    source = Path(str(module.__file__))
    folder = Path(getattr(module, entry).stats.cache_path)
    kept = folder.glob(f"{source.stem}.{entry}-*.nbi")
    return any(file.stat().st_mtime > source.stat().st_mtime for file in kept)


@cache
def _compile_in_background() -> "subprocess.Popen[bytes]":
    """Start it once per process. It outlives its caller: the next one finds its work done."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, "-m", "planner.kernel.compile"], env={**os.environ, "PYTHONPATH": path},
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            start_new_session=True)
