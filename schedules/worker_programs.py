"""Divide a schedule into what each worker must know.

A worker needs its own program, the tensors that it sends and receives, and the workers that it sums gradients with.
Tensors are numbered here, among pipelines that share micro-batches, so that both ends use the same number. What is
equal for several workers is a single *content*, named by its digest: all workers of a column that are far from any
failure have the same content. Planned times are left out, because no worker follows them; a worker that runs the same
ops in the same order as before keeps its content. Contents name pipelines by their positions among those that share
micro-batches, so a schedule whose pipelines get other numbers keeps its contents.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from slipstream.schedules.graph import order_transfers, pipeline_groups, place_as_early, programs_of, topological_order
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.precedence import OpKey, Tensor, consumers_with_rules
from slipstream.schedules.schedule import (
    COMPUTE_KINDS,
    Op,
    OpKind,
    Program,
    ProgramOp,
    Schedule,
    Seat,
    Worker,
    with_pipeline_numbers,
)

Sums = tuple[tuple[LayerRange, tuple[Worker, ...]], ...]
"""Ranges of layers over which a worker reduces gradients, each with all workers that take part."""
SumsByColumn = tuple[tuple[LayerRange, tuple[Worker, ...] | int], ...]
"""Form in which `Sums` is stored: the workers that take part, or a column for all of its live ones.

So a failure changes nothing.
"""
Route = tuple[int, int, tuple[int, ...]]
"""Route of a micro-batch, as (pipeline, number in it, numbers of its slices in order)."""
DIGEST_CHARACTERS = 32


class Crossing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tensor that one worker sends to another.

    If all workers exchange tensors in the order of `number`, none waits forever: what is produced first has the lower
    number (see `schedules.graph.order_transfers`).
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
    """Position, in the source's program, of the op that makes the tensor.

    The field `taken` is the position, in the target's program, of the op that takes it.
    """
    taken: int

    def with_pipeline_numbers(self, pipelines: Sequence[int]) -> "Crossing":
        """Return a copy of this tensor in which a pipeline p is number `pipelines[p]`."""
        (before, from_column), (after, to_column) = self.source, self.target
        return Crossing(self.number, self.tensor, self.slice, pipelines[self.pipeline], self.microbatch,
                        Worker(pipelines[before], from_column), Worker(pipelines[after], to_column), self.made,
                        self.taken)


class WorkerSchedule(Schedule, frozen=True, kw_only=True):
    """Schedule as one worker knows it: it has only this worker's seat and program, and all ops start at tick 0."""

    crossings: tuple[Crossing, ...] = ()
    """Tensors that the worker sends and receives, sorted by their numbers."""
    sums: Sums = ()
    ties: tuple[tuple[int, tuple[Worker, ...]], ...] = ()
    """Groups of layers with shared (tied) parameters of which this worker holds any: (number of the group, all
    holders)."""
    own_routes: tuple[Route, ...] = ()
    """Routes of the micro-batches that this worker runs. Empty if all micro-batches pass the stages of the grid."""

    @property
    def members(self) -> tuple[Worker, ...]:
        """Workers that take part in the current generation, sorted."""
        down = set(self.failed)
        return tuple(worker for worker in self.grid.workers() if worker not in down)

    def route_of(self, pipeline: int, microbatch: int) -> Sequence[int]:
        """Return the numbers of the slices that a micro-batch passes, in order; this worker must run the
        micro-batch."""
        if not self.own_routes:
            return self.grid.stages_of_microbatch(microbatch)
        return next((slices for one, number, slices in self.own_routes if (one, number) == (pipeline, microbatch)), ())


class WorkerProgram(msgspec.Struct, frozen=True, array_like=True):
    """Program of a worker with its tensors and routes, as stored; it names pipelines by their index in
    `WorkerShare.pipelines`."""

    program: Program
    crossings: tuple[Crossing, ...]
    routes: tuple[Route, ...]


