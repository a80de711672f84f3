"""The true optimum of tiny problems, by enumeration: the planner's judge.

It shares none of its code but the problem and what micro-batches hold of memory.
"""

import itertools
from collections import defaultdict

from slipstream.planner.model.memory import activation_capacity, activation_memory, stash_memory
from slipstream.planner.model.problem import Problem, Unit
from slipstream.schedules.schedule import OpKind, Worker


def optimal_period(problem: Problem) -> int:
    """The smallest period over all hosts and all orders of ops.

    Once hosts and orders are fixed, the rules are bounds on differences of start times, and the
    least period for which they have a solution is found by bisection. Memory depends on a worker's
    order alone.
    """
    units = list(problem.iterate_units())
    best = 0
    for unit in units:
        hosts = problem.allowed_hosts(unit.slice, unit.pipeline)
        for kind in problem.op_kinds:
            best += max(problem.op_ticks(kind, unit.slice, host) for host in hosts)
    best += 2 * len(units) * problem.times.transfer + sum(
        map(problem.ticks_after_group, problem.live_workers)
    )
    hosts_by_unit = [problem.allowed_hosts(unit.slice, unit.pipeline) for unit in units]
    choices = [
        dict(zip(units, choice, strict=True)) for choice in itertools.product(*hosts_by_unit)
    ]
    for hosts in sorted(choices, key=lambda hosts: _busiest(problem, hosts)):
        least = _busiest(problem, hosts)
        orders = [
            _orders(problem, worker, units) for worker, units in _units_of(problem, hosts).items()
        ]
        for sequences in itertools.product(*orders):
            if least >= best:
                return best
            if _possible(problem, hosts, sequences, best - 1):
                best = _shorten(problem, hosts, sequences, least, best - 1)
    return best


def _units_of(problem: Problem, hosts) -> dict[Worker, list[Unit]]:
    units_of: dict[Worker, list[Unit]] = {worker: [] for worker in problem.live_workers}
    for unit, worker in hosts.items():
        units_of[worker].append(unit)
    return units_of


def _busiest(problem: Problem, hosts) -> int:
    """What the worker with most to do takes in any order: no period is shorter."""
    return max(_busy(problem, worker, units) for worker, units in _units_of(problem, hosts).items())


def _busy(problem: Problem, worker: Worker, units: list[Unit]) -> int:
    """What a worker does in any order: no window of its is shorter."""
    work = sum(
        problem.op_ticks(kind, unit.slice, worker) for unit in units for kind in problem.op_kinds
    )
    return work + problem.ticks_after_group(worker) if units else 0


def _orders(problem: Problem, worker: Worker, units: list[Unit]):
    """Every order of a worker's ops that keeps units together and memory in bounds."""
    labels = [unit for unit in units for _ in problem.op_kinds]
    found = []
    for labelled in set(itertools.permutations(labels)):
        done: dict[Unit, int] = defaultdict(int)
        sequence = []
        for unit in labelled:
            sequence.append((problem.op_kinds[done[unit]], unit))
            done[unit] += 1
        if _fits(problem, worker, sequence):
            found.append(sequence)
    return found


def _fits(problem: Problem, worker: Worker, sequence) -> bool:
    if problem.memory is None:
        return True
    used = 0
    for kind, unit in sequence:
        if kind is OpKind.F:
            used += activation_memory(problem, unit.slice)
        elif kind is OpKind.W:
            used -= stash_memory(problem, unit.slice)
        else:
            used += stash_memory(problem, unit.slice) - activation_memory(problem, unit.slice)
        if used > activation_capacity(problem, worker):
            return False
    return True


def _shorten(problem: Problem, hosts, sequences, low: int, high: int) -> int:
    """The least period of these orders, which is none below `low` and at most `high`."""
    while low < high:
        middle = (low + high) // 2
        if _possible(problem, hosts, sequences, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _possible(problem: Problem, hosts, sequences, period: int) -> bool:
    """Return whether start times exist, by longest paths.

    The constraints are `start[b] >= start[a] + weight`; no circle of them may grow.
    """
    edges = []
    ends = defaultdict(list)
    for sequence in sequences:
        for before, after in itertools.pairwise(sequence):
            edges.append((before, after, _cost(problem, hosts, before)))
        for op in sequence:
            ends[problem.reduction_root[problem.column_of[op[1].slice]]].append(op)
            for source in _sources(problem, op):
                hop = 0 if hosts[source[1]] == hosts[op[1]] else problem.times.transfer
                edges.append((source, op, _cost(problem, hosts, source) + hop))
    for sequence in sequences:
        if sequence:
            column = problem.column_of[sequence[0][1].slice]
            edges += _window(problem, hosts, sequence, ends, column, period)
    value = dict.fromkeys((op for sequence in sequences for op in sequence), 0)
    if problem.optimizer == "synchronous":
        value["begin"] = 0
        edges += [("begin", op, 0) for op in list(value) if op != "begin"]
    for _ in range(len(value) + 1):
        changed = False
        for source, target, weight in edges:
            if value[source] + weight > value[target]:
                value[target] = value[source] + weight
                changed = True
        if not changed:
            return value.get("begin", 0) == 0 or problem.optimizer == "staggered"
    return False


def _window(problem, hosts, sequence, ends, column, period):
    """Every op of the column ends A + O before the end, or earlier.

    The end is that of the worker's window, or of the whole period.
    """
    if problem.optimizer == "staggered":
        return [
            (
                op,
                sequence[0],
                _cost(problem, hosts, op) + problem.column_closing_ticks(column) - period,
            )
            for op in ends[problem.reduction_root[column]]
        ]
    found = []
    for other, ops in ends.items():
        closing = max(problem.column_closing_ticks(other), max(problem.times.optimizer))
        found += [(op, "begin", _cost(problem, hosts, op) + closing - period) for op in ops]
    return found


def _cost(problem: Problem, hosts, op) -> int:
    return problem.op_ticks(op[0], op[1].slice, hosts[op[1]])


def _sources(problem: Problem, op):
    kind, unit = op
    path = problem.grid.stages_of_microbatch(unit.microbatch)
    if kind is OpKind.F and unit.slice > path[0]:
        yield OpKind.F, unit._replace(slice=unit.slice - 1)
    elif kind is problem.gradient_kind and unit.slice < path[-1]:
        yield kind, unit._replace(slice=unit.slice + 1)
