"""Keys of failure patterns.

They are equal exactly for failure sets that interchangeable pipelines turn into each other.
"""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planner.model.from_job import build_problem
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.pattern import (
    count_key,
    dead_column,
    failure_patterns,
    pattern_key,
    pattern_of,
    pipeline_classes,
    representative_failures,
)
from tests.jobs import grid, jobs

SLOW = "slow = {'1.0' = 1.5, '2.0' = 1.5}\n"
USUAL = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"


def classes_of(job):
    problem = build_problem(job)
    return pipeline_classes(problem.grid, problem.times, problem.memory)


@given(st.data(), jobs(memory=False))
def test_the_key_forgets_only_which_of_equal_pipelines_failed(data, job):
    classes = classes_of(job)
    workers = list(build_problem(job).grid.workers())
    failed = data.draw(st.sets(st.sampled_from(workers)))
    shuffled: dict[int, int] = {}
    for kind in set(classes):
        members = [pipeline for pipeline, other in enumerate(classes) if other == kind]
        shuffled |= dict(zip(members, data.draw(st.permutations(members)), strict=True))
    moved = {Worker(shuffled[worker.pipeline], worker.column) for worker in failed}
    pattern = pattern_of(failed, classes)
    assert (
        pattern_of(moved, classes)
        == pattern
        == pattern_of(representative_failures(pattern, classes), classes)
    )
    assert len(representative_failures(pattern, classes)) == len(failed)


@pytest.mark.parametrize(
    "job", [grid(3, 2, 2), grid(2, 3, 2), grid(3, 2, [2, 3, 2]), grid(3, 2, 2, times=USUAL + SLOW)]
)
@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_every_pattern_is_listed_once(job, failures):
    classes = classes_of(job)
    listed = list(failure_patterns(failures, job.stages, classes))
    there = {
        pattern_of(failed, classes)
        for failed in combinations(build_problem(job).grid.workers(), failures)
    }
    keys = {pattern_key(pattern, classes) for pattern in listed}
    assert len(listed) == len(set(listed)) == len(keys) and set(listed) == there


def test_keys_read_well():
    assert count_key(3) == "count-3"
    assert (
        pattern_key(pattern_of([Worker(2, 3), Worker(0, 2), Worker(2, 2)], (0, 0, 0)), (0, 0, 0))
        == "pattern-2+2,3"
    )
    assert pattern_key(pattern_of([Worker(1, 0)], (0, 1, 0)), (0, 1, 0)) == "pattern-1:0"


def test_slow_workers_and_other_counts_make_classes():
    assert classes_of(grid(3, 2, 2, times=USUAL + SLOW)) == (0, 1, 1)
    assert classes_of(grid(3, 2, [4, 5, 4])) == (0, 1, 0)


def test_a_dead_column_is_seen():
    problem = build_problem(grid(2, 2, 2))
    assert dead_column([Worker(0, 1), Worker(1, 0)], problem.grid) is None
    assert dead_column([Worker(0, 1), Worker(1, 1)], problem.grid) == 1
    both_ways = build_problem(grid(2, 2, 2, more="[placement]\norder = 'bidirectional'\n")).grid
    assert dead_column([Worker(0, 1), Worker(1, 1)], both_ways) is None
    assert dead_column([Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)], both_ways) == 0
