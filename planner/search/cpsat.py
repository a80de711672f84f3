"""Improve plans and prove lower bounds on the period with CP-SAT.

If a plan is known, the solver starts from it, its hint, and returns no longer one. In the formulas,
F, I and W are start times, p durations and h hosts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate, pairwise
from itertools import chain as chain_of
from typing import NamedTuple

from ortools.sat.python import cp_model
from ortools.sat.python.cp_model import BoolVarT, CpModel, IntervalVar, IntVar, LinearExprT

from slipstream.planner.budget import SOLVER_UNITS_PER_STEP, Budget
from slipstream.planner.model.arrays import ProblemArrays, Solution, to_ints
from slipstream.planner.model.memory import activation_capacity, memory_changes
from slipstream.planner.model.problem import LiveWorker, MicroBatch, Problem, Unit
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, CpSatParams
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.memory import CHANGING_AT_START
from slipstream.schedules.precedence import OpKey, producers_with_rules
from slipstream.schedules.schedule import OpKind, Worker

# --- Variables ------------------------------------------------------------------------------------


class Variables:
    """Variables of the CP-SAT model: starts, hosts of units, windows of groups, period.

    A host of a unit is a worker that may run it. If a unit has several hosts, each has a literal (a
    Boolean variable) that says whether it runs the unit; a single host has none. No start or end is
    later than tick `horizon`.
    """

    def __init__(self, model: CpModel, problem: Problem, horizon: int) -> None:
        # No start or end is later than the horizon.
        self.horizon = horizon
        self.units = tuple(problem.iterate_units())
        self.hosts: dict[Unit, tuple[Worker, ...]] = {
            unit: problem.allowed_hosts(unit.slice, unit.pipeline) for unit in self.units
        }
        self.host_literals: dict[tuple[Unit, Worker], BoolVarT] = {}
        self.start: dict[OpKey, IntVar] = {}
        self.end: dict[OpKey, IntVar | LinearExprT] = {}
        self.runs: dict[Worker, list[tuple[OpKind, Unit, IntervalVar]]] = {
            worker: [] for worker in problem.live_workers
        }
        for unit in self.units:
            self._add_unit(model, problem, unit)
        # R_g and E_g: first start and last end of each group g.
        groups = range(len(problem.groups.held))
        self.first = [model.new_int_var(0, horizon, f"R{group}") for group in groups]
        self.last = [model.new_int_var(0, horizon, f"E{group}") for group in groups]
        self.reductions = {
            reduction: model.new_int_var(0, horizon, f"A {reduction.layers}")
            for reduction in iterate_inner_reductions(problem)
        }
        """Start tick of each reduction that may lie before compute ops of its workers."""
        self.period = model.new_int_var(0, 2 * horizon, "period")

    def _add_unit(self, model: CpModel, problem: Problem, unit: Unit) -> None:
        # One host of several: its literal is true.
        hosts = self.hosts[unit]
        name = f"{unit.pipeline}.{unit.microbatch}@{unit.slice}"
        if len(hosts) > 1:
            for host in hosts:
                self.host_literals[unit, host] = model.new_bool_var(f"on {name} {host}")
            model.add_exactly_one(self.host_literals[unit, host] for host in hosts)
        for kind in problem.op_kinds:
            key = OpKey(kind, *unit)
            start = self.start[key] = model.new_int_var(0, self.horizon, f"{kind} {name}")
            # The end is an expression if p is the same on all hosts, else a variable.
            costs = {host: problem.op_ticks(kind, unit.slice, host) for host in hosts}
            if len(set(costs.values())) == 1:
                end: IntVar | LinearExprT = start + costs[hosts[0]]
            else:
                end = model.new_int_var(0, self.horizon, f"end {kind} {name}")
            self.end[key] = end
            # An interval on each host, present if the host is chosen.
            for host in hosts:
                label = f"{kind} {name} {host}"
                if len(hosts) == 1:
                    interval = model.new_fixed_size_interval_var(start, costs[host], label)
                elif isinstance(end, IntVar):
                    interval = model.new_optional_interval_var(
                        start, costs[host], end, self.host_literals[unit, host], label
                    )
                else:
                    interval = model.new_optional_fixed_size_interval_var(
                        start, costs[host], self.host_literals[unit, host], label
                    )
                self.runs[host].append((kind, unit, interval))

    def iterate_literals(self, unit: Unit) -> Iterator[tuple[Worker, BoolVarT | None]]:
        """Iterate over pairs: host of a unit, and its literal (None for a single host)."""
        for host in self.hosts[unit]:
            yield host, self.host_literals.get((unit, host))


def unit_of(key: OpKey) -> Unit:
    """Return the unit to which an op belongs."""
    return Unit(key.slice, key.pipeline, key.microbatch)


# --- Constraints ----------------------------------------------------------------------------------


class Constraints:
    """Builder that adds the rules of a schedule to a CP-SAT model, as constraints."""

    def __init__(self, model: CpModel, problem: Problem, variables: Variables) -> None:
        self._model = model
        self._problem = problem
        self._variables = variables

    def add_rules(self) -> None:
        """Add the rules of a schedule: data flows, no overlap, memory, busy windows."""
        self._add_data_flows()
        self.add_no_overlap()
        self._add_memory_limits()
        self._add_windows()

    def add_implied_constraints(self) -> None:
        """Add constraints that follow from the rules or break symmetry, to shorten the search.

        The shortest plan does not become longer by any of them.
        """
        self._order_microbatches()
        self._limit_stages()
        self._limit_loads()
        self._order_forwards()
        self._order_workers()

    def _add_data_flows(self) -> None:
        # start of an op >= end of each op that it waits for, plus the transfer between workers
        problem, variables = self._problem, self._variables
        for key, start in variables.start.items():
            path = problem.grid.stages_of_microbatch(key.microbatch)
            for producer, rule in producers_with_rules(key, path):
                if producer not in variables.start:
                    continue
                self._model.add(start >= variables.end[producer])
                if producer.slice != key.slice and rule.tensor and problem.times.transfer:
                    self._add_transfer(producer, key)

    def _add_transfer(self, producer: OpKey, key: OpKey) -> None:
        """Require the transfer between the ops `producer` and `key` unless one host runs both."""
        model, variables = self._model, self._variables
        source, target = unit_of(producer), unit_of(key)
        arrival = variables.end[producer] + self._problem.times.transfer
        # No worker may run both.
        if not set(variables.hosts[source]) & set(variables.hosts[target]):
            model.add(variables.start[key] >= arrival)
            return
        # Else: if h runs the source, and not the target, the target waits for the transfer.
        for host, literal in variables.iterate_literals(source):
            conditions = [] if literal is None else [literal]
            if host in variables.hosts[target]:
                other = variables.host_literals.get((target, host))
                if other is None:
                    continue  # the target then runs on this host, too
                conditions.append(other.negated())
            model.add(variables.start[key] >= arrival).only_enforce_if(*conditions)

    def add_no_overlap(self) -> None:
        """Require that no two ops of a worker overlap, reductions included."""
        problem, variables = self._problem, self._variables
        # All workers of a group run its reductions at once, so they share the intervals.
        reductions: dict[int, list[IntervalVar]] = {}
        for reduction, start in variables.reductions.items():
            reductions.setdefault(reduction.group, []).append(
                self._model.new_fixed_size_interval_var(
                    start, reduction.ticks, f"A {reduction.layers}"
                )
            )
        for worker, runs in variables.runs.items():
            computing = [interval for *_, interval in runs]
            reducing = reductions.get(problem.group_number(worker), ())
            self._model.add_no_overlap([*computing, *reducing])

    def _add_memory_limits(self) -> None:
        problem = self._problem
        if problem.memory is None:
            return
        for worker in problem.live_workers:
            demands: list[tuple[IntervalVar, int]] = []
            for kind, unit, _ in self._variables.runs[worker]:
                if kind is OpKind.F:
                    demands += self.make_memory_intervals(unit, worker)
            # Without need, the model is smaller.
            room = activation_capacity(problem, worker)
            if sum(demand for _, demand in demands) > room:
                coarse = coarsen_memory([demand for _, demand in demands], room)
                self._model.add_cumulative(
                    [interval for interval, _ in demands], coarse.amounts, coarse.room
                )

    def make_memory_intervals(self, unit: Unit, host: Worker) -> list[tuple[IntervalVar, int]]:
        """Return pairs: interval in which a unit takes memory, and amount in memory units.

        The intervals are present in the model only if the worker `host` runs the unit.
        """
        # The ticks at which the memory changes.
        problem, variables = self._problem, self._variables
        times = []
        for kind in problem.op_kinds:
            changes = variables.start if kind in CHANGING_AT_START else variables.end
            times.append(changes[OpKey(kind, *unit)])
        # Between two ops that change it, the memory is that of all changes so far.
        intervals = []
        for (begin, end), amount in zip(
            pairwise(times), accumulate(memory_changes(problem, unit.slice)), strict=False
        ):
            if not amount:
                continue
            length = self._model.new_int_var(0, variables.horizon, "held")
            literal = variables.host_literals.get((unit, host))
            if literal is None:
                interval = self._model.new_interval_var(begin, length, end, "held")
            else:
                interval = self._model.new_optional_interval_var(
                    begin, length, end, literal, "held"
                )
            intervals.append((interval, amount))
        return intervals

    def _add_windows(self) -> None:
        """Require that no busy window is longer than the period.

        A window lasts from the start R_g of the worker's group, or 0 if synchronous, to the end of
        the closing ops that follow the group's end E_g.
        """
        problem, variables, model = self._problem, self._variables, self._model
        final, synchronous = problem.op_kinds[-1], problem.optimizer == "synchronous"
        # All windows of a group end together, O after E_g, as its workers run each reduction at the
        # same time. R_g <= start, end <= E_g; if synchronous, every O waits for the last compute op
        # of the job, so period >= end of each W + O, from time 0.
        for key, start in variables.start.items():
            group = problem.group_number(variables.hosts[unit_of(key)][0])
            model.add(variables.first[group] <= start)
            model.add(variables.last[group] >= variables.end[key])
            if synchronous and key.kind is final:
                model.add(variables.period >= variables.end[key] + problem.max_optimizer_ticks)
        # A group with one reduction runs it after its compute ops. Of several, each only follows
        # the W of its own layers, and ends by E_g.
        for reduction, start in variables.reductions.items():
            model.add(variables.last[reduction.group] >= start + reduction.ticks)
            for key in variables.start:
                if key.kind is final and problem.layers_by_slice[key.slice] == reduction.layers:
                    model.add(start >= variables.end[key])
        # period >= E_g - R_g + A + O, or E_g + A + O if synchronous; once for all equal workers.
        closing = {
            (problem.group_number(worker), _ticks_after_compute(problem, worker))
            for worker in problem.live_workers
        }
        for group, ticks in sorted(closing):
            begin = 0 if synchronous else variables.first[group]
            model.add(variables.period >= variables.last[group] - begin + ticks)

    def _order_microbatches(self) -> None:
        """Break symmetry: micro-batches of a pipeline without a choice of hosts run in order."""
        # Assigning the k-th F, I and W of every stage to micro-batch k keeps every rule, unless
        # some unit has a choice of hosts.
        problem, variables = self._problem, self._variables
        grid = problem.grid
        for pipeline, count in enumerate(grid.microbatches):
            stages = range(len(grid.stages))
            if any(len(problem.allowed_hosts(stage, pipeline)) > 1 for stage in stages):
                continue
            for microbatch in range(count - grid.chains):
                later = microbatch + grid.chains  # next micro-batch of the same chain
                for stage in grid.stages_of_microbatch(microbatch):
                    for kind in problem.op_kinds:
                        early = OpKey(kind, stage, pipeline, microbatch)
                        late = OpKey(kind, stage, pipeline, later)
                        self._model.add(variables.start[late] >= variables.end[early])

    def _limit_stages(self) -> None:
        """Let no more ops of a stage run at once than it has holders."""
        # It follows from no overlap, but lets the solver reason before it has chosen hosts.
        problem, variables = self._problem, self._variables
        keys_of: dict[tuple[Worker, ...], list[OpKey]] = {}
        for key in variables.start:
            keys_of.setdefault(problem.holders_by_slice[key.slice], []).append(key)
        for holders, keys in keys_of.items():
            if len(holders) < 2 or all(len(variables.hosts[unit_of(key)]) == 1 for key in keys):
                continue
            # On the fastest host, as any of them may run the op.
            spans = []
            for key in keys:
                hosts = variables.hosts[unit_of(key)]
                ticks = min(problem.op_ticks(key.kind, key.slice, host) for host in hosts)
                if ticks:
                    span = self._model.new_fixed_size_interval_var(
                        variables.start[key], ticks, f"any {key.kind}"
                    )
                    spans.append(span)
            self._model.add_cumulative(spans, [1] * len(spans), len(holders))

    def _limit_loads(self) -> None:
        """Require that a worker's ops, reductions and step together take at most the period."""
        problem, variables = self._problem, self._variables
        for worker, runs in variables.runs.items():
            loads: list[LinearExprT | int] = []
            has_choice = False
            for kind, unit, _ in runs:
                ticks = problem.op_ticks(kind, unit.slice, worker)
                literal = variables.host_literals.get((unit, worker))
                has_choice = has_choice or literal is not None
                loads.append(ticks if literal is None else ticks * literal)
            # sum of p over its ops + A + O <= period
            if has_choice:
                closing = problem.column_closing_ticks(worker.column)
                self._model.add(sum(loads) + closing <= variables.period)

    def _order_forwards(self) -> None:
        """Break symmetry: interchangeable micro-batches begin in the order of their numbers."""
        problem, variables = self._problem, self._variables
        for batches in find_interchangeable(problem):
            stage = problem.grid.stages_of_microbatch(batches[0].microbatch)[0]
            hosts = variables.hosts[Unit(stage, *batches[0])]
            least = min(problem.op_ticks(OpKind.F, stage, host) for host in hosts)
            starts = [variables.start[OpKey(OpKind.F, stage, *batch)] for batch in batches]
            # F(k) <= F(k + 1), and F(k) + p <= F(k + n) on n workers, p on the fastest of them.
            for early, late in pairwise(starts):
                self._model.add(early <= late)
            for early, late in zip(starts, starts[len(hosts) :], strict=False):
                self._model.add(early + least <= late)

    def _order_workers(self) -> None:
        """Break symmetry: of equal workers, the first ones begin with earlier micro-batches."""
        # All micro-batches are interchangeable and may run on any worker of a column, so that equal
        # workers are interchangeable, too.
        problem, variables = self._problem, self._variables
        for equal, stage in find_equal_workers(problem):
            batches = find_interchangeable(problem)[0]
            for before, worker in pairwise(equal):
                # A worker's first micro-batch comes after one of the worker before it.
                for number, batch in enumerate(batches):
                    literal = variables.host_literals[Unit(stage, *batch), worker]
                    earlier = [
                        variables.host_literals[Unit(stage, *other), before]
                        for other in batches[:number]
                    ]
                    self._model.add_bool_or(literal.negated(), *earlier)


