"""What steers a search.

It is read from a file, refused in one line, and really used; a search says what it tried.
"""

import re
import threading
from pathlib import Path

import msgspec
import pytest

from slipstream.planner import params
from slipstream.planner.budget import Budget, Clock, SearchEnd, Tally
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import (
    DEFAULTS,
    AnnealingParams,
    CpSatParams,
    ListParams,
    ParamsError,
    SearchParams,
    read_params,
)
from slipstream.planner.plan import plan_only, plan_with
from slipstream.planner.reference import FaultFree
from slipstream.planner.search.annealing import OPERATOR_NAMES
from slipstream.planner.search.engine import find_best_candidate
from slipstream.schedules.codec import encode
from slipstream.schedules.schedule import Worker
from tests.jobs import grid

JOB = grid(
    3,
    8,
    8,
    times="forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer = 5\n",
    more="[memory]\ncapacity = 8\nactivation = 1\nweight_stash = 1\n",
)
DOWN = [Worker(0, 4)]
TIGHT = grid(
    3,
    4,
    6,
    times="forward = 14\nbackward_input = 14\nbackward_weight = 10\ntransfer = 2\noptimizer = 5\n",
    more="[memory]\ncapacity = 4\nactivation = 1\nweight_stash = 0.5\n",
)
"""A job whose list schedules annealing makes shorter."""


def test_a_file_changes_what_it_names_and_leaves_the_rest(tmp_path):
    path = tmp_path / "params.toml"
    path.write_text(
        "[annealing]\naim = 0.25\ncycles = [{hot = 1, cold = 0.5, pull = 2}]\n"
        "[cp_sat]\nlargest_proof = 0\n"
    )
    found = read_params(path)
    assert (
        found.annealing.aim == 0.25
        and found.annealing.cycles[0].pull == 2
        and found.cp_sat.largest_proof == 0
    )
    assert found.lists == DEFAULTS.lists and found.annealing.trade == DEFAULTS.annealing.trade


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[annealing]\nheat = 1\n", "unknown field `heat`.*annealing"),
        ("[lists]\nstarts = 'x'\n", "Expected `int`.*lists.starts"),
        ("[lists]\nstarts = 0\n", ">= 1.*lists.starts"),
        ("[annealing]\naim = 1.5\n", "<= 1.*annealing.aim"),
        ("[annealing]\ncycles = []\n", "length >= 1"),
        ("[annealing]\ntrade = 0.7\nmove = 0.7\n", "trade \\+ move"),
        ("[walks]\n", "unknown field `walks`"),
        ("aim =", "params.toml"),
        ("", None),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "params.toml"
    path.write_text(text)
    if says is None:
        assert read_params(path) == DEFAULTS
        return
    with pytest.raises(ParamsError, match=says) as refused:
        read_params(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ParamsError, match="nowhere"):
        read_params(tmp_path / "nowhere.toml")


def tally_of(steering, job=JOB, down=DOWN):
    budget = Budget.of_steps(400_000)
    solved = find_best_candidate(build_problem(job, down), "cp-sat", budget, steering)
    return budget.tally, solved


def test_a_search_says_what_it_tried_and_how_often_that_helped():
    tally, solved = tally_of(DEFAULTS, TIGHT, [Worker(1, 2)])
    operators = {f"annealing: {name}" for name in OPERATOR_NAMES.values()}
    assert operators < set(tally.tried) and all(tally.tried[name] > 0 for name in operators)
    assert all(0 <= tally.helped[what] <= tried for what, tried in tally.tried.items())
    assert (
        tally.helped["annealing: exchange runs of ops"] > 0
        and tally.helped["list schedules: dispatch rules"] > 0
    )
    assert solved.ran.startswith("list schedules, annealing")
    steps = sum(tally.tried[name] for name in operators)
    assert 0 < steps <= 400_000


