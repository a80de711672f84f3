"""Build the graph of ops and transfers, and the order in which workers exchange tensors.

The graph's nodes are ops, transfers, and all-reduces. There is one all-reduce for each range of
layers, which starts when its last worker arrives. Edges are data dependencies, the order of ops on
a worker, and the order of transfers between two workers. A graph without cycles has no deadlock,
however long ops and transfers really take.
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
    """Tensor that one worker sends to another: an activation or gradient of a micro-batch.

    The field `slice` is the slice that takes the tensor. An activation comes from the previous
    slice of the route, a gradient from the next one. The micro-batch has number `microbatch` in
    `pipeline`.
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
    """Gradient all-reduce of a range of layers, by all live workers that hold them.

    Unlike `Op`, which is one worker's part, it is a single node of the graph.
    """

    layers: LayerRange

    def __str__(self) -> str:
        return f"A({layers_text(self.layers)}) on all its workers"


Node = Op | Transfer | Collective


def order_transfers(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> list[Transfer]:
    """Return the tensors that are sent, in an order in which no worker waits forever.

    `programs` has the ops of each worker, and all workers can follow the order. Tensors for ops
    that are not in `programs` are left out. Raises ValueError if the ops alone already wait for
    each other in a circle.
    """
    # Transfers go in the order of the ops that make them. With each inserted right after its op, a
    # topological order of ops remains one, even if transfers between the same two workers wait for
    # each other in turn.
    by_key = _ops_by_key(programs)
    ordered = []
    for node in topological_order(schedule, programs):
        if not isinstance(node, Op) or node.kind not in COMPUTE_KINDS:
            continue
        key = op_key(node)
        path = schedule.route_of(key.pipeline, key.microbatch)
        # An op sends its result to each other worker that takes it; an op of the same worker just
        # uses it.
        for taking, rule in consumers_with_rules(key, path):
            consumer = by_key.get(taking)
            if rule.tensor is not None and consumer is not None and consumer.worker != node.worker:
                ordered.append(
                    Transfer(
                        rule.tensor,
                        taking.slice,
                        taking.pipeline,
                        taking.microbatch,
                        node.worker,
                        consumer.worker,
                    )
                )
    return ordered


def interleave_transfers(
    ops: Iterable[Op],
    crossing: Sequence[Transfer],
    worker: Worker,
    path: Callable[[int, int], Sequence[int]],
) -> Iterator[Op | Transfer]:
    """Iterate over a worker's ops and transfers in the order in which it issues them.

    `crossing` has the tensors of all workers in an order that all follow (`order_transfers`). Each
    receive comes before the op that needs it, and each send after the op that makes the tensor. The
    function `path` returns the slices of a micro-batch's route, given its pipeline and number.
    """
    # Transfers of this worker, each with its place among them.
    own_transfers = [
        transfer for transfer in crossing if worker in (transfer.source, transfer.target)
    ]
    numbers: dict[tuple[bool, Tensor, int, int, int], int] = {}
    for index, transfer in enumerate(own_transfers):
        is_sent = transfer.source == worker
        place = transfer.slice, transfer.pipeline, transfer.microbatch
        numbers[is_sent, transfer.kind, *place] = index

    def end_of_last(sends: bool, tensors: Iterable[tuple[OpKey, Tensor | None]]) -> int:
        """Return the index after this worker's last send or receive of `tensors`; or 0."""
        last = -1
        for key, tensor in tensors:
            if tensor is not None:
                place = key.slice, key.pipeline, key.microbatch
                last = max(last, numbers.get((sends, tensor, *place), -1))
        return 1 + last

    issued = 0
    for op in ops:
        if op.kind not in COMPUTE_KINDS:
            yield op
            continue
        key = op_key(op)
        slices = path(key.pipeline, key.microbatch)
        needs = end_of_last(
            False, ((key, rule.tensor) for _, rule in producers_with_rules(key, slices))
        )
        makes = end_of_last(
            True, ((consumer, rule.tensor) for consumer, rule in consumers_with_rules(key, slices))
        )
        # Transfers keep their order: before the one that is needed now, all earlier ones are
        # issued.
        yield from own_transfers[issued:needs]
        yield op
        issued = max(issued, needs)
        yield from own_transfers[issued:makes]
        issued = max(issued, makes)


def dependency_edges(
    schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]
) -> Iterator[tuple[Node, Node]]:
    """Iterate over pairs (awaited, waiting) of ops or all-reduces.

    The pairs that follow from the order of each worker's ops come first, then data dependencies.
    `programs` has the ops of all workers, or of those whose pipelines share no micro-batch with the
    rest.
    """
    for ops in programs.values():
        if schedule.has_overlap:
            yield from _overlap_edges(schedule, ops)
        else:
            yield from pairwise(_graph_node(op, schedule) for op in ops)
    # Data dependencies, by the rules of `precedence`.
    by_key = _ops_by_key(programs)
    for key, op in by_key.items():
        path = schedule.route_of(key.pipeline, key.microbatch)
        yield from (
            (by_key[producer], op) for producer in producer_keys(key, path) if producer in by_key
        )