class WorkerShare(NamedTuple):
    """Part of a divided schedule that one worker needs: its seat, and the digests of everything else, which are keys of
    `DividedSchedule.contents`."""

    seat: Seat
    """Seat of the worker (role, held layers), in which its program is number 0."""
    pipelines: tuple[int, ...]
    """Numbers of the pipelines that the worker's `WorkerProgram` names by index."""
    frame: str
    """Digest of what all workers know: the schedule without seats and programs.

    The fields `work` and `sums` are the digests of the worker's `WorkerProgram` and of its gradient sums.
    """
    work: str
    sums: str

    @property
    def content_digests(self) -> tuple[str, str, str]:
        """Digests of all that this share refers to: what all workers know (`frame`), the worker's program (`work`), and
        its gradient sums (`sums`)."""
        return self.frame, self.work, self.sums


class DividedSchedule(msgspec.Struct, frozen=True):
    """Schedule, divided into what each worker needs of it (its share); what several shares have in common is stored
    once."""

    failed: tuple[Worker, ...]
    shares: dict[Worker, WorkerShare]
    contents: dict[str, bytes]
    """JSON of what shares refer to (frame, programs, gradient sums), by its digest."""


EquivalentSchedule = tuple[DividedSchedule, Mapping[int, int]]
"""Divided schedule that differs only in pipeline numbers, with all workers in their own roles, and the new number of
each pipeline."""


def divide_schedule(schedule: Schedule, alike: EquivalentSchedule | None = None, *,
                    ties: Sequence[Sequence[Worker]] = ()) -> DividedSchedule:
    """Divide a schedule into shares of its workers. `ties` has all holders of each group of layers with tied
    parameters.

    The argument `alike` is a pair: a divided schedule that differs from this one only in pipeline numbers, and the new
    number of each of its pipelines. Its `WorkerProgram` contents are reused, which saves nearly all of the computation.
    The order of tensors that are planned for the same instant may then differ, but all workers can follow either order.
    """
    contents: dict[str, bytes] = {}

    def store(content: object) -> str:
        """Encode an object to which shares refer, add it to `contents`, and return its digest."""
        data = msgspec.json.encode(content)
        digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]
        contents[digest] = data
        return digest

    # The frame has neither failures nor the plan's figures, so that it stays the same from one order to the next.
    frame = store(msgspec.structs.replace(schedule, seats=(), programs=(), failed=(), period_ticks=0,
                                          lower_bound_ticks=0, status="feasible", method="", bound_scope=msgspec.UNSET))
    if alike is None:
        works = dict(_encode_programs(schedule, store))
    else:
        parts, numbers = alike
        works = {Worker(numbers[worker.pipeline], worker.column): (
            tuple(numbers[one] for one in share.pipelines), share.work) for worker, share in parts.shares.items()}
        contents |= {share.work: parts.contents[share.work] for share in parts.shares.values()}
    shares = {}
    for seat, sums in zip(schedule.seats, _encode_sums(schedule, ties, store), strict=True):
        pipelines, work = works[seat.worker]
        shares[seat.worker] = WorkerShare(Seat(seat.worker, seat.role, 0, seat.holds), pipelines, frame, work, sums)
    failed = tuple(worker for worker in schedule.grid.workers() if worker not in shares)
    return DividedSchedule(failed, shares, contents)


def assemble_worker_schedule(failed: tuple[Worker, ...], share: WorkerShare,
                             contents: Mapping[str, bytes]) -> WorkerSchedule:
    """Build a worker's schedule from its share of a divided schedule. `contents` has what the share refers to, by
    digest, and `failed` the workers that are down.

    Raises KeyError if a content is missing.
    """
    head = _FRAME.decode(contents[share.frame])
    work = _WORK.decode(contents[share.work])
    sums, ties = _SUMS.decode(contents[share.sums])
    fields = {name: getattr(head, name) for name in Schedule.__struct_fields__}
    numbers = share.pipelines
    down = set(failed)
    reduced = tuple((layers, tuple(worker for pipeline in range(head.grid.pipelines)
                                   if (worker := Worker(pipeline, sharers)) not in down)
                     if isinstance(sharers, int) else sharers) for layers, sharers in sums)
    return WorkerSchedule(**fields | {"failed": failed, "seats": (share.seat,),
                                      "programs": (with_pipeline_numbers(work.program, numbers),)},
                          crossings=tuple(worker.with_pipeline_numbers(numbers) for worker in work.crossings),
                          sums=reduced, ties=ties,
                          own_routes=tuple((numbers[pipeline], number, slices) for pipeline, number,
                                           slices in work.routes))


