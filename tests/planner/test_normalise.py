"""Normalised plans are never longer than leaving failures where they fell.

They depend on the number of failures alone.
"""

from itertools import combinations, product

import msgspec
import pytest

from slipstream.planner import normalise
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import parse_job
from slipstream.planner.model.bounds_roles import RoleBounds
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound, NoPlanError
from slipstream.planner.normalise import (
    candidate_vacancies,
    normal_form,
    normalised,
    window_bounds_of,
)
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_job, plan_only, plan_with
from slipstream.schedules.check import check
from slipstream.schedules.codec import encode
from slipstream.schedules.schedule import Scope, Worker
from slipstream.schedules.tables.pattern import dead_column, pattern_of, pipeline_classes
from tests.jobs import grid

GREEDY = PlanOptions(method="greedy", steps=24_000_000)
TIMES = (
    "forward = [3, 2]\nbackward_input = [0, 2]\nbackward_weight = [4, 2]\noptimizer = 2\n"
    "transfer = 1\n"
)
SMALL = {
    "memory": grid(3, 2, 3, more="[memory]\ncapacity = 3\nactivation = 1\nweight_stash = 1\n"),
    "uneven": grid(3, 2, 2, times=TIMES),
    "deep": grid(2, 3, 3),
    "counts": grid(3, 2, [2, 3, 2]),
    "slow": grid(
        3,
        2,
        2,
        times="forward = 2\nbackward_input = 2\nbackward_weight = 2\nslow = {'1.1' = 1.5}\n",
    ),
}


@pytest.mark.parametrize("method", ["1f1b", "recycle"])
def test_a_baseline_claims_only_what_its_file_proves(method):
    # The file has no costs of layers, but the bound counted stages that are shared layer by layer.
    job = parse_job("""
pipelines = 3
stages = 1
microbatches = 3
placement = {layers = [2]}
time = {forward = 1, backward_input = 1, backward_weight = 1}
""")
    schedule = normalised(job, [Worker(0, 0)], PlanOptions(method=method, steps=2_000)).schedule
    assert schedule.scope is Scope.ROLES and schedule.lower_bound_ticks
    assert proven_bound(schedule).ticks >= schedule.lower_bound_ticks


def test_ctrl_c_is_told_also_where_roles_stay(monkeypatch):
    job = SMALL["deep"]
    in_place = plan_only(GREEDY, job, [Worker(0, 1)])
    monkeypatch.setattr(
        normalise,
        "normal_form",
        lambda *_, **__: msgspec.structs.replace(in_place, interrupted=True),
    )
    monkeypatch.setattr(RoleBounds, "best_bound", lambda _: Bound(0, Scope.ROLES))
    plan = normalised(job, [Worker(0, 1)], GREEDY)
    assert plan.interrupted and not plan.schedule.moves


def failure_sets(job, size):
    shape = build_problem(job).grid
    return [
        failed
        for failed in combinations(shape.workers(), size)
        if dead_column(failed, shape) is None
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [1, 2])
def test_never_worse_than_leaving_failures_where_they_fell(name, size):
    job = SMALL[name]
    normal = normal_form(job, size, GREEDY).schedule
    for failed in failure_sets(job, size):
        in_place = plan_job(job, failed, method="greedy", steps=24_000_000).schedule
        moved = normalised(job, failed, GREEDY).schedule
        assert check(moved) == [] and moved.failed == failed
        assert moved.period_ticks <= in_place.period_ticks and (
            moved.moves == () or moved.period_ticks < in_place.period_ticks
        )
        if name != "slow":  # where slow workers are alive; without them a job may do better
            assert moved.period_ticks == normal.period_ticks


