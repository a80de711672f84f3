"""The modules of the kernel as plain Python: the same source, not compiled."""

import importlib.util
import sys
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from unittest import mock

import numba

from slipstream.planner.search import kernel


@contextmanager
def interpreted(*names: str):
    """Within it, `from planner.search.kernel import NAME` gives the module uncompiled."""
    with mock.patch.multiple(kernel, create=True, **{name: _load(name) for name in names}):
        yield


@cache
def _load(name: str) -> ModuleType:
    full = f"slipstream.planner.search.kernel.{name}"
    spec = importlib.util.find_spec(full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(numba.config, "DISABLE_JIT", True), mock.patch.dict(sys.modules, {full: module}):
        spec.loader.exec_module(module)
    assert not hasattr(next(iter(vars(module).values())), "py_func")
    return module
