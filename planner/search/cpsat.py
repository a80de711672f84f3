"""CP-SAT: improve a plan, which is the hint and never made worse, and prove how short one can be."""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain as chain_of
from itertools import pairwise

from ortools.sat.python import cp_model
from ortools.sat.python.cp_model import BoolVarT, CpModel, IntervalVar, IntVar, LinearExprT

from slipstream.planner.budget import SOLVER_UNITS_PER_STEP, Budget
from slipstream.planner.model.arrays import ProblemArrays, Solution, ints
from slipstream.planner.model.problem import LiveWorker, MicroBatch, Problem, Unit
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, CpSatParams
from slipstream.schedules.precedence import OpKey, waits
from slipstream.schedules.schedule import OpKind, Worker

# --- Variables --------------------------------------------------------------------------------------------------------


class Variables:
    """One start per op, one literal per possible host of a unit with a choice, a window per column, and the period."""

    def __init__(self, model: CpModel, problem: Problem, horizon: int) -> None:
        self.horizon = horizon
        self.units = tuple(problem.units())
        self.hosts: dict[Unit, tuple[Worker, ...]] = {unit: problem.hosts(unit.slice, unit.pipeline)
                                                   for unit in self.units}
        self.on: dict[tuple[Unit, Worker], BoolVarT] = {}
        self.start: dict[OpKey, IntVar] = {}
        self.end: dict[OpKey, IntVar | LinearExprT] = {}
        self.runs: dict[Worker, list[tuple[OpKind, Unit, IntervalVar]]] = {worker: [] for worker in problem.live}
        for unit in self.units:
            self._add_unit(model, problem, unit)
        columns = range(problem.grid.columns)
        self.first = [model.new_int_var(0, horizon, f"R{column}") for column in columns]
        self.last = [model.new_int_var(0, horizon, f"E{column}") for column in columns]
        self.period = model.new_int_var(0, 2 * horizon, "period")

    def _add_unit(self, model: CpModel, problem: Problem, unit: Unit) -> None:
        hosts = self.hosts[unit]
        name = f"{unit.pipeline}.{unit.microbatch}@{unit.slice}"
        if len(hosts) > 1:
            for host in hosts:
                self.on[unit, host] = model.new_bool_var(f"on {name} {host}")
            model.add_exactly_one(self.on[unit, host] for host in hosts)
        for kind in problem.kinds:
            key = (kind, *unit)
            start = self.start[key] = model.new_int_var(0, self.horizon, f"{kind} {name}")
            costs = {host: problem.cost(kind, unit.slice, host) for host in hosts}
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
                    interval = model.new_optional_interval_var(start, costs[host], end, self.on[unit, host], label)
                else:
                    interval = model.new_optional_fixed_size_interval_var(start, costs[host], self.on[unit, host],
                                                                          label)
                self.runs[host].append((kind, unit, interval))

    def literals(self, unit: Unit) -> Iterator[tuple[Worker, BoolVarT | None]]:
        """Each possible host with the literal that chooses it, None where there is no choice."""
        for host in self.hosts[unit]:
            yield host, self.on.get((unit, host))


# --- Constraints ------------------------------------------------------------------------------------------------------


