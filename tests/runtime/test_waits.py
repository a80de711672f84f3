"""Every wait of the runtime says for whom it waits, and how long at most."""

import ast
import importlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from slipstream import runtime
from slipstream.runtime.waits import WAITS, Ender

ROOT = Path(runtime.__file__).parent
BLOCKING = frozenset(
    {
        "wait",
        "acquire",
        "sleep",
        "result",
        "synchronize",
        "flock",
        "waitpid",
        "sendall",
        "create_connection",
        "read_first",
        "run_call",
    }
)
TOOLS = ROOT / "tools"
"""Programs of their own."""


def is_wait(call: ast.Call) -> bool:
    """Whether a call may block, by its name and its object's."""
    if not isinstance(call.func, ast.Attribute):
        return isinstance(call.func, ast.Name) and call.func.id in {"wait", "sleep"}
    name, on = call.func.attr, ast.unparse(call.func.value)
    match name:
        case "select":
            return "select" in on
        case "recv":
            return "socket" in on or "connection" in on
        case "join":
            return "thread" in on
        case "get":
            return not call.args and not on.isupper()  # those of constants are context variables
    return name in BLOCKING


def waiting_functions(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}" if name else child.name
        if isinstance(child, ast.Call) and is_wait(child):
            yield name
        yield from waiting_functions(child, inner)


def find_waits() -> set[str]:
    found = set[str]()
    for path in ROOT.rglob("*.py"):
        if TOOLS not in path.parents:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found |= {
                f"{module}:{name}" for name in waiting_functions(ast.parse(path.read_text()), "")
            }
    return found


def test_every_wait_is_declared_and_nothing_else_is():
    declared = [wait.where for wait in WAITS]
    assert len(set(declared)) == len(declared)
    assert find_waits() == set(declared)


@pytest.mark.parametrize(
    "wait",
    [wait for wait in WAITS if not isinstance(wait.ends, Ender)],
    ids=lambda wait: wait.where,
)
def test_every_limit_is_that_of_the_code(wait):
    module, name = wait.ends.split(":")
    limit = getattr(importlib.import_module(f"slipstream.runtime.{module}"), name)
    assert (limit.total_seconds() if isinstance(limit, timedelta) else limit) > 0


def test_nobody_waits_for_another_worker_without_an_end():
    # What only a computation, a device or a disk ends is a wait of a process for itself.
    for wait in WAITS:
        if wait.ends in (Ender.OWN, Ender.DEVICE, Ender.DISK):
            assert not any(
                word in wait.awaited for word in ("worker", "member", "node 0", "holder", "peer")
            ) or wait.awaited.startswith("nobody"), wait
