"""Find the tensors that workers exchange, and an order without deadlock.

Tensors are numbered among pipelines that share micro-batches, so that both ends use the same
number.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from slipstream.schedules.graph import (
    order_transfers,
    place_as_early,
    programs_of,
    topological_order,
)
from slipstream.schedules.precedence import OpKey, Tensor, consumers_with_rules
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule, Seat, Worker


class Crossing(NamedTuple):
    """Tensor that one worker sends to another.

    If all workers exchange tensors in the order of `number`, none waits forever: what is produced
    first has the lower number (see `schedules.graph.order_transfers`).
    """

    number: int
    tensor: Tensor
    slice: int
    """Number of the slice at which an op takes the tensor."""
    pipeline: int
    microbatch: int
    source: Worker
    target: Worker
    made: int
    """Position of the making op in the source's program; `taken` is the taking op's."""
    taken: int


def crossings_by_worker(
    schedule: Schedule, pipelines: Sequence[int]
) -> dict[Worker, list[Crossing]]:
    """Return the tensors that each worker sends and receives, in an order without deadlock.

    The workers are those whose roles are in these pipelines; the order is `Crossing.number`. These
    pipelines must not share micro-batches with the rest.
    """
    by_worker = _group_by_worker(_ordered_crossings(schedule, pipelines))
    return {
        seat.worker: by_worker[seat.worker]
        for seat in schedule.seats
        if seat.role.pipeline in pipelines
    }


def _group_by_worker(crossings: Iterable[Crossing]) -> dict[Worker, list[Crossing]]:
    """Return the tensors that each worker sends or receives, by worker, in the given order."""
    grouped: dict[Worker, list[Crossing]] = defaultdict(list)
    for crossing in crossings:
        grouped[crossing.source].append(crossing)
        grouped[crossing.target].append(crossing)
    return grouped


def _ordered_crossings(schedule: Schedule, pipelines: Sequence[int]) -> list[Crossing]:
    """Return all tensors that these workers exchange, numbered in an order without deadlock.

    The workers are those whose roles are in these pipelines; numbers begin at 0. The pipelines must
    share no micro-batches with others, and the schedule must pass its checks: its times then give
    such an order. If ops without duration leave the order open, the graph of ops decides. If
    `pipelines` is a single one, each op counts as starting as early as possible; the tensors'
    numbers then stay the same if a failure elsewhere only delays this pipeline.
    """
    wanted = set(pipelines)
    seats = [seat for seat in schedule.seats if seat.role.pipeline in wanted]
    places = _places_by_op(schedule, seats)
    if len(pipelines) == 1:
        order = topological_order(schedule, programs_of(schedule, pipelines))
        early = place_as_early(
            schedule, (op for op in order if isinstance(op, Op) and op.kind in COMPUTE_KINDS)
        )
        places = {
            key: made._replace(start_ticks=early[key].start_ticks) for key, made in places.items()
        }
    crossings = _number_crossings(schedule, places, sorted(places, key=places.__getitem__))
    if not _is_in_program_order(crossings):
        crossings = _number_crossings(
            schedule, places, _order_by_graph(schedule, pipelines, places)
        )
    return crossings


class _OpPlace(NamedTuple):
    """Where and when an op that makes or takes a tensor is planned."""

    start_ticks: int
    way: int
    place: int
    """Position of the op in its worker's program."""
    worker: Worker


_EXCHANGING = OpKind.F, OpKind.I, OpKind.B
Places = Mapping[OpKey, _OpPlace]


def _places_by_op(schedule: Schedule, seats: Sequence[Seat]) -> Places:
    """Return the place of each F, I and B of these seats by key."""
    found: dict[OpKey, _OpPlace] = {}
    ways: dict[tuple[OpKind, int, Sequence[int]], int] = {}
    for seat in seats:
        own_pipeline, worker = seat.role.pipeline, seat.worker
        for place, op in enumerate(schedule.programs[seat.program]):
            if op.kind in _EXCHANGING:
                pipeline = own_pipeline if op.pipeline is None else op.pipeline
                _, slice, _, microbatch = key = cast(
                    OpKey, (op.kind, op.slice, pipeline, op.microbatch)
                )
                path = schedule.route_of(pipeline, microbatch)
                way = ways.get((op.kind, slice, path))
                if way is None:
                    at = path.index(slice)
                    way = ways[op.kind, slice, path] = (
                        at if op.kind is OpKind.F else 2 * len(path) - at
                    )
                found[key] = _OpPlace(op.start_ticks, way, place, worker)
    return found


def _order_by_graph(schedule: Schedule, pipelines: Sequence[int], places: Places) -> list[OpKey]:
    """Return the keys of the ops that send a tensor, in the order of `order_transfers`."""
    found: dict[OpKey, None] = {}
    for tensor in order_transfers(schedule, programs_of(schedule, pipelines)):
        path = schedule.route_of(tensor.pipeline, tensor.microbatch)
        at = path.index(tensor.slice)
        kinds, slice = ([OpKind.F], path[at - 1]) if tensor.kind == "activation" else (
            [OpKind.I, OpKind.B], path[at + 1])
        found |= {
            key: None
            for kind in kinds
            if (key := (kind, slice, tensor.pipeline, tensor.microbatch)) in places
        }
    return list(found)


def _number_crossings(schedule: Schedule, places: Places, order: Sequence[OpKey]) -> list[Crossing]:
    """Return the tensors that go between workers, numbered in the order of their ops."""
    found: list[Crossing] = []
    takers: dict[tuple[OpKind, int, Sequence[int]], list[tuple[OpKind, int, Tensor]]] = {}
    for key in order:
        _, _, made, source = places[key]
        kind, slice, pipeline, microbatch = key
        path = schedule.route_of(pipeline, microbatch)
        taking = takers.get((kind, slice, path))
        if taking is None:
            taking = takers[kind, slice, path] = [(taker[0], taker[1], rule.tensor)
                                                  for taker, rule in consumers_with_rules(key, path)
                                                  if rule.tensor is not None]
        for taking_kind, at_slice, tensor in taking:
            taken = places.get((taking_kind, at_slice, pipeline, microbatch))
            if taken is not None and taken.worker != source:
                found.append(
                    Crossing(
                        len(found),
                        tensor,
                        at_slice,
                        pipeline,
                        microbatch,
                        source,
                        taken.worker,
                        made,
                        taken.place,
                    )
                )
    return found


def _is_in_program_order(crossings: Sequence[Crossing]) -> bool:
    """Return whether this order lets every worker run its program in order.

    At each tensor's turn, the sender must not yet be past the op that makes it, nor the receiver
    have reached the op that takes it.
    """
    reached: dict[Worker, int] = {}
    for crossing in crossings:
        if (
            reached.get(crossing.source, -1) > crossing.made
            or reached.get(crossing.target, -1) >= crossing.taken
        ):
            return False
        reached[crossing.source] = crossing.made
    return True
