"""What a run asks for when workers fail."""

import msgspec
import pytest

from slipstream.planner import failures as failures_module
from slipstream.planner.blockwise import TooLargeError
from slipstream.planner.failures import FailurePlanner, period_seconds
from slipstream.planner.job.file import StageMemory
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import BlockParams, FailureParams, ListParams, SearchParams
from slipstream.planner.plan import plan_only
from slipstream.planner.tables.build import build_table
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.table import Table
from tests.jobs import grid

JOB = grid(3, 2, 2)
FIRST = plan_only(PlanOptions(method="greedy", time_limit=0.1), JOB, ()).schedule


@pytest.mark.parametrize("enough", [1.0, 1e9])
def test_a_job_too_large_to_be_planned_at_once_has_more_time(monkeypatch, enough):
    # Where that is too little, too, there is no plan; the run asks for others then.

    def plan(options, job, down):
        if options.time_limit < enough:
            raise TooLargeError("too large")
        return plan_only(msgspec.structs.replace(options, time_limit=0.1), job, down)

    asked, failures = (Worker(1, 1),), FailurePlanner(JOB, FIRST)
    monkeypatch.setattr(failures_module, "plan_only", plan)
    if enough > 1.0:
        with pytest.raises(NoPlanError, match="too large"):
            failures.after(asked)
    else:
        schedule = failures.after(asked)
        assert schedule.failed == asked and not check(schedule)


@pytest.mark.parametrize("enough", [True, False])
def test_a_job_too_large_to_return_to_a_checkpoint_at_once_has_more_time(enough):
    # With this margin, the job is planned whole in an hour or so only, as a large one in seconds.
    params = SearchParams(
        blocks=BlockParams(
            certain=0, largest_moved=0, grace_seconds=0.0, grace_share=0.0, whole_margin=1e6
        ),
        failures=FailureParams(at_once_seconds=0.01, large_seconds=1e6 if enough else 0.01),
    )
    asked, failures = (Worker(1, 1),), FailurePlanner(JOB, FIRST, params=params)
    if enough:
        schedule = failures.plan_from_checkpoint(asked, ())
        assert schedule.failed == asked and not check(schedule)
    else:
        with pytest.raises(NoPlanError, match="are 36 ops to place"):
            failures.plan_from_checkpoint(asked, ())


@pytest.mark.parametrize(("size", "chunks"), [(80, 1), (60, 2)])
def test_the_first_answer_to_a_failure_of_a_large_job_is_the_first_plan_whatever_the_machine_does(
    size, chunks, monkeypatch
):
    # It takes one step, and cuts no micro-batch; the same failure has the same answer again,
    # whatever the machine does. Each virtual stage has ops of its own.
    asked = []
    job = grid(size, 2, size, more=f"[placement]\norder = 'interleaved'\nchunks = {chunks}\n")

    def plan(options, job, down):
        asked.append(options)
        return plan_only(options, job, down)

    failures = FailurePlanner(
        job, plan_only(PlanOptions(method="greedy", steps=1), job, ()).schedule
    )
    monkeypatch.setattr(failures_module, "plan_only", plan)
    schedule, again = failures.after((Worker(1, 1),)), failures.after((Worker(1, 1),))
    assert schedule == again and not check(schedule) and not schedule.slices
    assert [(question.steps, question.slices) for question in asked] == [(1, False)] * 2
    small = FailurePlanner(JOB, FIRST)
    small.after((Worker(1, 1),))
    assert asked[-1].steps is None and asked[-1].slices


HEAVY = msgspec.structs.replace(
    JOB,
    memory=StageMemory(
        capacity=(9.0,) * 2,
        activation=(1.0,) * 2,
        weight_stash=(0.0,) * 2,
        weights=(1e9,) * 2,
        unit_bytes=1.0,
    ),
)


