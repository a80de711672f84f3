"""Improve plans and prove lower bounds on the period with CP-SAT. A plan serves as hint, and never
becomes worse."""

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
from slipstream.planner.model.memory import activation_room, memory_changes
from slipstream.planner.model.problem import LiveWorker, MicroBatch, Problem, Unit
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, CpSatParams
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.memory import CHANGING_AT_START
from slipstream.schedules.precedence import OpKey, producers_with_rules
from slipstream.schedules.schedule import OpKind, Worker

# --- Variables --------------------------------------------------------------------------------------------------------


class Variables:
    """Variables of the CP-SAT model: starts, hosts of units, windows of groups, period.

    A host is a worker that may run the unit. Units with a single possible host have no literal.
    """

    def __init__(self, model: CpModel, problem: Problem, horizon: int) -> None:
        self.horizon = horizon
        self.units = tuple(problem.iterate_units())
        self.hosts: dict[Unit, tuple[Worker, ...]] = {unit: problem.allowed_hosts(unit.slice, unit.pipeline)
                                                   for unit in self.units}
        self.host_literals: dict[tuple[Unit, Worker], BoolVarT] = {}
        self.start: dict[OpKey, IntVar] = {}
        self.end: dict[OpKey, IntVar | LinearExprT] = {}
        self.runs: dict[Worker, list[tuple[OpKind, Unit, IntervalVar]]] = {worker: []
                                                                           for worker in problem.live_workers}
        for unit in self.units:
            self._add_unit(model, problem, unit)
        groups = range(len(problem.groups.held))
        self.first = [model.new_int_var(0, horizon, f"R{group}") for group in groups]
        self.last = [model.new_int_var(0, horizon, f"E{group}") for group in groups]
        self.reductions = {reduction: model.new_int_var(0, horizon, f"A {reduction.layers}")
                           for reduction in iterate_inner_reductions(problem)}
        """Start of each reduction that may lie before compute ops of its workers."""
        self.period = model.new_int_var(0, 2 * horizon, "period")

    def _add_unit(self, model: CpModel, problem: Problem, unit: Unit) -> None:
        hosts = self.hosts[unit]
        name = f"{unit.pipeline}.{unit.microbatch}@{unit.slice}"
        if len(hosts) > 1:
            for host in hosts:
                self.host_literals[unit, host] = model.new_bool_var(f"on {name} {host}")
            model.add_exactly_one(self.host_literals[unit, host] for host in hosts)
        for kind in problem.op_kinds:
            key = (kind, *unit)
            start = self.start[key] = model.new_int_var(0, self.horizon, f"{kind} {name}")
            costs = {host: problem.op_ticks(kind, unit.slice, host) for host in hosts}
            if len(set(costs.values())) == 1:
                end: IntVar | LinearExprT = start + costs[hosts[0]]
            else:
                end = model.new_int_var(0, self.horizon, f"end {kind} {name}")
            self.end[key] = end
            for host in hosts:
                label = f"{kind} {name} {host}"
                if len(hosts) == 1:
                    interval = model.new_fixed_size_interval_var(start, costs[host], label)
                elif isinstance(end, IntVar):
                    interval = model.new_optional_interval_var(start, costs[host], end, self.host_literals[unit, host],
                                                               label)
                else:
                    interval = model.new_optional_fixed_size_interval_var(start, costs[host],
                                                                          self.host_literals[unit, host],
                                                                          label)
                self.runs[host].append((kind, unit, interval))

    def iterate_literals(self, unit: Unit) -> Iterator[tuple[Worker, BoolVarT | None]]:
        """Iterate over a unit's hosts, each with its literal; None for an only one."""
        for host in self.hosts[unit]:
            yield host, self.host_literals.get((unit, host))


# --- Constraints ------------------------------------------------------------------------------------------------------


