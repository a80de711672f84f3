"""Bounds where more is allowed than seems: reductions in bubbles, both directions, roles exchanged,
recomputation.

Each case has a period that is possible, found by an exact search over the rules alone. Neither a
plan nor the proof of its file may claim that it is not.
"""

import pytest

from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.bounding import any_roles_bound
from slipstream.planner.budget import Budget
from slipstream.planner.job.file import parse_job
from slipstream.planner.model.assumptions import has_single_stages, is_provable_by_search
from slipstream.planner.model.from_job import build_problem, has_exact_units
from slipstream.planner.normalise import normalised
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem
from slipstream.planner.plan import plan_job, plan_only
from slipstream.planner.recompute import (
    choose_recomputation,
    with_bound_of_choices,
    with_recomputation,
)
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Scope, Worker
from tests.jobs import grid

ONE = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"
STEPS = 20_000
LONG = "[placement]\norder = 'bidirectional'\n"

BUBBLE = grid(
    1,
    2,
    1,
    times=f"{ONE}all_reduce = 4\ntransfer = 2\n",
    more="[placement]\nchunks = 2\norder = 'interleaved'\n",
)
LISTED = grid(
    1,
    3,
    1,
    times="forward = [2, 3, 0, 1, 0, 1]\nbackward_input = [3, 0, 1, 1, 0, 1]\n"
    "backward_weight = [1, 0, 1, 0, 0, 1]\nall_reduce = 1\n",
    more="[placement]\norder = [0, 2, 1, 1, 0, 2]\nchunks = 2\n[memory]\ncapacity = 4\n"
    "activation = [1, 1, 0.94, 2, 1, 1]\nweight_stash = 1\n",
)
BOTH_FUSED = grid(
    2,
    2,
    [1, 1],
    times="forward = 3\nbackward_input = 3\nbackward_weight = 1\nall_reduce = 1\ntransfer = 2\n",
    more=LONG,
)
UNEQUAL = grid(
    3,
    2,
    [1, 1, 2],
    times="forward = 2\nbackward_input = 3\nbackward_weight = 2\noptimizer = 3\nall_reduce = 4\n",
    more=LONG,
)
TIGHT = grid(
    2,
    2,
    1,
    times="forward = 0.87\nbackward_input = 0.8\nbackward_weight = 0.87\noptimizer = 0.34\n",
    more=f"{LONG}[memory]\ncapacity = 5.64\nactivation = 0.94\nweight_stash = 0.5\n",
)
SLOW = grid(
    2,
    2,
    [3, 1],
    times="forward = 2\nbackward_input = 1\nbackward_weight = 1\ntransfer = 1\n"
    "slow = {'1.0' = 3}\n",
    more=LONG,
)
FREE = grid(
    3,
    2,
    [2, 1, 1],
    times="forward = 1\nbackward_input = [1, 0]\nbackward_weight = [0, 1]\nall_reduce = 1\n"
    "transfer = 2\nslow = {'2.0' = 2}\n",
    more=LONG,
)


@pytest.mark.parametrize(
    ("job", "failed", "how", "possible"),
    [
        (BUBBLE, [], {}, 25),
        (LISTED, [], {"backward": "fused"}, 17),
        (BOTH_FUSED, [], {"backward": "fused"}, 19),
        (UNEQUAL, ["0.0", "2.0"], {}, 28),
        (TIGHT, ["0.1"], {}, 5.76),
        (SLOW, ["0.0"], {"optimizer": "synchronous"}, 16),
        (FREE, ["2.0"], {}, 6),
    ],
    ids=["bubble", "listed", "both fused", "unequal", "tight", "slow", "free"],
)
def test_what_is_possible_is_not_disproved(job, failed, how, possible):
    schedule = plan_job(job, [Worker.parse(name) for name in failed], steps=STEPS, **how).schedule
    assert check(schedule) == [] and schedule.seconds(schedule.lower_bound_ticks) <= possible + 1e-9
    boldest = schedule.with_bound(schedule.period_ticks, schedule.scope)
    claimed = boldest.seconds(proven_bound(boldest, Budget.of_steps(STEPS)).ticks)
    assert claimed <= possible + 1e-9


