"""Find the tensors that workers exchange, and an order without deadlock.

Tensors are numbered within a group of pipelines that share micro-batches. Both ends of a transfer
use the same number.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from slipstream.schedules.graph import (
    order_transfers,
    place_as_early,
    programs_of,
    topological_order,
)
from slipstream.schedules.precedence import OpKey, Tensor, consumers_with_rules
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule, Seat, Worker


class Crossing(NamedTuple):
    """Tensor that one worker sends to another, with its number in a common order.

    If all workers exchange tensors in the order of `number`, none waits forever: what is made first
    has the lower number (see `schedules.graph.order_transfers`).
    """

    number: int
    tensor: Tensor
    slice: int
    """Slice of the op that takes the tensor."""
    pipeline: int
    microbatch: int
    source: Worker
    target: Worker
    made: int
    """Index, in the source's program, of the op that makes the tensor."""
    taken: int
    """Index, in the target's program, of the op that takes the tensor."""


def crossings_by_worker(
    schedule: Schedule, pipelines: Sequence[int]
) -> dict[Worker, list[Crossing]]:
    """Return the tensors that each worker sends or receives, in an order without deadlock.

    The result has the workers whose roles are in `pipelines`. These pipelines must share no
    micro-batches with others, and the schedule must pass `schedules.check`. The tensors are sorted
    by `Crossing.number`.
    """
    by_worker = _group_by_worker(_ordered_crossings(schedule, pipelines))
    return {
        seat.worker: by_worker[seat.worker]
        for seat in schedule.seats
        if seat.role.pipeline in pipelines
    }


def _group_by_worker(crossings: Iterable[Crossing]) -> dict[Worker, list[Crossing]]:
    """Return the tensors that each worker sends or receives, in the given order."""
    grouped: dict[Worker, list[Crossing]] = defaultdict(list)
    for crossing in crossings:
        grouped[crossing.source].append(crossing)
        grouped[crossing.target].append(crossing)
    return grouped


def _ordered_crossings(schedule: Schedule, pipelines: Sequence[int]) -> list[Crossing]:
    """Return the tensors that these pipelines' workers exchange, in an order without deadlock."""
    # The schedule passes its checks, so planned starts give an order without deadlock.
    wanted = set(pipelines)
    seats = [seat for seat in schedule.seats if seat.role.pipeline in wanted]
    places = _places_by_op(schedule, seats)
    # In a single pipeline, each op counts as starting as early as possible: tensors then keep their
    # numbers if a failure elsewhere only delays this pipeline.
    if len(pipelines) == 1:
        order = topological_order(schedule, programs_of(schedule, pipelines))
        early = place_as_early(
            schedule, (op for op in order if isinstance(op, Op) and op.kind in COMPUTE_KINDS)
        )
        places = {
            key: made._replace(start_ticks=early[key].start_ticks) for key, made in places.items()
        }
    # Of ops without duration at one tick, the graph knows the order.
    crossings = _number_crossings(schedule, places, sorted(places, key=places.__getitem__))
    if not _is_in_program_order(crossings):
        crossings = _number_crossings(
            schedule, places, _order_by_graph(schedule, pipelines, places)
        )
    return crossings


class _OpPlace(NamedTuple):
    """Place and time of an op that makes or takes a tensor."""

    start_ticks: int
    way: int
    """Number that ascends over a micro-batch's ops: forwards, then backwards."""
    place: int
    """Index of the op in its worker's program."""
    worker: Worker


_EXCHANGING = OpKind.F, OpKind.I, OpKind.B
"""Kinds of op that make or take tensors."""
Places = Mapping[OpKey, _OpPlace]


