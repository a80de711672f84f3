"""Tiny problems against the true optimum."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from ortools.sat.python import cp_model

from slipstream.planner.budget import Budget
from slipstream.planner.job.file import parse_job
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.plan import plan_job
from slipstream.planner.search import cpsat
from slipstream.planner.search.engine import find_best_candidate
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from tests.jobs import failures, grid, jobs
from tests.planner.search.brute_force import optimal_period

OWN = [
    (1, 1, 2, []),
    (1, 2, 2, []),
    (1, 3, 1, []),
    (2, 2, 1, ["1.0"]),
    (2, 2, 1, ["0.1"]),
    (3, 2, 1, ["2.1"]),
    (2, 1, 1, ["0.0"]),
    (3, 2, 1, ["0.0", "1.1"]),
    (2, 3, 1, ["1.1"]),
    (2, 1, [2, 1], []),
    (2, 2, [2, 1], ["1.1"]),
    (3, 1, [1, 2, 1], ["0.0"]),
]
"""Pipelines, stages, micro-batches and failures, where only micro-batches of the dead go elsewhere.
"""
SHARED = [
    (2, 1, 1, ["0.0"]),
    (2, 2, 1, ["1.0"]),
    (2, 2, 1, ["0.1"]),
    (2, 1, [2, 1], []),
    (2, 1, 1, []),
]
"""Where all may: there are many more choices of hosts."""


@st.composite
def tiny(draw, shapes=OWN):
    """A job small enough to enumerate, its failures and modes."""
    backward = draw(st.sampled_from(["split", "fused"]))
    optimizer = draw(st.sampled_from(["staggered", "synchronous"]))
    pipelines, stages, counts, failed = draw(st.sampled_from(shapes))
    both_ways = stages == 2 and draw(st.booleans())
    memory = draw(
        st.sampled_from(
            [
                "",
                f"[memory]\ncapacity = {1 + both_ways}\nweight_stash = 1\n",
                f"[memory]\ncapacity = {3 + both_ways}\nactivation = 2\nweight_stash = 1\n",
            ]
        )
    )
    # Enumeration counts the memory of a forward that takes no time; half-open intervals do not.
    least = {
        "forward": 1 if memory else 0,
        "backward_input": 0,
        "backward_weight": 0,
        "optimizer": 0,
    }
    lines = []
    for key, low in least.items():
        values = st.lists(st.integers(low, 3), min_size=stages, max_size=stages)
        lines.append(f"{key} = {draw(values.filter(any))}")
    times = "\n".join(lines)
    if draw(st.booleans()):
        times += (
            "\nslow = {'0.0' = 1.5, '1.1' = 2}"
            if pipelines > 1 and stages > 1
            else "\nslow = {'0.0' = 1.25}"
        )
    # Enumeration puts reductions after all compute; with several stages some may lie in bubbles.
    times += f"\nall_reduce = {0 if both_ways else draw(st.integers(0, 1))}"
    times += f"\ntransfer = {draw(st.integers(0, 2))}"
    placement = "[placement]\norder = 'bidirectional'\n" if both_ways else ""
    job = grid(pipelines, stages, counts, times=times, more=memory + placement)
    return job, [Worker.parse(name) for name in failed], backward, optimizer


def proven_optimal(case, *, sharing: bool) -> None:
    job, failed, backward, optimizer = case
    problem = build_problem(job, failed, backward=backward, optimizer=optimizer, sharing=sharing)
    optimum = optimal_period(problem)
    assert lower_bound(problem) <= optimum
    solved = find_best_candidate(problem, "cp-sat", Budget.of_steps(12_000_000))
    schedule = solved.make_schedule()
    assert check(schedule) == []
    assert schedule.period_ticks == solved.bound.ticks == optimum


@settings(max_examples=40, deadline=None)
@given(tiny())
def test_cp_sat_finds_the_true_optimum(case):
    proven_optimal(case, sharing=False)


@settings(max_examples=25, deadline=None)
@given(tiny(SHARED))
def test_cp_sat_finds_the_true_optimum_of_shared_work(case):
    proven_optimal(case, sharing=True)


@settings(max_examples=25, deadline=None)
@given(tiny(SHARED))
def test_bounds_of_shared_work_hold_for_slices_too(case):
    """What may be cut has a bound no higher than what may not."""
    job, failed, backward, optimizer = case
    layered = replace(job, layers=(2,) * len(job.columns))
    whole = build_problem(layered, failed, backward=backward, optimizer=optimizer, sharing=True)
    cut = build_problem(
        layered, failed, backward=backward, optimizer=optimizer, sharing=True, sliced=True
    )
    assert lower_bound(cut) <= lower_bound(whole) <= optimal_period(whole)


def optimum(problem, *, implied: bool) -> int | None:
    """The shortest period by CP-SAT, which is told of no bound.

    None where its time does not suffice.
    """
    model = cp_model.CpModel()
    variables = cpsat.Variables(model, problem, 300)
    constraints = cpsat.Constraints(model, problem, variables)
    constraints.add_rules()
    if implied:
        constraints.add_implied_constraints()
    model.minimize(variables.period)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 0.2
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_is_implied_or_bounded_excludes_no_best_plan(data):
    """The rules alone allow no shorter plan, and the bounds are not above it.

    The jobs are too large to enumerate.
    """
    job = data.draw(jobs(max_pipelines=3, max_stages=3, max_microbatches=3))
    failed, sharing = data.draw(failures(job)), data.draw(st.booleans())
    backward, optimizer = (
        data.draw(st.sampled_from(["split", "fused"])),
        data.draw(st.sampled_from(["staggered", "synchronous"])),
    )
    problem = build_problem(job, failed, backward=backward, optimizer=optimizer, sharing=sharing)
    assume(problem.host_operation_count < 120)
    with_all, plain = optimum(problem, implied=True), optimum(problem, implied=False)
    least = min((found for found in (with_all, plain) if found is not None), default=None)
    assert with_all is None or plain is None or with_all == plain
    assert least is None or lower_bound(problem) <= least


def test_micro_batches_that_come_back_one_after_the_other_bound_the_period():
    """Two stages with two of three workers each, and micro-batches that any may run.

    By hand: of twelve, the last three come back to stage 0 at 21.9 at the earliest, so that one of
    its two workers runs two more W, and 27.65 remain.
    """
    job = parse_job(
        "pipelines = 3\nstages = 3\nmicrobatches = [5, 4, 3]\n[time]\nforward = [1.5, 1, 2]\n"
        "backward_input = [0, 1, 2.5]\nbackward_weight = [2.5, 1, 1.5]\noptimizer = 0.5\n"
        "all_reduce = 0.25\ntransfer = 0.1\n"
    )
    plan = plan_job(job, [Worker(0, 1), Worker(2, 0)], steps=4_000_000)
    assert plan.schedule.status == "optimal" and plan.period == pytest.approx(27.65)


def test_slow_workers_are_exact_and_leave_to_others_what_they_have_no_time_for():
    clock = "forward = 1\nbackward_input = 1\nbackward_weight = 1\nslow = {'0.1' = 1.5}"
    alone = build_problem(grid(2, 3, 8, times=clock), sharing=False)
    assert lower_bound(alone) * alone.tick_seconds == 8 * 4.5
    shared = build_problem(grid(2, 3, 8, times=clock))  # 10 of 16 micro-batches in 30 s, 6 in 27 s
    assert 30 <= lower_bound(shared) * shared.tick_seconds < 33
    plan = plan_job(grid(2, 3, 8, times=clock), steps=400_000)
    assert (
        plan.schedule.period_ticks < 1.1 * plan.schedule.lower_bound_ticks
        and plan.schedule.shed >= 2
    )
    both = build_problem(
        grid(2, 2, 6, times=clock, more="[placement]\nchunks = 2\norder = 'v'\n"), sharing=False
    )
    assert lower_bound(both) * both.tick_seconds >= 6 * 2 * 4.5


def test_the_pipeline_with_most_micro_batches_bounds_the_period_unless_others_help():
    job = grid(3, 1, [8, 1, 1])
    assert lower_bound(build_problem(job, sharing=False)) == 24
    assert lower_bound(build_problem(job)) == 12


@pytest.mark.parametrize(("capacity", "optimum"), [(1, 6), (2, 6)])
def test_two_microbatches_on_one_worker(capacity, optimum):
    problem = build_problem(
        grid(1, 1, 2, more=f"[memory]\ncapacity = {capacity}\nweight_stash = 1\n")
    )
    assert optimal_period(problem) == optimum


@pytest.mark.parametrize(
    ("stages", "microbatches", "capacity", "optimum"), [(2, 2, 1, 10), (2, 2, 2, 7), (3, 1, 1, 7)]
)
def test_round_trips_with_little_memory(stages, microbatches, capacity, optimum):
    """Every micro-batch makes its round trip alone.

    There is room for one, and the bound counts the first and the last.
    """
    problem = build_problem(
        grid(1, stages, microbatches, more=f"[memory]\ncapacity = {capacity}\nweight_stash = 1\n")
    )
    assert lower_bound(problem) <= optimal_period(problem) == optimum
    if capacity == 1:
        assert lower_bound(problem) == optimum
