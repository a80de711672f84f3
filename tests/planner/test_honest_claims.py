"""Bounds and references say what they are of.

The jobs are those on which they once claimed too much.
"""

from itertools import pairwise

import msgspec
import pytest
import typer
from msgspec.structs import replace

import slipstream.cli.plan as plan_command
import slipstream.planner.plan as planner_plan
from slipstream.planner.blockwise import Blocks
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import JobError
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound
from slipstream.planner.normalise import normalised, window_bounds_of
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import BlockParams, SearchParams
from slipstream.planner.plan import plan_job, plan_with
from slipstream.planner.simulation.availability_trace import AvailabilityTrace, Change
from slipstream.planner.simulation.loads import Loads
from slipstream.schedules import codec
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Room, Scope, Worker
from slipstream.schedules.tables.relabel import relabel_schedule
from tests.jobs import grid

ONE = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"
DOWN = [Worker(0, 0)]


# With both layers on each worker, each runs one micro-batch alone: 6 ticks. Else there is a
# transfer each way.
FAR = grid(2, 2, 2, times=f"{ONE}transfer = 10\n", more="[placement]\nlayers = [1, 1]\n")


def test_bounds_of_different_questions_are_not_combined():
    bound, other = Bound(3, Scope.STAGES), Bound(5, Scope.LAYERS)
    assert (bound | Bound(5, Scope.STAGES)).ticks == 5
    with pytest.raises(AssertionError, match="not comparable"):
        bound | other
    scopes = [scope for scope in Scope if scope is not Scope.PLACEMENT]
    assert all(wide.is_valid_for(narrow) for narrow, wide in pairwise(scopes))
    assert [scope for scope in Scope if Scope.PLACEMENT.is_valid_for(scope)] == [
        Scope.OWN,
        Scope.PLACEMENT,
    ]
    assert not any(
        scope.is_valid_for(Scope.PLACEMENT) for scope in Scope if scope is not Scope.PLACEMENT
    )


@pytest.mark.parametrize(
    ("method", "scope"), [("cp-sat", Scope.LAYERS), ("greedy", Scope.LAYERS), ("1f1b", Scope.OWN)]
)
def test_a_bound_with_layers_in_place_is_none_where_they_move(method, scope):
    schedule = plan_with(PlanOptions(layers="move", method=method, steps=200_000), FAR).schedule
    assert schedule.scope is scope and check(schedule) == []
    assert scope is not Scope.LAYERS or schedule.seconds(schedule.lower_bound_ticks) <= 6


def test_a_large_job_in_blocks_says_that_its_bound_is_of_layers_in_place(monkeypatch):
    monkeypatch.setattr(planner_plan, "choose_blocks", lambda *_, **__: Blocks(2, 0.1))
    params = SearchParams(blocks=BlockParams(largest_moved=0))
    schedule = plan_with(PlanOptions(layers="move", steps=200_000, params=params), FAR).schedule
    assert schedule.scope is Scope.OWN and schedule.seconds(schedule.lower_bound_ticks) > 6


@pytest.mark.parametrize(
    ("failed", "options", "scope"),
    [
        ([], PlanOptions(steps=100_000), Scope.OWN),
        (DOWN, PlanOptions(steps=100_000), Scope.STAGES),
        (DOWN, PlanOptions(steps=100_000, layers="move"), Scope.LAYERS),
    ],
)
def test_what_a_plan_claims_is_proven_by_its_file(failed, options, scope):
    job = grid(2, 2, 4)
    schedule = codec.decode(codec.encode(plan_with(options, job, failed).schedule))
    assert schedule.scope is scope is proven_bound(schedule).scope
    assert proven_bound(schedule).ticks == schedule.lower_bound_ticks


def test_with_roles_moved_the_bound_is_of_all_roles():
    job = grid(3, 2, 6)
    schedule = normalised(job, [Worker(0, 0), Worker(1, 0)], PlanOptions(steps=400_000)).schedule
    assert (
        schedule.scope is Scope.ROLES
        and proven_bound(schedule).ticks == schedule.lower_bound_ticks > 0
    )


def test_a_file_without_the_scope_is_read_as_the_narrowest_that_it_can_mean():
    schedule = plan_job(grid(2, 2, 2), steps=10_000).schedule
    text = codec.encode(schedule).replace(b',"bound_scope":"own micro-batches"', b"")
    old = codec.decode(text)
    assert old.bound_scope is msgspec.UNSET and old.scope is Scope.OWN and codec.encode(old) == text
    with pytest.raises(codec.ScheduleError, match="bound_scope"):
        codec.decode(codec.encode(schedule).replace(b"own micro-batches", b"everything"))


def test_any_holder_may_help_where_roles_move_though_no_worker_of_its_stage_is_down():
    """What bounds pipelines that keep their own micro-batches is no bound for such a stage."""
    windows = window_bounds_of(grid(2, 2, 2), PlanOptions())
    assert windows.column_bound(0, 0) == lower_bound(build_problem(grid(2, 2, 2), sharing=True))


def test_a_plan_with_roles_in_place_is_not_called_optimal_for_all_roles():
    # Two failures in one column: spread over both, the period is shorter than what is optimal for
    # them in place.
    job = grid(3, 2, 6)
    plan = normalised(job, [Worker(0, 0), Worker(1, 0)], PlanOptions(time_limit=2.0))
    best = min(
        plan_job(job, down, time_limit=1.0).schedule.period_ticks
        for down in ([Worker(0, 0), Worker(0, 1)], [Worker(0, 0), Worker(1, 1)])
    )
    assert plan.schedule.lower_bound_ticks <= best


