"""Pipelines that share no worker are ordered each by its own best rule."""

import numpy as np

from slipstream.planner.layout.candidates import candidates
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.decompose import undivided
from slipstream.planner.model.from_job import layered_problem, with_layout
from slipstream.planner.model.problem import Question
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.search.assignment import assign
from slipstream.planner.search.composition import Composition
from slipstream.planner.search.list_scheduler import DispatchRule, ListScheduler, shares_of_forward
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from tests.jobs import grid


def rules(problem):
    """Forwards wait before a worker's first gradient, or always."""
    return [DispatchRule(forward_order=order, lookahead=wait, fill_wait=shares_of_forward(problem, wait),
                         forward_lookahead=after * wait)
            for order in ("deepest", "oldest") for wait in (0.0, 0.5, 1.0) for after in (0.0, 1.0)]


def recut(pipelines, stages, microbatches, failed, kind="whole micro-batches"):
    job = grid(pipelines, stages, microbatches, more=f"[placement]\nlayers = {[4] * stages}\n",
               times="forward = 40\nbackward_input = 40\nbackward_weight = 40\ntransfer = 4\noptimizer = 20\n")
    given = layered_problem(job, failed, Question(layers="move"))
    layout = next(layout for layout in candidates(given) if kind in layout.kind and "short" not in layout.kind)
    return with_layout(given, layout)


def test_each_set_of_workers_runs_its_own_best_order():
    problem = recut(3, 4, 8, [Worker(1, 2)])
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
    composition = Composition(scheduler.arrays)
    assert composition.worthwhile
    periods = []
    for rule in rules(problem):
        periods.append(scheduler.period(rule))
        composition.offer(scheduler.made[0])
    period, order, start = composition.best()
    solution = scheduler.arrays.solution(order, start)
    assert sorted(order.tolist()) == list(range(len(order)))
    assert solution_period(problem, solution) <= period <= 1.01 * min(periods)
    solved = [(undivided(problem), solution)]
    assert check(build_schedule(problem, solved, method="greedy")) == []


def test_an_order_that_is_no_better_is_no_news():
    problem = recut(2, 4, 8, [Worker(1, 2)])
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
    composition = Composition(scheduler.arrays)
    scheduler.period(DispatchRule())
    assert composition.offer(scheduler.made[0])
    assert not composition.offer(scheduler.made[0])


def test_forwards_wait_for_the_first_gradient_or_for_all():
    problem = recut(3, 4, 16, [Worker(1, 2)])
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
    whole, none = shares_of_forward(problem, 1.0), shares_of_forward(problem, 0.0)

    def order(**waits) -> list[int]:
        return scheduler.order(DispatchRule(**waits)).tolist()

    assert order(fill_wait=none) == order()
    assert order(fill_wait=whole) != order()
    assert order(fill_wait=whole, forward_lookahead=1.0) == order(forward_lookahead=1.0) != order(fill_wait=whole)
    assert order(fill_wait=none, forward_lookahead=1.0) != order(forward_lookahead=1.0)


def test_gradients_of_longer_routes_may_go_last_where_their_forwards_go_first():
    problem = recut(3, 4, 16, [Worker(1, 2)], "spread")
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
    kinds, units = scheduler.arrays.ops.kinds, scheduler.arrays.units
    longest = max(len(route) for route in problem.routes.values())

    def mean_place(kind: int, advance: float, gradient_advance: float) -> float:
        rule = DispatchRule(forward_order="oldest", advance=advance, gradient_advance=gradient_advance)
        ops = [op for op in scheduler.order(rule).tolist() if op % kinds == kind]
        return float(np.mean([place for place, op in enumerate(ops)
                              if len(problem.routes[units[op // kinds][1:]]) == longest]))

    assert mean_place(0, 9.0, -9.0) < mean_place(0, -9.0, -9.0)
    assert mean_place(1, 9.0, 9.0) < mean_place(1, 9.0, -9.0)


def test_longer_routes_go_first_where_the_rule_says_so():
    problem = recut(2, 4, 8, [Worker(1, 2)])
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
    length = {batch: len(route) for batch, route in problem.routes.items()}
    assert len(set(length.values())) > 1
    order = scheduler.order(DispatchRule(advance=100.0, gradient_advance=100.0)).tolist()
    kinds, units = scheduler.arrays.ops.kinds, scheduler.arrays.units
    first = {}
    for op in order:
        unit = units[op // kinds]
        row = scheduler.arrays.ops.worker[op // kinds]
        if op % kinds == 0:
            first.setdefault(row, length[unit.pipeline, unit.microbatch])
    mixed = [row for row in first if len({length[unit[1:]] for number, unit in enumerate(units)
                                          if scheduler.arrays.ops.worker[number] == row}) > 1]
    assert all(first[row] == max(length[unit[1:]] for number, unit in enumerate(units)
                                 if scheduler.arrays.ops.worker[number] == row) for row in mixed)


def test_micro_batches_that_cross_tie_pipelines_together():
    problem = recut(2, 4, 8, [Worker(1, 2)])
    arrays = ProblemArrays(problem, assign(problem, "least-loaded"))
    worker = arrays.ops.worker.copy()
    first = np.flatnonzero(worker == worker[0])[0]
    other = next(row for row in range(len(arrays.workers)) if arrays.workers[row].pipeline == 1)
    worker[first] = other
    arrays.ops = arrays.ops._replace(worker=worker)
    assert not Composition(arrays).worthwhile
