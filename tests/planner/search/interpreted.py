"""The kernel as plain Python: the same source, not compiled."""

import importlib.util
import sys
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from unittest import mock

import numba

from slipstream import planner
from slipstream.planner import kernel


@contextmanager
def interpreted():
    """Within it, `from slipstream.planner import kernel` gives the module uncompiled."""
    with mock.patch.object(planner, "kernel", _plain()):
        yield


@cache
def _plain() -> ModuleType:
    spec = importlib.util.find_spec(kernel.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(numba.config, "DISABLE_JIT", True), mock.patch.dict(sys.modules, {kernel.__name__: module}):
        spec.loader.exec_module(module)
    assert not hasattr(module.list_order, "py_func")
    return module
