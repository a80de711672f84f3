"""Folders keep the rules of `tests.style`; those that are not listed follow."""

from pathlib import Path

import pytest

from slipstream.cli.app import COMMANDS
from tests.style import ROOT, Breach, find_breaches, find_files, first_sentence

KEPT = (
    "cli/drawing",
    "cli/figures",
    "planner/blockwise.py",
    "planner/__init__.py",
    "planner/bound_verifier.py",
    "planner/bounding.py",
    "planner/budget.py",
    "planner/candidates.py",
    "planner/comparison.py",
    "planner/compiled.py",
    "planner/exchange.py",
    "planner/failures.py",
    "benchmarks",
    "cli",
    "docs/conf.py",
    "examples",
    "planner/job",
    "planner/kernel",
    "planner/layout",
    "planner/loops.py",
    "planner/model",
    "planner/normalise.py",
    "planner/overlapped.py",
    "planner/params.py",
    "planner/placement.py",
    "planner/published",
    "planner/recompute.py",
    "planner/search",
    "planner/simulation",
    "runtime/api.py",
    "runtime/own_loop.py",
    "runtime/ranks",
    "runtime/replay",
    "runtime/tools",
    "runtime/torch_pipelining",
    "runtime/torch_private.py",
    "runtime/torchtitan_pipelining",
    "runtime/worker",
    "runtime/coordinator",
    "runtime/launch.py",
    "runtime/node_agent.py",
    "runtime/processes",
    "runtime/protocol",
    "runtime/run_folder.py",
    "runtime/waits.py",
    "planner/options.py",
    "planner/periods.py",
    "planner/plan.py",
    "planner/published",
    "planner/recompute.py",
    "planner/reference.py",
    "planner/report.py",
    "planner/simulation",
    "planner/stated_question.py",
    "planner/tables",
    "runtime/__init__.py",
    "runtime/checkpoints",
    "runtime/computing",
    "runtime/config.py",
    "runtime/config_errors.py",
    "runtime/data",
    "runtime/device.py",
    "runtime/errors.py",
    "runtime/events.py",
    "runtime/failure_domains.py",
    "runtime/models",
    "runtime/moving",
    "runtime/object_reference.py",
    "runtime/placement.py",
    "runtime/run_identity.py",
    "runtime/run_record.py",
    "runtime/seeds.py",
    "runtime/state",
    "runtime/tensor_codec.py",
    "schedules",
    "src/slipstream",
    "tests/exact",
    "tests/style.py",
    "tests/test_style.py",
)
"""Folders and files whose code keeps all rules."""

FILES = [path for folder in KEPT for path in find_files(ROOT / folder)]

BROKEN = {
    "line": f"x = {'1' * 100}",
    "sentence": f'"""{"Word " * 16}."""',
    "gloss": '"""Return groups (workers that hold the same layers)."""',
    "name": "for one in reports:\n    pass",
    "statement": "x = [a if a else b for a in c]",
    "constants": "A, B = 1, 2",
}
"""A breach of each rule."""


@pytest.mark.parametrize("rule", BROKEN)
def test_the_scan_finds_a_breach(rule):
    assert [breach.rule for breach in find_breaches(BROKEN[rule])] == [rule]


def test_a_sentence_ends_at_a_full_stop_or_blank_line():
    assert first_sentence("Return the ticks.\n\nRaises no error.") == "Return the ticks"
    assert first_sentence("Return 0.5 of `x.py`. More of it.") == "Return 0.5 of `x.py`"
    assert first_sentence("Return a pair:\n\nfirst, second") == "Return a pair:"


def test_keyword_arguments_of_a_call_count_each_by_itself():
    table = "x = build(\n    a=[b for b in c],\n    d=[e for e in f],\n)"
    assert not find_breaches(table)


def is_line_of_help(path: Path, breach: Breach) -> bool:
    """Return whether a long sentence is what `slipstream --help` says of a command."""
    if path.parent != ROOT / "cli" or path.stem not in COMMANDS:
        return False
    return breach.rule == "sentence" and COMMANDS[path.stem].rstrip(".") in breach.text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_keeps_the_rules(path: Path):
    breaches = [
        breach for breach in find_breaches(path.read_text()) if not is_line_of_help(path, breach)
    ]
    assert not breaches, "\n".join(
        f"{breach.line}: {breach.rule}: {breach.text}" for breach in breaches
    )
