"""The rules of the scheduling problem as CP-SAT constraints, one method a rule."""

from ortools.sat.python.cp_model import CpModel, IntervalVar, LinearExprT

from slipstream.planner.model.problem import Problem, Unit
from slipstream.planner.search.cpsat.variables import Variables
from slipstream.schedules.precedence import OpKey, waits
from slipstream.schedules.schedule import OpKind, Worker


class Constraints:
    """Adds every rule to the model; F, I and W are start times, p durations, h hosts."""

    def __init__(self, model: CpModel, problem: Problem, variables: Variables) -> None:
        self._model = model
        self._problem = problem
        self._variables = variables

    def add_all(self) -> None:
        """All rules, in the order of the problem's statement."""
        self._data_flows()
        self._one_op_at_a_time()
        self._memory()
        self._windows()
        self._microbatches_in_order()

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
            tail = problem.column_tail(column)
            if problem.tied[column] != column:
                model.add(variables.last[column] == variables.last[problem.tied[column]])
            if problem.optimizer == "staggered":
                model.add(variables.period >= variables.last[column] - variables.first[column] + tail)
            else:
                model.add(variables.period >= variables.last[column] + tail)
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