def test_the_search_proves_what_reductions_in_bubbles_allow():
    """25 s, where all reductions after all compute take 29."""
    schedule = plan_job(BUBBLE, steps=10 * STEPS).schedule
    assert schedule.seconds(schedule.lower_bound_ticks) == 25


def test_both_columns_of_two_directions_share_their_work():
    schedule = plan_job(TIGHT, [Worker(0, 1)], steps=10 * STEPS).schedule
    assert schedule.status == "optimal" and schedule.seconds(
        schedule.period_ticks
    ) == pytest.approx(5.76)
    assert proven_bound(schedule, Budget.of_steps(10 * STEPS)).ticks == schedule.period_ticks


def test_assumptions_are_predicates():
    straight, both = build_problem(grid(2, 2, 1)), build_problem(UNEQUAL)
    assert (
        has_single_stages(straight) and not has_single_stages(both) and is_provable_by_search(both)
    )
    assert not has_single_stages(build_problem(BUBBLE))
    assert both.allowed_hosts(0, 0) == tuple(both.live_workers) and straight.allowed_hosts(
        0, 0
    ) == (Worker(0, 0),)


# --- Roles ----------------------------------------------------------------------------------------

TIMES = "forward = [1, 2]\nbackward_input = [1, 2]\nbackward_weight = [1, 2]\n"


def test_roles_are_exchanged_with_slow_workers():
    """The plan takes 14 s; where each worker keeps its role, 24 s.

    0.1, slow, is in the role of 0.0, and 1.0 in that of 0.1.
    """
    job = grid(2, 2, 1, times=f"{TIMES}slow = {{'0.1' = 2}}\n")
    schedule = normalised(job, [Worker(0, 0), Worker(1, 1)], PlanOptions(steps=STEPS)).schedule
    assert (
        schedule.scope is Scope.ROLES and 12 <= schedule.seconds(schedule.lower_bound_ticks) <= 14
    )
    assert proven_bound(schedule).ticks >= schedule.lower_bound_ticks


def test_roles_are_exchanged_with_workers_of_other_room():
    """The roomy worker helps most in column 1; each may be the vacant role's.

    The bound is no more than any plan.
    """
    memory = "[memory]\ncapacity = 2\nactivation = 1\nweight_stash = 1\ncapacity_of = {'1.0' = 6}\n"
    job = grid(3, 2, 4, times=TIMES, more=memory)
    schedule = normalised(job, [Worker(0, 0)], PlanOptions(steps=STEPS)).schedule
    assert schedule.lower_bound_ticks > 0 and schedule.gap is not None
    # Another worker of the same kind.
    roomier = grid(3, 2, 4, times=TIMES, more=memory.replace("1.0", "1.1"))
    assert any_roles_bound(job, [Worker(0, 0)], PlanOptions()) == any_roles_bound(
        roomier, [Worker(0, 0)], PlanOptions()
    )
    for role in (Worker(0, 0), Worker(0, 1)):
        for other in (job, roomier):
            assert (
                schedule.seconds(schedule.lower_bound_ticks)
                <= plan_job(other, [role], steps=STEPS).period + 1e-9
            )


def test_a_slow_worker_that_is_down_does_not_count():
    slow = grid(3, 2, 2, times=f"{TIMES}slow = {{'0.0' = 3}}\n")
    alive, down = (
        any_roles_bound(slow, [worker], PlanOptions()).ticks
        for worker in (Worker(1, 0), Worker(0, 0))
    )
    assert (
        down
        == any_roles_bound(grid(3, 2, 2, times=TIMES), [Worker(0, 0)], PlanOptions()).ticks
        < alive
    )
    assert bounding_problem(PlanOptions(), slow, ()).has_slow_workers


# --- No bound -------------------------------------------------------------------------------------


def test_no_bound_is_no_gap():
    schedule = plan_job(grid(2, 2, 2), steps=STEPS).schedule
    assert schedule.gap == 0.0 and schedule.with_bound(0, schedule.scope).gap is None


# --- Recomputation --------------------------------------------------------------------------------


