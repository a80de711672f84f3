"""Model a question as one CP-SAT problem: hosts, holdings, starts, reductions and memory together.

Each method states a rule of docs/concepts.md. A route passes every part in order. Parts that a
worker runs one directly after the other are a slice of several layers.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from tests.exact.question import Batch, Question, Worker

Op = tuple[str, Batch, int]
"""Compute op as (kind, micro-batch, part)."""
EFFORT = 2.0
"""Deterministic time of the solver for one job, in its unit of about a second."""
COARSE = 10_000
"""Most ticks of a period for which the solver raises its bound tick by tick."""


class _Run(NamedTuple):
    """Op that a worker may run; the literal says whether it does."""

    op: Op
    start: Any
    ticks: int
    literal: Any


class ExactModel:
    """CP-SAT model of the shortest period of one question in ticks, at most `at_most`.

    Roles, holdings and hosts are literals by worker: constants where the scope leaves no choice.
    """

    def __init__(self, question: Question, at_most: int | None) -> None:
        self.question, self.model = question, cp_model.CpModel()
        self.solver = cp_model.CpSolver()
        self.parts, live = range(len(question.parts)), question.live
        self.limit = question.horizon if at_most is None else min(at_most, question.horizon)
        self.period = self.model.new_int_var(0, self.limit, "period")
        moves_roles, moves_layers = question.scope == "roles", question.scope == "any layers"
        self.roles: dict[Worker, dict[int, Any]] = {
            worker: self._choose(moves_roles, range(question.columns), [worker[1]])
            for worker in live
        }
        self.holds: dict[Worker, dict[int, Any]] = {
            worker: self._choose(
                moves_roles or moves_layers, self.parts, question.holdings[worker[1]]
            )
            for worker in live
        }
        self.hosts: dict[tuple[Batch, int], dict[Worker, Any]] = {
            (batch, part): self._choose(True, question.hosts(batch, part))
            for batch in question.batches
            for part in self.parts
        }
        self.starts = {
            (kind, *visit): self._new_time() for visit in self.hosts for kind in question.kinds
        }
        self.runs: dict[Worker, list[_Run]] = {worker: [] for worker in live}
        for op, start in self.starts.items():
            for worker, literal in self.hosts[op[1:]].items():
                run = _Run(op, start, question.ticks(op[0], op[2], worker), literal)
                self.runs[worker].append(run)
        self.reductions = [self._new_time() for _ in self.parts]
        self.steps = {worker: self._new_time() for worker in live}
        self.assign_roles_and_hosts()
        self.order_routes()
        self.run_one_at_a_time()
        self.keep_within_memory()
        self.step_after_reductions()
        self.break_symmetry()
        self.model.minimize(self.period)

    def _new_time(self) -> Any:
        return self.model.new_int_var(0, self.question.horizon, "")

    def _choose(self, is_free: bool, choices: Any, usual: Any = ()) -> dict[Any, Any]:
        """Return a variable for each choice, or True for each usual one."""
        if is_free:
            return {choice: self.model.new_bool_var("") for choice in choices}
        return dict.fromkeys(sorted(usual), True)

    def _end(self, op: Op) -> Any:
        """Return the end of an op, by the worker that runs it."""
        kind, batch, part = op
        return self.starts[op] + sum(
            literal * self.question.ticks(kind, part, worker)
            for worker, literal in self.hosts[batch, part].items()
        )

    # --- Rules -----------------------------------------------------------------------

    def assign_roles_and_hosts(self) -> None:
        """Let each worker play one role, and one holder run each part of a micro-batch."""
        question = self.question
        if question.scope == "roles":
            for worker, roles in self.roles.items():
                self.model.add_exactly_one(roles.values())
                for part, literal in self.holds[worker].items():
                    columns = [column for column in roles if part in question.holdings[column]]
                    self.model.add(literal == sum(roles[column] for column in columns))
            for column in range(question.columns):
                players = sum(roles[column] for roles in self.roles.values())
                self.model.add(players <= question.pipelines)
        for (_, part), choice in self.hosts.items():
            self.model.add_exactly_one(choice.values())
            for worker, literal in choice.items():
                self.model.add_implication(literal, self.holds[worker][part])

    def order_routes(self) -> None:
        """Rules 1 to 3: an op waits for the results that it takes.

        F waits for the F before, I for the I of the next part or the last F, and W for its I.
        """
        gradient = self.question.kinds[1]
        for batch in self.question.batches:
            for part, after in pairwise(self.parts):
                self._let_wait(("F", batch, part), ("F", batch, after))
                self._let_wait((gradient, batch, after), (gradient, batch, part))
            self._let_wait(("F", batch, self.parts[-1]), (gradient, batch, self.parts[-1]))
            for part in self.parts if gradient == "I" else ():
                self._let_wait(("I", batch, part), ("W", batch, part))

    def _let_wait(self, awaited: Op, op: Op) -> None:
        """Let an op start after another, plus a transfer between workers."""
        start, end = self.starts[op], self._end(awaited)
        self.model.add(start >= end)
        if awaited[2] == op[2]:
            return
        hosts = self.hosts[op[1:]]
        for worker, literal in self.hosts[awaited[1:]].items():
            leaves = [literal, hosts[worker].negated()] if worker in hosts else [literal]
            self.model.add(start >= end + self.question.transfer).only_enforce_if(leaves)

    def run_one_at_a_time(self) -> None:
        """Rule 4: a worker runs one op at a time.

        Reductions occupy it, or its links if they overlap with compute.
        """
        new_interval = self.model.new_optional_fixed_size_interval_var
        for worker, runs in self.runs.items():
            compute = [new_interval(run.start, run.ticks, run.literal, "") for run in runs]
            reductions = [
                new_interval(self.reductions[part], self.question.ticks("A", part), literal, "")
                for part, literal in self.holds[worker].items()
            ]
            if self.question.overlap:
                self.model.add_no_overlap(compute)
                self.model.add_no_overlap(reductions)
            else:
                self.model.add_no_overlap(compute + reductions)

    def keep_within_memory(self) -> None:
        """Rule 5: no worker ever holds more than its memory.

        What it holds is a level. Role and weights change it at the beginning, F adds an activation,
        I replaces that by a stash, and W frees the stash.
        """
        question = self.question
        if question.memory is None:
            return
        for worker, runs in self.runs.items():
            amounts = {column: question.memory_for(worker, column) for column in self.roles[worker]}
            limit = max(amounts.values())
            changes: list[tuple[Any, int, Any]] = [
                (0, limit - amounts[column], literal)
                for column, literal in self.roles[worker].items()
            ]
            for part, literal in self.holds[worker].items():
                changes.append((0, question.parts[part].costs["weights"], literal))
            for (kind, _, part), start, ticks, literal in runs:
                costs = question.parts[part].costs
                activation, stash = costs["activation"], costs["weight_stash"]
                change = {"F": activation, "I": stash - activation, "W": -stash, "B": -activation}
                time = start if kind == "F" else start + ticks
                changes.append((time, change[kind], literal))
            times, sizes, literals = zip(*changes, strict=True)
            least = -sum(map(abs, sizes))
            self.model.add_reservoir_constraint_with_active(times, sizes, literals, least, limit)

    def step_after_reductions(self) -> None:
        """Rules 6 and 7: A follows each W of its part, and O follows all.

        All holders start A of a part together. The period is the longest window, from the first
        op to the end of O. With a synchronous optimizer all begin at once, and O follows the last
        W of all.
        """
        question, is_synchronous = self.question, self.question.optimizer == "synchronous"
        last = [op for op in self.starts if op[0] == question.kinds[-1]]
        for op in last:
            self.model.add(self.reductions[op[2]] >= self._end(op))
            for step in self.steps.values() if is_synchronous else ():
                self.model.add(self._end(op) <= step)
        for worker, step in self.steps.items():
            begin = 0 if is_synchronous else self._new_time()
            load: Any = defaultdict(int)
            for run in self.runs[worker]:
                self.model.add(begin <= run.start).only_enforce_if(run.literal)
                self.model.add(run.start + run.ticks <= step).only_enforce_if(run.literal)
                load[run.op[2]] += run.literal * run.ticks
            optimizer, closing = 0, 0
            for part, literal in self.holds[worker].items():
                reduction, ticks = self.reductions[part], question.ticks("A", part)
                self.model.add(reduction + ticks <= step).only_enforce_if(literal)
                # This follows from the rules, and helps the solver: A follows the work of its part.
                self.model.add(begin + load[part] <= reduction).only_enforce_if(literal)
                optimizer += literal * question.ticks("O", part)
                closing += 0 if question.overlap else literal * ticks
            self.model.add(begin + sum(load.values()) + closing <= step)
            self.model.add(self.period >= step + optimizer - begin)

    def break_symmetry(self) -> None:
        """Order what can be exchanged: equal micro-batches, and equal workers."""
        question = self.question
        batches: dict[Any, list[Any]] = defaultdict(list)
        for batch in question.batches:
            choices = tuple(tuple(self.hosts[batch, part]) for part in self.parts)
            batches[choices].append(self.starts["F", batch, 0])
        workers: dict[Any, list[Any]] = defaultdict(list)
        for worker, runs in self.runs.items():
            forwards = [run for run in runs if run.op[0] == "F"]
            memory: list[int] = []
            if question.memory is not None:
                memory = [question.memory_for(worker, column) for column in self.roles[worker]]
            ops = tuple(run.op for run in forwards)
            alike = (ops, question.slow.get(worker), tuple(memory))
            workers[alike].append(-sum(run.literal for run in forwards))
        for values in (*batches.values(), *workers.values()):
            for before, after in pairwise(values):
                self.model.add(before <= after)

    # --- What the solver finds out ---------------------------------------------------

    def solve(self, effort: float) -> None:
        """Minimise the period within a deterministic time.

        Then `bound` is proven, and if there is a solution, `value` and `chosen` return it.
        """
        parameters = self.solver.parameters
        parameters.num_workers = 1
        parameters.max_deterministic_time = effort
        # The search raises the bound by one tick at a time, which leads nowhere if ticks are fine.
        parameters.use_objective_lb_search = self.limit <= COARSE
        status = self.solver.solve(self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        self.effort = self.solver.deterministic_time
        self.has_solution = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        self.is_impossible = status == cp_model.INFEASIBLE
        bound = self.solver.response_proto.inner_objective_lower_bound
        self.bound = self.limit + 1 if self.is_impossible else max(0, bound)

    def value(self, variable: Any) -> int:
        """Return the value of a variable in the solution."""
        return int(self.solver.value(variable))

    def chosen(self, literals: Mapping[Any, Any]) -> list[Any]:
        """Return what the solution has chosen."""
        return [choice for choice, literal in literals.items() if self.value(literal)]
