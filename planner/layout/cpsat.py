"""The exact assignment of layers and micro-batches to replicas, by CP-SAT: least longest load, then fewest moves.

Equal replicas are counted, not listed: a *kind* of those that are cut anew has one set of variables for all copies,
and all replicas that keep their stages together run what is left of each layer. The model has a few thousand variables
where the cluster has thousands of workers.

    hold[k, p, range]   position p of kind k holds this range of layers
    tasks[k, p, layer]  micro-batches whose layer it runs
    whole[k], more[k]   a replica of kind k runs so many whole micro-batches, and this many layers of one more
    load                the longest load of any worker, in ticks
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model

from slipstream.planner.budget import SOLVER_UNITS_PER_STEP, Budget
from slipstream.planner.layout.division import Divider, Division, Replica, Slice, Workload, fill_idle
from slipstream.planner.model.problem import Problem
from slipstream.planner.params import DEFAULTS


class _Position(NamedTuple):
    """A worker of a kind of replica, as variables."""

    hold: dict[tuple[int, int], cp_model.IntVar]
    """Range of layers -> whether it holds these."""
    tasks: dict[int, cp_model.IntVar]
    """Layer -> micro-batches whose layer it runs."""


class _Kind(NamedTuple):
    """Equal replicas that are cut anew."""

    copies: tuple[int, ...]
    """Their numbers among all replicas."""
    positions: list[_Position]
    whole: cp_model.IntVar
    more: cp_model.IntVar


class Assignment:
    """The model of a problem on given replicas, and its hint: a division that is known."""

    def __init__(self, problem: Problem, replicas: Sequence[Replica], known: Division, limit: int, *,
                 free: bool) -> None:
        """`known`: a division whose longest load is `limit`. `free`: how much each replica runs is open, too, not only
        how it is cut."""
        self._problem, self._replicas, self._known, self._limit = problem, replicas, known, limit
        self._model = cp_model.CpModel()
        self._load = self._model.new_int_var(0, limit, "load")
        self._kept = [index for index, replica in enumerate(replicas) if not replica.cut]
        self._free = free and bool(self._kept)
        self._kinds = [self._kind(copies) for copies in self._equal_replicas()]
        self._further: dict[tuple[int, int], cp_model.IntVar] = {}
        """[kind, layer] whether the micro-batch that is cut over several replicas passes this layer on this kind."""

    @property
    def size(self) -> int:
        """Ranges that all positions together may choose from."""
        return sum(len(position.hold) for kind in self._kinds for position in kind.positions)

    def solve(self, budget: Budget, largest: int) -> Division | None:
        """A division with the least longest load found in the budget, and of these one that moves few layers.

        None where nothing is better than what is known.
        """
        if not self._kinds or self.size > largest:
            return None
        for kind in self._kinds:
            self._ranges_hold_tasks(kind)
            self._longest_load(kind)
        self._rest_fits()
        self._hint()
        solver = _solver(budget.share(0.5))
        self._model.minimize(self._load)
        found = solver.solve(self._model)
        budget.clock.count(solver.deterministic_time / SOLVER_UNITS_PER_STEP)
        if found not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        self._model.add(self._load <= solver.value(self._load))
        self._model.clear_hints()  # type: ignore[no-untyped-call]
        for variable in self._variables():
            self._model.add_hint(variable, solver.value(variable))
        self._model.minimize(self._moved())
        second = _solver(budget)
        best = second if second.solve(self._model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else solver
        budget.clock.count(second.deterministic_time / SOLVER_UNITS_PER_STEP)
        return self._division(best)

    def _equal_replicas(self) -> list[tuple[int, ...]]:
        """The numbers of the replicas that are cut anew, equal ones together."""
        problem, groups = self._problem, defaultdict(list)
        for index, replica in enumerate(self._replicas):
            if replica.cut:
                shape = tuple(problem.workers[worker] for worker in replica.workers)
                part = () if self._free else tuple(self._profile(index))
                groups[shape, part].append(index)
        return [tuple(copies) for copies in groups.values()]

    def _profile(self, index: int) -> list[int]:
        """[layer] tasks of a replica in the division that is known."""
        return [sum(workload.get(layer, 0) for workload in self._known.workloads[index])
                for layer in range(self._problem.grid.layer_count)]

    def _kind(self, copies: tuple[int, ...]) -> _Kind:
        model, problem, replica = self._model, self._problem, self._replicas[copies[0]]
        most = problem.grid.total_microbatches
        positions = []
        for number, worker in enumerate(replica.workers):
            hold: dict[tuple[int, int], cp_model.IntVar] = {}
            layers: set[int] = set()
            for first, end in self._ranges(replica, number, copies[0]):
                hold[first, end] = model.new_bool_var(f"hold {worker} {first} {end}")
                layers.update(range(first, end))
            tasks = {layer: model.new_int_var(0, most, f"tasks {worker} {layer}") for layer in sorted(layers)}
            positions.append(_Position(hold, tasks))
        return _Kind(copies, positions, model.new_int_var(0, most, "whole"),
                     model.new_int_var(0, problem.grid.layer_count - 1, "more"))

    def _ranges(self, replica: Replica, number: int, index: int) -> list[tuple[int, int]]:
        """Ranges that a worker has memory for, no further from its present and its known ones than these are long."""
        problem, worker = self._problem, replica.workers[number]
        known = sorted(self._known.workloads[index][number])
        near = sorted({*known, *problem.layers_held(worker)})
        if not near:
            return []
        reach = max(1, problem.grid.layer_count // len(replica.workers) // 2)
        low, high = max(0, known[0] - reach if known else near[0]), min(
            problem.grid.layer_count, (known[-1] + 1 + reach) if known else near[-1] + 1)
        found = []
        for first in range(low, high):
            room = problem.workers[worker].room
            for end in range(first + 1, high + 1):
                room -= problem.costs.weights[end - 1] + problem.costs.most[end - 1]
                if room < 0:
                    break
                found.append((first, end))
        return found

    def _ranges_hold_tasks(self, kind: _Kind) -> None:
        """Positions hold one range or none, in order of layers, at most one layer in common."""
        model, count = self._model, self._problem.grid.layer_count
        reached: cp_model.LinearExprT = 0
        for position in kind.positions:
            model.add_at_most_one(position.hold.values())
            for layer, tasks in position.tasks.items():
                holding = [literal for (first, end), literal in position.hold.items() if first <= layer < end]
                model.add(tasks <= self._problem.grid.total_microbatches * sum(holding))
            begins = sum(first * literal for (first, _), literal in position.hold.items())
            absent = count - count * sum(position.hold.values())
            model.add(begins + absent >= reached - 1)
            ends = model.new_int_var(0, count, "reached")
            model.add(ends >= reached)
            model.add(ends >= sum(end * literal for (_, end), literal in position.hold.items()))
            reached = ends
        for layer in range(count):
            further = model.new_bool_var(f"more beyond {layer}")
            model.add(kind.more > layer).only_enforce_if(further)
            model.add(kind.more <= layer).only_enforce_if(~further)
            run = sum(position.tasks[layer] for position in kind.positions if layer in position.tasks)
            if self._free:
                model.add(run == kind.whole + further)
            else:
                model.add(run == self._profile(kind.copies[0])[layer])
            self._further[kind.copies[0], layer] = further

    def _longest_load(self, kind: _Kind) -> None:
        """Load: tasks by their ticks and the worker's slowness, all-reduce and optimizer of what it holds, idle."""
        problem, replica = self._problem, self._replicas[kind.copies[0]]
        usual = max(1, self._known.whole[kind.copies[0]])
        for number, (worker, position) in enumerate(zip(replica.workers, kind.positions, strict=True)):
            compute = sum(problem.costs.work[layer] * tasks for layer, tasks in position.tasks.items())
            idle = fill_idle(problem, worker, len(replica.workers) - 1 - number)
            beside = sum((sum(problem.costs.closing[first:end]) + idle(first, end, usual)) * literal
                         for (first, end), literal in position.hold.items())
            self._model.add(1000 * self._load >= problem.slowness(worker) * compute + 1000 * beside)

    def _rest_fits(self) -> None:
        """What no replica that is cut anew runs is run by those that keep their stages."""
        problem, model = self._problem, self._model
        if not self._free:
            return
        rest = [problem.grid.total_microbatches - sum(
            len(kind.copies) * (kind.whole + self._further[kind.copies[0], layer]) for kind in self._kinds)
            for layer in range(problem.grid.layer_count)]
        for layer in range(problem.grid.layer_count):
            model.add(rest[layer] >= 0)
        replicas = len(self._kept)
        usual = max(1, max(self._known.whole[index] for index in self._kept))
        replica = self._replicas[self._kept[0]]
        for (first, end), column in problem.paths[0]:
            number = next(place for place, worker in enumerate(replica.workers) if worker.column == column)
            worker = replica.workers[number]
            held = problem.layers_held(worker)
            idle = fill_idle(problem, worker, len(replica.workers) - 1 - number)(first, end, usual)
            beside = sum(problem.costs.closing[layer] for layer in held) + idle
            work = {problem.costs.work[layer] for layer in range(first, end)}
            if len(work) == 1 and len(held) == end - first:
                most = model.new_int_var(0, problem.grid.total_microbatches * (end - first), f"tasks of stage {first}")
                model.add(replicas * most >= sum(rest[first:end]))
                model.add(self._load >= most * work.pop() + beside)
            else:
                model.add(replicas * (self._load - beside) >= sum(
                    problem.costs.work[layer] * rest[layer] for layer in range(first, end)))

    def _moved(self) -> cp_model.LinearExprT:
        """Layers that workers must load."""
        terms = []
        for kind in self._kinds:
            for worker, position in zip(self._replicas[kind.copies[0]].workers, kind.positions, strict=True):
                held = set(self._problem.layers_held(worker))
                for (first, end), literal in position.hold.items():
                    terms.append(len(kind.copies) * self._bytes(set(range(first, end)) - held) * literal)
        return sum(terms)

    def _bytes(self, layers: set[int]) -> int:
        """What layers weigh; where the job does not say, all the same."""
        weights = self._problem.costs.weights
        return sum(weights[layer] for layer in layers) if any(weights) else len(layers)

    def _variables(self) -> list[cp_model.IntVar]:
        return [variable for kind in self._kinds for variable in (
            kind.whole, kind.more, *(one for position in kind.positions
                                     for one in (*position.hold.values(), *position.tasks.values())))]

    def _hint(self) -> None:
        """The division that is known; equal replicas as the first of them."""
        for kind in self._kinds:
            index = kind.copies[0]
            profile = self._profile(index)
            self._model.add_hint(kind.whole, min(profile))
            self._model.add_hint(kind.more, sum(profile) - min(profile) * len(profile))
            for workload, position in zip(self._known.workloads[index], kind.positions, strict=True):
                ends = (min(workload), max(workload) + 1) if workload else None
                for layers, literal in position.hold.items():
                    self._model.add_hint(literal, layers == ends)
                for layer, tasks in position.tasks.items():
                    self._model.add_hint(tasks, workload.get(layer, 0))
        self._model.add_hint(self._load, self._limit)

    def _division(self, solver: cp_model.CpSolver) -> Division | None:
        """The solver's answer for every replica; None where tasks do not divide evenly over equal ones."""
        limit = solver.value(self._load)
        divider = Divider(self._problem, self._replicas)
        whole, workloads = list(self._known.whole), list(self._known.workloads)
        if not self._free:
            for kind in self._kinds:
                for index in kind.copies:
                    workloads[index] = self._workloads(kind, solver)
            return Division(tuple(whole), tuple(workloads), self._known.slices, self._known.items)
        slices: list[Slice] = []
        for kind in self._kinds:
            for index in kind.copies:
                whole[index] = solver.value(kind.whole)
                workloads[index] = self._workloads(kind, solver)
                if solver.value(kind.more):
                    slices.append(Slice(len(slices), 0, solver.value(kind.more), index, None))
        left = self._problem.grid.total_microbatches - len(slices) - sum(whole[index] for kind in self._kinds
                                                                   for index in kind.copies)
        for index in self._kept:
            whole[index] = min(left, divider.most_whole(index, limit))
            left -= whole[index]
        return divider.complete(whole, workloads, slices, limit)

    def _workloads(self, kind: _Kind, solver: cp_model.CpSolver) -> tuple[Workload, ...]:
        return tuple({layer: solver.value(tasks) for layer, tasks in position.tasks.items() if solver.value(tasks)}
                     for position in kind.positions)


def _solver(budget: Budget) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    for name, limit in budget.clock.solver_limits(budget.seconds).items():
        setattr(solver.parameters, name, limit)
    solver.parameters.catch_sigint_signal = False
    solver.parameters.random_seed = budget.seed
    solver.parameters.num_workers = 1
    return solver


def improved(problem: Problem, replicas: Sequence[Replica], known: tuple[int, Division],
             budget: Budget, largest: int = DEFAULTS.layouts.largest_assignment) -> Division | None:
    """A division no longer than the known (longest load, division) that moves fewer layers; None where there is none.

    The same for the same seed where the solver is done within the budget.
    """
    for free, share in ((True, 0.7), (False, 1.0)):
        division = Assignment(problem, replicas, known[1], known[0], free=free).solve(budget.share(share), largest)
        if division is not None:
            return division
    return None
