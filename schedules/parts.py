"""Parts of a schedule: what each worker must know of it, and no more.

A worker needs its own program, the tensors that it sends and receives, and with whom it sums gradients. Tensors are
numbered here, among pipelines that share micro-batches: the same number at both ends. What is equal for several workers
is one content, named by its digest: all workers of a column that are far from any failure have the same. Nobody follows
planned times, so that these are left out, and who runs the same ops in the same order as before has the same content.
Contents name pipelines by their places among those that share micro-batches, so that a schedule whose pipelines get
other numbers has the contents that it had.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from slipstream.schedules.graph import as_early, groups, programs_of, topological_order, transfers
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.precedence import OpKey, Tensor, consumers
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Program, ProgramOp, Schedule, Seat, Worker, renamed

Sums = tuple[tuple[LayerRange, tuple[Worker, ...]], ...]
"""The ranges of layers by which a worker reduces gradients, each with all workers that do."""
SumsByColumn = tuple[tuple[LayerRange, tuple[Worker, ...] | int], ...]
"""The same; a column stands for all live workers of it, so that a failure changes nothing."""
Route = tuple[int, int, tuple[int, ...]]
"""Pipeline and number of a micro-batch, and the slices that it passes."""
DIGEST_CHARACTERS = 32


class Crossing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that one worker sends to another.

    In an order of these numbers nobody waits for ever: what is produced first has the lower one, see
    `schedules.graph.transfers`.
    """

    number: int
    tensor: Tensor
    slice: int
    """The one that takes it."""
    pipeline: int
    microbatch: int
    source: Worker
    target: Worker
    made: int
    """The place in its source's program of the op that makes it, and in its target's of the one that takes it."""
    taken: int

    def named(self, pipelines: Sequence[int]) -> "Crossing":
        """The same with other numbers of pipelines."""
        (before, from_column), (after, to_column) = self.source, self.target
        return Crossing(self.number, self.tensor, self.slice, pipelines[self.pipeline], self.microbatch,
                        Worker(pipelines[before], from_column), Worker(pipelines[after], to_column), self.made,
                        self.taken)


class Part(Schedule, frozen=True, kw_only=True):
    """A schedule as one worker knows it: with its own seat and program alone, all ops of which start at tick 0."""

    crossings: tuple[Crossing, ...] = ()
    """What it sends and receives, by number."""
    sums: Sums = ()
    ties: tuple[tuple[int, tuple[Worker, ...]], ...] = ()
    """The groups of layers that share parameters of which it holds any, by their number, with all workers that do."""
    own_routes: tuple[Route, ...] = ()
    """Of micro-batches that it runs, where these are not the grid's."""

    @property
    def members(self) -> tuple[Worker, ...]:
        """All workers that take part, sorted."""
        down = set(self.failed)
        return tuple(worker for worker in self.grid.workers() if worker not in down)

    def path(self, pipeline: int, microbatch: int) -> Sequence[int]:
        """The slices of a micro-batch that this worker runs, in order."""
        if not self.own_routes:
            return self.grid.path(microbatch)
        return next((slices for one, number, slices in self.own_routes if (one, number) == (pipeline, microbatch)), ())


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A worker's program and its tensors: a content. Its pipelines are places in `Share.pipelines`."""

    program: Program
    crossings: tuple[Crossing, ...]
    routes: tuple[Route, ...]


class Share(NamedTuple):
    """One worker's share of a schedule."""

    seat: Seat
    """With its program as number 0."""
    pipelines: tuple[int, ...]
    """Those that its work names."""
    frame: str
    """Digests of contents: of what all workers know, of its `Work`, of its sums."""
    work: str
    sums: str

    @property
    def contents(self) -> tuple[str, str, str]:
        """All digests."""
        return self.frame, self.work, self.sums


class Parts(msgspec.Struct, frozen=True):
    """A schedule, divided among its workers."""

    failed: tuple[Worker, ...]
    shares: dict[Worker, Share]
    contents: dict[str, bytes]
    """By digest."""


Alike = tuple[Parts, Mapping[int, int]]
"""The parts of a schedule that is the same but for the numbers of its pipelines, and the numbers that these have here.
Each worker plays its own role."""


