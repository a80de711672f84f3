"""The compiled list scheduler is op for op that of `planner.search.list_scheduler`."""

import importlib
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model.arrays import Dense
from planner.model.problem import build_problem
from planner.search.assignment import deal
from planner.search.compiled_lister import CompiledLister, PlainLister
from planner.search.list_scheduler import Guests, Policy
from tests.jobs import failures, jobs

MODES = st.tuples(st.sampled_from(["split", "fused"]), st.sampled_from(["staggered", "synchronous"]))
SHARES = st.sampled_from([0.0, 0.5, 1.0])


@pytest.fixture(scope="module")
def kernel():
    """Compiles here and now if need be: some ten seconds, once."""
    return importlib.import_module("planner.search.kernel.list_scheduler")


@settings(max_examples=200, deadline=None)
@given(st.data(), jobs(), MODES, st.sampled_from(["least-loaded", "round-robin"]))
def test_compiled_and_plain_make_the_same_schedules(kernel, data, job, modes, dealing):
    problem = build_problem(job, data.draw(failures(job)), backward=modes[0], optimizer=modes[1])
    dense = Dense(problem, deal(problem, dealing))
    policy = Policy(patience=data.draw(SHARES), forward_patience=data.draw(SHARES), load_share=data.draw(SHARES),
                    forward_order=data.draw(st.sampled_from(["deepest", "oldest"])),
                    in_flight=data.draw(st.none() | st.tuples(*[st.integers(1, 4)] * len(problem.grid.stages))),
                    ignore_transfers=data.draw(st.booleans()), make_room=data.draw(st.booleans()),
                    guests=data.draw(st.sampled_from(get_args(Guests))),
                    eager_weights=data.draw(st.booleans()) and modes[0] == "split")
    plain, compiled = PlainLister(dense), CompiledLister(kernel, dense)
    assert plain.period(policy) == compiled.period(policy)
    ours, theirs = plain.solution(), compiled.solution()
    assert list(ours.starts.items()) == list(theirs.starts.items()) and ours.hosts == theirs.hosts
