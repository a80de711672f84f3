"""CP-SAT: improve a plan, which is the hint and never made worse, and prove how short one can be."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

import msgspec
from ortools.sat.python import cp_model

from slipstream.planner.budget import SOLVER_UNITS_PER_STEP, Budget
from slipstream.planner.model.problem import Problem, Unit
from slipstream.planner.model.solution import Solution
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.search.cpsat.constraints import Constraints
from slipstream.planner.search.cpsat.variables import Variables
from slipstream.schedules.precedence import OpKey
from slipstream.schedules.schedule import OpKind

POLL_SECONDS = 0.05
SMALL_MODEL = 1000
"""Compute ops up to which linear relaxations pay."""


class Improvement(msgspec.Struct, frozen=True, kw_only=True):
    """What the solver came back with: a plan no worse than the hint, and the bound it proved."""

    solution: Solution
    period_ticks: int
    lower_bound_ticks: int


class _OnSolution(cp_model.CpSolverSolutionCallback):
    """Reports the period, in ticks, of every better plan while the solver runs."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._progress = progress

    def on_solution_callback(self) -> None:
        """Called by the solver."""
        self._progress(round(self.objective_value))


def improve(problem: Problem, hint: Solution, *, lower_bound: int, budget: Budget,
            progress: Callable[[int], None]) -> Improvement:
    """Search for a smaller period within the budget, starting from `hint`.

    The result is the same for the same seed whenever optimality is proven in time: one search thread, so that nothing
    depends on the clock but the end. (Eight threads on two cores were no faster on the jobs of the tests; tables use
    the cores for different entries.)
    """
    before = solution_period(problem, hint)
    model, variables = _model(problem, lower_bound, before)
    _give_hint(model, problem, variables, hint, before)
    solver = _solver(budget, small=len(variables.start) <= SMALL_MODEL)
    status = _solve(solver, model, _OnSolution(progress), budget)
    if status == cp_model.UNKNOWN:
        return Improvement(solution=hint, period_ticks=before, lower_bound_ticks=lower_bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise AssertionError(f"CP-SAT calls a model with a known plan {solver.status_name(status)}")
    found = _read(problem, variables, solver)
    after = solution_period(problem, found)
    assert after <= before, f"CP-SAT returned period {after}, longer than its hint's {before}"
    bound = max(lower_bound, math.ceil(solver.best_objective_bound - 1e-6))
    return Improvement(solution=found, period_ticks=after, lower_bound_ticks=min(bound, after))


def _model(problem: Problem, shortest: int, longest: int) -> tuple[cp_model.CpModel, Variables]:
    """The problem as a model that looks for the shortest period between two."""
    model = cp_model.CpModel()
    variables = Variables(model, problem, _horizon(problem, longest))
    Constraints(model, problem, variables).add_all()
    model.add(variables.period >= shortest)
    model.add(variables.period <= longest)
    model.minimize(variables.period)
    return model, variables


def _solve(solver: cp_model.CpSolver, model: cp_model.CpModel, on_solution: _OnSolution,
           budget: Budget) -> cp_model.CpSolverStatus:
    """Run the solver beside this thread, so that the search can be ended in good order."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(solver.solve, model, on_solution)
        while not running.done():
            wait([running], timeout=POLL_SECONDS)
            if budget.stopped:
                solver.stop_search()  # again and again: it is lost on a search that has not quite begun
        status = running.result()
    budget.clock.count(solver.deterministic_time / SOLVER_UNITS_PER_STEP)
    return status


def _horizon(problem: Problem, period: int) -> int:
    """No op of any plan whose period is at most `period` ends later than this, once its first op starts at 0.

    Synchronous: by definition. Staggered: let R_c be the first start in column c. The first op is
    the F of some micro-batch at its first stage, so R = 0 in that column c0. It visits a stage s in every column c, and
    its I at the first stage follows its F at s, hence
    R_c <= F(s) <= I(first) <= R_c0 + period = period; and all ops of column c end by R_c + period <= 2 period.
    """
    return period if problem.optimizer == "synchronous" else 2 * period


def _give_hint(model: cp_model.CpModel, problem: Problem, variables: Variables, hint: Solution, period: int) -> None:
    shift = min(hint.starts.values())
    first = [variables.horizon] * problem.grid.columns
    last = [0] * problem.grid.columns
    for key, variable in variables.start.items():
        start = hint.starts[key] - shift
        model.add_hint(variable, start)
        kind, stage, pipeline, microbatch = key
        host = hint.hosts[Unit(stage, pipeline, microbatch)]
        end = start + problem.cost(kind, stage, host)
        end_variable = variables.end[key]
        if isinstance(end_variable, cp_model.IntVar) and end_variable is not variable:  # it is where the op takes 0
            model.add_hint(end_variable, end)
        column = problem.column_of[stage]
        first[column], last[column] = min(first[column], start), max(last[column], end)
    for (unit, host), literal in variables.on.items():
        model.add_hint(literal, hint.hosts[unit] == host)
    for column, tied in enumerate(problem.tied):
        last[tied] = max(last[tied], last[column])
    for column, tied in enumerate(problem.tied):
        model.add_hint(variables.first[column], first[column])
        model.add_hint(variables.last[column], last[tied])
    model.add_hint(variables.period, period)


def _solver(budget: Budget, *, small: bool) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    for name, limit in budget.clock.solver_limits(budget.seconds).items():
        setattr(parameters, name, limit)
    parameters.catch_sigint_signal = False
    parameters.random_seed = budget.seed
    parameters.num_workers = 1
    # Linear relaxations prove small models optimal a third sooner; in large ones their cuts overrun the time limit by
    # seconds and prove nothing (measured: the worked example; 8 pipelines x 8 stages x 16 micro-batches).
    parameters.linearization_level = 2 if small else 0
    return solver


def _read(problem: Problem, variables: Variables, solver: cp_model.CpSolver) -> Solution:
    hosts = {}
    for unit in variables.units:
        choices = [host for host, literal in variables.literals(unit)
                   if literal is None or solver.boolean_value(literal)]
        assert len(choices) == 1, f"CP-SAT chose hosts {choices} for {unit}"
        hosts[unit] = choices[0]
    starts = {key: solver.value(variable) for key, variable in variables.start.items()}
    order = sorted(starts, key=lambda key: _flow(problem, key, starts))
    return Solution(hosts=hosts, starts={key: starts[key] for key in order})


def _flow(problem: Problem, key: OpKey, starts: Mapping[OpKey, int]) -> tuple[int, ...]:
    """A run order for ops that share an instant, the same on all workers: older micro-batches first, each as it flows.

    Any such order is free of circles, since what an op waits for at the same instant comes before it.
    """
    kind, stage, pipeline, microbatch = key
    entered = starts[OpKind.F, problem.grid.path(microbatch)[0], pipeline, microbatch]
    forward = kind is OpKind.F
    return (starts[key], entered, pipeline, microbatch, not forward, stage if forward else -stage, kind is OpKind.W)