class Constraints:
    """Builder that adds all rules to the CP-SAT model. In the formulas, F, I and W are start times,
    p durations and h hosts."""

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
        """Add constraints that follow from the rules, and symmetry breaking. Neither makes a plan
        longer."""
        self._order_microbatches()
        self._limit_stages()
        self._limit_loads()
        self._order_forwards()
        self._order_workers()

    def _add_data_flows(self) -> None:
        """Require that an op starts after those it waits for, and the transfer."""
        problem, variables = self._problem, self._variables
        for key, start in variables.start.items():
            for producer, rule in producers_with_rules(key, problem.grid.stages_of_microbatch(key[3])):
                if producer not in variables.start:
                    continue
                self._model.add(start >= variables.end[producer])
                if producer[1] != key[1] and rule.tensor and problem.times.transfer:
                    self._add_transfer(producer, key)

    def _add_transfer(self, producer: OpKey, key: OpKey) -> None:
        """Require the transfer between the ops `producer` and `key` unless one host runs both."""
        model, variables, source, target = self._model, self._variables, Unit(*producer[1:]), Unit(*key[1:])
        arrival = variables.end[producer] + self._problem.times.transfer
        if not set(variables.hosts[source]) & set(variables.hosts[target]):
            model.add(variables.start[key] >= arrival)
            return
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
        reductions: dict[int, list[IntervalVar]] = {}
        for reduction, start in variables.reductions.items():
            reductions.setdefault(reduction.group, []).append(
                self._model.new_fixed_size_interval_var(start, reduction.ticks, f"A {reduction.layers}"))
        for worker, runs in variables.runs.items():
            self._model.add_no_overlap([*(interval for *_, interval in runs),
                                        *reductions.get(problem.group_number(worker), ())])

    def _add_memory_limits(self) -> None:
        """Require that activations and what W needs never exceed a worker's capacity."""
        problem = self._problem
        if problem.memory is None:
            return
        for worker in problem.live_workers:
            demands: list[tuple[IntervalVar, int]] = []
            for kind, unit, _ in self._variables.runs[worker]:
                if kind is OpKind.F:
                    demands += self.make_memory_intervals(unit, worker)
            room = activation_room(problem, worker)
            if sum(demand for _, demand in demands) > room:
                coarse = coarsen_memory([demand for _, demand in demands], room)
                self._model.add_cumulative([interval for interval, _ in demands], coarse.amounts, coarse.room)

    def make_memory_intervals(self, unit: Unit, host: Worker) -> list[tuple[IntervalVar, int]]:
        """Return pairs (interval, memory units of a unit), present if its host is chosen."""
        problem, variables = self._problem, self._variables
        times = [(variables.start if kind in CHANGING_AT_START else variables.end)[kind, *unit]
                 for kind in problem.op_kinds]
        intervals = []
        for (begin, end), amount in zip(pairwise(times), accumulate(memory_changes(problem, unit.slice)), strict=False):
            if not amount:
                continue
            length = self._model.new_int_var(0, variables.horizon, "held")
            literal = variables.host_literals.get((unit, host))
            interval = self._model.new_interval_var(begin, length, end, "held") if literal is None else \
                self._model.new_optional_interval_var(begin, length, end, literal, "held")
            intervals.append((interval, amount))
        return intervals

    def _add_windows(self) -> None:
        """Bound each group's starts by R_g and ends by E_g, and derive the period.

        All windows of a group end together, O after E_g, as its workers run each reduction at the
        same time. A group with one reduction runs it after its compute ops; of several, each only
        waits for the W of its own layers, and E_g is at least its end.

        Staggered: period >= E_g - R_g + A + O. Synchronous: every O waits for the last compute op
        of the job, so period >= E_g + A + O and period >= (last compute op) + O of any worker, from
        time 0.
        """
        problem, variables, model = self._problem, self._variables, self._model
        final, synchronous = problem.op_kinds[-1], problem.optimizer == "synchronous"
        for key, start in variables.start.items():
            group = problem.group_number(variables.hosts[Unit(*key[1:])][0])
            model.add(variables.first[group] <= start)
            model.add(variables.last[group] >= variables.end[key])
            if synchronous and key[0] is final:
                model.add(variables.period >= variables.end[key] + problem.max_optimizer_ticks)
        for reduction, start in variables.reductions.items():
            model.add(variables.last[reduction.group] >= start + reduction.ticks)
            for key in variables.start:
                if key[0] is final and problem.layers_by_slice[key[1]] == reduction.layers:
                    model.add(start >= variables.end[key])
        closing = {(problem.group_number(worker), _ticks_after_compute(problem, worker))
                   for worker in problem.live_workers}
        for group, ticks in sorted(closing):
            begin = 0 if synchronous else variables.first[group]
            model.add(variables.period >= variables.last[group] - begin + ticks)

    def _order_microbatches(self) -> None:
        """Break symmetry: micro-batches of a pipeline run in order where hosts are single.

        They are interchangeable: assigning the k-th F, I and W of every stage to micro-batch k
        keeps every rule. This is not true if some unit has a choice of hosts.
        """
        problem, variables = self._problem, self._variables
        grid = problem.grid
        for pipeline, count in enumerate(grid.microbatches):
            if any(len(problem.allowed_hosts(stage, pipeline)) > 1 for stage in range(len(grid.stages))):
                continue
            for microbatch in range(count - grid.chains):
                later = microbatch + grid.chains  # next micro-batch of the same chain
                for stage in grid.stages_of_microbatch(microbatch):
                    for kind in problem.op_kinds:
                        early, late = (kind, stage, pipeline, microbatch), (kind, stage, pipeline, later)
                        self._model.add(variables.start[late] >= variables.end[early])


    def _limit_stages(self) -> None:
        """Allow at most as many ops at a time as their stages have holders."""
        problem, variables = self._problem, self._variables
        keys_of: dict[tuple[Worker, ...], list[OpKey]] = {}
        for key in variables.start:
            keys_of.setdefault(problem.holders_by_slice[key[1]], []).append(key)
        for holders, keys in keys_of.items():
            if len(holders) < 2 or all(len(variables.hosts[Unit(*key[1:])]) == 1 for key in keys):
                continue
            spans = [self._model.new_fixed_size_interval_var(variables.start[key], ticks, f"any {key[0]}")
                     for key in keys if (ticks := min(problem.op_ticks(key[0], key[1], host)
                                                      for host in variables.hosts[Unit(*key[1:])]))]
            self._model.add_cumulative(spans, [1] * len(spans), len(holders))

    def _limit_loads(self) -> None:
        """Require that a worker's ops, reductions and step take at most the period."""
        problem, variables = self._problem, self._variables
        for worker, runs in variables.runs.items():
            ticks = [(problem.op_ticks(kind, unit.slice, worker), variables.host_literals.get((unit, worker)))
                     for kind, unit, _ in runs]
            if any(literal is not None for _, literal in ticks):
                self._model.add(sum(cost if literal is None else cost * literal for cost, literal in ticks)
                                + problem.column_closing_ticks(worker.column) <= variables.period)

    def _order_forwards(self) -> None:
        """Break symmetry: micro-batches of a group of `find_interchangeable` begin in the order of
        their names.

        If n workers hold their first stage, the F of the group's micro-batch k + n starts after
        that of micro-batch k, later by at least the ticks of an F on the fastest of these workers.
        """
        problem, variables = self._problem, self._variables
        for batches in find_interchangeable(problem):
            stage = problem.grid.stages_of_microbatch(batches[0].microbatch)[0]
            hosts = variables.hosts[Unit(stage, *batches[0])]
            least = min(problem.op_ticks(OpKind.F, stage, host) for host in hosts)
            starts = [variables.start[OpKind.F, stage, *batch] for batch in batches]
            for early, late in pairwise(starts):
                self._model.add(early <= late)
            for early, late in zip(starts, starts[len(hosts):], strict=False):
                self._model.add(early + least <= late)

    def _order_workers(self) -> None:
        """Break symmetry of equal workers: each runs a micro-batch after the one before it.

        This requires that all micro-batches are interchangeable and may run on any worker of a
        column, so that equal workers are interchangeable, too.
        """
        problem, variables = self._problem, self._variables
        for equal, stage in find_equal_workers(problem):
            batches = find_interchangeable(problem)[0]
            for before, worker in pairwise(equal):
                for number, batch in enumerate(batches):
                    literal = variables.host_literals[Unit(stage, *batch), worker]
                    earlier = [variables.host_literals[Unit(stage, *other), before] for other in batches[:number]]
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
    """True if the unit divides all amounts: the same ones fit as before."""


