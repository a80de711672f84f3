"""Small jobs, whose optimum is known by hand.

It is found, and no plan is refused that exists.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.budget import Budget
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only, plan_with
from slipstream.planner.search.cpsat import MAX_MODEL_MEMORY, coarsen_memory
from slipstream.planner.search.engine import find_best_candidate
from slipstream.schedules.check import check
from slipstream.schedules.schedule import OpKind, Worker
from tests.jobs import grid

ONES = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"


def planned(job, *failed, steps=20_000, **options):
    """The checked schedule of a plan, and its period in seconds."""
    schedule = plan_only(
        PlanOptions(steps=steps, **options), job, [Worker.parse(name) for name in failed]
    ).schedule
    assert check(schedule) == []
    return schedule, schedule.seconds(schedule.period_ticks)


# --- Memory in fine units -------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 2**42), min_size=1, max_size=6), st.integers(1, 2**41))
def test_coarser_units_of_memory_are_on_the_safe_side(amounts, room):
    """Rounded down, what fits still fits; rounded up, what does not fit still does not."""
    down, up = (coarsen_memory(amounts, room, up=up) for up in (False, True))
    assert (
        down.room == up.room <= MAX_MODEL_MEMORY
        and max(*down.amounts, *up.amounts) <= down.room + 1
    )
    for count in range(1, len(amounts) + 1):
        fits = sum(amounts[:count]) <= room
        assert not fits or sum(down.amounts[:count]) <= down.room
        assert fits or sum(up.amounts[:count]) > up.room
        assert not down.is_exact or fits == (sum(down.amounts[:count]) <= down.room)


def test_an_exact_divisor_of_all_amounts_changes_no_answer():
    assert coarsen_memory([2**40, 3 * 2**40], 7 * 2**40 + 5) == ([1, 3], 7, True)


@pytest.mark.parametrize("activation", [0.666666666667, 1.333333333333])
def test_memory_in_units_finer_than_the_solver_can_count(activation):
    # Amounts have no common divisor, and times many ticks: as a model for CP-SAT, this had no
    # solution.
    #
    # CP-SAT runs where the larger activation leaves list schedules above the bound.
    job = grid(
        1,
        2,
        3,
        times="forward = [1, 0.666667, 0.666667, 0.666667]\n"
        "backward_input = [0, 0.5, 0.5, 0.5]\n"
        "backward_weight = [1, 0.333334, 0.333334, 0.333334]\n",
        more=f"[memory]\ncapacity = 4\nactivation = [1, {activation}, 0.333333333333, "
        "0.333333333333]\n"
        "weight_stash = 0.111111111111\n[placement]\norder = 'v'\nchunks = 2\n",
    )
    solved = find_best_candidate(build_problem(job), "cp-sat", Budget.of_steps(400_000))
    assert check(solved.make_schedule()) == []
    assert solved.period == solved.bound.ticks
    assert "CP-SAT" in solved.ran or activation < 1


def test_an_activation_as_large_as_the_capacity_fits_where_other_amounts_are_finer_than_a_unit():
    # The activation is rounded up and the capacity down: a third of the other amount once made them
    # differ.
    job = grid(
        2,
        2,
        1,
        times=ONES,
        more="[memory]\ncapacity = [1, 1.5]\nactivation = 1\nweight_stash = 0.333333333333\n",
    )
    assert planned(job, "1.1")[1] == 7  # 0.1 waits for the first F, then works for 6 s


def test_one_worker_that_comes_to_hold_all_layers_steps_them_all():
    """F0 F1 I1 W1 I0 W0 fits its memory.

    CP-SAT once allowed too short a period, and so proved that no plan exists.
    """
    job = grid(
        1,
        2,
        1,
        times=ONES,
        more="optimizer = 3\n[memory]\ncapacity = 2\nactivation = 1\nweight_stash = [2, 0.5]\n",
    )
    assert planned(job, "0.1", layers="move", from_checkpoint=True)[1] == 12


# --- Plans where list schedules get stuck ---------------------------------------------------------


@pytest.mark.parametrize("method", ["cp-sat", "greedy"])
def test_a_worker_without_room_runs_nothing(method):
    # Worker 0.0 has no room for a micro-batch, so 1.0 runs both, one after the other.
    job = grid(
        2,
        1,
        1,
        times=ONES,
        more="[memory]\ncapacity = 1\nactivation = 1\ncapacity_of = {'0.0' = 0.5}\n",
    )
    schedule, period = planned(job, method=method)
    assert period == 6 and {op.worker for op in schedule.all_ops() if op.kind is OpKind.F} == {
        Worker(1, 0)
    }
    assert planned(job, "0.0", method=method)[1] == 6


@pytest.mark.parametrize(
    ("pipelines", "capacity", "failed", "period"),
    [(4, 2, [], 6), (4, 2, ["2.0"], 12), (3, 1, [], 9)],
)
def test_cp_sat_leaves_out_equal_workers_without_room(pipelines, capacity, failed, period):
    # Workers 0.0 and 1.0 are equal, but run nothing.
    job = grid(
        pipelines,
        1,
        1,
        times=ONES,
        more=f"[memory]\ncapacity = {capacity}\nactivation = 1\n"
        "capacity_of = {'0.0' = 0.5, '1.0' = 0.5}\n",
    )
    assert planned(job, *failed)[1] == period


def test_who_has_room_only_as_w_takes_no_time_leaves_it_to_a_peer():
    """A worker without room for a W of no time leaves it to a peer.

    A list schedule counts the stash of that W, for which 1.1 has no room, but 0.1 has.
    """
    times = "forward = 1\nbackward_input = 1\nbackward_weight = [1, 0]\n"
    job = grid(
        2,
        2,
        24,
        times=times,
        more="[memory]\ncapacity = 4\nactivation = 1\nweight_stash = [1, 2]\n"
        "capacity_of = {'1.1' = 1}\n",
    )
    assert planned(job, method="greedy")[1] <= 100


def test_peers_take_turns_where_none_has_room_for_all_virtual_stages():
    # A worker has room for one of its two at a time: one runs the first, the other the second.
    job = grid(
        2,
        1,
        1,
        times=ONES,
        more="[memory]\ncapacity = 1\nactivation = 1\n[placement]\norder = 'interleaved'\n"
        "chunks = 2\n",
    )
    schedule, _ = planned(job)
    assert {
        op.worker
        for op in schedule.all_ops()
        if op.kind is OpKind.F and op.microbatch == 0 and op.pipeline == 0
    } == {Worker(0, 0), Worker(1, 0)}


def test_peers_run_parts_of_a_stage_for_which_none_has_room():
    # A stage of two layers takes 2, each worker has room for 1: 0.0 runs the first layer, 1.0 the
    # second, or so.
    job = grid(
        2,
        1,
        1,
        times=ONES,
        more="[memory]\ncapacity = 1\nactivation = 2\n[placement]\nlayers = [2]\n",
    )
    assert planned(job)[1] == 4
    with pytest.raises(NoPlanError, match="as CP-SAT has proven"):
        planned(job, "0.0")


@pytest.mark.parametrize("memory", ["", "[memory]\ncapacity = 2\nactivation = 1\n"])
def test_workers_of_the_other_direction_hold_what_a_dead_column_held(memory):
    job = grid(1, 2, 2, times=ONES, more=f"{memory}[placement]\norder = 'bidirectional'\n")
    assert planned(job, "0.0")[1] == 12, "0.1 runs both micro-batches at both stages"


def test_a_plan_with_moved_layers_needs_none_with_layers_in_place():
    job = grid(
        2,
        1,
        1,
        times=ONES,
        more="[memory]\ncapacity = 1\nactivation = 2\nweights = 0\n[placement]\nlayers = [2]\n",
    )
    plan = plan_with(PlanOptions(steps=20_000, layers="move"), job)
    assert plan.period == 4 and plan.fault_free is None


def test_a_baseline_that_gets_stuck_is_refused():
    job = grid(
        2,
        1,
        1,
        times=ONES,
        more="[memory]\ncapacity = 1\nactivation = 1\n[placement]\n"
        "order = 'interleaved'\nchunks = 2\n",
    )
    with pytest.raises(NoPlanError, match="1f1b gets stuck"):
        planned(job, method="1f1b")


def test_what_no_worker_has_room_for_is_refused():
    job = grid(2, 1, 1, times=ONES, more="[memory]\ncapacity = 0.5\nactivation = 1\n")
    with pytest.raises(NoPlanError, match="no schedule can run it"):
        planned(job)


# --- Unequal numbers of micro-batches -------------------------------------------------------------


@pytest.mark.parametrize(
    "pipelines, stages, counts, period", [(3, 1, [4, 1, 1], 6), (4, 4, [12, 8, 8, 8], 27)]
)
def test_pipelines_with_few_micro_batches_help_those_with_many(pipelines, stages, counts, period):
    assert planned(grid(pipelines, stages, counts, times=ONES))[1] == period


def test_pipelines_that_read_more_than_their_share_form_equal_groups_with_helpers():
    problem = build_problem(grid(12, 2, [5] * 3 + [3] * 6 + [4] * 3, times=ONES))
    assert [
        (piece.problem.grid.microbatches, len(piece.copies)) for piece in decompose(problem)
    ] == [((5, 3), 3), ((3,), 3), ((4,), 3)]


def test_pipelines_stay_apart_if_sharing_gains_nothing():
    # One worker runs 9 of 17 micro-batches in any case, in pipelines of 8 and 9.
    problem = build_problem(grid(4, 2, [9, 8, 8, 8], times=ONES))
    assert [len(piece.copies) for piece in decompose(problem)] == [1, 3]


# --- Layers that move -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job, longest",
    [
        (grid(1, 2, 2, times=ONES), 6),
        (
            grid(
                1,
                3,
                3,
                times="forward = [1, 3, 3]\nbackward_input = 1\nbackward_weight = [3, 0, 1]\n"
                "transfer = 3\n",
            ),
            14,
        ),
        (
            grid(
                1,
                2,
                1,
                times="forward = [1, 1]\nbackward_input = 0\nbackward_weight = [0, 3]\n"
                "slow = {'0.1' = 3, '0.0' = 1.337}\n",
                more="[memory]\ncapacity = 1\nweights = 2\n[placement]\nlayers = [1, 3]\n",
            ),
            5.35,
        ),
    ],
    ids=["whole micro-batches", "long transfers", "slow workers and little room"],
)
def test_layers_of_small_jobs_move_to_where_they_do_best(job, longest):
    assert planned(job, layers="move")[1] <= longest


# --- Reductions in bubbles ------------------------------------------------------------------------


def interleaved(pipelines, counts, more=""):
    return grid(
        pipelines,
        2,
        counts,
        times=f"{ONES}all_reduce = 4\ntransfer = 2\n{more}",
        more="[placement]\norder = 'interleaved'\nchunks = 2\n",
    )


@pytest.mark.parametrize("method", ["cp-sat", "greedy"])
def test_the_reduction_of_a_late_virtual_stage_fits_a_bubble(method):
    # It is before the worker's last compute op: 25 s instead of 29, as long as all reductions were
    # last.
    schedule, period = planned(interleaved(1, 1), method=method)
    assert period == 25
    kinds = [op.kind for op in schedule.ops(Worker(0, 0))]
    assert OpKind.W in kinds[kinds.index(OpKind.A) :]


@pytest.mark.parametrize("optimizer", ["staggered", "synchronous"])
@pytest.mark.parametrize("failed", [(), ("1.1",)])
def test_reductions_in_bubbles_of_several_pipelines_keep_every_rule(optimizer, failed):
    schedule, period = planned(interleaved(2, [2, 1]), *failed, optimizer=optimizer)
    assert period >= schedule.seconds(schedule.lower_bound_ticks)