@pytest.mark.parametrize(("pays_within", "moves"), [(3600.0, True), (2.0, False)])
def test_roles_move_only_where_the_time_saved_makes_up_for_the_pause(
    pays_within, moves, tmp_path, monkeypatch
):
    # Two workers of one stage are dead: with roles moved the period is shorter, and layers are
    # loaded first.
    job, down = HEAVY, (Worker(0, 0), Worker(1, 0))
    build_table(
        job,
        b"",
        tmp_path,
        PlanOptions(method="greedy", time_limit=0.1),
        max_failures=2,
        settled=False,
    )
    first = plan_only(PlanOptions(method="greedy", time_limit=0.1), job, ()).schedule
    params = SearchParams(failures=FailureParams(pause_pays_seconds=pays_within))
    table = Table.load(tmp_path)
    moved = table.lookup(down, roles_move=True)
    assert table.lookup(down) is None and moved.layers_to_load == 1
    schedule = FailurePlanner(job, first, table, params=params).after(down)
    assert bool(schedule.moves) == moves and not check(schedule)
    answer = FailurePlanner(job, first, table, params=params).after((Worker(0, 0),))
    assert not answer.moves or moves, "one of three: the table has it in place"


def test_of_equal_periods_no_role_moves(tmp_path):
    # The table's answer with roles moved is for stage 1; a worker of stage 0 has died.
    job = msgspec.structs.replace(HEAVY, time=msgspec.structs.replace(JOB.time))
    build_table(
        job,
        b"",
        tmp_path,
        PlanOptions(method="greedy", time_limit=0.1),
        max_failures=1,
        settled=False,
    )
    first = plan_only(PlanOptions(method="greedy", time_limit=0.1), job, ()).schedule
    table = Table.load(tmp_path)
    failures = FailurePlanner(job, first, table)
    for worker in first.grid.workers():
        found, roles = failures.after((worker,)), table.lookup((worker,), roles_move=True).schedule
        assert not found.moves or period_seconds(roles) < period_seconds(
            table.lookup((worker,)).schedule
        )


def test_what_steers_the_search_is_passed_on(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "slipstream.planner.failures.plan_only",
        lambda options, *_: asked.append(options.params) or plan_only(options, *_),
    )
    params = SearchParams(lists=ListParams(most_steps=9))
    FailurePlanner(JOB, FIRST, params=params).after((Worker(1, 1),))
    assert asked == [params]


def test_plans_claim_no_bound_of_one_choice_of_what_is_recomputed():
    # The job is what the planner made of `recompute = "auto"`; another choice may be shorter.
    job, free = grid(3, 2, 2, more="[training]\nrecompute = 'auto'\n"), grid(3, 2, 2)
    down, stage_down = (Worker(1, 1),), (Worker(0, 1), Worker(1, 1), Worker(2, 1))
    holdings = tuple(
        (worker, FIRST.held_layers_of_column(worker.column))
        for worker in FIRST.members
        if worker not in down
    )
    claims = {}
    for variant in (job, free):
        failures = FailurePlanner(variant, FIRST, settled_seconds=0.1)
        schedules = (
            failures.after(down),
            failures.after(stage_down),
            failures.at_speeds(down, ((Worker(0, 0), 2.0),)),
            failures.plan_at_once(down, holdings, ()),
            failures.plan_rebalanced(down, holdings, ()),
            failures.plan_from_checkpoint(down, ()),
        )
        assert not any(map(check, schedules))
        claims[variant.training.get("recompute")] = {
            schedule.lower_bound_ticks for schedule in schedules
        }
    assert claims["auto"] == {0}
    assert 0 not in claims[None]


def test_a_layer_that_nobody_holds_is_named():
    """No plan with layers in place: the run asks for another, and no error ends its planner."""
    holdings = tuple((Worker(pipeline, 0), FIRST.held_layers_of_column(0)) for pipeline in range(3))
    down = tuple(Worker(pipeline, 1) for pipeline in range(3))
    with pytest.raises(NoPlanError, match=r"no live worker holds layer 1; .* --from-checkpoint"):
        FailurePlanner(JOB, FIRST).plan_at_once(down, holdings, ())
