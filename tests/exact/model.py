"""Model a question as one CP-SAT problem: hosts, holdings, starts, reductions and memory together.

Each method states a rule of docs/concepts.md. A route passes every part in order. Parts that a
worker runs one directly after the other are a slice of several layers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from tests.exact.question import Batch, Question, Worker

Op = tuple[str, Batch, int]
"""Compute op as (kind, micro-batch, part)."""
EFFORT = 2.0
"""Deterministic time of the solver for one job, in its unit of about a second."""
PATIENCE = 60.0
"""Most seconds of the solver for one question, which is then not decided."""
COARSE = 10_000
"""Most ticks of a period for which the solver raises its bound tick by tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Solution in ticks: where and when everything runs."""

    period: int
    starts: Mapping[Op, int]
    hosts: Mapping[tuple[Batch, int], Worker]
    reductions: tuple[int, ...]
    """Start of the reduction of each part."""
    steps: Mapping[Worker, int]
    """Start of the optimizer step of each live worker."""
    held: Mapping[Worker, tuple[int, ...]]
    columns: Mapping[Worker, int]
    """Column of each worker's role."""


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver found out: a solution if there is one, and a proven bound in ticks."""

    solution: Solution | None
    bound: int
    is_decided: bool
    effort: float
    """Deterministic time that the solver took."""


class ExactModel:
    """CP-SAT model of the shortest period of one question in whole ticks, at most `at_most`."""

    def __init__(self, question: Question, at_most: int | None) -> None:
        self.question, self.model = question, cp_model.CpModel()
        self.parts = range(len(question.parts))
        self.horizon = self._longest()
        self.limit = self.horizon if at_most is None else min(at_most, self.horizon)
        self.period = self.model.new_int_var(0, self.limit, "period")
        self.columns = {(worker, column): self._boolean(worker[1] == column)
                        for worker in question.live for column in range(question.columns)}
        self.holds = {(worker, part): self._boolean(part in question.held[worker[1]])
                      for worker in question.live for part in self.parts}
        self.hosts = {(batch, part): {worker: self.model.new_bool_var("")
                                      for worker in question.hosts(batch, part)}
                      for batch in question.batches for part in self.parts}
        self.starts: dict[Op, Any] = {(kind, *visit): self._time()
                                      for visit in self.hosts for kind in question.kinds}
        self.reductions = [self._time() for _ in self.parts]
        self.steps = {worker: self._time() for worker in question.live}
        self.begins = {worker: 0 if question.optimizer == "synchronous" else self._time()
                       for worker in question.live}
        self.assign_roles_and_hosts()
        self.order_route()
        self.run_one_at_a_time()
        self.keep_within_memory()
        self.step_after_reductions()
        self.break_symmetry()
        self.model.minimize(self.period)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _boolean(self, value: bool) -> Any:
        """Return a value that is fixed in place, or a variable if roles or layers may move."""
        return (
            self.model.new_bool_var("")
            if self.question.scope in ("roles", "any layers")
            else int(value)
        )

    def _longest(self) -> int:
        """Return ticks in which all ops and transfers can follow one another.

        A time at which nothing happens anywhere can be cut out of a schedule, so none needs more.
        """
        question = self.question
        route = sum(max(question.ticks(kind, part, worker) for worker in question.live)
                    for kind in question.kinds for part in self.parts)
        route += 2 * len(self.parts) * int(question.transfer)
        closing = sum(question.ticks(kind, part) for kind in "AO" for part in self.parts)
        return route * len(question.batches) + closing * (len(question.live) + 1)

    def _end(self, op: Op) -> Any:
        """Return the end of an op, by the worker that runs it."""
        return self.starts[op] + sum(literal * self.question.ticks(op[0], op[2], worker)
                                     for worker, literal in self.hosts[op[1:]].items())

    def _ops_on(self, worker: Worker) -> Iterator[tuple[Op, Any]]:
        """Iterate over the ops that a worker may run, each with the literal that says so."""
        return (
            (op, self.hosts[op[1:]][worker]) for op in self.starts if worker in self.hosts[op[1:]]
        )

    def _held_by(self, worker: Worker) -> Iterator[tuple[int, Any]]:
        """Iterate over the parts that a worker may hold, each with the literal that says so."""
        held = ((part, self.holds[worker, part]) for part in self.parts)
        return (
            (part, literal) for part, literal in held if not isinstance(literal, int) or literal
        )

    # --- Rules -----------------------------------------------------------------------

    def assign_roles_and_hosts(self) -> None:
        """Let each worker play one role, and one holder run each part of a micro-batch."""
        question, columns = self.question, range(self.question.columns)
        if question.scope == "roles":
            for worker in question.live:
                self.model.add_exactly_one(self.columns[worker, column] for column in columns)
                for part in self.parts:
                    self.model.add(
                        self.holds[worker, part]
                        == sum(
                            self.columns[worker, column]
                            for column in columns
                            if part in question.held[column]
                        )
                    )
            for column in columns:
                self.model.add(sum(self.columns[worker, column] for worker in question.live)
                               <= question.pipelines)
        for (_, part), choice in self.hosts.items():
            self.model.add_exactly_one(choice.values())
            for worker, literal in choice.items():
                self.model.add(literal <= self.holds[worker, part])

    def order_route(self) -> None:
        """Rules 1 to 3: results have arrived, I follows the I of the next part, W follows its I."""
        gradient, last = self.question.kinds[1], self.parts[-1]
        for batch in self.question.batches:
            for part in self.parts[:-1]:
                self._let_wait(("F", batch, part), ("F", batch, part + 1))
                self._let_wait((gradient, batch, part + 1), (gradient, batch, part))
            self._let_wait(("F", batch, last), (gradient, batch, last))
            if gradient == "I":
                for part in self.parts:
                    self._let_wait(("I", batch, part), ("W", batch, part))

    def _let_wait(self, awaited: Op, op: Op) -> None:
        """Let an op start after the end of another, plus a transfer if another worker runs it."""
        self.model.add(self.starts[op] >= self._end(awaited))
        for worker, literal in self.hosts[awaited[1:]].items() if awaited[2] != op[2] else ():
            other = self.hosts[op[1:]].get(worker)
            elsewhere = [literal] if other is None else [literal, other.negated()]
            self.model.add(self.starts[op] >= self._end(awaited) + int(self.question.transfer)
                           ).only_enforce_if(elsewhere)

    def run_one_at_a_time(self) -> None:
        """Rule 4: a worker runs one op at a time.

        Reductions occupy it, or its links if they overlap with compute.
        """
        for worker in self.question.live:
            busy = [self.model.new_optional_fixed_size_interval_var(
                self.starts[op], self.question.ticks(op[0], op[2], worker), literal, "")
                for op, literal in self._ops_on(worker)]
            reductions = [self.model.new_optional_fixed_size_interval_var(
                self.reductions[part], self.question.ticks("A", part), literal, "")
                for part, literal in self._held_by(worker)]
            for together in (busy, reductions) if self.question.overlap else (busy + reductions,):
                self.model.add_no_overlap(together)

    def keep_within_memory(self) -> None:
        """Rule 5: weights, activations from F to I, and stashes to the end of W fit each worker."""
        if self.question.capacity is None:
            return
        for worker in self.question.live:
            spans, amounts = [], []
            for (kind, batch, part), literal in self._ops_on(worker):
                own = self.question.parts[part]
                if kind == "F" and own.activation:
                    spans.append(self._span(worker, literal, ("F", batch, part), 0,
                                            (self.question.kinds[1], batch, part)))
                    amounts.append(int(own.activation))
                if kind == "W" and own.stash:
                    spans.append(
                        self._span(
                            worker,
                            literal,
                            ("I", batch, part),
                            self.question.ticks("I", part, worker),
                            ("W", batch, part),
                        )
                    )
                    amounts.append(int(own.stash))
            self.model.add_cumulative(spans, amounts, self._room(worker))

    def _span(self, worker: Worker, literal: Any, first: Op, delay: int, last: Op) -> Any:
        """Return the interval from `delay` after the start of one op to the end of another."""
        end = self.starts[last] + self.question.ticks(last[0], last[2], worker)
        return self.model.new_optional_interval_var(
            self.starts[first] + delay, self._time(), end, literal, ""
        )

    def _room(self, worker: Worker) -> Any:
        """Return the room that the layers of a worker leave for activations."""
        question = self.question
        rooms = [int(question.room(worker, column)) for column in range(question.columns)]
        total = rooms[worker[1]] + int(question.weights(worker[1]))
        room = self.model.new_int_var(0, max(0, total, *rooms), "")
        if question.scope == "any layers":
            self.model.add(
                room
                == total
                - sum(
                    self.holds[worker, part] * int(question.parts[part].weights)
                    for part in self.parts
                )
            )
        else:
            self.model.add(room == sum(self.columns[worker, column] * rooms[column]
                                       for column in range(question.columns)))
        return room

    def step_after_reductions(self) -> None:
        """Rules 6 and 7: A follows the last W of its part, and O all of its worker.

        All holders start A of a part together. The period is the longest window, from the first
        op to the end of O. With a synchronous optimizer all begin at once, and O follows the last
        W of all.
        """
        question = self.question
        last = [op for op in self.starts if op[0] == question.kinds[-1]]
        for op in last:
            self.model.add(self.reductions[op[2]] >= self._end(op))
        for worker, step in self.steps.items():
            begin, held = self.begins[worker], list(self._held_by(worker))
            optimizer = sum(literal * question.ticks("O", part) for part, literal in held)
            self.model.add(begin <= step)
            self.model.add(self.period >= step + optimizer - begin)
            load: dict[int, Any] = defaultdict(int)
            for op, literal in self._ops_on(worker):
                self.model.add(begin <= self.starts[op]).only_enforce_if(literal)
                self.model.add(self._end(op) <= step).only_enforce_if(literal)
                load[op[2]] += literal * question.ticks(op[0], op[2], worker)
            if question.optimizer == "synchronous":
                for op in last:
                    self.model.add(self._end(op) <= step)
            closing: Any = 0
            for part, literal in held:
                reduction, ticks = self.reductions[part], question.ticks("A", part)
                self.model.add(reduction + ticks <= step).only_enforce_if(literal)
                # What follows from the rules helps the solver: A follows the work of its part.
                self.model.add(begin + load[part] <= reduction).only_enforce_if(literal)
                closing += 0 if question.overlap else literal * ticks
            self.model.add(begin + sum(load.values()) + closing <= step)

    def break_symmetry(self) -> None:
        """Order what can be exchanged: equal micro-batches, and equal workers."""
        batches: dict[Any, list[Batch]] = defaultdict(list)
        for batch in self.question.batches:
            batches[tuple(tuple(self.hosts[batch, part]) for part in self.parts)].append(batch)
        for before, after in (pair for alike in batches.values() for pair in pairwise(alike)):
            self.model.add(self.starts["F", before, 0] <= self.starts["F", after, 0])
        workers: dict[Any, list[Worker]] = defaultdict(list)
        for worker in self.question.live:
            workers[self._properties(worker)].append(worker)
        for one, other in (pair for alike in workers.values() for pair in pairwise(alike)):
            self.model.add(sum(literal for op, literal in self._ops_on(one) if op[0] == "F") >=
                           sum(literal for op, literal in self._ops_on(other) if op[0] == "F"))

    def _properties(self, worker: Worker) -> Any:
        """Return what tells a worker apart from those that could do all that it does."""
        question, column = self.question, worker[1]
        if question.scope == "own micro-batches":
            return worker
        is_own_room = question.scope == "any layers" or worker in question.capacity_of
        total = question.room(worker, column) + question.weights(column) \
            if question.capacity is not None and is_own_room else None
        is_free = question.scope in ("roles", "any layers")
        return None if is_free else column, question.slow.get(worker), total


def solve(question: Question, *, at_most: int | None = None, effort: float = EFFORT) -> Solved:
    """Minimise the period of a question in whole ticks within a deterministic time.

    With `at_most`, only periods up to it are looked for. If there is none, the bound is
    `at_most` + 1.
    """
    exact = ExactModel(question, at_most)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    # The search raises the bound by one tick at a time, which leads nowhere if ticks are fine.
    solver.parameters.use_objective_lb_search = exact.limit <= COARSE
    # A linear programme of fine ticks has gone on without end, in which no deterministic time passes.
    solver.parameters.max_time_in_seconds = PATIENCE
    status = solver.solve(exact.model)
    assert status != cp_model.MODEL_INVALID, exact.model.validate()
    if status == cp_model.INFEASIBLE:
        return Solved(None, exact.limit + 1, True, solver.deterministic_time)
    bound = max(0, round(solver.best_objective_bound))
    if status == cp_model.UNKNOWN:
        return Solved(None, bound, False, solver.deterministic_time)
    held = {worker: tuple(part for part in exact.parts if solver.value(exact.holds[worker, part]))
            for worker in question.live}
    hosts = {visit: next(worker for worker, literal in choice.items() if solver.value(literal))
             for visit, choice in exact.hosts.items()}
    columns = {
        worker: column
        for (worker, column), literal in exact.columns.items()
        if solver.value(literal)
    }
    solution = Solution(
        period=round(solver.objective_value),
        hosts=hosts,
        held=held,
        columns={worker: worker[1] for worker in question.live}
        if question.scope == "any layers"
        else columns,
        starts={op: solver.value(start) for op, start in exact.starts.items()},
        reductions=tuple(map(solver.value, exact.reductions)),
        steps={worker: solver.value(step) for worker, step in exact.steps.items()},
    )
    return Solved(solution, bound, status == cp_model.OPTIMAL, solver.deterministic_time)