def test_two_failures_in_one_stage_are_worth_a_move():
    job = grid(
        3, 3, 4, times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1\n"
    )
    failed = [Worker(0, 0), Worker(1, 0)]
    plan = normalised(job, failed, GREEDY)
    in_place = plan_job(job, failed, method="greedy", steps=24_000_000)
    assert plan.schedule.period_ticks < in_place.schedule.period_ticks
    assert plan.fault_free_period == in_place.fault_free_period
    assert {seat.role.column for seat in plan.schedule.moves} == {0}


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_the_programme_finds_the_least_window(failures):
    job = grid(
        3,
        3,
        4,
        times="forward = [3, 2, 1]\nbackward_input = [1, 2, 2]\nbackward_weight = 1\n"
        "transfer = 1\n",
    )
    windows = window_bounds_of(job, GREEDY)
    periods = []
    for counts in product(range(3), repeat=3):
        if sum(counts) == failures:
            bounds = (windows.column_bound(column, down) for column, down in enumerate(counts))
            periods.append(max(bounds))
    best = min(periods)
    ranked = windows.best_distributions(failures)
    assert ranked == sorted(ranked) and ranked[0][0] == best
    assert all(
        sum(counts) == failures and max(map(windows.column_bound, range(3), counts)) == longest
        for longest, _, _, counts in ranked
    )


def test_equal_windows_are_filled_evenly(monkeypatch):
    monkeypatch.setattr(normalise.WindowBounds, "column_bound", lambda self, column, down: 10)
    *_, counts = window_bounds_of(grid(8, 4, 2), GREEDY).best_distributions(6)[0]
    assert counts == (1, 1, 2, 2)


@pytest.mark.parametrize("job", [grid(4, 3, 4), grid(12, 4, 2)])
@pytest.mark.parametrize("order", [(8, 5, 4, 3, 1), (1, 4, 3, 8, 5)])
def test_one_object_serves_all_numbers_in_any_order(job, order):
    windows = window_bounds_of(job, GREEDY)
    asked = [windows.best_distributions(failures) for failures in order]
    assert asked == [
        window_bounds_of(job, GREEDY).best_distributions(failures) for failures in order
    ]


def test_a_normal_form_does_not_depend_on_what_was_asked_before():
    job = grid(12, 4, 2)
    windows = window_bounds_of(job, GREEDY)
    windows.best_distributions(8)
    after = normal_form(job, 4, GREEDY, windows=windows)
    assert encode(after.schedule) == encode(normal_form(job, 4, GREEDY).schedule)


def test_slow_workers_keep_their_roles():
    job = SMALL["slow"]
    for failures in (1, 2, 3):
        assert all(
            Worker(1, 1) not in holes
            for holes in candidate_vacancies(job, window_bounds_of(job, GREEDY), failures)
        )


def test_a_slow_worker_that_is_down_keeps_no_role():
    """The plan is that of workers of one speed.

    Nobody plays the role of the dead slow worker as slowly as it was.
    """
    times, down = (
        "forward = 2\nbackward_input = 2\nbackward_weight = 2\n",
        [Worker(0, 1), Worker(1, 1)],
    )
    slow, even = (
        normalised(grid(3, 2, 6, times=times_), down, GREEDY)
        for times_ in (f"{times}slow = {{'1.1' = 1.7}}\n", times)
    )
    assert (
        slow.schedule.moves
        and slow.period == even.period
        and slow.schedule.gap == even.schedule.gap
    )


def test_candidates_are_patterns_of_the_right_size():
    job = grid(6, 4, 4)
    problem = build_problem(job)
    classes = pipeline_classes(problem.grid, problem.times, problem.memory)
    for failures in (1, 3, 7, 18):
        found = candidate_vacancies(job, window_bounds_of(job, GREEDY), failures)
        assert found and all(
            len(holes) == failures and dead_column(holes, problem.grid) is None for holes in found
        )
        assert len({pattern_of(holes, classes) for holes in found}) == len(found)