def coarsen_memory(amounts: Sequence[int], room: int, *, up: bool = False) -> CoarseMemory:
    """Return amounts and room in a coarser unit: their common divisor if that suffices.

    Otherwise amounts are rounded down: every plan within the room stays within it, so that bounds
    hold, but a plan by these amounts may exceed the room by a trifle. If `up`, they are rounded up:
    plans by these amounts fit.
    """
    unit = max(1, math.gcd(*amounts))
    is_exact = room // unit <= MAX_MODEL_MEMORY
    if not is_exact:
        unit = -(-room // MAX_MODEL_MEMORY)
    coarse = [min(-(-amount // unit) if up else amount // unit, room // unit + 1) for amount in amounts]
    return CoarseMemory(coarse, room // unit, is_exact)


# --- Which reductions may lie between compute ops ---------------------------------------------------------------------


class InnerReduction(NamedTuple):
    """Reduction of one of several ranges of a group: other ops may follow it."""

    layers: LayerRange
    group: int
    """Number of the group: the workers that hold the same layers."""
    ticks: int


def iterate_inner_reductions(problem: Problem) -> Iterator[InnerReduction]:
    """Iterate over the reductions of groups that have several."""
    counts = Counter(group for _, groups in problem.groups.reductions for group in groups)
    for layers, groups in problem.groups.reductions:
        if counts[groups[0]] > 1:
            yield InnerReduction(layers, groups[0], problem.reduction_ticks(layers))


def _ticks_after_compute(problem: Problem, worker: Worker) -> int:
    """Return the ticks of O, and of A if the group has a single one."""
    inner = {reduction.group for reduction in iterate_inner_reductions(problem)}
    group = problem.group_number(worker)
    return problem.optimizer_ticks(worker) + (0 if group in inner else problem.ticks_of_reductions(group))


# --- What may change names --------------------------------------------------------------------------------------------


def find_interchangeable(problem: Problem) -> list[list[MicroBatch]]:
    """Return groups of micro-batches that may exchange their numbers.

    There are some if several workers may run them at some stage. Those of a group take equal times
    and may run on the same workers. If holders share all micro-batches, a group has those of one
    direction of all pipelines; otherwise only of one pipeline.
    """
    grid, groups = problem.grid, []
    for chain in range(grid.chains):
        batches_by_pipeline = [[MicroBatch(pipeline, microbatch) for microbatch in range(chain, count, grid.chains)]
                               for pipeline, count in enumerate(grid.microbatches)]
        groups += [list(chain_of.from_iterable(batches_by_pipeline))] if problem.sharing else batches_by_pipeline
    return [batches for batches in groups if batches and any(
        len(problem.allowed_hosts(stage, batches[0].pipeline)) > 1
        for stage in problem.grid.stages_of_microbatch(batches[0].microbatch))]


def find_equal_workers(problem: Problem) -> list[tuple[list[Worker], int]]:
    """Return interchangeable workers of a column, with a stage that all micro-batches pass."""
    if not problem.sharing or problem.grid.chains > 1:
        return []
    groups = []
    for column in range(problem.grid.columns):
        stage = problem.grid.stages_of_column(column)[0]
        kinds: dict[LiveWorker, list[Worker]] = {}
        for worker in problem.holders_by_slice[stage]:
            kinds.setdefault(problem.workers[worker], []).append(worker)
        groups += [(equal, stage) for equal in kinds.values() if len(equal) > 1]
    return groups


class CanonicalNames:
    """Renaming of a plan's micro-batches and workers such that it satisfies the model's symmetry
    breaking."""

    def __init__(self, problem: Problem, plan: Solution) -> None:
        self._batches: dict[MicroBatch, MicroBatch] = {}
        self._workers: dict[Worker, Worker] = {}
        for batches in find_interchangeable(problem):
            stage = problem.grid.stages_of_microbatch(batches[0].microbatch)[0]
            starts = {batch: plan.start_by_key[OpKind.F, stage, *batch] for batch in batches}
            self._batches |= dict(zip(batches, sorted(batches, key=starts.__getitem__), strict=True))
        for equal, stage in find_equal_workers(problem):
            used = [plan.hosts[Unit(stage, *self.original_microbatch(*batch))]
                    for batch in find_interchangeable(problem)[0]]
            first_use = {worker: used.index(worker) if worker in used else len(used) for worker in equal}
            self._workers |= dict(zip(sorted(equal, key=first_use.__getitem__), equal, strict=True))

    def original_microbatch(self, pipeline: int, microbatch: int) -> MicroBatch:
        """Return the micro-batch of the plan that this micro-batch of the model represents."""
        return self._batches.get(MicroBatch(pipeline, microbatch), MicroBatch(pipeline, microbatch))

    def canonical_worker(self, worker: Worker) -> Worker:
        """Return the worker that takes this one's place in the model, or itself."""
        return self._workers.get(worker, worker)


POLL_SECONDS = 0.05

BOUND_DESCRIPTION = "what CP-SAT proved"
"""Words by which a bound says that CP-SAT proved it."""


class _OnSolution(cp_model.CpSolverSolutionCallback):
    """Callback of the solver that reports the period, in ticks, of every better plan."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._progress = progress

    def on_solution_callback(self) -> None:
        """Report the period of a new solution. CP-SAT calls this method."""
        self._progress(round(self.objective_value))


def improve_solution(problem: Problem, hint: Solution, *, lower_bound: int, budget: Budget,
                     progress: Callable[[int], None],
                     params: CpSatParams = DEFAULTS.cp_sat) -> tuple[Solution, int, int]:
    """Search with CP-SAT, within the budget, for a shorter plan than the given one, `hint`.

    Return the best plan, its period in ticks, and the proven bound in ticks, at least
    `lower_bound`. The same seed gives the same result whenever optimality is proven in time: with
    one search thread, only the end depends on the clock. (Eight threads on two cores were no faster
    on the jobs of the tests; tables use the cores for different entries.)
    """
    hint_period = solution_period(hint)
    model, variables = _build_model(problem, lower_bound, hint_period)
    _give_hint(model, problem, variables, hint, hint_period)
    solver, status = run_solver(model, variables, budget, params, _OnSolution(progress))
    if status == cp_model.UNKNOWN:
        return hint, hint_period, lower_bound
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise AssertionError(f"CP-SAT reports {solver.status_name(status)} for a model with a known plan")
    solution = _read_solution(hint.arrays, variables, solver)
    bound = max(lower_bound, math.ceil(solver.best_objective_bound - 1e-6))
    new_period = solution_period(solution)
    if new_period > hint_period or not is_within_room(solution):  # reductions are placed anew, memory is counted finely
        solution, new_period = hint, hint_period
    return solution, new_period, min(bound, new_period)


class FirstPlan(NamedTuple):
    """Result of a search for a plan of a problem for which none was known."""

    solution: Solution | None
    """Plan; None if none was found."""
    is_impossible: bool
    """True if CP-SAT has proven that no plan exists."""


def find_solution(problem: Problem, budget: Budget, params: CpSatParams = DEFAULTS.cp_sat) -> FirstPlan:
    """Search with CP-SAT for the shortest plan of a problem without a known one."""
    if not all(problem.allowed_hosts(unit.slice, unit.pipeline) for unit in problem.iterate_units()):
        return FirstPlan(None, is_impossible=True)
    model, variables = _build_model(problem, 0, ample_period(problem))
    solver, status = run_solver(model, variables, budget, params)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return FirstPlan(None, is_impossible=status == cp_model.INFEASIBLE)
    hosts = {unit: problem.allowed_hosts(unit.slice, unit.pipeline)[0] for unit in variables.units}
    solution = _read_solution(ProblemArrays(problem, hosts), variables, solver)
    return FirstPlan(solution if is_within_room(solution) else None, is_impossible=False)


def ample_period(problem: Problem) -> int:
    """Return ticks in which all ops can run one after the other, wherever they run."""
    ops = sum(max(problem.op_ticks(kind, unit.slice, host) for host in problem.allowed_hosts(unit.slice, unit.pipeline))
              + problem.times.transfer for unit in problem.iterate_units() for kind in problem.op_kinds)
    return ops + sum(problem.times.all_reduce) + max(problem.times.optimizer)


def is_within_room(solution: Solution) -> bool:
    """Return whether workers keep within memory, which a coarsened model does not ensure."""
    arrays, problem = solution.arrays, solution.arrays.problem
    if problem.memory is None:
        return True
    kinds, end = arrays.ops.kinds, solution.end
    changes = [memory_changes(problem, number) for number in range(len(problem.layers_by_slice))]
    by_worker = [defaultdict[int, int](int) for _ in arrays.workers]
    for op, start in enumerate(solution.start.tolist()):
        unit, kind = divmod(op, kinds)
        tick = start if kind == 0 else int(end[op])
        # What is taken at the tick at which it is freed is held for no time.
        by_worker[arrays.ops.worker[unit]][tick] += changes[arrays.ops.slice[unit]][kind]
    peaks = [max(accumulate(change for _, change in sorted(by_tick.items())), default=0) for by_tick in by_worker]
    return all(peak <= activation_room(problem, worker) for worker, peak in zip(arrays.workers, peaks, strict=True))


def disproves_shorter(problem: Problem, period: int, budget: Budget, params: CpSatParams = DEFAULTS.cp_sat) -> bool:
    """Return whether CP-SAT proves that no plan is shorter than `period` ticks."""
    model, variables = _build_model(problem, 0, period - 1)
    return run_solver(model, variables, budget, params)[1] == cp_model.INFEASIBLE


def _build_model(problem: Problem, shortest: int, longest: int) -> tuple[cp_model.CpModel, Variables]:
    """Return a model that minimises the period between `shortest` and `longest`, and its
    variables."""
    model = cp_model.CpModel()
    variables = Variables(model, problem, _latest_possible_end(problem, longest))
    constraints = Constraints(model, problem, variables)
    constraints.add_rules()
    constraints.add_implied_constraints()
    model.add(variables.period >= shortest)
    model.add(variables.period <= longest)
    model.minimize(variables.period)
    return model, variables


def run_solver(model: cp_model.CpModel, variables: Variables, budget: Budget, params: CpSatParams,
                on_solution: _OnSolution | None = None) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    """Solve the model within the budget; return the solver and its status.

    It runs in another thread, so that this one can stop it; `on_solution` is called for each better
    plan.
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    for name, limit in budget.clock.solver_limits(budget.seconds_left).items():
        setattr(parameters, name, limit)
    parameters.catch_sigint_signal = False
    parameters.random_seed = budget.seed
    parameters.num_workers = 1
    parameters.linearization_level = _choose_linearization(model, variables, params)
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
"""Largest product of memory, ticks and ticks that fits the solver's cuts."""


def _choose_linearization(model: cp_model.CpModel, variables: Variables, params: CpSatParams) -> int:
    """Return the level of linear relaxation: 0 without, 1, or 2 with cuts over times."""
    if len(variables.start) > params.largest_relaxed:
        return 0
    capacities = [constraint.cumulative.capacity.offset for constraint in model.proto.constraints
                  if constraint.has_cumulative()]
    # Cuts of level 2 weigh ends of intervals by their memory times ticks. OR-Tools 9.15 ends the process on overflow.
    return 2 if max(capacities, default=1) * variables.horizon**2 <= MAX_CUT else 1


def _latest_possible_end(problem: Problem, period: int) -> int:
    """Return a tick by which a plan of this period ends, from tick 0.

    With a synchronous optimizer, it is the period, by definition. Staggered: let R_g be the first
    start in group g. The first op is the F of some micro-batch at its first stage, so R = 0 in that
    group g0. The micro-batch visits the layers of every group g, and its I at the first stage
    follows its F there, hence R_g <= F <= I(first) <= R_g0 + period = period; and all ops of group
    g end by R_g + period <= 2 period.
    """
    return period if problem.optimizer == "synchronous" else 2 * period


def _give_hint(model: cp_model.CpModel, problem: Problem, variables: Variables, hint: Solution, period: int) -> None:
    shift = min(hint.start_by_key.values())
    spans: dict[Worker, list[tuple[int, int]]] = {worker: [] for worker in problem.live_workers}
    ready: dict[LayerRange, int] = {}
    renaming = CanonicalNames(problem, hint)
    for key, variable in variables.start.items():
        kind, stage, *named = key
        batch = renaming.original_microbatch(*named)
        start = hint.start_by_key[kind, stage, *batch] - shift
        model.add_hint(variable, start)
        host = hint.hosts[Unit(stage, *batch)]
        end = start + problem.op_ticks(kind, stage, host)
        end_variable = variables.end[key]
        if isinstance(end_variable, cp_model.IntVar) and end_variable is not variable:  # equal if the op takes 0
            model.add_hint(end_variable, end)
        spans[host].append((start, end))
        layers = problem.layers_by_slice[stage]
        ready[layers] = max(ready.get(layers, 0), end)
    for (unit, host), literal in variables.host_literals.items():
        runs = hint.hosts[Unit(unit.slice, *renaming.original_microbatch(unit.pipeline, unit.microbatch))]
        model.add_hint(literal, renaming.canonical_worker(runs) == host)
    busy = [[span for worker, ops in spans.items() if problem.group_number(worker) == group for span in ops]
            for group in range(len(problem.groups.held))]
    first = [min((start for start, _ in ops), default=0) for ops in busy]
    for reduction, variable in sorted(variables.reductions.items(), key=lambda pair: ready.get(pair[0].layers, 0)):
        ops = busy[reduction.group]
        begin = _find_gap(ops, ready.get(reduction.layers, 0), reduction.ticks)
        ops.append((begin, begin + reduction.ticks))
        model.add_hint(variable, begin)
    for group, ops in enumerate(busy):
        model.add_hint(variables.first[group], first[group])
        model.add_hint(variables.last[group], max((end for _, end in ops), default=0))
    model.add_hint(variables.period, period)


def _find_gap(spans: Sequence[tuple[int, int]], earliest: int, ticks: int) -> int:
    """Return the first tick from `earliest` on of `ticks` ticks beside the `spans`."""
    begin = earliest
    for start, end in sorted(spans):
        if begin + ticks <= start:
            break
        begin = max(begin, end)
    return begin


def _read_solution(arrays: ProblemArrays, variables: Variables, solver: cp_model.CpSolver) -> Solution:
    rows = []
    for unit in variables.units:
        choices = [host for host, literal in variables.iterate_literals(unit)
                   if literal is None or solver.boolean_value(literal)]
        assert len(choices) == 1, f"CP-SAT chose hosts {choices} for {unit}"
        rows.append(arrays.row_of[choices[0]])
    keys = list(arrays.iterate_op_keys())
    starts = {key: solver.value(variables.start[key]) for key in keys}
    order = sorted(range(len(keys)), key=lambda op: _flow_sort_key(arrays.problem, keys[op], starts))
    return arrays.with_assignment(to_ints(rows)).make_solution(to_ints(order), to_ints(list(starts.values())))


def _flow_sort_key(problem: Problem, key: OpKey, starts: Mapping[OpKey, int]) -> tuple[int, ...]:
    """Return a key that sorts ops by start, then by age of their micro-batch.

    Any such order is free of cycles: an op that another one waits for at the same instant comes
    before it.
    """
    kind, stage, pipeline, microbatch = key
    entered = starts[OpKind.F, problem.grid.stages_of_microbatch(microbatch)[0], pipeline, microbatch]
    forward = kind is OpKind.F
    return (starts[key], entered, pipeline, microbatch, not forward, stage if forward else -stage, kind is OpKind.W)
