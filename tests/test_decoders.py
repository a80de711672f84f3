"""Decoders are made at import, before any thread starts.

msgspec crashes where two threads are the first to read a type: in 2 of 100 tries at a switch
interval of a microsecond.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = "schedules", "planner", "runtime", "cli"
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAKERS = {"Decoder", "DocumentKind"}
"""Classes of ours that make a decoder, and msgspec's own.

Ours do so when one of them is made.
"""


def in_functions(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that are not made at import.

    Those by which a maker is made do not count.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in MAKERS:
            for method in node.body:
                if getattr(method, "name", "") in ("__init__", "__post_init__"):
                    method.body = []  # type: ignore[attr-defined]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from (node for node in ast.walk(function) if isinstance(node, ast.Call))


def reads_a_type(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    typed = ast.unparse(call.func).startswith("msgspec.") and any(
        keyword.arg == "type" for keyword in call.keywords
    )
    return name in MAKERS or typed


@pytest.mark.parametrize(
    "source",
    [
        "def f(data):\n    return msgspec.json.decode(data, type=Task)",
        "def f():\n    return msgspec.json.Decoder(Task)",
        "f = lambda data: Decoder(Task)(data)",
    ],
)
def test_the_scan_finds_what_is_made_late(source):
    assert any(map(reads_a_type, in_functions(ast.parse(source))))


def test_no_decoder_is_made_after_import():
    late = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in MODULES
        for call in in_functions(ast.parse(path.read_text()))
        if reads_a_type(call)
    ]
    assert not late