def test_parameters_are_those_that_are_used():
    """Parameters steer the search.

    An operator whose share is 0 is never tried; nor is what is too large for a limit.
    """
    never = SearchParams(
        annealing=AnnealingParams(trade=0.0, move=0.0),
        lists=ListParams(most_steps=0),
        cp_sat=CpSatParams(largest_proof=0),
    )
    tally, _ = tally_of(never)
    assert tally.tried["annealing: trade units"] == tally.tried["annealing: move a unit"] == 0
    assert (
        tally.tried["list schedules: random steps"] == 0
        and "CP-SAT: from the best plan" not in tally.tried
    )
    more, _ = tally_of(SearchParams(annealing=AnnealingParams(trade=0.5, move=0.25)))
    tried = [
        more.tried[f"annealing: {name}"]
        for name in ("trade units", "move a unit", "exchange runs of ops")
    ]
    assert tried[0] > tried[1] > 0.1 * sum(tried)


def test_each_parameter_is_read_somewhere():
    sources = "".join(
        path.read_text()
        for path in Path(params.__file__).parent.rglob("*.py")
        if path.name != "params.py"
    )
    read = set(re.findall(r"\.(\w+)", sources))
    groups = {field.name: field.type for field in msgspec.structs.fields(SearchParams)}
    assert set(groups) <= read
    assert [
        f"{name}.{field.name}"
        for name, group in groups.items()
        for field in msgspec.structs.fields(group)
        if field.name not in read
    ] == []


def test_chains_and_what_they_try_are_parameters():
    """One chain with runs of one op makes another plan.

    Only neighbours change; the plan takes the same steps each time.
    """
    params = AnnealingParams(chains=1, largest_run=1, longest_jump=1, margin=0.0, spare_units=0)
    plans = [
        encode(solved_by(params)),
        encode(solved_by(params)),
        encode(solved_by(AnnealingParams())),
    ]
    assert plans[0] == plans[1] != plans[2]


def solved_by(annealing):
    options = PlanOptions(steps=50_000, params=SearchParams(annealing=annealing))
    return plan_only(options, JOB, DOWN).schedule


def test_the_schedule_says_what_ran():
    quick = PlanOptions(method="greedy", steps=1000)
    assert plan_only(quick, JOB, DOWN).schedule.method == "list schedules"
    assert (
        plan_only(msgspec.structs.replace(quick, method="recycle"), JOB, DOWN).schedule.method
        == "recycle"
    )


def test_no_plan_depends_on_what_is_known_of_the_fault_free_period():
    """What the reference takes is counted for itself."""
    options = PlanOptions(steps=100_000)
    plans = [
        plan_with(options, JOB, DOWN, fault_free=fault_free)
        for fault_free in (None, FaultFree(period=1.0, bound=1.0))
    ]
    assert encode(plans[0].schedule) == encode(plans[1].schedule)


def test_what_threads_have_tried_is_added_up():
    tally, other = Tally(), Tally()
    tally.count_uses("list schedules: random steps", 3, 1)
    other.count_uses("list schedules: random steps", 4, 2)
    other.count_uses("annealing: trade units", 0)
    tally.join(other)
    assert (
        tally.tried["list schedules: random steps"] == 7
        and tally.helped["list schedules: random steps"] == 3
    )
    assert tally.techniques == ["list schedules"]


def test_why_a_search_ends_is_told():
    problem = build_problem(JOB, DOWN)

    def ended(method, steps, **how):
        budget = msgspec.structs.replace(Budget.of_steps(steps), **how)
        return find_best_candidate(problem, method, budget).end

    stopped = threading.Event()
    stopped.set()
    assert ended("cp-sat", 100_000) is SearchEnd.STEPS and ended("greedy", 100) is SearchEnd.STEPS
    assert ended("greedy", 10_000_000) is SearchEnd.STALE
    assert ended("cp-sat", 100_000, stop=stopped) is SearchEnd.INTERRUPT
    now = Clock().now()
    assert ended("cp-sat", 0, clock=Clock(), deadline=now) is SearchEnd.SECONDS
    assert (
        find_best_candidate(build_problem(grid(2, 2, 4)), "cp-sat", Budget.of_steps(4_000_000)).end
        is SearchEnd.BOUND
    )