def crossings_of(schedule: Schedule, worker: Worker) -> Sequence[Crossing]:
    """Return the tensors that a live worker sends and receives, sorted by their numbers.

    For a `WorkerSchedule`, the worker must be its own.
    """
    if isinstance(schedule, WorkerSchedule):
        assert worker == schedule.seats[0].worker
        return schedule.crossings
    pipeline = schedule.seat_of[worker].role.pipeline
    group = next(group for group in pipeline_groups(schedule) if pipeline in group)
    return crossings_by_worker(schedule, group)[worker]


def crossings_by_worker(schedule: Schedule, pipelines: Sequence[int]) -> dict[Worker, list[Crossing]]:
    """Return the tensors that each worker whose role is in these pipelines sends and receives, in an order
    (`Crossing.number`) that avoids deadlocks.

    These pipelines must not share micro-batches with the rest.
    """
    by_worker = _group_by_worker(_ordered_crossings(schedule, pipelines))
    return {seat.worker: by_worker[seat.worker] for seat in schedule.seats if seat.role.pipeline in pipelines}


def _group_by_worker(crossings: Iterable[Crossing]) -> dict[Worker, list[Crossing]]:
    """Return the tensors that each worker sends or receives, by worker, in the given order."""
    grouped: dict[Worker, list[Crossing]] = defaultdict(list)
    for crossing in crossings:
        grouped[crossing.source].append(crossing)
        grouped[crossing.target].append(crossing)
    return grouped


def _ordered_crossings(schedule: Schedule, pipelines: Sequence[int],
                       named: Mapping[int, int] | None = None) -> list[Crossing]:
    """Return all tensors that workers whose roles are in these pipelines send to each other, numbered from 0 in an
    order in which every worker can exchange its own without a deadlock.

    If `named` is given, it maps pipelines to the numbers that the result uses. The pipelines in `pipelines` must share
    no micro-batches with others, and the schedule must pass its checks: its times then give such an order. If ops
    without duration leave the order open, the graph of ops decides. If `pipelines` is a single one, each op counts as
    starting as early as possible; the tensors' numbers then stay the same if a failure elsewhere only delays this
    pipeline.
    """
    wanted = set(pipelines)
    seats = [seat for seat in schedule.seats if seat.role.pipeline in wanted]
    places = _places_by_op(schedule, seats)
    if len(pipelines) == 1:
        order = topological_order(schedule, programs_of(schedule, pipelines))
        early = place_as_early(schedule, (op for op in order if isinstance(op, Op) and op.kind in COMPUTE_KINDS))
        places = {key: made._replace(start_ticks=early[key].start_ticks) for key, made in places.items()}
    names = named or range(schedule.grid.pipelines)
    crossings = _number_crossings(schedule, places, sorted(places, key=places.__getitem__), names)
    if not _is_in_program_order(crossings):
        crossings = _number_crossings(schedule, places, _order_by_graph(schedule, pipelines, places), names)
    return crossings


