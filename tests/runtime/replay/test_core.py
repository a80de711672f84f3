"""The core of the runtime stays small: `runtime/replay`, with all of ours that it imports."""

import ast
import importlib.util
from pathlib import Path

import pytest

from slipstream.runtime import replay

LIMIT = 2900
"""Statements that ARCHITECTURE.md promises, without docstrings: they do not depend on layout."""


def find_file(module):
    """The file of one of our modules; None for a name inside a module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def imported_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def is_text(statement):
    """Return whether a statement is a docstring."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def count_statements(tree):
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(not is_text(statement) for statement in statements)


@pytest.fixture(scope="module")
def trees():
    """Syntax trees of the core's modules and of all of ours that they import."""
    waiting, found = [*Path(replay.__file__).parent.glob("*.py")], {}
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = ast.parse(path.read_text())
        names = {name for name in imported_names(found[path]) if name.startswith("slipstream.")}
        waiting += filter(None, map(find_file, names))
    return found


def test_the_core_has_no_more_code_than_promised(trees):
    names = {path.name for path in trees}
    assert {"executor.py", "program.py"} <= names
    assert sum(map(count_statements, trees.values())) <= LIMIT


def test_it_imports_torch_and_no_other_large_library(trees):
    roots = {name.partition(".")[0] for tree in trees.values() for name in imported_names(tree)}
    assert "torch" in roots and not roots & {
        "transformers",
        "safetensors",
        "numpy",
        "ortools",
        "numba",
        "networkx",
    }