def _places_by_op(schedule: Schedule, seats: Sequence[Seat]) -> Places:
    """Return the place of each F, I and B of these seats, by op key."""
    places: dict[OpKey, _OpPlace] = {}
    ways: dict[tuple[OpKind, int, Sequence[int]], int] = {}
    for seat in seats:
        role_pipeline, worker = seat.role.pipeline, seat.worker
        for place, op in enumerate(schedule.programs[seat.program]):
            if op.kind in _EXCHANGING:
                pipeline = role_pipeline if op.pipeline is None else op.pipeline
                assert op.slice is not None and op.microbatch is not None
                path = schedule.route_of(pipeline, op.microbatch)
                # Many micro-batches share a route, which is searched once for all of them.
                way = ways.get((op.kind, op.slice, path))
                if way is None:
                    position = path.index(op.slice)
                    way = position if op.kind is OpKind.F else 2 * len(path) - position
                    ways[op.kind, op.slice, path] = way
                key = OpKey(op.kind, op.slice, pipeline, op.microbatch)
                places[key] = _OpPlace(op.start_ticks, way, place, worker)
    return places


def _order_by_graph(schedule: Schedule, pipelines: Sequence[int], places: Places) -> list[OpKey]:
    """Return the keys of the ops that send tensors, in the order of `order_transfers`."""
    senders: dict[OpKey, None] = {}
    for transfer in order_transfers(schedule, programs_of(schedule, pipelines)):
        path = schedule.route_of(transfer.pipeline, transfer.microbatch)
        position = path.index(transfer.slice)
        if transfer.kind == "activation":
            kinds, slice_ = [OpKind.F], path[position - 1]
        else:
            kinds, slice_ = [OpKind.I, OpKind.B], path[position + 1]
        for kind in kinds:
            key = OpKey(kind, slice_, transfer.pipeline, transfer.microbatch)
            if key in places:
                senders[key] = None
    return list(senders)


def _number_crossings(schedule: Schedule, places: Places, order: Sequence[OpKey]) -> list[Crossing]:
    """Return the tensors that go between workers, numbered from 0 in this order of ops."""
    crossings: list[Crossing] = []
    takers: dict[tuple[OpKind, int, Sequence[int]], list[_Taker]] = {}
    for key in order:
        made = places[key]
        path = schedule.route_of(key.pipeline, key.microbatch)
        # The takers are the same for all micro-batches of a route.
        kinds = takers.get((key.kind, key.slice, path))
        if kinds is None:
            kinds = takers[key.kind, key.slice, path] = list(_find_takers(key, path))
        for taker in kinds:
            taken = places.get(OpKey(taker.kind, taker.slice, key.pipeline, key.microbatch))
            # What one worker makes and takes itself does not cross; ops of other groups are not in
            # `places`.
            if taken is not None and taken.worker != made.worker:
                crossings.append(
                    Crossing(
                        number=len(crossings),
                        tensor=taker.tensor,
                        slice=taker.slice,
                        pipeline=key.pipeline,
                        microbatch=key.microbatch,
                        source=made.worker,
                        target=taken.worker,
                        made=made.place,
                        taken=taken.place,
                    )
                )
    return crossings


class _Taker(NamedTuple):
    """Kind and slice of an op that takes a tensor, whichever the micro-batch."""

    kind: OpKind
    slice: int
    tensor: Tensor


def _find_takers(key: OpKey, path: Sequence[int]) -> Iterator[_Taker]:
    """Yield the ops on the route `path` that take the tensor of op `key`."""
    for taker, rule in consumers_with_rules(key, path):
        if rule.tensor is not None:
            yield _Taker(taker.kind, taker.slice, rule.tensor)


def _is_in_program_order(crossings: Sequence[Crossing]) -> bool:
    """Return whether workers that exchange tensors in this order keep that of their programs."""
    # At each tensor's turn, the sender must not yet be past the op that makes it, nor the receiver
    # have reached the op that takes it.
    reached: dict[Worker, int] = {}
    for crossing in crossings:
        if (
            reached.get(crossing.source, -1) > crossing.made
            or reached.get(crossing.target, -1) >= crossing.taken
        ):
            return False
        reached[crossing.source] = crossing.made
    return True