def divide(schedule: Schedule, alike: Alike | None = None, *, ties: Sequence[Sequence[Worker]] = ()) -> Parts:
    """A schedule's parts. `ties` are the workers that hold any layer of each group that shares parameters.

    The works of `alike` are taken: they are nearly all of what is computed here. Only the order of tensors that are
    made at one instant by plan may then be another one, which all can follow as well.
    """
    contents: dict[str, bytes] = {}

    def keep(content: object) -> str:
        data = msgspec.json.encode(content)
        digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]
        contents[digest] = data
        return digest

    # Neither failures nor the plan's own figures are in it: it stays the same from one order to the next.
    frame = keep(msgspec.structs.replace(schedule, seats=(), programs=(), failed=(), period_ticks=0,
                                         lower_bound_ticks=0, status="feasible", method="", bound_scope=msgspec.UNSET))
    if alike is None:
        works = dict(_works(schedule, keep))
    else:
        parts, numbers = alike
        works = {Worker(numbers[worker.pipeline], worker.column): (
            tuple(numbers[one] for one in share.pipelines), share.work) for worker, share in parts.shares.items()}
        contents |= {share.work: parts.contents[share.work] for share in parts.shares.values()}
    tied = [(number, tuple(sorted(workers))) for number, workers in enumerate(ties)]
    ties_of: dict[Worker, tuple[int, ...]] = defaultdict(tuple)
    for number, workers in tied:
        for worker in workers:
            ties_of[worker] += (number,)
    sums_of_program = _sums(schedule)
    sums: dict[tuple[int, tuple[int, ...]], str] = {}
    shares = {}
    for seat in schedule.seats:
        mine = ties_of.get(seat.worker, ())
        if (seat.program, mine) not in sums:
            sums[seat.program, mine] = keep((sums_of_program[seat.program], [tied[number] for number in mine]))
        pipelines, work = works[seat.worker]
        shares[seat.worker] = Share(Seat(seat.worker, seat.role, 0, seat.holds), pipelines, frame, work,
                                    sums[seat.program, mine])
    down = tuple(worker for worker in schedule.grid.workers() if worker not in shares)
    return Parts(down, shares, contents)


def part_from(failed: tuple[Worker, ...], share: Share, contents: Mapping[str, bytes]) -> Part:
    """A worker's part, put together again. Raises KeyError where a content is not there."""
    head = _FRAME.decode(contents[share.frame])
    work = _WORK.decode(contents[share.work])
    sums, ties = _SUMS.decode(contents[share.sums])
    fields = {name: getattr(head, name) for name in Schedule.__struct_fields__}
    numbers = share.pipelines
    down = set(failed)
    reduced = tuple((layers, tuple(one for pipeline in range(head.grid.pipelines)
                                   if (one := Worker(pipeline, sharers)) not in down)
                     if isinstance(sharers, int) else sharers) for layers, sharers in sums)
    return Part(**fields | {"failed": failed, "seats": (share.seat,), "programs": (renamed(work.program, numbers),)},
                crossings=tuple(one.named(numbers) for one in work.crossings), sums=reduced, ties=ties,
                own_routes=tuple((numbers[pipeline], number, slices) for pipeline, number, slices in work.routes))


def crossings_of(schedule: Schedule, worker: Worker) -> Sequence[Crossing]:
    """What a live worker sends and receives, by number; of a part, its own worker."""
    if isinstance(schedule, Part):
        assert worker == schedule.seats[0].worker
        return schedule.crossings
    pipeline = schedule.seat_of[worker].role.pipeline
    group = next(group for group in groups(schedule) if pipeline in group)
    return crossings_by_worker(schedule, group)[worker]


def crossings_by_worker(schedule: Schedule, pipelines: Sequence[int]) -> dict[Worker, list[Crossing]]:
    """What each worker whose role is in these pipelines sends and receives, by number. These pipelines share no
    micro-batch with the rest."""
    found = _by_worker(_crossings(schedule, pipelines))
    return {seat.worker: found[seat.worker] for seat in schedule.seats if seat.role.pipeline in pipelines}


