"""What waits for what: the graph of ops and transfers, and the order in which workers exchange tensors.

Nodes are ops, transfers, and one node per range of layers for its gradient all-reduce (a collective: it starts when the
last of its workers gets there). Edges are data dependencies, the order of ops on a worker, and the order of transfers
between two workers. No cycle means no deadlock, whatever the real durations are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from slipstream.schedules.layers import layers_text
from slipstream.schedules.precedence import OpKey, Tensor, consumers, op_key, producers, waits
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Op, OpKind, Schedule, Worker


class Transfer(NamedTuple):
    """One tensor on its way: the activation or gradient of micro-batch `pipeline.microbatch`.

    `slice` is the one that consumes it: an activation comes from the slice before on the route, a gradient from the one
    after.
    """

    kind: Tensor
    slice: int
    pipeline: int
    microbatch: int
    source: Worker
    target: Worker

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.pipeline}.{self.microbatch} to slice {self.slice}, " \
               f"{self.source} -> {self.target}"


class Collective(NamedTuple):
    """The gradient all-reduce of some layers over all live workers that hold them."""

    layers: LayerRange

    def __str__(self) -> str:
        return f"A({layers_text(self.layers)}) on all its workers"


Node = Op | Transfer | Collective


def transfers(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> list[Transfer]:
    """Every tensor that crosses between two workers, in an order that all workers can follow without deadlock.

    The order is that of the producing ops in a topological order of the op graph, so that putting each transfer right
    after its producer extends it to all nodes: every edge, also those between successive transfers of one pair of
    workers, points forward. Raises ValueError when the ops alone already wait for each other in a circle.
    """
    by_key = _by_key(programs)
    found = []
    for node in topological_order(schedule, programs):
        if not isinstance(node, Op) or node.kind not in COMPUTE_KINDS:
            continue
        _, _, pipeline, microbatch = made = op_key(node)
        for key, rule in consumers(made, schedule.path(pipeline, microbatch)):
            consumer = by_key.get(key)
            if rule.tensor is not None and consumer is not None and consumer.worker != node.worker:
                found.append(Transfer(rule.tensor, *key[1:], node.worker, consumer.worker))
    return found


def with_transfers(ops: Iterable[Op], crossing: Sequence[Transfer], worker: Worker,
                   path: Callable[[int, int], Sequence[int]]) -> Iterator[Op | Transfer]:
    """A worker's ops with its part of the transfers, in their common order: each receive before the op that needs it,
    each send after the op that made it. `path`: the slices of a micro-batch, by its pipeline and index.
    """
    mine = [transfer for transfer in crossing if worker in (transfer.source, transfer.target)]
    numbers = {(transfer.source == worker, *transfer[:4]): index for index, transfer in enumerate(mine)}

    def end(sends: bool, tensors: Iterable[tuple[OpKey, Tensor | None]]) -> int:
        """The end of the last of these tensors that crosses; 0 for none. An op's key names who takes each."""
        return 1 + max((numbers.get((sends, tensor, *key[1:]), -1) for key, tensor in tensors if tensor), default=-1)

    issued = 0
    for op in ops:
        if op.kind not in COMPUTE_KINDS:
            yield op
            continue
        key = op_key(op)
        slices = path(key[2], key[3])
        needs = end(False, ((key, rule.tensor) for _, rule in waits(key, slices)))
        makes = end(True, ((consumer, rule.tensor) for consumer, rule in consumers(key, slices)))
        yield from mine[issued:needs]
        yield op
        issued = max(issued, needs)
        yield from mine[issued:makes]
        issued = max(issued, makes)