def _encode_programs(schedule: Schedule,
                     store: Callable[[object], str]) -> Iterator[tuple[Worker, tuple[tuple[int, ...], str]]]:
    """Iterate over pairs of a worker and (numbers of the pipelines that its `WorkerProgram` names by index, digest of
    that program). The function `store` stores a program and returns its digest."""
    seats: dict[int, list[Seat]] = defaultdict(list)
    for seat in schedule.seats:
        seats[seat.role.pipeline].append(seat)
    whole = bool(schedule.common_route)
    known: dict[object, list[str]] = {}
    for group in pipeline_groups(schedule):
        group_seats = [seat for pipeline in group for seat in seats[pipeline]]
        pipelines = tuple(sorted({*group, *(seat.worker.pipeline for seat in group_seats)}))
        place = {pipeline: index for index, pipeline in enumerate(pipelines)}
        layout = tuple((place[seat.worker.pipeline], seat.worker.column, place[seat.role.pipeline], seat.role.column,
                        seat.program) for seat in group_seats)
        if layout not in known:
            crossings = _group_by_worker(_ordered_crossings(schedule, group, place))
            known[layout] = [store(WorkerProgram(
                tuple(_without_time(op, place) for op in schedule.programs[seat.program]),
                tuple(crossings[Worker(place[seat.worker.pipeline], seat.worker.column)]),
                () if whole else tuple(_routes_of_seat(schedule, seat, place)))) for seat in group_seats]
        for seat, digest in zip(group_seats, known[layout], strict=True):
            yield seat.worker, (pipelines, digest)


def _encode_sums(schedule: Schedule, ties: Sequence[Sequence[Worker]], store: Callable[[object], str]) -> Iterator[str]:
    """Iterate over the seats; yield for each the digest of what its worker sums: the layers that it all-reduces, with
    the workers that take part, and the groups of layers with tied parameters that it holds.

    The argument `ties` has all holders of each such group. The function `store` stores the content and returns its
    digest.
    """
    tied = [(number, tuple(sorted(workers))) for number, workers in enumerate(ties)]
    ties_of: dict[Worker, tuple[int, ...]] = defaultdict(tuple)
    for number, workers in tied:
        for worker in workers:
            ties_of[worker] += (number,)
    sums = _sums_by_program(schedule)
    known: dict[tuple[int, tuple[int, ...]], str] = {}
    for seat in schedule.seats:
        key = seat.program, ties_of.get(seat.worker, ())
        if key not in known:
            known[key] = store((sums[seat.program], [tied[number] for number in key[1]]))
        yield known[key]


def _without_time(op: ProgramOp, place: Mapping[int, int]) -> ProgramOp:
    """Return a copy of an op that starts at tick 0, in which its pipeline p is replaced by the index `place[p]`."""
    return ProgramOp(op.kind, op.slice, op.microbatch, 0, None if op.pipeline is None else place[op.pipeline])


def _routes_of_seat(schedule: Schedule, seat: Seat, place: Mapping[int, int]) -> Iterator[Route]:
    """Iterate over the routes of the micro-batches that a seat's worker runs, in which each pipeline p is replaced by
    the index `place[p]`."""
    own = seat.role.pipeline
    for pipeline, number in sorted({(own if op.pipeline is None else op.pipeline, op.microbatch)
                                    for op in schedule.programs[seat.program] if op.microbatch is not None}):
        yield place[pipeline], number, tuple(schedule.route_of(pipeline, number))


def _sums_by_program(schedule: Schedule) -> list[SumsByColumn]:
    """Return, for each program, pairs of a range of layers that it all-reduces and the workers that take part.

    The workers are given by the number of their column if they are all of its live workers, else as a tuple.
    """
    ranges = [sorted({schedule.layers_of(op.slice) for op in program if op.kind is OpKind.A and op.slice is not None})
              for program in schedule.programs]
    workers: dict[LayerRange, list[Worker]] = defaultdict(list)
    for seat in schedule.seats:
        for layers in ranges[seat.program]:
            workers[layers].append(seat.worker)
    live = Counter(seat.worker.column for seat in schedule.seats)
    reducers: dict[LayerRange, tuple[Worker, ...] | int] = {}
    for layers, holders in workers.items():
        columns = {worker.column for worker in holders}
        reducers[layers] = holders[0].column if len(columns) == 1 and len(holders) == live[holders[0].column] \
            else tuple(sorted(holders))
    return [tuple((layers, reducers[layers]) for layers in own_ranges if layers in reducers) for own_ranges in ranges]


