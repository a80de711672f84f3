"""Build the graph of ops and transfers, and the order in which workers exchange tensors.

Nodes are ops, transfers, and one node per range of layers for its gradient all-reduce (a
collective: it starts when its last worker arrives). Edges are data dependencies, the order of ops
on a worker, and the order of transfers between two workers. A graph without cycles has no deadlock,
whatever the real durations are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from slipstream.schedules.layers import layers_text
from slipstream.schedules.precedence import (
    OpKey,
    Tensor,
    consumers_with_rules,
    op_key,
    producer_keys,
    producers_with_rules,
)
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Op, OpKind, Schedule, Worker


class Transfer(NamedTuple):
    """Tensor sent between workers: the activation or gradient of micro-batch `pipeline.microbatch`.

    The field `slice` is the one that consumes the tensor: an activation comes from the slice before
    it on the route, a gradient from the slice after it.
    """

    kind: Tensor
    slice: int
    pipeline: int
    microbatch: int
    source: Worker
    target: Worker

    def __str__(self) -> str:
        return (
            f"{self.kind} of micro-batch {self.pipeline}.{self.microbatch} to slice {self.slice}, "
            f"{self.source} -> {self.target}"
        )


class Collective(NamedTuple):
    """Gradient all-reduce of a range of layers, a node of the graph.

    All live workers that hold the layers take part.
    """

    layers: LayerRange

    def __str__(self) -> str:
        return f"A({layers_text(self.layers)}) on all its workers"


Node = Op | Transfer | Collective


def order_transfers(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> list[Transfer]:
    """Return the tensors that are sent, in an order that cannot deadlock.

    All workers, with their ops in `programs`, can follow it. Transfers are ordered like the ops
    that make them in a topological order of the op graph. With each transfer inserted right after
    its op, this order remains topological, even if transfers between the same two workers wait for
    each other in turn. Raises ValueError if the ops alone already wait for each other in a circle.
    """
    by_key = _ops_by_key(programs)
    ordered = []
    for node in topological_order(schedule, programs):
        if not isinstance(node, Op) or node.kind not in COMPUTE_KINDS:
            continue
        _, _, pipeline, microbatch = made = op_key(node)
        for key, rule in consumers_with_rules(made, schedule.route_of(pipeline, microbatch)):
            consumer = by_key.get(key)
            if rule.tensor is not None and consumer is not None and consumer.worker != node.worker:
                ordered.append(Transfer(rule.tensor, *key[1:], node.worker, consumer.worker))
    return ordered


def interleave_transfers(ops: Iterable[Op], crossing: Sequence[Transfer], worker: Worker,
                         path: Callable[[int, int], Sequence[int]]) -> Iterator[Op | Transfer]:
    """Iterate over a worker's ops and transfers in the order in which it issues them.

    The transfers are those of `crossing`, which has the order that all workers follow. Each receive
    comes before the op that needs it, and each send after the op that makes the tensor. `path`
    returns the slices of a micro-batch, given its pipeline and number.
    """
    own_transfers = [
        transfer for transfer in crossing if worker in (transfer.source, transfer.target)
    ]
    numbers = {
        (transfer.source == worker, *transfer[:4]): index
        for index, transfer in enumerate(own_transfers)
    }

    def end_of_last(sends: bool, tensors: Iterable[tuple[OpKey, Tensor | None]]) -> int:
        """Return the index in `own_transfers` after the last of these tensors, or 0."""
        return 1 + max(
            (numbers.get((sends, tensor, *key[1:]), -1) for key, tensor in tensors if tensor),
            default=-1,
        )

    issued = 0
    for op in ops:
        if op.kind not in COMPUTE_KINDS:
            yield op
            continue
        key = op_key(op)
        slices = path(key[2], key[3])
        needs = end_of_last(
            False, ((key, rule.tensor) for _, rule in producers_with_rules(key, slices))
        )
        makes = end_of_last(
            True, ((consumer, rule.tensor) for consumer, rule in consumers_with_rules(key, slices))
        )
        yield from own_transfers[issued:needs]
        yield op
        issued = max(issued, needs)
        yield from own_transfers[issued:makes]
        issued = max(issued, makes)


def dependency_edges(
    schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]
) -> Iterator[tuple[Node, Node]]:
    """Iterate over pairs of ops and all-reduces: the second waits for the first.

    The pairs that follow from the order of each worker's ops come first, then data dependencies. In
    `programs` are the ops of all workers, or those of pipelines that share no micro-batch with the
    rest.
    """
    for ops in programs.values():
        if schedule.has_overlap:
            yield from _overlap_edges(schedule, ops)
        else:
            yield from pairwise(_graph_node(op, schedule) for op in ops)
    by_key = _ops_by_key(programs)
    for key, op in by_key.items():
        _, _, pipeline, microbatch = key
        path = schedule.route_of(pipeline, microbatch)
        yield from (
            (by_key[producer], op) for producer in producer_keys(key, path) if producer in by_key
        )


def _overlap_edges(schedule: Schedule, ops: Sequence[Op]) -> Iterator[tuple[Node, Node]]:
    """Iterate over pairs of one worker's ops: the second waits for the first.

    Reductions overlap compute. Reductions run one after the other, each after the last backward on
    this worker of any of its layers. Other ops run one after the other, and O runs after all of
    them.
    """
    yield from pairwise(op for op in ops if op.kind is not OpKind.A)
    yield from pairwise(_graph_node(op, schedule) for op in ops if op.kind in (OpKind.A, OpKind.O))
    for index, op in enumerate(ops):
        awaited = last_local_backward(schedule, ops, index)
        if awaited is not None:
            yield awaited, _graph_node(op, schedule)


def last_local_backward(schedule: Schedule, ops: Sequence[Op], index: int) -> Op | None:
    """Return the last backward before an all-reduce whose gradients it sums.

    It is a W (or B) of any of these layers; the all-reduce is the op at `index` of a worker's
    program. Reductions must overlap compute. The result is None if there is no such W or B, or if
    the op is no all-reduce.
    """
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


def early_reduction_order(schedule: Schedule, ops: Sequence[Op]) -> list[int]:
    """Return a worker's ops, as indices, with each all-reduce as early as possible.

    Each A comes directly after the op that it awaits on this worker, or after the A before it. For
    reductions that overlap compute: A thus waits for other workers while this one computes, not
    afterwards.
    """
    last, places = -1, []
    for index, op in enumerate(ops):
        if op.kind is OpKind.A:
            awaited = last_local_backward(schedule, ops, index)
            last = max(last, index if awaited is None else ops.index(awaited))
        places.append((last, 1) if op.kind is OpKind.A else (index, 0))
    return sorted(range(len(ops)), key=places.__getitem__)


def _ops_by_key(programs: Mapping[Worker, Sequence[Op]]) -> dict[OpKey, Op]:
    return {op_key(op): op for ops in programs.values() for op in ops if op.kind in COMPUTE_KINDS}


def _graph_node(op: Op, schedule: Schedule) -> Node:
    return (
        Collective(schedule.layers_of(op.slice))
        if op.kind is OpKind.A and op.slice is not None
        else op
    )


def topological_order(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> list[Node]:
    """Return the ops and all-reduces, each after what it waits for.

    Ties are broken by planned time; `programs` has the ops of each worker. Raises ValueError if
    they wait for each other in a circle.
    """
    nodes = list(
        dict.fromkeys(_graph_node(op, schedule) for ops in programs.values() for op in ops)
    )
    number = {node: index for index, node in enumerate(nodes)}
    followers: list[list[int]] = [[] for _ in nodes]
    awaited = [0] * len(nodes)
    for before, after in dependency_edges(schedule, programs):
        followers[number[before]].append(number[after])
        awaited[number[after]] += 1
    ready = [
        (_planned_order(node), index) for index, node in enumerate(nodes) if not awaited[index]
    ]
    heapify(ready)
    ordered = []
    while ready:
        _, index = heappop(ready)
        ordered.append(nodes[index])
        for follower in followers[index]:
            awaited[follower] -= 1
            if not awaited[follower]:
                heappush(ready, (_planned_order(nodes[follower]), follower))
    if len(ordered) < len(nodes):
        require_acyclic(schedule, programs)
    return ordered


def require_acyclic(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> None:
    """Raise ValueError, which describes the circle, if ops and all-reduces wait in one."""
    sorter: TopologicalSorter[Node] = TopologicalSorter()
    for before, after in dependency_edges(schedule, programs):
        sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError as error:
        raise _deadlock_error(schedule, error.args[1]) from None


def _deadlock_error(schedule: Schedule, circle: Iterable[Node]) -> ValueError:
    """Build the error for a circle, in which each node waits for the one before."""
    texts = []
    for node in circle:
        texts.append(schedule.op_text(node) if isinstance(node, Op) else str(node))
    return ValueError("deadlock: " + " waits for ".join(reversed(texts)))


def _planned_order(node: Node) -> tuple[int, str]:
    return (node.start_ticks, "") if isinstance(node, Op) else (0, str(node))


def place_as_early(schedule: Schedule, ops: Iterable[Op]) -> dict[OpKey, Op]:
    """Return compute ops by key, each with the earliest start that is possible.

    It waits for its worker and for the ops that it needs. Each worker keeps the order of `ops`,
    which must list an op after all that it waits for.
    """
    free: dict[Worker, int] = defaultdict(int)
    placed: dict[OpKey, Op] = {}
    for op in ops:
        begin, key = free[op.worker], op_key(op)
        for awaited in producer_keys(key, schedule.route_of(key[2], key[3])):
            before = placed.get(awaited)
            if before is None:
                continue
            transfer = schedule.times.transfer if before.worker != op.worker else 0
            begin = max(begin, before.end_ticks + transfer)
        placed[key] = replace(
            op, start_ticks=begin, end_ticks=begin + op.end_ticks - op.start_ticks
        )
        free[op.worker] = placed[key].end_ticks
    return placed


def component_roots(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Return the smallest number of each one's component by `pairs` (union-find, path halving)."""
    above = list(range(count))

    def find_root(number: int) -> int:
        while above[number] != number:
            above[number] = number = above[above[number]]
        return number

    for left, right in pairs:
        first, second = find_root(left), find_root(right)
        above[max(first, second)] = min(first, second)
    return [find_root(number) for number in range(count)]


def pipeline_groups(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return sorted groups of pipelines that share micro-batches, directly or through others.

    A pipeline that shares none is a group of its own. Workers of different groups wait for each
    other only in all-reduces.
    """
    foreign = []
    for program in schedule.programs:
        foreign.append({op.pipeline for op in program if op.pipeline is not None})
    first = component_roots(
        schedule.grid.pipelines,
        (
            (seat.role.pipeline, pipeline)
            for seat in schedule.seats
            for pipeline in foreign[seat.program]
        ),
    )
    members: dict[int, list[int]] = defaultdict(list)
    for pipeline, root in enumerate(first):
        members[root].append(pipeline)
    return sorted(map(tuple, members.values()))


def programs_of(
    schedule: Schedule, pipelines: Iterable[int] | None = None
) -> dict[Worker, list[Op]]:
    """Return the ops of the live workers of these pipelines (default: all).

    A worker counts by its role's pipeline; its ops are in the order of its program.
    """
    wanted = None if pipelines is None else set(pipelines)
    return {seat.worker: schedule.ops(seat.worker) for seat in schedule.seats
            if wanted is None or seat.role.pipeline in wanted}