def _by_worker(crossings: Iterable[Crossing]) -> dict[Worker, list[Crossing]]:
    found: dict[Worker, list[Crossing]] = defaultdict(list)
    for one in crossings:
        found[one.source].append(one)
        found[one.target].append(one)
    return found


def _crossings(schedule: Schedule, pipelines: Sequence[int], named: Mapping[int, int] | None = None) -> list[Crossing]:
    """All tensors that workers whose roles are in these pipelines exchange, by number; with other numbers of pipelines
    where these are `named`.

    These pipelines share no micro-batch with the rest, and the schedule passes its checks. So its times put ops in an
    order that all can follow; where ops that take no time leave that open, the graph does. In a pipeline by itself each
    op counts as early as it can be: its numbers stay the same where a failure elsewhere only makes it wait.
    """
    wanted = set(pipelines)
    seats = [seat for seat in schedule.seats if seat.role.pipeline in wanted]
    places = _places(schedule, seats)
    if len(pipelines) == 1:
        order = topological_order(schedule, programs_of(schedule, pipelines))
        early = as_early(schedule, (op for op in order if isinstance(op, Op) and op.kind in COMPUTE_KINDS))
        places = {key: made._replace(start_ticks=early[key].start_ticks) for key, made in places.items()}
    names = named or range(schedule.grid.pipelines)
    found = _numbered(schedule, places, sorted(places, key=places.__getitem__), names)
    if not _can_be_followed(found):
        found = _numbered(schedule, places, _by_graph(schedule, pipelines, places), names)
    return found


def _works(schedule: Schedule, keep: Callable[[object], str]) -> Iterator[tuple[Worker, tuple[tuple[int, ...], str]]]:
    """Of each worker, the pipelines that its work names, and the work's digest."""
    seats: dict[int, list[Seat]] = defaultdict(list)
    for seat in schedule.seats:
        seats[seat.role.pipeline].append(seat)
    whole = bool(schedule.usual_path)
    known: dict[object, list[str]] = {}
    for group in groups(schedule):
        mine = [seat for pipeline in group for seat in seats[pipeline]]
        pipelines = tuple(sorted({*group, *(seat.worker.pipeline for seat in mine)}))
        place = {pipeline: index for index, pipeline in enumerate(pipelines)}
        alike = tuple((place[seat.worker.pipeline], seat.worker.column, place[seat.role.pipeline], seat.role.column,
                       seat.program) for seat in mine)
        if alike not in known:
            crossings = _by_worker(_crossings(schedule, group, place))
            known[alike] = [keep(Work(
                tuple(_untimed(op, place) for op in schedule.programs[seat.program]),
                tuple(crossings[Worker(place[seat.worker.pipeline], seat.worker.column)]),
                () if whole else tuple(_routes(schedule, seat, place)))) for seat in mine]
        for seat, digest in zip(mine, known[alike], strict=True):
            yield seat.worker, (pipelines, digest)


def _untimed(op: ProgramOp, place: Mapping[int, int]) -> ProgramOp:
    return ProgramOp(op.kind, op.slice, op.microbatch, 0, None if op.pipeline is None else place[op.pipeline])


def _routes(schedule: Schedule, seat: Seat, place: Mapping[int, int]) -> Iterator[Route]:
    own = seat.role.pipeline
    for pipeline, number in sorted({(own if op.pipeline is None else op.pipeline, op.microbatch)
                                    for op in schedule.programs[seat.program] if op.microbatch is not None}):
        yield place[pipeline], number, tuple(schedule.path(pipeline, number))


def _sums(schedule: Schedule) -> list[SumsByColumn]:
    """By program."""
    ranges = [sorted({schedule.layers_of(op.slice) for op in program if op.kind is OpKind.A and op.slice is not None})
              for program in schedule.programs]
    workers: dict[LayerRange, list[Worker]] = defaultdict(list)
    for seat in schedule.seats:
        for layers in ranges[seat.program]:
            workers[layers].append(seat.worker)
    live = Counter(seat.worker.column for seat in schedule.seats)
    told: dict[LayerRange, tuple[Worker, ...] | int] = {}
    for layers, found in workers.items():
        columns = {worker.column for worker in found}
        told[layers] = found[0].column if len(columns) == 1 and len(found) == live[found[0].column] \
            else tuple(sorted(found))
    return [tuple((layers, told[layers]) for layers in mine if layers in told) for mine in ranges]