class Constraints:
    """Adds every rule to the model; F, I and W are start times, p durations, h hosts."""

    def __init__(self, model: CpModel, problem: Problem, variables: Variables) -> None:
        self._model = model
        self._problem = problem
        self._variables = variables

    def add_rules(self) -> None:
        """All rules, in the order of the problem's statement."""
        self._data_flows()
        self._one_op_at_a_time()
        self._memory()
        self._windows()

    def add_implied(self) -> None:
        """What follows from the rules, and one order of what may change names: no plan becomes longer by it."""
        self._microbatches_in_order()
        self._columns_at_once()
        self._loads()
        self._forwards_in_order()
        self._workers_in_order()

    def _data_flows(self) -> None:
        """Start of an op >= end of each producer + transfer where a tensor crosses and their hosts differ.

        Neighbouring virtual stages lie on different workers unless they share a column and a host.
        """
        problem, variables = self._problem, self._variables
        for key, start in variables.start.items():
            for producer, rule in waits(key, problem.grid.path(key[3])):
                if producer not in variables.start:
                    continue
                hop = problem.times.transfer if rule.tensor else 0
                if problem.column_of[producer[1]] != problem.column_of[key[1]]:
                    self._model.add(start >= variables.end[producer] + hop)
                    continue
                self._model.add(start >= variables.end[producer])
                if producer[1] != key[1] and hop:
                    self._transfer_unless_same_host(producer, key)

    def _transfer_unless_same_host(self, producer: OpKey, key: OpKey) -> None:
        """Both units in one column: start >= end + transfer unless one host runs both."""
        variables, source, target = self._variables, Unit(*producer[1:]), Unit(*key[1:])
        hop = self._problem.times.transfer
        for host, literal in variables.literals(source):
            other = variables.on.get((target, host))
            if literal is None or (other is None and variables.hosts[target] == (host,)):
                continue  # the whole pipeline runs this column on its own worker
            away = self._model.add(variables.start[key] >= variables.end[producer] + hop)
            away.only_enforce_if(literal, *([other.negated()] if other is not None else []))

    def _one_op_at_a_time(self) -> None:
        """No two ops of a worker overlap."""
        for runs in self._variables.runs.values():
            self._model.add_no_overlap(interval for *_, interval in runs)

    def _memory(self) -> None:
        """At every time on every worker: activations (F start to I end) + stashes (I end to W end) <= capacity."""
        problem = self._problem
        if problem.memory is None:
            return
        for worker in problem.live:
            demands: list[tuple[IntervalVar, int]] = []
            for kind, unit, _ in self._variables.runs[worker]:
                if kind is OpKind.F:
                    demands += self._held(unit, worker)
            if sum(demand for _, demand in demands) > problem.room(worker):
                self._model.add_cumulative([interval for interval, _ in demands], [demand for _, demand in demands],
                                           problem.room(worker))

    def _held(self, unit: Unit, host: Worker) -> list[tuple[IntervalVar, int]]:
        """What a unit holds on a host: (interval, amount), present when the host is chosen."""
        problem, variables = self._problem, self._variables
        start = variables.start[OpKind.F, *unit]
        freed = variables.end[problem.gradient_kind, *unit]
        spans: list[tuple[LinearExprT, LinearExprT, int]] = [(start, freed, problem.activation(unit.slice))]
        if problem.backward == "split":
            spans.append((freed, variables.end[OpKind.W, *unit], problem.stash(unit.slice)))
        found = []
        for begin, end, amount in spans:
            if not amount:
                continue
            length = self._model.new_int_var(0, variables.horizon, "held")
            literal = variables.on.get((unit, host))
            interval = self._model.new_interval_var(begin, length, end, "held") if literal is None else \
                self._model.new_optional_interval_var(begin, length, end, literal, "held")
            found.append((interval, amount))
        return found

    def _windows(self) -> None:
        """R_c <= every start and E_c >= every end in column c; the period follows from the windows.

        Columns that reduce gradients together end together.
        Staggered: period >= E_c - R_c + A + O. Synchronous: every O waits for the last compute op of the job, so
        period >= E_c + A + O and period >= E_c + O of any column, from time 0.
        """
        problem, variables, model = self._problem, self._variables, self._model
        for key, start in variables.start.items():
            column = problem.column_of[key[1]]
            model.add(variables.first[column] <= start)
            model.add(variables.last[column] >= variables.end[key])
        for column in range(problem.grid.columns):
            closing = problem.column_closing(column)
            if problem.tied[column] != column:
                model.add(variables.last[column] == variables.last[problem.tied[column]])
            if problem.optimizer == "staggered":
                model.add(variables.period >= variables.last[column] - variables.first[column] + closing)
            else:
                model.add(variables.period >= variables.last[column] + closing)
                slowest = max(problem.times.optimizer)
                model.add(variables.period >= variables.last[column] + slowest)

    def _microbatches_in_order(self) -> None:
        """Symmetry: micro-batches of a pipeline whose units all have a single host run each stage in order.

        They are interchangeable: handing the k-th F, I and W of every stage to micro-batch k keeps every rule. Where
        some unit has a choice that is not so.
        """
        problem, variables = self._problem, self._variables
        grid = problem.grid
        for pipeline, count in enumerate(grid.microbatches):
            if any(len(problem.hosts(stage, pipeline)) > 1 for stage in range(len(grid.stages))):
                continue
            for microbatch in range(count - grid.chains):
                later = microbatch + grid.chains  # the next one along the same chain
                for stage in grid.path(microbatch):
                    for kind in problem.kinds:
                        early, late = (kind, stage, pipeline, microbatch), (kind, stage, pipeline, later)
                        self._model.add(variables.start[late] >= variables.end[early])


    def _columns_at_once(self) -> None:
        """No more ops of a column at a time than it has live workers, whoever runs them.

        Ops take the time of the fastest possible host at least.
        """
        problem, variables = self._problem, self._variables
        for column, pipelines in enumerate(problem.live_by_column):
            keys = [key for key in variables.start if problem.column_of[key[1]] == column]
            if len(pipelines) < 2 or all(len(variables.hosts[Unit(*key[1:])]) == 1 for key in keys):
                continue
            spans = [self._model.new_fixed_size_interval_var(variables.start[key], ticks, f"any {key[0]}")
                     for key in keys if (ticks := min(problem.cost(key[0], key[1], host)
                                                      for host in variables.hosts[Unit(*key[1:])]))]
            self._model.add_cumulative(spans, [1] * len(spans), len(pipelines))

    def _loads(self) -> None:
        """What a worker runs fits in the period, with its closing ops."""
        problem, variables = self._problem, self._variables
        for worker, runs in variables.runs.items():
            ticks = [(problem.cost(kind, unit.slice, worker), variables.on.get((unit, worker)))
                     for kind, unit, _ in runs]
            if any(literal is not None for _, literal in ticks):
                self._model.add(sum(cost if literal is None else cost * literal for cost, literal in ticks)
                                + problem.column_closing(worker.column) <= variables.period)

    def _forwards_in_order(self) -> None:
        """Symmetry: micro-batches that are `interchangeable` begin at their first stage in the order of their names.

        Of n workers there, none begins the n-th next one before an F has ended.
        """
        problem, variables = self._problem, self._variables
        for batches in interchangeable(problem):
            stage = problem.grid.path(batches[0].microbatch)[0]
            hosts = variables.hosts[Unit(stage, *batches[0])]
            least = min(problem.cost(OpKind.F, stage, host) for host in hosts)
            starts = [variables.start[OpKind.F, stage, *batch] for batch in batches]
            for early, late in pairwise(starts):
                self._model.add(early <= late)
            for early, late in zip(starts, starts[len(hosts):], strict=False):
                self._model.add(early + least <= late)

    def _workers_in_order(self) -> None:
        """Symmetry: of equal workers of a column, one runs its first micro-batch only after the one before did.

        Wherever all micro-batches may change names, and each may be run by any worker of a column, which then may, too.
        """
        problem, variables = self._problem, self._variables
        for equal, stage in equal_workers(problem):
            batches = interchangeable(problem)[0]
            for before, worker in pairwise(equal):
                for number, batch in enumerate(batches):
                    literal = variables.on[Unit(stage, *batch), worker]
                    earlier = [variables.on[Unit(stage, *other), before] for other in batches[:number]]
                    self._model.add_bool_or(literal.negated(), *earlier)


