"""Pieces of a layout: pipelines whose workers share micro-batches, wherever these come from."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.budget import Budget
from slipstream.planner.model.decompose import decompose, renumber_by_runner
from slipstream.planner.model.from_job import build_layered_problem, with_layout
from slipstream.planner.model.problem import Bound, Layout, MicroBatch, RouteSlice
from slipstream.planner.search.improvement import improve_by_list_schedules
from slipstream.planner.search.incumbent import divide_problem
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from tests.jobs import grid

STAGES = 3
MICROBATCHES = 4


def problem_of(runners, all_reduce=0):
    """A layout in which each micro-batch passes the stages of these pipelines.

    They are listed as [pipeline][micro-batch], one a stage.
    """
    job = grid(
        len(runners),
        STAGES,
        MICROBATCHES,
        times="forward = 4\nbackward_input = 4\nbackward_weight = 4\n"
        f"transfer = 1\noptimizer = 2\nall_reduce = {all_reduce}\n",
        more="[placement]\nlayers = [2, 2, 2]\n",
    )
    routes = {}
    for pipeline, pipeline_runners in enumerate(runners):
        for number, passed in enumerate(pipeline_runners):
            routes[MicroBatch(pipeline, number)] = tuple(
                RouteSlice((2 * stage, 2 * stage + 2), Worker(runner, stage))
                for stage, runner in enumerate(passed)
            )
    holds = {
        Worker(pipeline, stage): ((2 * stage, 2 * stage + 2),)
        for pipeline in range(len(runners))
        for stage in range(STAGES)
    }
    return with_layout(
        build_layered_problem(job), Layout(kind="by hand", holds=holds, routes=routes)
    )


def whole(*runners):
    rows = []
    for pipeline_runners in runners:
        rows.append([(runner,) * STAGES for runner in pipeline_runners])
    return rows


def test_whole_micro_batches_of_another_pipeline_join_nothing():
    problem = problem_of(whole([0, 1, 0, 2], [1, 1, 1, 1], [2, 2, 2, 2]))
    renamed, names = renumber_by_runner(problem)
    assert renamed.grid.microbatches == (2, 5, 5)
    assert [names[MicroBatch(1, number)] for number in range(5)] == [
        (1, 0),
        (0, 1),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    (alike,) = (piece for piece in decompose(problem) if len(piece.copies) == 2)
    assert alike.copies == ((1,), (2,)) and alike.problem.grid.microbatches == (5,)
    assert alike.original_microbatch((2,), 0, 3) == MicroBatch(0, 3) and alike.original_microbatch(
        (2,), 0, 4
    ) == MicroBatch(2, 3)


def test_pipelines_that_share_as_much_are_alike_whichever_micro_batch_it_is():
    problem = problem_of(
        [
            [(1, 2, 1), (0,) * STAGES, (0,) * STAGES, (3, 4, 3)],
            *whole(*([runners] * MICROBATCHES for runners in range(1, 5))),
        ]
    )
    (alike,) = (piece for piece in decompose(problem) if len(piece.copies) == 2)
    assert alike.copies == ((1, 2), (3, 4))
    assert [alike.original_microbatch(copy, 0, 2) for copy in alike.copies] == [(0, 0), (0, 3)], (
        "in the middle of its own"
    )
    assert check(listed(problem)) == []


def test_a_pipeline_that_runs_nothing_still_reduces_and_steps():
    problem = problem_of(whole([1, 1, 1, 1], [1, 1, 1, 1]))
    schedule = listed(problem)
    assert check(schedule) == []
    assert len(schedule.programs[schedule.seats[0].program]) == 2, "A and O"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_schedules_of_any_pieces_pass_the_checker(data):
    pipelines = data.draw(st.integers(2, 5))
    crossing = data.draw(st.integers(0, 2))
    pipeline_runners = []
    for pipeline in range(pipelines):
        row = []
        for _ in range(MICROBATCHES):
            anyone = data.draw(st.integers(0, pipelines - 1))
            row.append(data.draw(st.sampled_from([pipeline, pipeline, anyone])))
        pipeline_runners.append(row)
    runners = whole(*pipeline_runners)
    for _ in range(crossing):
        pipeline, number = (
            data.draw(st.integers(0, pipelines - 1)),
            data.draw(st.integers(0, MICROBATCHES - 1)),
        )
        runners[pipeline][number] = tuple(
            data.draw(st.integers(0, pipelines - 1)) for _ in range(STAGES)
        )
    assert check(listed(problem_of(runners, all_reduce=data.draw(st.sampled_from([0, 2]))))) == []


def listed(problem):
    """The best list schedule, whose period is what the search says."""
    incumbent = improve_by_list_schedules(
        divide_problem(problem, Bound(1, problem.bound_scope)), Budget.of_steps(12_000)
    )
    schedule = incumbent.make_schedule("greedy")
    assert schedule.period_ticks == incumbent.period
    return schedule