def test_a_bound_holds_for_every_choice_of_recomputed_stages():
    times = "forward = [1, 2, 1]\nbackward_input = [2, 1, 3]\nbackward_weight = [1, 2, 1]\n"
    job = grid(
        1,
        3,
        3,
        times=times,
        more="[memory]\ncapacity = 4\nactivation = 2\nweight_stash = 1\nrecomputed = 1\n"
        "[training]\nrecompute = 'auto'\n",
    )
    options = PlanOptions(steps=STEPS)
    choices = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    plans = {
        stages: plan_job(with_recomputation(job, stages), steps=STEPS).schedule
        for stages in choices
    }
    shortest = min(schedule.seconds(schedule.period_ticks) for schedule in plans.values())
    for schedule in plans.values():
        honest = with_bound_of_choices(schedule, job, options, ())
        assert 0 < honest.seconds(honest.lower_bound_ticks) <= shortest
        assert honest.lower_bound_ticks <= schedule.lower_bound_ticks


def test_no_stage_recomputes_where_none_is_as_good():
    job = parse_job(
        "pipelines = 1\nstages = 3\nmicrobatches = 3\n[time]\nforward = [3, 1, 2]\n"
        "backward_input = [2, 3, 1]\nbackward_weight = [2, 1, 3]\ntransfer = 1\n[memory]\n"
        "capacity = 5\n"
        "activation = 3\nweight_stash = 1\nrecomputed = 1\n[training]\nrecompute = 'auto'\n"
    )
    options = PlanOptions(steps=10 * STEPS)
    chosen = choose_recomputation(job, options)
    assert chosen.without is not None and (not chosen.stages or chosen.period < chosen.without)
    assert chosen.without <= plan_job(with_recomputation(job, ()), steps=STEPS).period


# --- Times and memory that are no whole numbers of units ------------------------------------------


def test_bounds_are_rounded_down_where_times_are_finer_than_ticks():
    # Two micro-batches one after the other take 6 s and a little, by op less than a millionth of
    # the longest.
    fine = "forward = 1.00000004\nbackward_input = 1\nbackward_weight = 1\noptimizer = 0.0000003\n"
    job = grid(1, 1, 2, times=fine)
    assert not has_exact_units(job) and has_exact_units(grid(1, 1, 2))
    schedule = plan_job(job, steps=STEPS).schedule
    exact = 2 * 3.00000004 + 0.0000003
    assert (
        exact < schedule.seconds(schedule.period_ticks)
        and schedule.seconds(schedule.lower_bound_ticks) <= exact
    )


def test_memory_that_is_rounded_up_bounds_nothing():
    """A bound does not use memory that is rounded up.

    Three activations fit exactly; in units of 1 / 2^40 of the capacity, needs rounded up, two do.
    """
    memory = (
        "[memory]\ncapacity = 1.0000000000001\nactivation = 0.3333333333333666\nweight_stash = 0\n"
    )
    job, plain = (
        grid(1, 3, 3, more=more) for more in (memory, "[memory]\ncapacity = 3\nactivation = 1\n")
    )
    schedule, possible = (plan_job(variant, steps=STEPS).schedule for variant in (job, plain))
    assert schedule.seconds(schedule.lower_bound_ticks) <= possible.seconds(possible.period_ticks)


def test_a_capacity_of_its_own_that_is_no_whole_unit_does_not_lower_the_bound():
    """With activations of 1, whole stages use no more of 3.5 than of 3."""
    schedules = []
    for own in (3, 3.5):
        capacity_of = f"capacity_of = {{'0.0' = {own}, '0.1' = {own}, '0.2' = {own}}}\n"
        memory = f"[memory]\ncapacity = 4\nactivation = 1\nweight_stash = 1\n{capacity_of}"
        job = grid(1, 3, 6, more=memory)
        schedules.append(plan_job(job, steps=STEPS).schedule)
        assert schedules[-1].scope is Scope.STAGES
    assert schedules[0].lower_bound_ticks == schedules[1].lower_bound_ticks


def test_workers_that_hold_no_layers_do_not_count_in_a_synchronous_period():
    job = grid(
        2,
        2,
        1,
        times="forward = 1\nbackward_input = 0\nbackward_weight = 0\nall_reduce = 1\n"
        "transfer = 1\n",
    )
    options = PlanOptions(optimizer="synchronous", steps=500, layers="move")
    assert plan_only(options, job, ()).period == 4.0
