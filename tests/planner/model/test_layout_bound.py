"""The bound of a given layout: below every plan of it, above its longest load where workers must wait."""

import random

import pytest

from slipstream.planner.bound import Bound
from slipstream.planner.budget import Budget
from slipstream.planner.layout.candidates import candidates
from slipstream.planner.model.bounds import whole_fill
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import build_problem, layered_problem, with_layout
from slipstream.planner.model.layout import Layout, MicroBatch, Stop
from slipstream.planner.model.layout_bound import LayoutBound, can_bound
from slipstream.planner.model.problem import Question
from slipstream.planner.search.engine import solve
from slipstream.planner.search.incumbent import divided
from slipstream.planner.search.list_scheduler import StuckError
from slipstream.planner.search.list_schedules import list_schedules
from slipstream.schedules.schedule import Worker
from tests.jobs import grid


def layered(pipelines, stages, microbatches, *, more=""):
    layers = f"[placement]\nlayers = {[4] * stages}\n"
    return grid(pipelines, stages, microbatches, more=layers + more,
                times="forward = 4\nbackward_input = 4\nbackward_weight = 4\ntransfer = 1\noptimizer = 2\n")


def problems(job, failed):
    given = layered_problem(job, failed, Question(layers="move"))
    return [with_layout(given, layout) for layout in candidates(given)]


@pytest.mark.parametrize("seed", range(6))
def test_no_list_schedule_of_a_layout_undercuts_its_bound(seed):
    chosen = random.Random(seed)
    pipelines, stages = chosen.choice([2, 3, 4]), chosen.choice([2, 3, 4])
    memory = f"[memory]\ncapacity = {2 * stages}\nactivation = 1\nweight_stash = 1\nweights = {stages}\n"
    job = layered(pipelines, stages, chosen.choice([stages, 2 * stages, 7]), more=chosen.choice(["", memory]))
    failed = chosen.sample([Worker(*divmod(number, stages)) for number in range(pipelines * stages)], 1)
    for problem in problems(job, failed):
        try:
            known = list_schedules(divided(problem, Bound(1, problem.scope)), Budget.of_steps(20_000))
        except StuckError:  # too little memory for that layout
            continue
        bound = LayoutBound([piece.problem for piece in known.pieces])
        assert not bound.excludes(known.period)
        assert bound.period(1, known.period) <= known.period


def test_micro_batches_that_are_too_few_to_fill_are_counted():
    """The first worker runs 4 F of 4 ticks while its first micro-batch makes a round trip of 3 x (4 + 1 + 4 + 1)."""
    job = layered(1, 4, 4)
    problem = next(problem for problem in problems(job, []) if can_bound(problem))
    work = 4 * 12 + 2
    bound = LayoutBound([piece.problem for piece in decompose(problem)])
    ticks = problem.tick_seconds
    assert bound.period(1, 10_000, over=lambda: True) == 1, "no time: nothing is excluded"
    assert bound.period(1, 10_000) * ticks == pytest.approx(work + 3 * 10 - 3 * 4, rel=0.01)


@pytest.mark.parametrize(("stages", "microbatches", "least"), [(4, 9, 2216), (8, 17, 4152), (4, 16, 3880)])
def test_lines_fill_with_whole_forwards(stages, microbatches, least):
    """As `planner.model.bounds.whole_fill`; micro-batches that are cut in two let workers run half of one."""
    job = grid(1, stages, microbatches, more=f"[placement]\nlayers = {[4] * stages}\n",
               times="forward = 80\nbackward_input = 80\nbackward_weight = 80\ntransfer = 8\noptimizer = 40\n")

    def bound(parts: int) -> float:
        ends = [(layer, layer + 4 // parts) for layer in range(0, 4 * stages, 4 // parts)]
        route = tuple(Stop(layers, Worker(0, layers[0] // 4)) for layers in ends)
        layout = Layout(kind="", holds={Worker(0, stage): ((4 * stage, 4 * stage + 4),) for stage in range(stages)},
                        routes={MicroBatch(0, number): route for number in range(microbatches)})
        problem = with_layout(layered_problem(job), layout)
        return LayoutBound([problem]).period(1, 10_000) * problem.tick_seconds

    assert bound(1) == pytest.approx(least, rel=0.0011)
    whole = build_problem(job, [])
    assert bound(1) == pytest.approx(whole_fill(whole).period * whole.tick_seconds, rel=0.0011)
    assert bound(2) <= bound(1)


def test_memory_makes_workers_wait():
    def least(capacity: int) -> float:
        job = layered(1, 4, 16, more=f"[memory]\ncapacity = {capacity}\nactivation = 1\n")
        problem = problems(job, [])[0]
        bound = LayoutBound([piece.problem for piece in decompose(problem)])
        return bound.period(1, 10_000) * problem.tick_seconds

    assert least(8) < least(4) < least(2)
    assert least(4) == pytest.approx(16 * 12 + 2 + 3 * 10 - 3 * 4, rel=0.01)


def test_a_plan_of_the_layout_can_be_as_short():
    problem = problems(layered(2, 2, 6), [])[0]
    solved = solve(problem, "cp-sat", Budget.of_steps(400_000))
    known = list_schedules(divided(problem, Bound(1, problem.scope)), Budget.of_steps(400_000))
    bound = LayoutBound([piece.problem for piece, _ in solved.pieces]).period(1, known.period)
    assert bound == pytest.approx(known.period, rel=0.05)
    assert known.bound.ticks == 1