def arcs(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> Iterator[tuple[Node, Node]]:
    """Each worker's order, then the data dependencies: pairs of ops or collectives, the second waiting for the first.

    `programs` holds the ops of the workers to look at: all of them, or those of pipelines that share no micro-batch
    with the rest.
    """
    for ops in programs.values():
        if schedule.overlaps:
            yield from _beside_compute(schedule, ops)
        else:
            yield from pairwise(_node(op, schedule) for op in ops)
    by_key = _by_key(programs)
    for key, op in by_key.items():
        _, _, pipeline, microbatch = key
        path = schedule.path(pipeline, microbatch)
        yield from ((by_key[producer], op) for producer in producers(key, path) if producer in by_key)


def _beside_compute(schedule: Schedule, ops: Sequence[Op]) -> Iterator[tuple[Node, Node]]:
    """The order of a worker whose reductions go on beside compute: one after the other, each after the last backward of
    any of its layers here; other ops one after the other; O after all of them."""
    yield from pairwise(op for op in ops if op.kind is not OpKind.A)
    yield from pairwise(_node(op, schedule) for op in ops if op.kind in (OpKind.A, OpKind.O))
    for index, op in enumerate(ops):
        awaited = awaited_here(schedule, ops, index)
        if awaited is not None:
            yield awaited, _node(op, schedule)


def awaited_here(schedule: Schedule, ops: Sequence[Op], index: int) -> Op | None:
    """Of an A in a worker's program, where reductions overlap: the last W (or B) before it of any of its layers."""
    reduced = ops[index]
    if reduced.kind is not OpKind.A or reduced.slice is None:
        return None
    first, end = schedule.layers_of(reduced.slice)
    for op in (ops[earlier] for earlier in range(index - 1, -1, -1)):
        if op.kind in (OpKind.W, OpKind.B) and op.slice is not None:
            low, high = schedule.layers_of(op.slice)
            if low < end and first < high:
                return op
    return None


def reducing_early(schedule: Schedule, ops: Sequence[Op]) -> list[Op]:
    """A worker's program where reductions overlap, with each A as early as these arcs allow: directly behind what it
    awaits here, or the A before it. So it waits for other workers beside what this one computes, not behind it."""
    last, places = -1, []
    for index, op in enumerate(ops):
        if op.kind is OpKind.A:
            awaited = awaited_here(schedule, ops, index)
            last = max(last, index if awaited is None else ops.index(awaited))
        places.append((last, 1) if op.kind is OpKind.A else (index, 0))
    return [op for _, op in sorted(zip(places, ops, strict=True), key=lambda one: one[0])]


def _by_key(programs: Mapping[Worker, Sequence[Op]]) -> dict[OpKey, Op]:
    return {op_key(op): op for ops in programs.values() for op in ops if op.kind in COMPUTE_KINDS}


def _node(op: Op, schedule: Schedule) -> Node:
    return Collective(schedule.layers_of(op.slice)) if op.kind is OpKind.A and op.slice is not None else op


def topological_order(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> list[Node]:
    """Ops and collectives, each after what it waits for, otherwise by planned time. Raises ValueError naming a circle.
    """
    nodes = list(dict.fromkeys(_node(op, schedule) for ops in programs.values() for op in ops))
    number = {node: index for index, node in enumerate(nodes)}
    followers: list[list[int]] = [[] for _ in nodes]
    awaited = [0] * len(nodes)
    for before, after in arcs(schedule, programs):
        followers[number[before]].append(number[after])
        awaited[number[after]] += 1
    ready = [(_planned(node), index) for index, node in enumerate(nodes) if not awaited[index]]
    heapify(ready)
    found = []
    while ready:
        _, index = heappop(ready)
        found.append(nodes[index])
        for follower in followers[index]:
            awaited[follower] -= 1
            if not awaited[follower]:
                heappush(ready, (_planned(nodes[follower]), follower))
    if len(found) < len(nodes):
        require_acyclic(schedule, programs)
    return found


def require_acyclic(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> None:
    """Raises ValueError naming a circle of `arcs`. Cheaper than `topological_order`."""
    sorter: TopologicalSorter[Node] = TopologicalSorter()
    for before, after in arcs(schedule, programs):
        sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError as error:
        raise _deadlock(schedule, error.args[1]) from None


def _deadlock(schedule: Schedule, circle: Iterable[Node]) -> ValueError:
    """`circle`: each node waits for the one before it, the first for the last, which is the same."""
    texts = [schedule.op_text(node) if isinstance(node, Op) else str(node) for node in circle]
    return ValueError("deadlock: " + " waits for ".join(reversed(texts)))


def _planned(node: Node) -> tuple[int, str]:
    return (node.start_ticks, "") if isinstance(node, Op) else (0, str(node))


def as_early(schedule: Schedule, ops: Iterable[Op]) -> dict[OpKey, Op]:
    """Compute ops, each as early as its worker and those that it waits for let it begin; these come before it."""
    free: dict[Worker, int] = defaultdict(int)
    placed: dict[OpKey, Op] = {}
    for op in ops:
        begin, key = free[op.worker], op_key(op)
        for before in (placed[one] for one in producers(key, schedule.path(key[2], key[3])) if one in placed):
            begin = max(begin, before.end_ticks + (schedule.times.transfer if before.worker != op.worker else 0))
        placed[key] = replace(op, start_ticks=begin, end_ticks=begin + op.end_ticks - op.start_ticks)
        free[op.worker] = placed[key].end_ticks
    return placed


def joined(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """[number] the least of all that a number is joined with by pairs: union-find with path halving."""
    above = list(range(count))

    def top(number: int) -> int:
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    for one, other in pairs:
        first, second = top(one), top(other)
        above[max(first, second)] = min(first, second)
    return [top(number) for number in range(count)]


def groups(schedule: Schedule) -> list[tuple[int, ...]]:
    """Pipelines that share micro-batches, as sorted groups: between groups only all-reduces are waited for."""
    foreign = [{op.pipeline for op in program if op.pipeline is not None} for program in schedule.programs]
    first = joined(schedule.grid.pipelines, ((seat.role.pipeline, pipeline) for seat in schedule.seats
                                             for pipeline in foreign[seat.program]))
    found: dict[int, list[int]] = defaultdict(list)
    for pipeline, one in enumerate(first):
        found[one].append(pipeline)
    return sorted(map(tuple, found.values()))


def programs_of(schedule: Schedule, pipelines: Iterable[int] | None = None) -> dict[Worker, list[Op]]:
    """The placed ops of each live worker whose role lies in these pipelines (default: all)."""
    wanted = None if pipelines is None else set(pipelines)
    return {seat.worker: schedule.ops(seat.worker) for seat in schedule.seats
            if wanted is None or seat.role.pipeline in wanted}
