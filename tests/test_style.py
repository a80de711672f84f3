"""Folders keep the rules of `tests.style`; those that are not listed follow."""

from pathlib import Path

import pytest

from tests.style import ROOT, find_breaches, find_files, first_sentence

KEPT = (
    "cli/drawing",
    "cli/figures",
    "planner/job",
    "planner/layout",
    "planner/model",
    "planner/published",
    "planner/recompute.py",
    "planner/simulation",
    "schedules",
    "tests/style.py",
    "tests/test_style.py",
)
"""Folders and files whose code keeps all rules."""

LATER = {
    "planner/job/__init__.py",
    "planner/job/arrangement.py",
    "planner/job/file.py",
    "planner/job/run_keys.py",
    "planner/model/from_job.py",
    "planner/model/memory.py",
    "planner/model/problem.py",
    "schedules/program.py",
    "schedules/schedule.py",
}
"""Files in them that follow."""

FILES = [
    path
    for folder in KEPT
    for path in find_files(ROOT / folder)
    if str(path.relative_to(ROOT)) not in LATER
]

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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_keeps_the_rules(path: Path):
    breaches = find_breaches(path.read_text())
    assert not breaches, "\n".join(
        f"{breach.line}: {breach.rule}: {breach.text}" for breach in breaches
    )
