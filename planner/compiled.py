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

MODULE = "planner.kernel.annealing"
ENTRY = "anneal"
"""The function that all others are compiled for."""


def annealing() -> ModuleType | None:
    """The compiled `planner.kernel.annealing`, or None while it is being compiled."""
    module = _module()
    if _is_compiled(module):
        return module
    _compile_in_background()
    return None


@cache
def _module() -> ModuleType:
    """Imported late: numba alone takes a third of a second."""
    return importlib.import_module(MODULE)


def _is_compiled(module: ModuleType) -> bool:
    """Whether numba has code on disk that is newer than the source."""
    source = Path(str(module.__file__))
    folder = Path(getattr(module, ENTRY).stats.cache_path)
    kept = folder.glob(f"{source.stem}.{ENTRY}-*.nbi")
    return any(file.stat().st_mtime > source.stat().st_mtime for file in kept)


@cache
def _compile_in_background() -> "subprocess.Popen[bytes]":
    """Start it once per process. It outlives its caller: the next one finds its work done."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, "-m", "planner.kernel.compile"], env={**os.environ, "PYTHONPATH": path},
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            start_new_session=True)