class _Made(NamedTuple):
    """When an op that gives something to others, or takes it, begins by plan, and where. Of equals, the one that is
    earlier on its way is less."""

    start_ticks: int
    way: int
    place: int
    """In the program of its worker."""
    worker: Worker


_EXCHANGING = OpKind.F, OpKind.I, OpKind.B
Places = Mapping[OpKey, _Made]


def _places(schedule: Schedule, seats: Sequence[Seat]) -> Places:
    found: dict[OpKey, _Made] = {}
    ways: dict[tuple[OpKind, int, Sequence[int]], int] = {}
    for seat in seats:
        own, worker = seat.role.pipeline, seat.worker
        for place, op in enumerate(schedule.programs[seat.program]):
            if op.kind in _EXCHANGING:
                pipeline = own if op.pipeline is None else op.pipeline
                _, slice, _, microbatch = key = cast(OpKey, (op.kind, op.slice, pipeline, op.microbatch))
                path = schedule.path(pipeline, microbatch)
                way = ways.get((op.kind, slice, path))
                if way is None:
                    at = path.index(slice)
                    way = ways[op.kind, slice, path] = at if op.kind is OpKind.F else 2 * len(path) - at
                found[key] = _Made(op.start_ticks, way, place, worker)
    return found


def _by_graph(schedule: Schedule, pipelines: Sequence[int], places: Places) -> list[OpKey]:
    """The same by `schedules.graph`."""
    found: dict[OpKey, None] = {}
    for one in transfers(schedule, programs_of(schedule, pipelines)):
        path = schedule.path(one.pipeline, one.microbatch)
        at = path.index(one.slice)
        kinds, slice = ([OpKind.F], path[at - 1]) if one.kind == "activation" else (
            [OpKind.I, OpKind.B], path[at + 1])
        found |= {key: None for kind in kinds if (key := (kind, slice, one.pipeline, one.microbatch)) in places}
    return list(found)


def _numbered(schedule: Schedule, places: Places, order: Sequence[OpKey],
              names: Mapping[int, int] | Sequence[int]) -> list[Crossing]:
    found: list[Crossing] = []
    takers: dict[tuple[OpKind, int, Sequence[int]], list[tuple[OpKind, int, Tensor]]] = {}
    called: dict[Worker, Worker] = {}
    for key in order:
        _, _, made, source = places[key]
        kind, slice, pipeline, microbatch = key
        path = schedule.path(pipeline, microbatch)
        taking = takers.get((kind, slice, path))
        if taking is None:
            taking = takers[kind, slice, path] = [(taker[0], taker[1], rule.tensor)
                                                  for taker, rule in consumers(key, path) if rule.tensor is not None]
        for what, where, tensor in taking:
            takes = places.get((what, where, pipeline, microbatch))
            if takes is not None and takes.worker != source:
                for worker in (source, takes.worker):
                    if worker not in called:
                        called[worker] = Worker(names[worker.pipeline], worker.column)
                found.append(Crossing(len(found), tensor, where, names[pipeline], microbatch, called[source],
                                      called[takes.worker], made, takes.place))
    return found


def _can_be_followed(crossings: Sequence[Crossing]) -> bool:
    """Whether each worker has taken what its program takes before, and given what it gives before, at each number."""
    given: dict[Worker, int] = {}
    for one in crossings:
        if given.get(one.source, -1) > one.made or given.get(one.target, -1) >= one.taken:
            return False
        given[one.source] = one.made
    return True


_FRAME = msgspec.json.Decoder(Schedule)
_WORK = msgspec.json.Decoder(Work)
_SUMS = msgspec.json.Decoder(tuple[SumsByColumn, tuple[tuple[int, tuple[Worker, ...]], ...]])