class _OpPlace(NamedTuple):
    """Planned start of an op that makes or takes a tensor, its positions on the route and in the program, and its
    worker.

    In a sort, the start comes first, then the position on the route (backwards after forwards).
    """

    start_ticks: int
    way: int
    place: int
    """Position of the op in its worker's program."""
    worker: Worker


_EXCHANGING = OpKind.F, OpKind.I, OpKind.B
Places = Mapping[OpKey, _OpPlace]


def _places_by_op(schedule: Schedule, seats: Sequence[Seat]) -> Places:
    """Return, by the op's key, the planned start of each F, I and B of these seats, its position on the route and in
    the program, and its worker."""
    found: dict[OpKey, _OpPlace] = {}
    ways: dict[tuple[OpKind, int, Sequence[int]], int] = {}
    for seat in seats:
        own_pipeline, worker = seat.role.pipeline, seat.worker
        for place, op in enumerate(schedule.programs[seat.program]):
            if op.kind in _EXCHANGING:
                pipeline = own_pipeline if op.pipeline is None else op.pipeline
                _, slice, _, microbatch = key = cast(OpKey, (op.kind, op.slice, pipeline, op.microbatch))
                path = schedule.route_of(pipeline, microbatch)
                way = ways.get((op.kind, slice, path))
                if way is None:
                    at = path.index(slice)
                    way = ways[op.kind, slice, path] = at if op.kind is OpKind.F else 2 * len(path) - at
                found[key] = _OpPlace(op.start_ticks, way, place, worker)
    return found


def _order_by_graph(schedule: Schedule, pipelines: Sequence[int], places: Places) -> list[OpKey]:
    """Return the keys of those ops of these pipelines' workers that send a tensor, in the order of
    `schedules.graph.order_transfers`. `places` is the result of `_places_by_op`."""
    found: dict[OpKey, None] = {}
    for tensor in order_transfers(schedule, programs_of(schedule, pipelines)):
        path = schedule.route_of(tensor.pipeline, tensor.microbatch)
        at = path.index(tensor.slice)
        kinds, slice = ([OpKind.F], path[at - 1]) if tensor.kind == "activation" else (
            [OpKind.I, OpKind.B], path[at + 1])
        found |= {key: None for kind in kinds if (key := (kind, slice, tensor.pipeline, tensor.microbatch)) in places}
    return list(found)


def _number_crossings(schedule: Schedule, places: Places, order: Sequence[OpKey],
                      names: Mapping[int, int] | Sequence[int]) -> list[Crossing]:
    """Return the tensors that go from one worker to another, numbered in the order of the ops that make them.

    The argument `order` has the keys of these ops, and `places` is the result of `_places_by_op`; `names` has the
    number by which the result names each pipeline.
    """
    found: list[Crossing] = []
    takers: dict[tuple[OpKind, int, Sequence[int]], list[tuple[OpKind, int, Tensor]]] = {}
    workers: dict[Worker, Worker] = {}
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
                for worker in (source, taken.worker):
                    if worker not in workers:
                        workers[worker] = Worker(names[worker.pipeline], worker.column)
                found.append(Crossing(len(found), tensor, at_slice, names[pipeline], microbatch, workers[source],
                                      workers[taken.worker], made, taken.place))
    return found


def _is_in_program_order(crossings: Sequence[Crossing]) -> bool:
    """Return whether every worker can exchange tensors in this order while it runs its program in order.

    At each tensor's turn, the sender must not yet be past the op that makes it, nor the receiver have reached the op
    that takes it.
    """
    reached: dict[Worker, int] = {}
    for crossing in crossings:
        if reached.get(crossing.source, -1) > crossing.made or reached.get(crossing.target, -1) >= crossing.taken:
            return False
        reached[crossing.source] = crossing.made
    return True


_FRAME = msgspec.json.Decoder(Schedule)
_WORK = msgspec.json.Decoder(WorkerProgram)
_SUMS = msgspec.json.Decoder(tuple[SumsByColumn, tuple[tuple[int, tuple[Worker, ...]], ...]])
