"""Plan small jobs as a whole with CP-SAT: who runs each layer, and when.

The model is that of `planner.search.cpsat`, with layers in place of stages, and all live workers as
hosts if layers may move. Unless memory is rounded, every layout that is allowed is a solution of
the model, so that the solver also finds a plan where list schedules find none. The answer is a
layout and an order of ops, which are timed like all others; no bound is proven.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec
from ortools.sat.python import cp_model
from ortools.sat.python.cp_model import BoolVarT, CpModel, IntVar

from slipstream.planner.budget import Budget
from slipstream.planner.model.arrays import ProblemArrays, Solution, to_ints
from slipstream.planner.model.from_job import with_layout
from slipstream.planner.model.problem import Layout, MicroBatch, Problem, RouteSlice, Unit
from slipstream.planner.model.start_times import time_order
from slipstream.planner.params import CpSatParams
from slipstream.planner.search.cpsat import (
    Constraints,
    Variables,
    ample_period,
    coarsen_memory,
    run_solver,
    unit_of,
)
from slipstream.schedules.layers import LayerRange, merge_ranges, prefix_sums
from slipstream.schedules.precedence import OpKey, producers_with_rules
from slipstream.schedules.schedule import OpKind, Worker


def list_parts(problem: Problem) -> tuple[LayerRange, ...]:
    """Return the ranges of layers that a worker runs at a time, ascending.

    Each range is a single layer if micro-batches may be cut or layers moved, else a stage.
    """
    if problem.question.sliced or problem.question.layers == "move":
        return tuple((layer, layer + 1) for layer in range(problem.grid.layer_count))
    return tuple(sorted({layers for path in problem.path_by_chain for layers, _ in path}))


def is_small(problem: Problem, params: CpSatParams) -> bool:
    """Return whether a problem can be modelled here, and is small enough to be searched."""
    # If layers may move but no micro-batch may be cut, a choice for each layer is too free.
    units = problem.grid.total_microbatches * len(list_parts(problem))
    may_cut = problem.question.sliced or problem.question.layers == "fixed"
    return (
        may_cut
        and units * len(problem.op_kinds) * len(problem.live_workers) <= params.largest_layered
    )


class SmallPlan(NamedTuple):
    """Result of a search over all layouts of a small job."""

    solution: Solution | None
    """Plan, whose problem has the layout that was found; None if none was found."""
    is_impossible: bool = False
    """True if CP-SAT has proven that no layout has a plan."""


def search_layouts(
    problem: Problem, shortest: int, longest: int | None, budget: Budget, params: CpSatParams
) -> SmallPlan:
    """Search, within the budget, for the layout and order with the shortest period.

    If no live worker holds some layer and none may be loaded from a checkpoint, the result has no
    plan, and does not say that this is impossible.

    Parameters
    ----------
    problem
        Problem of single layers; `is_small` must be true of it.
    shortest
        Least period to look for, in ticks.
    longest
        Largest period to look for, in ticks; None: no plan is known, and any period is allowed.
    budget
        Limit of the search, and its seed.
    params
        Parameters of the solver.
    """
    if not problem.question.from_checkpoint:
        layers: set[int] = set()
        for worker in problem.live_workers:
            layers.update(problem.list_held_layers(worker))
        if len(layers) < problem.grid.layer_count:
            return SmallPlan(None)
    model = _LayerModel(problem, longest)
    solver, status = model.solve(shortest, longest, budget, params)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SmallPlan(
            None, is_impossible=longest is None and model.is_exact and status == cp_model.INFEASIBLE
        )
    return SmallPlan(model.read(solver))


class _LayerModel:
    """Model in which any worker runs, for any micro-batch, any layer that it may hold.

    The longest period to look for is `longest`, in ticks; None: any.
    """

    def __init__(self, problem: Problem, longest: int | None) -> None:
        self._problem, self._parts, self._model = problem, list_parts(problem), CpModel()
        # Memory counts what a worker comes to hold, so no host is excluded here.
        self._free = msgspec.structs.replace(self._with_hosts(), memory=None)
        self._with_memory = self._with_hosts()
        # One worker may come to hold all layers.
        self.ample = ample_period(self._free) + sum(problem.costs.optimizer)
        horizon = 2 * (self.ample if longest is None else longest)
        self._variables = variables = Variables(self._model, self._free, horizon)
        self.is_exact = True
        """True if memory is counted exactly: any layout with a plan is a solution."""
        self._holds = self._add_holdings()
        self._constraints = Constraints(self._model, self._free, variables)
        self._add_data_flows()
        self._constraints.add_no_overlap()
        self._add_memory_limits()
        self._add_windows()
        self._order_microbatches()

    def _with_hosts(self) -> Problem:
        """Return the problem with parts as slices, held by all workers that may hold them."""
        problem = self._problem
        holds = {worker: state.holds for worker, state in problem.workers.items()}
        if problem.question.layers == "move":
            holds = dict.fromkeys(holds, ((0, problem.grid.layer_count),))
        route = tuple(RouteSlice(part, problem.live_workers[0]) for part in self._parts)
        return with_layout(
            problem, Layout(kind="", holds=holds, routes=dict.fromkeys(problem.routes, route))
        )

    def _literals(self, worker: Worker, part: LayerRange) -> list[BoolVarT | int]:
        """Return, by micro-batch, the literal of "worker runs part"; 1 if it must."""
        variables, number = self._variables, self._free.number_of_slice[part]
        return [
            variables.host_literals.get((unit, worker), 1)
            for unit in variables.units
            if unit.slice == number and worker in variables.hosts[unit]
        ]

    def _add_holdings(self) -> dict[tuple[Worker, LayerRange], BoolVarT | int]:
        """Return the literals of "worker holds part"; 1 if layers stay in place."""
        problem, model = self._problem, self._model
        holds: dict[tuple[Worker, LayerRange], BoolVarT | int] = {}
        for worker, state in self._free.workers.items():
            for part in self._parts:
                if not any(low <= part[0] and part[1] <= high for low, high in state.holds):
                    continue
                if problem.question.layers == "fixed":
                    holds[worker, part] = 1
                    continue
                # A worker holds what it runs.
                holding = holds[worker, part] = model.new_bool_var(f"{worker} holds {part}")
                for literal in self._literals(worker, part):
                    model.add(holding >= literal)
        return holds

    def _add_data_flows(self) -> None:
        """Require that each op follows those it waits for, with the transfer if workers differ."""
        model, variables = self._model, self._variables
        hop = self._problem.times.transfer
        route = [self._free.number_of_slice[part] for part in self._parts]
        # One variable for each two units of a flow, whichever ops they exchange tensors for.
        away: dict[tuple[Unit, Unit], IntVar | int] = {}
        for key, start in variables.start.items():
            for producer, rule in producers_with_rules(key, route):
                if producer not in variables.start:
                    continue
                first, second = sorted((unit_of(producer), unit_of(key)))
                units = first, second
                if units not in away:
                    away[units] = self._add_away(*units) if hop and units[0] != units[1] else 0
                model.add(start >= variables.end[producer])
                if rule.tensor and units[0] != units[1] and hop:
                    model.add(start - away[units] * hop >= variables.end[producer])

    def _add_away(self, unit: Unit, other: Unit) -> IntVar:
        """Return a variable that is 1 if the workers of two units differ."""
        # If one host runs this unit and not the other, they differ.
        variables, away = self._variables, self._model.new_bool_var("away")
        for host in variables.hosts[unit]:
            here = variables.host_literals.get((unit, host), 1)
            there = variables.host_literals.get((other, host), int(host in variables.hosts[other]))
            self._model.add(away >= here - there)
        return away

    def _add_memory_limits(self) -> None:
        """Require that held weights and micro-batches stay within a worker's memory."""
        problem, model, variables = self._problem, self._model, self._variables
        if problem.memory is None:
            return
        weights = problem.costs.prefix_sums.weights
        always = model.new_fixed_size_interval_var(0, variables.horizon, "always")
        memory = Constraints(model, self._with_memory, variables)
        for worker, runs in variables.runs.items():
            # Micro-batches, from their F on.
            demands: list[tuple[cp_model.IntervalVar, int]] = []
            for kind, unit, _ in runs:
                if kind is OpKind.F:
                    demands += memory.make_memory_intervals(unit, worker)
            # Weights of the layers that it holds, always.
            for first, end in self._parts:
                holding = self._holds.get((worker, (first, end)))
                amount = weights[end] - weights[first]
                if holding is None or not amount:
                    continue
                interval = always
                if not isinstance(holding, int):
                    interval = model.new_optional_fixed_size_interval_var(
                        0, variables.horizon, holding, "weights"
                    )
                demands.append((interval, amount))
            if demands:
                amounts = [amount for _, amount in demands]
                coarse = coarsen_memory(amounts, problem.workers[worker].memory, up=True)
                self.is_exact = self.is_exact and coarse.is_exact
                model.add_cumulative(
                    [interval for interval, _ in demands], coarse.amounts, coarse.room
                )

    def _add_windows(self) -> None:
        """Let the period be the longest busy window."""
        # A worker's reductions follow all of its compute ops, unless they take no time; its O
        # follows the reductions of all layers that it holds.
        model, variables, problem = self._model, self._variables, self._problem
        horizon, costs = variables.horizon, problem.costs.prefix_sums
        step = prefix_sums(problem.costs.optimizer)
        every = model.new_int_var(0, horizon, "end of all")
        ends = {worker: model.new_int_var(0, horizon, "end") for worker in variables.runs}
        done = {worker: model.new_int_var(0, 2 * horizon, "done") for worker in variables.runs}
        # O takes the time of all layers that a worker holds.
        steps = {}
        for worker in variables.runs:
            steps[worker] = sum(
                self._holds.get((worker, (first, end)), 0) * (step[end] - step[first])
                for first, end in self._parts
            )
        for worker, runs in variables.runs.items():
            # From the first start of an op that the worker runs to the last end.
            first = model.new_int_var(0, horizon, "first")
            for kind, unit, _ in runs:
                literal = variables.host_literals.get((unit, worker))
                key = OpKey(kind, *unit)
                for rule in (
                    model.add(first <= variables.start[key]),
                    model.add(ends[worker] >= variables.end[key]),
                ):
                    if literal is not None:
                        rule.only_enforce_if(literal)
            # period >= end of the reductions - first start + O
            model.add(done[worker] >= ends[worker])
            model.add(every >= ends[worker])
            model.add(
                variables.period
                >= done[worker] + steps[worker] - (first if problem.optimizer == "staggered" else 0)
            )
            if problem.optimizer == "synchronous":
                model.add(variables.period >= every + steps[worker])
            # Implied: period >= sum of p over the worker's ops + A + O.
            load = sum(
                self._free.op_ticks(kind, unit.slice, worker)
                * variables.host_literals.get((unit, worker), 1)
                for kind, unit, _ in runs
            )
            closing = sum(
                self._holds.get((worker, (low, high)), 0)
                * (costs.all_reduce[high] - costs.all_reduce[low])
                for low, high in self._parts
            )
            model.add(variables.period >= load + closing + steps[worker])
        self._add_reductions(ends, done)

    def _add_reductions(self, ends: Mapping[Worker, IntVar], done: Mapping[Worker, IntVar]) -> None:
        model, variables = self._model, self._variables
        sums = self._problem.costs.prefix_sums.all_reduce
        # Those that take no time may begin before the last compute op of a worker.
        early = not any(self._problem.costs.all_reduce) and self._problem.optimizer == "staggered"
        intervals: dict[Worker, list[cp_model.IntervalVar]] = {worker: [] for worker in ends}
        for part in self._parts:
            number, ticks = self._free.number_of_slice[part], sums[part[1]] - sums[part[0]]
            begin = model.new_int_var(0, variables.horizon, f"A {part}")
            # It follows the last W of its layers on all workers.
            for key, end in variables.end.items():
                if key.kind is self._free.op_kinds[-1] and key.slice == number:
                    model.add(begin >= end)
            # It runs on all workers that hold them.
            for worker in ends:
                holding = self._holds.get((worker, part))
                if holding is None:
                    continue
                rules = [model.add(done[worker] >= begin + ticks)]
                if not early:
                    rules.append(model.add(begin >= ends[worker]))
                if not isinstance(holding, int):
                    for rule in rules:
                        rule.only_enforce_if(holding)
                if not ticks:
                    continue
                if isinstance(holding, int):
                    interval = model.new_fixed_size_interval_var(begin, ticks, "A")
                else:
                    interval = model.new_optional_fixed_size_interval_var(
                        begin, ticks, holding, "A"
                    )
                intervals[worker].append(interval)
        for reductions in intervals.values():
            model.add_no_overlap(reductions)

    def _order_microbatches(self) -> None:
        """Break symmetry: micro-batches, all interchangeable, begin in the order of names."""
        number = self._free.number_of_slice[self._parts[0]]
        starts = [
            self._variables.start[OpKey(OpKind.F, number, *batch)]
            for batch in sorted(self._free.routes)
        ]
        for early, late in pairwise(starts):
            self._model.add(early <= late)

    def solve(
        self, shortest: int, longest: int | None, budget: Budget, params: CpSatParams
    ) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
        """Search for the plan of shortest period, from `shortest` to `longest` ticks (None: any).

        Return the solver, which has the best plan found, and its status.
        """
        model, period = self._model, self._variables.period
        model.add(period >= shortest)
        model.add(period <= (self.ample if longest is None else longest))
        model.minimize(period)
        return run_solver(model, self._variables, budget, params)

    def read(self, solver: cp_model.CpSolver) -> Solution:
        """Return the solver's solution, of the problem with the layout that it has chosen."""
        variables, problem = self._variables, self._problem
        # What each worker runs.
        host = {}
        for unit in variables.units:
            host[unit] = next(
                worker
                for worker, literal in variables.iterate_literals(unit)
                if literal is None or solver.boolean_value(literal)
            )
        routes: dict[MicroBatch, list[RouteSlice]] = {batch: [] for batch in problem.routes}
        run: dict[Worker, set[LayerRange]] = {worker: set() for worker in problem.live_workers}
        for unit, worker in host.items():
            part = self._free.layers_by_slice[unit.slice]
            routes[MicroBatch(unit.pipeline, unit.microbatch)].append(RouteSlice(part, worker))
            run[worker].add(part)
        # If layers may move, a worker holds what it runs, and nothing else.
        holds = {worker: state.holds for worker, state in problem.workers.items()}
        if problem.question.layers == "move":
            holds = {worker: merge_ranges(sorted(run[worker])) for worker in holds}
        layout = Layout(
            kind="CP-SAT over layers",
            holds=holds,
            routes={batch: tuple(route) for batch, route in routes.items()},
        )
        laid_out = with_layout(problem, layout)
        return self._read_order(laid_out, solver)

    def _read_order(self, laid_out: Problem, solver: cp_model.CpSolver) -> Solution:
        variables = self._variables
        hosts = {
            Unit(visit.slice, *batch): visit.worker
            for batch, route in laid_out.routes.items()
            for visit in route
        }
        # The number in the model of each range of layers: the layout has numbers of its own.
        arrays = ProblemArrays(laid_out, hosts)
        number = {
            laid_out.layers_by_slice[visit.slice]: self._free.number_of_slice[
                laid_out.layers_by_slice[visit.slice]
            ]
            for route in laid_out.routes.values()
            for visit in route
        }

        def model_key(key: OpKey) -> OpKey:
            return key._replace(slice=number[laid_out.layers_by_slice[key.slice]])

        # Ops by start; of one instant, each after those that it waits for.
        keys = [model_key(key) for key in arrays.iterate_op_keys()]
        starts = [solver.value(variables.start[key]) for key in keys]
        flow = sorted(range(len(keys)), key=lambda op: self._flow_key(keys[op], starts[op], solver))
        order = arrays.make_solution(to_ints(flow), to_ints(starts)).order
        return arrays.make_solution(order, time_order(arrays, order)[1])

    def _flow_key(self, key: OpKey, start: int, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """Return a key that sorts ops by start, simultaneous ones by the flow of data."""
        kind, slice_, pipeline, microbatch = key
        first = self._free.number_of_slice[self._parts[0]]
        entered = solver.value(self._variables.start[OpKey(OpKind.F, first, pipeline, microbatch)])
        at, forward = self._parts.index(self._free.layers_by_slice[slice_]), kind is OpKind.F
        return (
            start,
            entered,
            pipeline,
            microbatch,
            not forward,
            at if forward else -at,
            kind is OpKind.W,
        )