# --- What may change names --------------------------------------------------------------------------------------------


def interchangeable(problem: Problem) -> list[list[MicroBatch]]:
    """Micro-batches that take the same time everywhere and have the same hosts, some of which are to be chosen.

    Where holders share all micro-batches, those of all pipelines along a chain; else, those of a pipeline.
    """
    grid, groups = problem.grid, []
    for chain in range(grid.chains):
        found = [[MicroBatch(pipeline, microbatch) for microbatch in range(chain, count, grid.chains)]
                 for pipeline, count in enumerate(grid.microbatches)]
        groups += [list(chain_of.from_iterable(found))] if problem.sharing else found
    return [batches for batches in groups if batches and any(
        len(problem.hosts(stage, batches[0].pipeline)) > 1 for stage in problem.grid.path(batches[0].microbatch))]


def equal_workers(problem: Problem) -> list[tuple[list[Worker], int]]:
    """Workers of a column that may change places, and a stage that each micro-batch passes there."""
    if not problem.sharing or problem.grid.chains > 1:
        return []
    found = []
    for column in range(problem.grid.columns):
        stage = problem.grid.stages_of(column)[0]
        kinds: dict[LiveWorker, list[Worker]] = {}
        for worker in problem.holders[stage]:
            kinds.setdefault(problem.workers[worker], []).append(worker)
        found += [(equal, stage) for equal in kinds.values() if len(equal) > 1]
    return found