def test_a_role_may_be_taken_over_from_a_checkpoint():
    # The third stage is in nobody's memory, and weights leave little room for activations of more
    # layers.
    job = grid(
        3,
        4,
        8,
        times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1",
        more="[memory]\ncapacity = 8\nweight_stash = 0.5\nweights = 12\n[placement]\n"
        "layers = [4, 4, 4, 4]\n",
    )
    down = [Worker(0, 2), Worker(1, 2), Worker(2, 2)]
    options = PlanOptions(method="greedy", layers="move", from_checkpoint=True, steps=800_000)
    plan = normalised(job, down, options)
    assert check(plan.schedule) == [] and set(plan.schedule.failed) == set(down)
    roles = normal_form(job, 3, PlanOptions(method="greedy", steps=200_000))
    assert plan.period <= roles.period * 1.01


def test_too_many_failures_have_no_plan():
    assert normal_form(grid(2, 2, 1), 2, GREEDY).schedule.failed
    with pytest.raises(
        NoPlanError, match="3 failures leave some stage without a live worker, however roles"
    ):
        normal_form(grid(2, 2, 1), 3, GREEDY)
    with pytest.raises(NoPlanError, match="stage 1 has no live worker"):
        normalised(grid(2, 2, 1), [Worker(0, 1), Worker(1, 1)], GREEDY)


def test_roles_are_tried_where_those_in_place_have_no_room():
    job = grid(
        2,
        2,
        1,
        times="forward = 1\nbackward_input = 1\nbackward_weight = 1",
        more='[memory]\ncapacity = 2\nactivation = 1\ncapacity_of = {"1.1" = 0.5}\n',
    )
    with pytest.raises(NoPlanError, match="room"):
        plan_with(GREEDY, job, [Worker(0, 1)])
    schedule = normalised(job, [Worker(0, 1)], GREEDY).schedule
    assert check(schedule) == [] and schedule.scope is Scope.ROLES
    assert {(seat.worker.column, seat.role.column) for seat in schedule.moves} >= {(0, 1)}


def test_a_column_bound_holds_whichever_of_its_unequal_workers_is_down():
    # The role of the worker with more memory is the first of each column. The search ends at the
    # bound of a column, so that the bound must hold whichever of its roles is vacant.
    job = grid(
        2,
        2,
        3,
        times="forward = [1, 3]\nbackward_input = [2, 4]\nbackward_weight = [2, 1]\n",
        more="[memory]\ncapacity = 3\nactivation = 1\nweight_stash = 0.5\n"
        'capacity_of = {"1.0" = 1, "1.1" = 1}\n',
    )
    periods = {}
    for (down,) in failure_sets(job, 1):
        periods[down] = plan_only(GREEDY, job, (down,)).period
    assert max(periods.values()) > min(periods.values())
    windows = window_bounds_of(job, GREEDY)
    for down, period in periods.items():
        assert windows.to_seconds(windows.column_bound(down.column, 1)) <= period * (1 + 1e-9)
    assert normal_form(job, 1, GREEDY).period == min(periods.values())


def test_unlike_workers_exchange_roles():
    """The slow worker goes where the work is short, though no vacant role moves there."""
    job = grid(
        2,
        2,
        1,
        times="forward = [1, 2]\nbackward_input = [1, 2]\nbackward_weight = [1, 2]\n"
        'slow = {"0.1" = 2}',
    )
    down = [Worker(0, 0), Worker(1, 1)]
    plan = normalised(job, down, GREEDY)
    assert plan.period < plan_with(GREEDY, job, down).period and check(plan.schedule) == []
    player = {seat.role.column: seat.worker for seat in plan.schedule.seats}
    assert player == {0: Worker(0, 1), 1: Worker(1, 0)}
    assert {slow.worker for slow in plan.schedule.times.slow} == {Worker(0, 1)}


def test_the_solver_refines_the_best_candidate():
    job = SMALL["memory"]
    fast = normal_form(job, 2, GREEDY).schedule
    solved = normal_form(
        job, 2, msgspec.structs.replace(GREEDY, method="cp-sat", steps=800_000)
    ).schedule
    assert check(solved) == [] and solved.period_ticks <= fast.period_ticks
    assert normal_form(job, 1, PlanOptions(method="1f1b")).schedule.backward == "fused"
