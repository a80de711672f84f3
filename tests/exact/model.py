"""Model a question as one CP-SAT problem: hosts, holdings, starts, reductions and memory together.

Each method states one of the rules of docs/concepts.md. A route passes every part in order. Consecutive
parts on one worker, one directly after the other, are a slice of several layers.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from tests.exact.question import Worker
from tests.exact.units import Units

Op = tuple[str, int, int, int]
"""Compute op as (kind, pipeline, micro-batch, part)."""
EFFORT = 2.0
"""Deterministic time of the solver for one question, in its unit of about a second."""
Visit = tuple[int, int, int]
"""Micro-batch at a part, as (pipeline, micro-batch, part)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Solution in ticks: where and when everything runs."""

    period: int
    starts: Mapping[Op, int]
    hosts: Mapping[Visit, Worker]
    reductions: Mapping[int, int]
    """Start of the reduction of each part."""
    steps: Mapping[Worker, int]
    """Start of the optimizer step of each live worker."""
    held: Mapping[Worker, tuple[int, ...]]
    columns: Mapping[Worker, int]
    """Column of each worker's role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What the solver found out: a solution if there is one, and a proven bound in ticks."""

    solution: Solution | None
    bound: int
    is_decided: bool


class ExactModel:
    """CP-SAT model of the shortest period of one question, in whole ticks."""

    def __init__(self, units: Units, at_most: int | None) -> None:
        self.units, self.question, self.model = units, units.question, cp_model.CpModel()
        self.horizon = self._longest()
        self.period = self.model.new_int_var(0, min(at_most or self.horizon, self.horizon), "period")
        self.columns = self._choose_roles()
        self.holds = self._choose_holdings()
        self.hosts = self._choose_hosts()
        self.starts = self._start_ops()
        self.reductions = {part: self._time(f"A{part}") for part in range(len(self.question.parts))}
        self.steps = {worker: self._time(f"O{worker}") for worker in self.question.live}
        self.begins = self._begin_windows()
        self.order_route()
        self.run_one_at_a_time()
        self.keep_within_memory()
        self.reduce_after_weight_gradients()
        self.step_last()
        self.break_symmetry()
        self.model.minimize(self.period)

    # --- Variables ------------------------------------------------------------------------------------------

    def _longest(self) -> int:
        """Return ticks in which everything can run one after the other.

        A time at which nothing runs anywhere can be cut out of a schedule, so none needs more.
        """
        parts, live = range(len(self.question.parts)), self.question.live
        longest = sum(max((self.units.ticks(kind, part, worker) for worker in live), default=0)
                      for kind in self.question.kinds for part in parts)
        route = longest + 2 * len(parts) * self.units.transfer
        closing = sum(self.units.ticks(kind, part) for kind in "AO" for part in parts)
        return route * len(self.question.batches()) + closing * (len(live) + 1)

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, name)

    def _choose_roles(self) -> dict[tuple[Worker, int], Any]:
        """Let each worker play the role of one column: its own, or any that is not full."""
        question, columns = self.question, range(self.question.columns)
        if question.scope != "roles":
            return {(worker, column): worker[1] == column for worker in question.live for column in columns}
        role = {(worker, column): self.model.new_bool_var(f"role {worker} {column}")
                for worker in question.live for column in columns}
        for worker in question.live:
            self.model.add_exactly_one(role[worker, column] for column in columns)
        for column in columns:
            self.model.add(sum(role[worker, column] for worker in question.live) <= question.pipelines)
        return role

    def _choose_holdings(self) -> dict[tuple[Worker, int], Any]:
        """Let each worker hold the parts of its role, or any if layers may move."""
        question, parts = self.question, range(len(self.question.parts))
        if question.scope not in ("roles", "any layers"):
            return {(worker, part): int(part in question.held[worker[1]])
                    for worker in question.live for part in parts}
        holds = {(worker, part): self.model.new_bool_var(f"hold {worker} {part}")
                 for worker in question.live for part in parts}
        if question.scope == "roles":
            for (worker, part), literal in holds.items():
                self.model.add(literal == sum(
                    self.columns[worker, column] for column in range(question.columns)
                    if part in question.held[column]))
        return holds

    def _choose_hosts(self) -> dict[Visit, dict[Worker, Any]]:
        """Let one worker that holds a part run it for a micro-batch: F, I and W."""
        hosts: dict[Visit, dict[Worker, Any]] = {}
        for batch in self.question.batches():
            for part in range(len(self.question.parts)):
                among = self.question.hosts(batch, part)
                choice = {worker: self.model.new_bool_var(f"{batch} {part} on {worker}") for worker in among}
                self.model.add_exactly_one(choice.values())
                for worker, literal in choice.items():
                    self.model.add(self.holds[worker, part] >= 1).only_enforce_if(literal)
                hosts[*batch, part] = choice
        return hosts

    def _start_ops(self) -> dict[Op, cp_model.IntVar]:
        return {(kind, *visit): self._time(f"{kind}{visit}") for visit in self.hosts
                for kind in self.question.kinds}

    def _begin_windows(self) -> dict[Worker, Any]:
        """Return when each worker's window begins: at its first op, or everybody's if O is synchronous."""
        if self.question.optimizer == "synchronous":
            return dict.fromkeys(self.question.live, 0)
        return {worker: self._time(f"begin {worker}") for worker in self.question.live}

    def _end(self, op: Op) -> Any:
        kind, *_, part = op
        ticks = (literal * self.units.ticks(kind, part, worker)
                 for worker, literal in self.hosts[op[1:]].items())
        return self.starts[op] + sum(ticks)

    def _optimizer_ticks(self, worker: Worker) -> Any:
        return sum(self.holds[worker, part] * self.units.ticks("O", part)
                   for part in range(len(self.question.parts)))

    # --- Rules ----------------------------------------------------------------------------------------------

    def order_route(self) -> None:
        """Rules 1 to 3: results have arrived, I follows the next part's I, and W follows its I."""
        gradient, last = self.question.kinds[1], len(self.question.parts) - 1
        for batch in self.question.batches():
            for part in range(last):
                self._let_wait(("F", *batch, part), ("F", *batch, part + 1))
                self._let_wait((gradient, *batch, part + 1), (gradient, *batch, part))
            self._let_wait(("F", *batch, last), (gradient, *batch, last))
            if self.question.backward == "split":
                for part in range(last + 1):
                    self._let_wait(("I", *batch, part), ("W", *batch, part))

    def _let_wait(self, awaited: Op, op: Op) -> None:
        """Let an op start after another one's end, plus a transfer if another worker runs it."""
        self.model.add(self.starts[op] >= self._end(awaited))
        if awaited[3] == op[3] or not self.units.transfer:
            return
        for worker, literal in self.hosts[awaited[1:]].items():
            other = self.hosts[op[1:]].get(worker)
            elsewhere = [literal] if other is None else [literal, other.negated()]
            self.model.add(self.starts[op] >= self._end(awaited) + self.units.transfer).only_enforce_if(elsewhere)

    def run_one_at_a_time(self) -> None:
        """Rule 4: a worker runs one op at a time; reductions occupy it, or one link if they overlap."""
        busy: dict[Worker, list[Any]] = defaultdict(list)
        links: dict[Worker, list[Any]] = defaultdict(list)
        for (kind, *batch, part), start in self.starts.items():
            for worker, literal in self.hosts[*batch, part].items():
                busy[worker].append(self.model.new_optional_fixed_size_interval_var(
                    start, self.units.ticks(kind, part, worker), literal, f"{kind} {batch} {part} {worker}"))
        for (worker, part), held in self.holds.items():
            taken = links if self.question.overlap else busy
            if not isinstance(held, int) or held:
                taken[worker].append(self.model.new_optional_fixed_size_interval_var(
                    self.reductions[part], self.units.ticks("A", part), held, f"A {part} {worker}"))
        for intervals in (*busy.values(), *links.values()):
            self.model.add_no_overlap(intervals)

    def keep_within_memory(self) -> None:
        """Rule 5: weights, activations from F to I, and then stashes to the end of W fit each worker."""
        if self.question.capacity is None:
            return
        gradient = self.question.kinds[1]
        held: dict[Worker, list[tuple[Any, int]]] = defaultdict(list)
        for visit, choice in self.hosts.items():
            for worker, literal in choice.items():
                spans = [("F", 0, gradient, self.units.activation(visit[2]))]
                if self.question.backward == "split":
                    after = self.units.ticks("I", visit[2], worker)
                    spans.append(("I", after, "W", self.units.stash(visit[2])))
                for first, delay, last, amount in spans:
                    if amount:
                        end = self.starts[last, *visit] + self.units.ticks(last, visit[2], worker)
                        size = self._time(f"{first} {visit} {worker} held")
                        span = self.model.new_optional_interval_var(
                            self.starts[first, *visit] + delay, size, end, literal, f"{first} {visit} {worker}")
                        held[worker].append((span, amount))
        for worker in self.question.live:
            spans_held = held[worker]
            self.model.add_cumulative([span for span, _ in spans_held], [amount for _, amount in spans_held],
                                      self._room(worker))

    def _room(self, worker: Worker) -> Any:
        """Return the units of memory that a worker's layers leave for activations."""
        question, parts = self.question, range(len(self.question.parts))
        assert question.capacity is not None
        if question.scope == "roles" and worker not in question.capacity_of:
            ways = [(self.columns[worker, column], question.capacity[column])
                    for column in range(question.columns)]
        elif question.scope == "roles":
            total = question.own_room(worker) + question.weights(question.held[worker[1]])
            ways = [(self.columns[worker, column], total - question.weights(question.held[column]))
                    for column in range(question.columns)]
        else:
            total = question.own_room(worker) + question.weights(question.held[worker[1]])
            if question.scope not in ("any layers", "any placement"):
                return self.units.room(question.own_room(worker))
            room = self.model.new_int_var(0, max(0, self.units.room(total)), f"room {worker}")
            self.model.add(room == self.units.room(total) - sum(
                self.holds[worker, part] * self.units.need(question.parts[part].weights) for part in parts))
            return room
        room = self.model.new_int_var(0, max(0, *(self.units.room(amount) for _, amount in ways)), f"room {worker}")
        self.model.add(room == sum(literal * self.units.room(amount) for literal, amount in ways))
        return room

    def reduce_after_weight_gradients(self) -> None:
        """Rule 6: all holders of a part reduce it at once, after its last weight gradient anywhere."""
        final = self.question.kinds[-1]
        for op in self.starts:
            if op[0] == final:
                self.model.add(self.reductions[op[3]] >= self._end(op))

    def step_last(self) -> None:
        """Rule 7: O follows all ops of its worker, and the period is the longest window."""
        final = self.question.kinds[-1]
        for worker, step in self.steps.items():
            begin = self.begins[worker]
            end = step + self._optimizer_ticks(worker)
            self.model.add(self.period >= end - begin)
            self.model.add(begin <= step)
            load: list[Any] = [self._optimizer_ticks(worker)]
            before: dict[int, list[Any]] = defaultdict(list)
            for part, reduction in self.reductions.items():
                held, ticks = self.holds[worker, part], self.units.ticks("A", part)
                if not isinstance(held, int) or held:
                    self.model.add(step >= reduction + ticks).only_enforce_if(held)
                    self.model.add(begin <= reduction).only_enforce_if(held)
                    load.append(0 if self.question.overlap else held * ticks)
            for op, start in self.starts.items():
                literal = self.hosts[op[1:]].get(worker)
                if literal is not None:
                    self.model.add(step >= self._end(op)).only_enforce_if(literal)
                    self.model.add(begin <= start).only_enforce_if(literal)
                    load.append(literal * self.units.ticks(op[0], op[3], worker))
                    before[op[3]].append(load[-1])
                if self.question.optimizer == "synchronous" and op[0] == final:
                    self.model.add(step >= self._end(op))
            # These follow from the rules, and help the solver.
            self.model.add(sum(load) <= end - begin)
            for part, reduction in self.reductions.items():
                held = self.holds[worker, part]
                if not isinstance(held, int) or held:
                    self.model.add(begin + sum(before[part]) <= reduction).only_enforce_if(held)

    def break_symmetry(self) -> None:
        """Order what can be exchanged: micro-batches with the same hosts, and workers that are alike."""
        same: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for batch in self.question.batches():
            same[tuple(tuple(self.hosts[*batch, part]) for part in range(len(self.question.parts)))].append(batch)
        for batches in same.values():
            for before, after in pairwise(batches):
                self.model.add(self.starts["F", *before, 0] <= self.starts["F", *after, 0])
        alike: dict[Any, list[Worker]] = defaultdict(list)
        for worker in self.question.live:
            alike[self._properties(worker)].append(worker)
        for workers in alike.values():
            for one, other in pairwise(workers):
                self.model.add(self._visits(one) >= self._visits(other))

    def _visits(self, worker: Worker) -> Any:
        return sum(choice[worker] for choice in self.hosts.values() if worker in choice)

    def _properties(self, worker: Worker) -> Any:
        """Return what tells workers apart: workers with equal properties can exchange all that they do."""
        question = self.question
        free = question.scope in ("roles", "any layers")
        if question.scope in ("own micro-batches", "any placement"):
            return worker
        room = None
        if question.capacity is not None and (question.scope == "any layers" or worker in question.capacity_of):
            room = question.own_room(worker) + question.weights(question.held[worker[1]])
        return (None if free else worker[1], question.slow.get(worker), room)