class Renaming:
    """A plan's micro-batches and workers under the names that the model allows for them."""

    def __init__(self, problem: Problem, plan: Solution) -> None:
        self._batches: dict[MicroBatch, MicroBatch] = {}
        self._workers: dict[Worker, Worker] = {}
        for batches in interchangeable(problem):
            stage = problem.grid.path(batches[0].microbatch)[0]
            starts = {batch: plan.starts[OpKind.F, stage, *batch] for batch in batches}
            self._batches |= dict(zip(batches, sorted(batches, key=starts.__getitem__), strict=True))
        for equal, stage in equal_workers(problem):
            used = [plan.hosts[Unit(stage, *self.batch(*batch))] for batch in interchangeable(problem)[0]]
            first_use = {worker: used.index(worker) if worker in used else len(used) for worker in equal}
            self._workers |= dict(zip(sorted(equal, key=first_use.__getitem__), equal, strict=True))

    def batch(self, pipeline: int, microbatch: int) -> MicroBatch:
        """The micro-batch of the plan that is to have this name."""
        return self._batches.get(MicroBatch(pipeline, microbatch), MicroBatch(pipeline, microbatch))

    def worker(self, worker: Worker) -> Worker:
        """The name that a worker of the plan is to have."""
        return self._workers.get(worker, worker)


POLL_SECONDS = 0.05

PROVED = "what CP-SAT proved"
"""What its bounds count."""


