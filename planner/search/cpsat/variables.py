"""Decision variables of the CP-SAT model."""

from collections.abc import Iterator

from ortools.sat.python.cp_model import BoolVarT, CpModel, IntervalVar, IntVar, LinearExprT

from slipstream.planner.model.problem import Problem, Unit
from slipstream.schedules.precedence import OpKey
from slipstream.schedules.schedule import OpKind, Worker


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
