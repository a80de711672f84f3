"""The core of the runtime stays small: `runtime/replay`, with all of ours that it imports."""

import ast
import importlib.util
import io
import tokenize
from pathlib import Path

import pytest

from slipstream.runtime import replay

LIMIT = 3200
"""Lines of code that ARCHITECTURE.md promises; lines without a token, and docstrings, do not count."""
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


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


def count_code(source, tree):
    documented = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - documented)


@pytest.fixture(scope="module")
def trees():
    """Syntax trees of the core's modules and of all of ours that they import, with their sources."""
    waiting, found = [*Path(replay.__file__).parent.glob("*.py")], {}
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        source = path.read_text()
        found[path] = ast.parse(source), source
        names = {name for name in imported_names(found[path][0]) if name.startswith("slipstream.")}
        waiting += filter(None, map(find_file, names))
    return found


def test_the_core_has_no_more_code_than_promised(trees):
    assert any(path.name == "executor.py" for path in trees) and any(path.name == "program.py" for path in trees)
    assert sum(count_code(source, tree) for tree, source in trees.values()) <= LIMIT


def test_it_imports_torch_and_no_other_large_library(trees):
    roots = {name.partition(".")[0] for tree, _ in trees.values() for name in imported_names(tree)}
    assert "torch" in roots and not roots & {"transformers", "safetensors", "numpy", "ortools", "numba", "networkx"}