class _OnSolution(cp_model.CpSolverSolutionCallback):
    """Reports the period, in ticks, of every better plan while the solver runs."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._progress = progress

    def on_solution_callback(self) -> None:
        """Called by the solver."""
        self._progress(round(self.objective_value))


def improve(problem: Problem, hint: Solution, *, lower_bound: int, budget: Budget, progress: Callable[[int], None],
            params: CpSatParams = DEFAULTS.cp_sat) -> tuple[Solution, int, int]:
    """Search for a smaller period within the budget, starting from `hint`: (solution, its period, the bound proven).

    The result is the same for the same seed whenever optimality is proven in time: one search thread, so that nothing
    depends on the clock but the end. (Eight threads on two cores were no faster on the jobs of the tests; tables use
    the cores for different entries.)
    """
    before = solution_period(hint)
    model, variables = _model(problem, lower_bound, before)
    _give_hint(model, problem, variables, hint, before)
    solver, status = _solve(model, variables, budget, params, _OnSolution(progress))
    if status == cp_model.UNKNOWN:
        return hint, before, lower_bound
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise AssertionError(f"CP-SAT calls a model with a known plan {solver.status_name(status)}")
    found = _read(hint.arrays, variables, solver)
    after = solution_period(found)
    assert after <= before, f"CP-SAT returned period {after}, longer than its hint's {before}"
    bound = max(lower_bound, math.ceil(solver.best_objective_bound - 1e-6))
    return found, after, min(bound, after)


def excludes(problem: Problem, period: int, budget: Budget, params: CpSatParams = DEFAULTS.cp_sat) -> bool:
    """Whether it is proven within the budget that no plan has a shorter period."""
    model, variables = _model(problem, 0, period - 1)
    return _solve(model, variables, budget, params)[1] == cp_model.INFEASIBLE


def _model(problem: Problem, shortest: int, longest: int) -> tuple[cp_model.CpModel, Variables]:
    """The problem as a model that looks for the shortest period between two."""
    model = cp_model.CpModel()
    variables = Variables(model, problem, _horizon(problem, longest))
    constraints = Constraints(model, problem, variables)
    constraints.add_rules()
    constraints.add_implied()
    model.add(variables.period >= shortest)
    model.add(variables.period <= longest)
    model.minimize(variables.period)
    return model, variables


def _solve(model: cp_model.CpModel, variables: Variables, budget: Budget, params: CpSatParams,
           on_solution: _OnSolution | None = None) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    """Run a solver beside this thread, so that the search can be ended in good order."""
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    for name, limit in budget.clock.solver_limits(budget.seconds).items():
        setattr(parameters, name, limit)
    parameters.catch_sigint_signal = False
    parameters.random_seed = budget.seed
    parameters.num_workers = 1
    parameters.linearization_level = 2 if len(variables.start) <= params.largest_relaxed else 0
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(solver.solve, model, on_solution)
        while not running.done():
            wait([running], timeout=POLL_SECONDS)
            if budget.stopped:
                solver.stop_search()  # again and again: it is lost on a search that has not quite begun
        status = running.result()
    budget.clock.count(solver.deterministic_time / SOLVER_UNITS_PER_STEP)
    return solver, status


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
    renaming = Renaming(problem, hint)
    for key, variable in variables.start.items():
        kind, stage, *named = key
        batch = renaming.batch(*named)
        start = hint.starts[kind, stage, *batch] - shift
        model.add_hint(variable, start)
        host = hint.hosts[Unit(stage, *batch)]
        end = start + problem.cost(kind, stage, host)
        end_variable = variables.end[key]
        if isinstance(end_variable, cp_model.IntVar) and end_variable is not variable:  # it is where the op takes 0
            model.add_hint(end_variable, end)
        column = problem.column_of[stage]
        first[column], last[column] = min(first[column], start), max(last[column], end)
    for (unit, host), literal in variables.on.items():
        runs = hint.hosts[Unit(unit.slice, *renaming.batch(unit.pipeline, unit.microbatch))]
        model.add_hint(literal, renaming.worker(runs) == host)
    for column, tied in enumerate(problem.tied):
        last[tied] = max(last[tied], last[column])
    for column, tied in enumerate(problem.tied):
        model.add_hint(variables.first[column], first[column])
        model.add_hint(variables.last[column], last[tied])
    model.add_hint(variables.period, period)


def _read(arrays: ProblemArrays, variables: Variables, solver: cp_model.CpSolver) -> Solution:
    rows = []
    for unit in variables.units:
        choices = [host for host, literal in variables.literals(unit)
                   if literal is None or solver.boolean_value(literal)]
        assert len(choices) == 1, f"CP-SAT chose hosts {choices} for {unit}"
        rows.append(arrays.row_of[choices[0]])
    keys = list(arrays.keys())
    starts = {key: solver.value(variables.start[key]) for key in keys}
    order = sorted(range(len(keys)), key=lambda op: _flow(arrays.problem, keys[op], starts))
    return arrays.assigned(ints(rows)).solution(ints(order), ints(list(starts.values())))


def _flow(problem: Problem, key: OpKey, starts: Mapping[OpKey, int]) -> tuple[int, ...]:
    """A run order for ops that share an instant, the same on all workers: older micro-batches first, each as it flows.

    Any such order is free of circles, since what an op waits for at the same instant comes before it.
    """
    kind, stage, pipeline, microbatch = key
    entered = starts[OpKind.F, problem.grid.path(microbatch)[0], pipeline, microbatch]
    forward = kind is OpKind.F
    return (starts[key], entered, pipeline, microbatch, not forward, stage if forward else -stage, kind is OpKind.W)