MAX_MODEL_MEMORY = 2**20
"""Largest room of a worker, in the model's units of memory.

The solver multiplies memory by ticks, which overflows if both are fine, and then ends the process
or denies that any plan exists.
"""


class CoarseMemory(NamedTuple):
    """Amounts of memory and a worker's room in a unit coarse enough for the solver."""

    amounts: list[int]
    room: int
    is_exact: bool
    """True if nothing was rounded: the same amounts fit together as before."""


def coarsen_memory(amounts: Sequence[int], room: int, *, up: bool = False) -> CoarseMemory:
    """Return memory `amounts` and a worker's `room` in a unit coarse enough for the solver.

    The unit is the greatest common divisor of the amounts if that is coarse enough. Otherwise
    amounts are rounded down, so that every plan that fits still does, and bounds remain valid. If
    `up`, they are rounded up instead, so that every plan that fits by them does fit.
    """
    # Beyond the room, any amount is as bad as the next, so that none is larger than room + 1.
    unit = max(1, math.gcd(*amounts))
    is_exact = room // unit <= MAX_MODEL_MEMORY
    if not is_exact:
        unit = -(-room // MAX_MODEL_MEMORY)
    if up:
        rounded = [-(-amount // unit) for amount in amounts]
    else:
        rounded = [amount // unit for amount in amounts]
    coarse = [min(amount, room // unit + 1) for amount in rounded]
    return CoarseMemory(coarse, room // unit, is_exact)


# --- Which reductions may lie between compute ops -------------------------------------------------


class InnerReduction(NamedTuple):
    """Reduction of one of several ranges of layers that a group holds.

    Compute ops of the group may follow it.
    """

    layers: LayerRange
    group: int
    """Number of the group."""
    ticks: int


def iterate_inner_reductions(problem: Problem) -> Iterator[InnerReduction]:
    """Iterate over the reductions of those groups that have several reductions."""
    # A single reduction of a group follows all of its compute ops.
    counts = Counter(group for _, groups in problem.groups.reductions for group in groups)
    for layers, groups in problem.groups.reductions:
        if counts[groups[0]] > 1:
            yield InnerReduction(layers, groups[0], problem.reduction_ticks(layers))


def _ticks_after_compute(problem: Problem, worker: Worker) -> int:
    inner = {reduction.group for reduction in iterate_inner_reductions(problem)}
    group = problem.group_number(worker)
    step = problem.optimizer_ticks(worker)
    return step if group in inner else step + problem.ticks_of_reductions(group)


# --- What may change names ------------------------------------------------------------------------


def find_interchangeable(problem: Problem) -> list[list[MicroBatch]]:
    """Return lists of micro-batches that may exchange their numbers without changing any time.

    The micro-batches of a list take equal times and have the same hosts, with a choice of hosts at
    some stage. A list has one direction of all pipelines if holders share all micro-batches,
    otherwise one direction of one pipeline.
    """
    # Without a choice of workers, `Constraints` orders micro-batches more strictly.
    grid = problem.grid
    groups: list[list[MicroBatch]] = []
    for chain in range(grid.chains):
        batches_by_pipeline = []
        for pipeline, count in enumerate(grid.microbatches):
            numbers = range(chain, count, grid.chains)
            batches_by_pipeline.append([MicroBatch(pipeline, number) for number in numbers])
        if problem.sharing:
            groups.append(list(chain_of.from_iterable(batches_by_pipeline)))
        else:
            groups += batches_by_pipeline
    return [batches for batches in groups if batches and _has_choice(problem, batches[0])]


def _has_choice(problem: Problem, batch: MicroBatch) -> bool:
    stages = problem.grid.stages_of_microbatch(batch.microbatch)
    return any(len(problem.allowed_hosts(stage, batch.pipeline)) > 1 for stage in stages)


def find_equal_workers(problem: Problem) -> list[tuple[list[Worker], int]]:
    """Return pairs: workers of a column that are interchangeable, and a stage of the column.

    The workers have room for a micro-batch, and all micro-batches pass the stage. There are no
    pairs if pipelines are bidirectional, or if holders do not share all micro-batches.
    """
    if not problem.sharing or problem.grid.chains > 1:
        return []
    groups = []
    for column in range(problem.grid.columns):
        stage = problem.grid.stages_of_column(column)[0]
        kinds: dict[LiveWorker, list[Worker]] = {}
        # A holder without room runs nothing, so it has no literal in the model.
        for worker in problem.hosts_by_slice[stage]:
            kinds.setdefault(problem.workers[worker], []).append(worker)
        groups += [(equal, stage) for equal in kinds.values() if len(equal) > 1]
    return groups


class CanonicalNames:
    """New names for a plan's micro-batches and workers, as the model's symmetry breaking requires.

    The model puts interchangeable micro-batches and workers in an order. A plan is a valid hint
    only if it has the same order.
    """

    def __init__(self, problem: Problem, plan: Solution) -> None:
        self._batches: dict[MicroBatch, MicroBatch] = {}
        self._workers: dict[Worker, Worker] = {}
        # Micro-batches in the order of their first F.
        for batches in find_interchangeable(problem):
            stage = problem.grid.stages_of_microbatch(batches[0].microbatch)[0]
            starts = {batch: plan.start_by_key[OpKey(OpKind.F, stage, *batch)] for batch in batches}
            self._batches |= dict(
                zip(batches, sorted(batches, key=starts.__getitem__), strict=True)
            )
        # Workers in the order of the first micro-batch that they run.
        for equal, stage in find_equal_workers(problem):
            hosts = [
                plan.hosts[Unit(stage, *self.original_microbatch(*batch))]
                for batch in find_interchangeable(problem)[0]
            ]
            first_use = dict.fromkeys(equal, len(hosts))
            for worker in set(hosts).intersection(equal):
                first_use[worker] = hosts.index(worker)
            self._workers |= dict(zip(sorted(equal, key=first_use.__getitem__), equal, strict=True))

    def original_microbatch(self, pipeline: int, microbatch: int) -> MicroBatch:
        """Return what the plan calls a micro-batch, given its name in the model."""
        return self._batches.get(MicroBatch(pipeline, microbatch), MicroBatch(pipeline, microbatch))

    def canonical_worker(self, worker: Worker) -> Worker:
        """Return what the model calls a worker, given its name in the plan."""
        return self._workers.get(worker, worker)


POLL_SECONDS = 0.05
"""Seconds between two checks, during a search of the solver, whether it must stop."""

BOUND_DESCRIPTION = "what CP-SAT proved"
"""Words by which a bound says that CP-SAT proved it."""


class _OnSolution(cp_model.CpSolverSolutionCallback):
    def __init__(self, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._progress = progress

    def on_solution_callback(self) -> None:
        self._progress(round(self.objective_value))


def improve_solution(
    problem: Problem,
    hint: Solution,
    *,
    lower_bound: int,
    budget: Budget,
    progress: Callable[[int], None],
    params: CpSatParams = DEFAULTS.cp_sat,
) -> tuple[Solution, int, int]:
    """Search with CP-SAT, within the budget, for a shorter plan than `hint`.

    Return the best plan (`hint` if none as short is found), its period in ticks, and the proven
    bound in ticks. If optimality is proven within the budget, the result depends on the seed alone,
    not on the clock.

    Parameters
    ----------
    problem
        Problem to solve.
    hint
        Plan to improve.
    lower_bound
        Proven bound in ticks.
    budget
        Limit of the search, and its seed.
    progress
        Function that is called with the period, in ticks, of each plan found, the hint included.
    params
        Parameters of the solver.
    """
    hint_period = solution_period(hint)
    model, variables = _build_model(problem, lower_bound, hint_period)
    _give_hint(model, problem, variables, hint, hint_period)
    solver, status = run_solver(model, variables, budget, params, _OnSolution(progress))
    if status == cp_model.UNKNOWN:
        return hint, hint_period, lower_bound
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise AssertionError(
            f"CP-SAT reports {solver.status_name(status)} for a model with a known plan"
        )
    # The objective is a float; a bound on whole ticks is whole.
    solution = _read_solution(hint.arrays, variables, solver)
    bound = max(lower_bound, math.ceil(solver.best_objective_bound - 1e-6))
    new_period = solution_period(solution)
    # The plan may be longer than CP-SAT says, or not fit: reductions are placed anew, and memory is
    # counted finely.
    if new_period > hint_period or not is_within_room(solution):
        solution, new_period = hint, hint_period
    return solution, new_period, min(bound, new_period)


class FirstPlan(NamedTuple):
    """Result of a search for a plan of a problem for which none was known."""

    solution: Solution | None
    """Plan; None if none was found."""
    is_impossible: bool
    """True if it is proven that no plan exists."""


def find_solution(
    problem: Problem, budget: Budget, params: CpSatParams = DEFAULTS.cp_sat
) -> FirstPlan:
    """Search with CP-SAT for a first plan of a problem, as short as possible.

    The result says if no plan was found, and if none can exist.
    """
    # A unit that no worker has room for needs no search.
    units = problem.iterate_units()
    if not all(problem.allowed_hosts(unit.slice, unit.pipeline) for unit in units):
        return FirstPlan(None, is_impossible=True)
    model, variables = _build_model(problem, 0, ample_period(problem))
    solver, status = run_solver(model, variables, budget, params)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return FirstPlan(None, is_impossible=status == cp_model.INFEASIBLE)
    hosts = {unit: problem.allowed_hosts(unit.slice, unit.pipeline)[0] for unit in variables.units}
    solution = _read_solution(ProblemArrays(problem, hosts), variables, solver)
    return FirstPlan(solution if is_within_room(solution) else None, is_impossible=False)


def ample_period(problem: Problem) -> int:
    """Return a period, in ticks, in which everything can run one after the other."""
    # All ops and transfers on the slowest workers, all reductions, and an optimizer step.
    ops = 0
    for unit in problem.iterate_units():
        hosts = problem.allowed_hosts(unit.slice, unit.pipeline)
        for kind in problem.op_kinds:
            slowest = max(problem.op_ticks(kind, unit.slice, host) for host in hosts)
            ops += slowest + problem.times.transfer
    return ops + sum(problem.times.all_reduce) + max(problem.times.optimizer)


def is_within_room(solution: Solution) -> bool:
    """Return whether all workers of a plan keep within their memory, counted exactly."""
    # The solver may have counted in a coarser unit.
    arrays, problem = solution.arrays, solution.arrays.problem
    if problem.memory is None:
        return True
    # What each worker takes or frees at each tick.
    kinds, end = arrays.ops.kinds, solution.end
    changes = [memory_changes(problem, number) for number in range(len(problem.layers_by_slice))]
    by_worker = [defaultdict[int, int](int) for _ in arrays.workers]
    for op, start in enumerate(solution.start.tolist()):
        unit, kind = divmod(op, kinds)
        tick = start if kind == 0 else int(end[op])
        # What is taken at the tick at which it is freed is held for no time.
        by_worker[arrays.ops.worker[unit]][tick] += changes[arrays.ops.slice[unit]][kind]
    for worker, by_tick in zip(arrays.workers, by_worker, strict=True):
        ordered = [change for _, change in sorted(by_tick.items())]
        if max(accumulate(ordered), default=0) > activation_capacity(problem, worker):
            return False
    return True


def disproves_shorter(
    problem: Problem, period: int, budget: Budget, params: CpSatParams = DEFAULTS.cp_sat
) -> bool:
    """Return whether CP-SAT proves, in time, that no plan is shorter than `period` ticks."""
    model, variables = _build_model(problem, 0, period - 1)
    return run_solver(model, variables, budget, params)[1] == cp_model.INFEASIBLE


def _build_model(
    problem: Problem, shortest: int, longest: int
) -> tuple[cp_model.CpModel, Variables]:
    # The period is to be found between `shortest` and `longest` ticks.
    model = cp_model.CpModel()
    variables = Variables(model, problem, _latest_possible_end(problem, longest))
    constraints = Constraints(model, problem, variables)
    constraints.add_rules()
    constraints.add_implied_constraints()
    model.add(variables.period >= shortest)
    model.add(variables.period <= longest)
    model.minimize(variables.period)
    return model, variables


def run_solver(
    model: cp_model.CpModel,
    variables: Variables,
    budget: Budget,
    params: CpSatParams,
    on_solution: _OnSolution | None = None,
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    """Solve the model within the budget; return the solver and its status.

    `on_solution` is a callback for each better plan; None: there is none.
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    for name, limit in budget.clock.solver_limits(budget.seconds_left).items():
        setattr(parameters, name, limit)
    # Ctrl-C reaches the search by `budget.is_stopped`.
    parameters.catch_sigint_signal = False
    parameters.random_seed = budget.seed
    # Eight threads on two cores were no faster on the jobs of the tests, and a search in one
    # thread is the same each time; tables use the cores for different entries.
    parameters.num_workers = 1
    parameters.linearization_level = _choose_linearization(model, variables, params)
    # In another thread, so that this one can stop it.
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(solver.solve, model, on_solution)
        while not running.done():
            wait([running], timeout=POLL_SECONDS)
            if budget.is_stopped:
                solver.stop_search()  # repeated: a search that has just begun may miss it
        status = running.result()
    budget.clock.count_steps(solver.deterministic_time / SOLVER_UNITS_PER_STEP)
    return solver, status


MAX_CUT = 2**62
"""Largest product, memory times ticks times ticks, that the solver's cuts can hold."""


def _choose_linearization(
    model: cp_model.CpModel, variables: Variables, params: CpSatParams
) -> int:
    """Return CP-SAT's level of linear relaxation: 0 (none), 1, or 2 (also cuts over times)."""
    if len(variables.start) > params.largest_relaxed:
        return 0
    capacities = [
        constraint.cumulative.capacity.offset
        for constraint in model.proto.constraints
        if constraint.has_cumulative()
    ]
    # Cuts of level 2 weigh ends of intervals by their memory times ticks. OR-Tools 9.15 ends the
    # process on overflow.
    return 2 if max(capacities, default=1) * variables.horizon**2 <= MAX_CUT else 1


def _latest_possible_end(problem: Problem, period: int) -> int:
    """Return a tick by which every plan of this period, begun at 0, ends."""
    # With a synchronous optimizer, it is the period, by definition. Staggered: let R_g be the first
    # start in group g. The first op is the F of some micro-batch at its first stage, so R = 0 in
    # that group g0. The micro-batch visits the layers of every group g, and its I at the first
    # stage follows its F there, hence R_g <= F <= I(first) <= R_g0 + period = period; and all ops
    # of group g end by R_g + period <= 2 period.
    return period if problem.optimizer == "synchronous" else 2 * period


def _give_hint(
    model: cp_model.CpModel, problem: Problem, variables: Variables, hint: Solution, period: int
) -> None:
    # Starts and ends of the ops. The model breaks symmetries by an order of interchangeable
    # micro-batches and workers, so those of the hint are renamed to keep it. The hint's first op is
    # shifted to tick 0. The reductions below need the ops' intervals (`spans`), and the tick at
    # which the last op of each range of layers ends (`ready`).
    shift = min(hint.start_by_key.values())
    spans: dict[Worker, list[tuple[int, int]]] = {worker: [] for worker in problem.live_workers}
    ready: dict[LayerRange, int] = {}
    renaming = CanonicalNames(problem, hint)
    for key, variable in variables.start.items():
        batch = renaming.original_microbatch(key.pipeline, key.microbatch)
        start = hint.start_by_key[OpKey(key.kind, key.slice, *batch)] - shift
        model.add_hint(variable, start)
        host = hint.hosts[Unit(key.slice, *batch)]
        end = start + problem.op_ticks(key.kind, key.slice, host)
        end_variable = variables.end[key]
        # Some ops have no end variable: the end is an expression, or the start's own variable.
        if isinstance(end_variable, cp_model.IntVar) and end_variable is not variable:
            model.add_hint(end_variable, end)
        spans[host].append((start, end))
        layers = problem.layers_by_slice[key.slice]
        ready[layers] = max(ready.get(layers, 0), end)
    # Hosts, renamed likewise.
    for (unit, host), literal in variables.host_literals.items():
        batch = renaming.original_microbatch(unit.pipeline, unit.microbatch)
        chosen = renaming.canonical_worker(hint.hosts[Unit(unit.slice, *batch)])
        model.add_hint(literal, chosen == host)
    # Reductions in the first gaps of their groups after the W of their layers.
    busy: list[list[tuple[int, int]]] = [[] for _ in problem.groups.held]
    for worker, ops in spans.items():
        busy[problem.group_number(worker)] += ops
    # Windows begin with compute ops: a reduction comes after the W of its layers.
    first = [min(ops, default=(0, 0))[0] for ops in busy]
    in_order = sorted(variables.reductions.items(), key=lambda pair: ready.get(pair[0].layers, 0))
    for reduction, variable in in_order:
        ops = busy[reduction.group]
        begin = _find_gap(ops, ready.get(reduction.layers, 0), reduction.ticks)
        ops.append((begin, begin + reduction.ticks))
        model.add_hint(variable, begin)
    # Windows end with the last op of a group, or with its last reduction.
    for group, ops in enumerate(busy):
        model.add_hint(variables.first[group], first[group])
        model.add_hint(variables.last[group], max((end for _, end in ops), default=0))
    model.add_hint(variables.period, period)


def _find_gap(spans: Sequence[tuple[int, int]], earliest: int, ticks: int) -> int:
    """Return the first tick, `earliest` or later, from which `ticks` ticks overlap no span."""
    begin = earliest
    for start, end in sorted(spans):
        if begin + ticks <= start:
            break
        begin = max(begin, end)
    return begin


def _read_solution(
    arrays: ProblemArrays, variables: Variables, solver: cp_model.CpSolver
) -> Solution:
    rows = []
    # The host of each unit.
    for unit in variables.units:
        choices = [
            host
            for host, literal in variables.iterate_literals(unit)
            if literal is None or solver.boolean_value(literal)
        ]
        assert len(choices) == 1, f"CP-SAT chose hosts {choices} for {unit}"
        rows.append(arrays.row_of[choices[0]])
    # Ops by start; of one instant, in the direction of their flow: one that another one waits for
    # comes before it, so that the order is free of cycles.
    keys = list(arrays.iterate_op_keys())
    starts = {key: solver.value(variables.start[key]) for key in keys}
    order = sorted(
        range(len(keys)), key=lambda op: _flow_sort_key(arrays.problem, keys[op], starts)
    )
    return arrays.with_assignment(to_ints(rows)).make_solution(
        to_ints(order), to_ints(list(starts.values()))
    )


def _flow_sort_key(problem: Problem, key: OpKey, starts: Mapping[OpKey, int]) -> tuple[int, ...]:
    """Return a key that sorts ops by start, simultaneous ones by age of their micro-batch."""
    first = problem.grid.stages_of_microbatch(key.microbatch)[0]
    entered = starts[key._replace(kind=OpKind.F, slice=first)]
    forward = key.kind is OpKind.F
    return (
        starts[key],
        entered,
        key.pipeline,
        key.microbatch,
        not forward,
        key.slice if forward else -key.slice,
        key.kind is OpKind.W,
    )
