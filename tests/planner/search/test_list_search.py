"""The search over list schedules: what it changes, and what it finds."""

import random
import threading
import time
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model.arrays import ProblemArrays
from planner.model.assemble import build_schedule
from planner.model.bounds import lower_bound
from planner.model.decompose import decompose
from planner.model.from_job import build_problem
from planner.search.assignment import ASSIGNMENT_RULES, assign
from planner.search.list_search import _exchanged, search
from schedules.check import check
from schedules.schedule import Worker
from tests.jobs import failures, grid, jobs


@settings(max_examples=60, deadline=None)
@given(st.data(), jobs(), st.sampled_from(ASSIGNMENT_RULES), st.integers(0, 99))
def test_an_exchange_keeps_loads_and_holders(data, job, rule, seed):
    problem = build_problem(job, data.draw(failures(job)), sharing=rule == "by-speed")
    before = ProblemArrays(problem, assign(problem, rule))
    after = _exchanged(before, random.Random(seed))
    assert after.hosts.keys() == before.hosts.keys()
    assert all(after.hosts[unit] in problem.hosts(unit.slice, unit.pipeline) for unit in after.hosts)
    assert Counter((unit.slice, worker) for unit, worker in after.hosts.items()) == \
        Counter((unit.slice, worker) for unit, worker in before.hosts.items())
    anew = ProblemArrays(problem, after.hosts)
    for arcs in ("predecessors", "successors"):
        assert all(map(np.array_equal, getattr(after.ops, arcs), getattr(anew.ops, arcs)))
    assert np.array_equal(after.ops.worker, anew.ops.worker) and np.array_equal(after.ops.duration, anew.ops.duration)
    assert np.array_equal(after.load, anew.load)


def test_exchanges_find_what_no_assignment_rule_gives():
    """Three pipelines, each with a dead worker of another stage: 4.4 % above the bound by the rules of assignment."""
    job = grid(3, 4, 8, times="forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer = 5",
               more="[memory]\ncapacity = 8\nweight_stash = 1\n")
    problem = build_problem(job, [Worker(0, 2), Worker(1, 3), Worker(2, 0)], sharing=False)
    piece, = decompose(problem)
    bound = lower_bound(problem)
    solution, period = search(problem, bound, time.monotonic() + 100, 0, lambda _: None, threading.Event())
    assert period <= 1.02 * bound
    schedule = build_schedule(problem, [(piece, solution)], lower_bound=bound, method="greedy")
    assert check(schedule) == []
    assert schedule.period_ticks == period