def _overlap_edges(schedule: Schedule, ops: Sequence[Op]) -> Iterator[tuple[Node, Node]]:
    """Iterate over a worker's pairs (awaited, waiting), if reductions overlap compute."""
    # Compute and links are two sequences, in each of which one op follows the other. O belongs to
    # both.
    yield from pairwise(op for op in ops if op.kind is not OpKind.A)
    yield from pairwise(_graph_node(op, schedule) for op in ops if op.kind in (OpKind.A, OpKind.O))
    # A reduction also waits for the last backward on this worker of any of its layers.
    for index, op in enumerate(ops):
        awaited = last_local_backward(schedule, ops, index)
        if awaited is not None:
            yield awaited, _graph_node(op, schedule)


def last_local_backward(schedule: Schedule, ops: Sequence[Op], index: int) -> Op | None:
    """Return the last backward on a worker whose gradients an all-reduce sums.

    `ops` is the worker's program, and the all-reduce is the op at `index`. The result is the last W
    (or B) before it of any of its layers. It is None if there is none, or if the op at `index` is
    no all-reduce. The schedule's reductions must overlap compute.
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

    Each A comes directly after the backward that it awaits on this worker, or after the previous A;
    one that awaits no backward here does not move. This is for reductions that overlap compute: A
    then waits for other workers while this one computes, not afterwards.
    """
    # The place of an op is its own index. An A has that of the op that it follows, and comes second
    # there.
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
    if op.kind is OpKind.A and op.slice is not None:
        return Collective(schedule.layers_of(op.slice))
    return op


def topological_order(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> list[Node]:
    """Return all ops and all-reduces, each after everything that it waits for.

    `programs` has the ops of each worker. Of several that may come next, the one planned first
    comes first; all-reduces count as planned for tick 0. Raises ValueError if ops or all-reduces
    wait for each other in a circle.
    """
    # Ops and all-reduces, with who follows each and for how many it waits.
    nodes = list(
        dict.fromkeys(_graph_node(op, schedule) for ops in programs.values() for op in ops)
    )
    number = {node: index for index, node in enumerate(nodes)}
    followers: list[list[int]] = [[] for _ in nodes]
    awaited = [0] * len(nodes)
    for before, after in dependency_edges(schedule, programs):
        followers[number[before]].append(number[after])
        awaited[number[after]] += 1
    # Kahn 1962: take a node that waits for nothing, and let its followers wait for one less.
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
    """Raise ValueError, which describes the circle, if ops and all-reduces wait in a circle."""
    sorter: TopologicalSorter[Node] = TopologicalSorter()
    for before, after in dependency_edges(schedule, programs):
        sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError as error:
        raise _deadlock_error(schedule, error.args[1]) from None


def _deadlock_error(schedule: Schedule, circle: Iterable[Node]) -> ValueError:
    """Return the error for a circle of nodes, each waiting for the previous one."""
    texts = []
    for node in circle:
        texts.append(schedule.op_text(node) if isinstance(node, Op) else str(node))
    return ValueError("deadlock: " + " waits for ".join(reversed(texts)))


def _planned_order(node: Node) -> tuple[int, str]:
    return (node.start_ticks, "") if isinstance(node, Op) else (0, str(node))


def place_as_early(schedule: Schedule, ops: Iterable[Op]) -> dict[OpKey, Op]:
    """Return compute ops by key, each with the earliest possible start.

    An op waits for its worker and for the ops whose results it needs, if `ops` has them. Each
    worker keeps its order in `ops`, which must list an op after all that it waits for.
    """
    free: dict[Worker, int] = defaultdict(int)
    placed: dict[OpKey, Op] = {}
    for op in ops:
        begin, key = free[op.worker], op_key(op)
        for awaited in producer_keys(key, schedule.route_of(key.pipeline, key.microbatch)):
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
    """Return, for each number below `count`, the smallest number connected with it.

    Each of `pairs` connects two numbers. Two numbers are also connected if both are with a third.
    """
    # Union-find with path halving (Tarjan and van Leeuwen 1984).
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
    """Return all pipelines in groups that share micro-batches, directly or through others.

    A pipeline that shares none is a group by itself. Each group is ascending, and so are the
    groups. Workers of different groups wait for each other only in all-reduces.
    """
    # A worker joins its role's pipeline with those of the micro-batches that it runs.
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
    """Return the ops, in program order, of each live worker whose role is in `pipelines`.

    None means all pipelines.
    """
    wanted = None if pipelines is None else set(pipelines)
    return {
        seat.worker: schedule.ops(seat.worker)
        for seat in schedule.seats
        if wanted is None or seat.role.pipeline in wanted
    }
