"""Improve a plan with CP-SAT: the plan is the hint, and never made worse."""

from collections.abc import Callable
from typing import Literal

import msgspec
from ortools.sat.python import cp_model

from planner.cpsat.constraints import Constraints
from planner.cpsat.variables import Variables
from planner.problem import Problem
from planner.solution import Solution, solution_period
from schedules.schedule import OpKind

Outcome = Literal["optimal", "improved", "unchanged"]


class Improvement(msgspec.Struct, frozen=True, kw_only=True):
    """What the solver came back with: a plan no worse than the hint, and the bound it proved."""

    solution: Solution
    period_ticks: int
    lower_bound_ticks: int
    outcome: Outcome


class _Report(cp_model.CpSolverSolutionCallback):
    """Tells of every better plan while the solver runs."""

    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()
        self._report = report

    def on_solution_callback(self) -> None:
        """Called by the solver."""
        self._report(round(self.objective_value))


def improve(problem: Problem, hint: Solution, *, lower_bound: int, seconds: float, seed: int,
            report: Callable[[int], None]) -> Improvement:
    """Search for a smaller period for at most `seconds`, starting from `hint`.

    The result is the same for the same seed whenever optimality is proven in time: the solver's workers run in
    lockstep (interleaved search), so that nothing depends on the clock but the end.
    """
    before = solution_period(problem, hint)
    model = cp_model.CpModel()
    horizon = _horizon(problem, hint, before)
    variables = Variables(model, problem, horizon)
    Constraints(model, problem, variables).add_all()
    model.add(variables.period >= lower_bound)
    model.add(variables.period <= before)
    model.minimize(variables.period)
    _give_hint(model, problem, variables, hint)
    solver = _solver(seconds, seed)
    status = solver.solve(model, _Report(report))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = _read(problem, variables, solver)
        after = solution_period(problem, found)
        bound = max(lower_bound, min(after, round(solver.best_objective_bound)))
        if after < before or (after == before and status == cp_model.OPTIMAL):
            return Improvement(solution=found, period_ticks=after, lower_bound_ticks=bound,
                               outcome="optimal" if after <= bound else "improved")
        return Improvement(solution=hint, period_ticks=before, lower_bound_ticks=min(bound, before),
                           outcome="unchanged")
    if status == cp_model.UNKNOWN:
        return Improvement(solution=hint, period_ticks=before, lower_bound_ticks=lower_bound, outcome="unchanged")
    raise AssertionError(f"CP-SAT calls a model with a known plan {solver.status_name(status)}")


def _horizon(problem: Problem, hint: Solution, period: int) -> int:
    """No op of a best plan ends later than this.

    Any plan can be left-shifted until each op waits for another; the chain back to time 0 then holds each op at most
    once, so the sum of all costs would do. The hint's own span plus one period is far smaller, and enough: ops of one
    column lie within a period of each other, and columns can be moved no further apart than their data forces them.
    """
    span = max(hint.starts.values()) - min(hint.starts.values())
    longest = max(problem.cost(kind, stage, host) for kind in problem.kinds
                  for stage in range(len(problem.grid.stages))
                  for host in problem.live_by_column[problem.column_of[stage]])
    return span + longest + period


def _give_hint(model: cp_model.CpModel, problem: Problem, variables: Variables, hint: Solution) -> None:
    shift = min(hint.starts.values())
    first = [variables.horizon] * problem.grid.columns
    last = [0] * problem.grid.columns
    for key, variable in variables.start.items():
        start = hint.starts[key] - shift
        model.add_hint(variable, start)
        kind, stage, pipeline, microbatch = key
        host = hint.hosts[variables.units[0]._replace(stage=stage, pipeline=pipeline, microbatch=microbatch)]
        end = start + problem.cost(kind, stage, host)
        if isinstance(variables.end[key], cp_model.IntVar):
            model.add_hint(variables.end[key], end)
        column = problem.column_of[stage]
        first[column], last[column] = min(first[column], start), max(last[column], end)
    for (unit, host), literal in variables.on.items():
        model.add_hint(literal, hint.hosts[unit] == host)
    for column in range(problem.grid.columns):
        model.add_hint(variables.first[column], first[column])
        model.add_hint(variables.last[column], last[column])
    model.add_hint(variables.period, solution_period(problem, hint))


def _solver(seconds: float, seed: int) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = seconds
    parameters.random_seed = seed
    parameters.num_workers = 8
    parameters.interleave_search = True
    return solver


def _read(problem: Problem, variables: Variables, solver: cp_model.CpSolver) -> Solution:
    hosts = {}
    for unit in variables.units:
        choices = [host for host, literal in variables.literals(unit)
                   if literal is None or solver.boolean_value(literal)]
        assert len(choices) == 1, f"CP-SAT chose hosts {choices} for {unit}"
        hosts[unit] = choices[0]
    starts = {key: solver.value(variable) for key, variable in variables.start.items()}
    assert all(kind in OpKind for kind, *_ in starts)
    return Solution(hosts=hosts, starts=starts)