def test_the_reference_does_not_depend_on_plans_with_layers_moved():
    times = "forward = [1, 9]\nbackward_input = [1, 9]\nbackward_weight = [1, 9]\n"
    job = grid(2, 2, 2, times=times, more="[placement]\nlayers = [1, 9]\n")
    alive = plan_job(job, time_limit=1.0)
    for down in (DOWN, []):
        moved = plan_with(
            PlanOptions(layers="move", time_limit=2.0), job, down, fault_free=alive.fault_free
        )
        assert moved.fault_free == alive.fault_free
        assert down or moved.period <= alive.period


# --- Workers with room of their own ---------------------------------------------------------------


def _roomy():
    schedule = plan_job(
        grid(2, 1, 4, more="[memory]\ncapacity = 10\nactivation = 1\nweight_stash = 1\n"),
        time_limit=1.0,
    ).schedule
    assert schedule.memory is not None
    return replace(schedule, memory=replace(schedule.memory, capacity_of=(Room(Worker(1, 0), 0),)))


def test_pipelines_with_other_room_are_not_equal():
    assert {violation.rule for violation in check(_roomy())} == {"memory"}


def test_a_role_goes_to_nobody_with_less_room():
    job = grid(3, 2, 3, more="[memory]\ncapacity = 10\nactivation = 1\nweight_stash = 1\n")
    planned = plan_job(job, [Worker(0, 0)], time_limit=1.0).schedule
    assert planned.memory is not None
    small = replace(planned, memory=replace(planned.memory, capacity_of=(Room(Worker(0, 0), 0),)))
    assert check(small) == []  # it is down
    for failed in small.grid.workers():
        found = relabel_schedule(small, [failed])
        assert found is None or check(found) == []


def test_a_bound_counts_the_room_that_workers_have():
    text = "[memory]\ncapacity = {}\nactivation = 1\nweight_stash = 1\n"
    wide = plan_job(grid(1, 2, 4, more=text.format(4)), time_limit=2.0).schedule
    assert wide.memory is not None
    roomy = replace(
        wide,
        memory=replace(
            wide.memory,
            capacity=(1, 1),
            capacity_of=tuple(Room(worker, 4) for worker in wide.grid.workers()),
        ),
    )
    assert check(roomy) == [] and proven_bound(roomy).ticks <= roomy.period_ticks


# --- Whole numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["fixed", "move"])
def test_a_stage_that_costs_nothing_may_lose_a_worker(layers):
    job = grid(
        2,
        2,
        2,
        times="forward = [0, 1]\nbackward_input = [0, 1]\nbackward_weight = [0, 1]\n",
        more="[placement]\nlayers = [2, 2]\n[layers]\nforward = [0, 0, 0.5, 0.5]\n"
        "backward_input = [0, 0, 0.5, 0.5]\nbackward_weight = [0, 0, 0.5, 0.5]\n",
    )
    plan = plan_with(PlanOptions(layers=layers, time_limit=1.0), job, DOWN)
    assert plan.schedule.lower_bound_ticks <= plan.schedule.period_ticks


@pytest.mark.parametrize("factor", [1.2345, 0.0014])
def test_slow_factors_are_whole_thousandths(factor):
    with pytest.raises(JobError, match="whole thousandths"):
        grid(2, 1, 2, times=f"{ONE}slow = {{'0.0' = {factor}}}\n")


# --- Counted once ---------------------------------------------------------------------------------


def test_gpus_that_come_back_are_no_failures():
    trace = AvailabilityTrace(
        name="t",
        places=1,
        live=(0,),
        length_seconds=100.0,
        gpus_per_worker=4,
        changes=tuple(
            Change(10.0 * number, gpus=((0, count),))
            for number, count in enumerate((3, 2, 3, 4), 1)
        ),
    )
    assert (trace.partial_losses, trace.seconds_between_failures) == (2, 50.0)


def test_loads_are_of_all_stages_that_a_worker_has():
    job = grid(
        1,
        2,
        1,
        times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = [1, 2, 4, 8]\n",
        more="[placement]\norder = 'interleaved'\nchunks = 2\n",
    )
    assert Loads(job).max_load_seconds((0, 0)) == 6 + 2 + 8


# --- Files ----------------------------------------------------------------------------------------


def test_no_schedule_is_written_that_cannot_be_read(monkeypatch):
    schedule = plan_job(grid(1, 2, 2), time_limit=0.5).schedule
    monkeypatch.setattr(codec, "MAX_OPS", 3)
    with pytest.raises(codec.ScheduleError, match="too large"):
        codec.encode(schedule)


def test_json_does_not_change_the_plan(tmp_path, monkeypatch):
    file, limits = tmp_path / "job.toml", []
    file.write_text(f"pipelines = 2\nstages = 2\nmicrobatches = 2\n[time]\n{ONE}")

    def planned(job, failed, options, **others):
        limits.append(options)
        raise typer.Exit(0)

    monkeypatch.setattr(plan_command, "make_plan", planned)
    for json in (False, True):
        with pytest.raises(typer.Exit):
            plan_command.plan(file, failed=["0.0"], json=json)
    assert limits[0] == limits[1]