def solve(units: Units, *, at_most: int | None = None, effort: float = EFFORT) -> Solved:
    """Minimise the period of a question in ticks within a deterministic limit.

    With `at_most`, only periods up to it are looked for; without any, the bound is `at_most` + 1.
    """
    exact = ExactModel(units, at_most)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.use_objective_lb_search = True
    status = solver.solve(exact.model)
    if status == cp_model.INFEASIBLE:
        return Solved(solution=None, bound=(at_most or exact.horizon) + 1, is_decided=True)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(exact.model.validate())
    bound = round(solver.best_objective_bound)
    if status == cp_model.UNKNOWN:
        return Solved(solution=None, bound=max(0, bound), is_decided=False)
    return Solved(solution=_read_solution(exact, solver), bound=bound, is_decided=status == cp_model.OPTIMAL)


def _read_solution(exact: ExactModel, solver: cp_model.CpSolver) -> Solution:
    question = exact.question

    def chosen(literals: Mapping[Any, Any]) -> Any:
        return next(key for key, literal in literals.items()
                    if (literal if isinstance(literal, int) else solver.value(literal)))

    held = {worker: tuple(part for part in range(len(question.parts)) if solver.value(exact.holds[worker, part]))
            for worker in question.live}
    columns = {worker: chosen({column: exact.columns[worker, column] for column in range(question.columns)})
               for worker in question.live}
    return Solution(
        period=round(solver.objective_value), held=held, columns=columns,
        starts={op: solver.value(start) for op, start in exact.starts.items()},
        hosts={visit: chosen(choice) for visit, choice in exact.hosts.items()},
        reductions={part: solver.value(start) for part, start in exact.reductions.items()},
        steps={worker: solver.value(step) for worker, step in exact.steps.items()})
