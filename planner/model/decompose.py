"""Solve what is equal once: pipelines that share no micro-batches meet only at the all-reduce.

A broken pipeline needs peers for its micro-batches, and the rest of the pipelines are whole. So a job falls into
pieces: groups of broken pipelines with healthy ones as peers, and single healthy pipelines. Equal pieces share one
plan, and planning grows with the number of different pieces, not with the number of workers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from slipstream.planner.model.problem import MicroBatch, Problem, Visit
from slipstream.planner.params import DEFAULTS, PieceParams
from slipstream.schedules.graph import joined
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.pattern import Columns, columns_by_pipeline

Dead = Mapping[int, Columns]
"""The columns in which each broken pipeline has no worker."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A smaller problem, and where it stands in the whole one, perhaps several times."""

    problem: Problem
    copies: tuple[tuple[int, ...], ...]
    """For each copy, the pipeline of the whole problem that each pipeline of the small one stands for."""
    names: Mapping[MicroBatch, MicroBatch] | None = None
    """The micro-batches of the whole problem by the names that they have in a copy, before its pipelines are numbered
    anew; None: the same."""

    def named(self, copy: Sequence[int], pipeline: int, microbatch: int) -> MicroBatch:
        """The micro-batch of the whole problem that one of this piece stands for in a copy."""
        batch = MicroBatch(copy[pipeline], microbatch)
        return self.names[batch] if self.names else batch


def undivided(problem: Problem) -> Piece:
    """The whole problem as one piece."""
    return Piece(problem=problem, copies=(tuple(range(problem.grid.pipelines)),))


def decompose(problem: Problem, params: PieceParams = DEFAULTS.pieces) -> tuple[Piece, ...]:
    """Pieces that together are the problem; groups of broken pipelines first. Just one where nothing can be gained.

    Exact for healthy pipelines, which may run equal plans without lengthening any window. For broken ones it decides
    who runs whose micro-batches: never so that a worker gets more micro-batches than the busiest must anyway.
    """
    whole = undivided(problem)
    if problem.assigned:
        renamed, names = by_runner(problem) if problem.grid.chains == 1 else (problem, None)
        return tuple(Piece(problem=part_of(renamed, copies[0]), copies=tuple(copies), names=names)
                     for copies in components(renamed))
    if problem.slow or problem.roomier:
        return (whole,)
    dead = columns_by_pipeline(problem.failed)
    if not dead:
        pieces = tuple(_healthy(problem, members) for members in _by_count(problem, range(problem.grid.pipelines)))
        return pieces if len(pieces) < problem.grid.pipelines else (whole,)
    if len(set(problem.grid.microbatches)) > 1:
        return (whole,)
    groups = _groups(problem, dead, params)
    helped = {pipeline for group in groups for pipeline in group}
    rest = [pipeline for pipeline in range(problem.grid.pipelines) if pipeline not in helped]
    if len(groups) == 1 and len(rest) < 2:
        return (whole,)
    return (*_distinct(problem, dead, groups), *([_healthy(problem, rest)] if rest else []))


def _by_count(problem: Problem, pipelines: Sequence[int]) -> list[list[int]]:
    """Pipelines with as many micro-batches as each other."""
    kinds: dict[int, list[int]] = defaultdict(list)
    for pipeline in pipelines:
        kinds[problem.grid.microbatches[pipeline]].append(pipeline)
    return list(kinds.values())


def _healthy(problem: Problem, members: Sequence[int]) -> Piece:
    """One whole pipeline that stands for all members."""
    return Piece(problem=part_of(problem, members[:1]), copies=tuple((pipeline,) for pipeline in members))


def _groups(problem: Problem, dead: Dead, params: PieceParams) -> list[list[int]]:
    """Broken pipelines with healthy ones as peers, as many groups as there are healthy pipelines for."""
    spare = [pipeline for pipeline in range(problem.grid.pipelines) if pipeline not in dead]
    broken = sorted(dead, key=lambda pipeline: (dead[pipeline], pipeline))
    for count in range(len(broken), 0, -1):
        parts = _parts(dead, broken, count)
        needs = [_peers_needed(problem, dead, part) for part in parts]
        if count == 1 or sum(needs) <= len(spare):
            break
    if count == 1:
        needs = [min(len(spare), max(needs[0], _peers_wanted(problem, dead, parts[0], params)))]
    else:
        more = (len(spare) - sum(needs)) // count
        needs = [max(need, min(need + more, _peers_wanted(problem, dead, part, params)))
                 for need, part in zip(needs, parts, strict=True)]
    groups = []
    for need, part in zip(needs, parts, strict=True):
        groups.append([*part, *spare[:need]])
        spare = spare[need:]
    return groups


def _parts(dead: Dead, broken: Sequence[int], count: int) -> list[list[int]]:
    """Broken pipelines in so many parts, as few different ones as can be, and different dead columns in each.

    Where that does not come out even, pipelines are assigned in turn: those with the same dead columns are neighbours
    in the order given, and so come to different parts as well.
    """
    left: dict[Columns, list[int]] = defaultdict(list)
    for pipeline in broken:
        left[dead[pipeline]].append(pipeline)
    parts: list[list[int]] = []
    while len(parts) < count:
        size = -(-sum(map(len, left.values())) // (count - len(parts)))
        most = sorted(left, key=lambda columns: -len(left[columns]))[:size]
        if len(most) < size or not left[most[-1]]:
            return [list(broken[index::count]) for index in range(count)]
        times = min(len(left[most[-1]]), count - len(parts))
        for _ in range(times):
            if -(-sum(map(len, left.values())) // (count - len(parts))) != size:
                break
            parts.append([left[columns].pop() for columns in most])
    return parts


def _peers_needed(problem: Problem, dead: Dead, part: Sequence[int]) -> int:
    """Healthy pipelines without which a worker would get more than the busiest must run anyway."""
    count, total = problem.grid.microbatches[0], problem.grid.total_microbatches
    need = 0
    for column, live in enumerate(problem.live_by_column):
        down = sum(column in dead[pipeline] for pipeline in part)
        extra = -(-total // len(live)) - count
        if down:
            need = max(need, -(-down * count // extra) - (len(part) - down))
    return need


def _peers_wanted(problem: Problem, dead: Dead, part: Sequence[int], params: PieceParams) -> int:
    """Healthy pipelines with which each need run one micro-batch of others at one stage, if that is not too large."""
    count = problem.grid.microbatches[0]
    down = sum(len(dead[pipeline]) for pipeline in part)
    ops = count * problem.grid.depth * len(problem.kinds)
    enough = min(down * count, params.largest // ops)
    shedding = min(params.shedding * down * count, params.largest_shedding // ops)
    return max(enough, shedding) if problem.shedding else enough


def _distinct(problem: Problem, dead: Dead, groups: Sequence[Sequence[int]]) -> list[Piece]:
    """Groups with equal problems as copies of one piece."""
    copies: dict[tuple[Columns, ...], list[tuple[int, ...]]] = defaultdict(list)
    for group in groups:
        copies[tuple(dead.get(pipeline, ()) for pipeline in group)].append(tuple(group))
    return [Piece(problem=part_of(problem, members[0]), copies=tuple(members)) for members in copies.values()]


# --- Pieces where a layout says who runs what: pipelines that some route joins; equal ones once -----------------------


def by_runner(problem: Problem) -> tuple[Problem, Mapping[MicroBatch, MicroBatch]]:
    """The same with micro-batches numbered in the pipeline that runs them, not in the one that they come from.

    In order of their own numbers, those of several pipelines in turn. Those that several run are numbered in the first
    of these, evenly over what that one runs alone: so pipelines with equally many are alike.
    The mapping is from the new names to those of the problem.
    """
    alone: list[list[MicroBatch]] = [[] for _ in range(problem.grid.pipelines)]
    shared: list[list[MicroBatch]] = [[] for _ in range(problem.grid.pipelines)]
    for batch in sorted(problem.routes, key=lambda batch: (batch.microbatch, batch.pipeline)):
        runners = {visit.worker.pipeline for visit in problem.routes[batch]}
        pipeline = batch.pipeline if batch.pipeline in runners else min(runners)
        (alone if len(runners) == 1 else shared)[pipeline].append(batch)
    names = {MicroBatch(pipeline, number): batch for pipeline, both in enumerate(zip(alone, shared, strict=True))
             for number, batch in enumerate(_evenly(*both))}
    routes = {new: problem.routes[batch] for new, batch in sorted(names.items())}
    counts = tuple(len(own) + len(others) for own, others in zip(alone, shared, strict=True))
    grid = msgspec.structs.replace(problem.grid, microbatches=counts)
    return msgspec.structs.replace(problem, grid=grid, routes=routes), names


def _evenly(some: Sequence[MicroBatch], others: Sequence[MicroBatch]) -> list[MicroBatch]:
    """All, the others in equal steps among some."""
    found, count = list(some), len(others)
    for number in reversed(range(count)):
        found.insert((2 * number + 1) * len(some) // (2 * count), others[number])
    return found


def components(problem: Problem) -> list[list[tuple[int, ...]]]:
    """Pipelines by the piece they belong to: for each different piece, all its copies, their pipelines in equal order.

    Pipelines are joined where a micro-batch of one passes the other; one that runs nothing, with the first.
    """
    copies: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    alike: dict[object, int] = {}
    kind = [alike.setdefault(_own(problem, pipeline), len(alike)) for pipeline in range(problem.grid.pipelines)]
    for members in _joined_pipelines(problem):
        ordered = tuple(sorted(members, key=lambda pipeline: (kind[pipeline], pipeline)))
        copies[tuple(kind[pipeline] for pipeline in ordered), _routes(problem, ordered)].append(ordered)
    return sorted(copies.values(), key=lambda group: (-len(group[0]), group))


def _joined_pipelines(problem: Problem) -> list[list[int]]:
    """The pipelines of each piece."""
    first = joined(problem.grid.pipelines, {(batch.pipeline, visit.worker.pipeline)
                                            for batch, route in problem.routes.items() for visit in route})
    busy = {first[batch.pipeline] for batch in problem.routes}
    found: dict[int, list[int]] = defaultdict(list)
    for pipeline, one in enumerate(first):
        found[one if one in busy else min(busy)].append(pipeline)
    return list(found.values())


def _own(problem: Problem, pipeline: int) -> tuple[object, ...]:
    """What a pipeline's workers are and hold."""
    return problem.grid.microbatches[pipeline], tuple(problem.workers.get(Worker(pipeline, column))
                                                      for column in range(problem.grid.columns))


def _routes(problem: Problem, pipelines: Sequence[int]) -> tuple[object, ...]:
    """The routes of these pipelines' micro-batches, as if they were numbered in their order."""
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    return tuple((slice_, number[worker.pipeline], worker.column) for pipeline in pipelines
                 for microbatch in range(problem.grid.microbatches[pipeline])
                 for slice_, worker in problem.routes[MicroBatch(pipeline, microbatch)])


def part_of(problem: Problem, pipelines: Sequence[int]) -> Problem:
    """The problem of some pipelines alone, numbered anew in their order."""
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    grid = msgspec.structs.replace(problem.grid, pipelines=len(pipelines),
                                   microbatches=tuple(problem.grid.microbatches[pipeline] for pipeline in pipelines))
    renumbered: dict[tuple[Visit, ...], tuple[Visit, ...]] = {}
    routes = {}
    for pipeline in pipelines:
        for microbatch in range(problem.grid.microbatches[pipeline]):
            route = problem.routes[MicroBatch(pipeline, microbatch)]
            if route not in renumbered:
                renumbered[route] = tuple(Visit(visit.slice, Worker(number[visit.worker.pipeline], visit.worker.column))
                                          for visit in route)
            routes[MicroBatch(number[pipeline], microbatch)] = renumbered[route]
    return msgspec.structs.replace(problem, grid=grid, routes=routes, workers={
        Worker(number[pipeline], column): problem.workers[Worker(pipeline, column)]
        for pipeline in pipelines for column in range(grid.columns) if Worker(pipeline, column) in problem.workers})
