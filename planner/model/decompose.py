"""Divide a problem into subproblems (pieces), so that equal ones are solved once.

Pipelines that share no micro-batches meet only at the all-reduce. A pipeline with dead workers, a
*broken* one, needs peers for its micro-batches; all other pipelines are independent. So a job
divides into sets of broken pipelines with healthy ones as peers, and single healthy pipelines.
Equal pieces share one plan, so that planning time grows with the number of different pieces and not
with the number of workers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from slipstream.planner.model.problem import MicroBatch, Problem, Visit
from slipstream.planner.params import DEFAULTS, PieceParams
from slipstream.schedules.graph import component_roots
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.pattern import Columns, columns_by_pipeline

DeadColumns = Mapping[int, Columns]
"""Columns of the workers that are down, for each pipeline that has such workers."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Subproblem of some pipelines, which is solved once for all its copies.

    A copy is a set of pipelines of the whole problem that run by the subproblem's solution.
    """

    problem: Problem
    copies: tuple[tuple[int, ...], ...]
    """Pipelines of each copy, by their numbers in the whole problem.

    Pipeline i of the subproblem stands for the one at index i of every copy.
    """
    names: Mapping[MicroBatch, MicroBatch] | None = None
    """Original micro-batch of each renumbered one; None if none was renumbered.

    Both name pipelines by their numbers in the whole problem.
    """

    def original_microbatch(
        self, copy: Sequence[int], pipeline: int, microbatch: int
    ) -> MicroBatch:
        """Return the micro-batch of the whole problem that a copy runs as the given one.

        `copy` is one of `copies`; `pipeline` and `microbatch` are numbers in the subproblem.
        """
        batch = MicroBatch(copy[pipeline], microbatch)
        return self.names[batch] if self.names else batch


def make_whole_piece(problem: Problem) -> Piece:
    """Return the problem itself as its only subproblem, with one copy."""
    return Piece(problem=problem, copies=(tuple(range(problem.grid.pipelines)),))


def decompose(problem: Problem, params: PieceParams = DEFAULTS.pieces) -> tuple[Piece, ...]:
    """Divide a problem into subproblems; return only the whole one if it must stay whole.

    It does if live workers are unlike, if a column has lost all, if workers are down and pipelines
    read unequally many micro-batches, or if dividing gains nothing. A layout is divided by its
    routes (`find_components`). Subproblems with dead workers come first. Dividing lengthens no plan
    if all workers are alive and pipelines read equally many micro-batches. Else it decides which
    peers help a pipeline, but gives no worker more than the busiest one must run anyway.
    """
    whole = make_whole_piece(problem)
    # A layout already says which pipelines share micro-batches.
    if problem.assigned:
        renamed = problem
        names: Mapping[MicroBatch, MicroBatch] | None = None
        if problem.grid.chains == 1:
            renamed, names = renumber_by_runner(problem)
        return tuple(
            Piece(problem=extract_pipelines(renamed, copies[0]), copies=tuple(copies), names=names)
            for copies in find_components(renamed)
        )
    # Unlike workers make pipelines differ, and a column that has lost all needs those of another.
    if (
        problem.has_slow_workers
        or problem.has_unequal_memory
        or not all(problem.live_pipelines_by_column)
    ):
        return (whole,)
    # Without failures, only pipelines that read more than their share need others.
    dead = columns_by_pipeline(problem.failed)
    if not dead:
        sharing = _group_by_load(problem)
        if sharing is None:
            return (whole,)
        rest = sorted(set(range(problem.grid.pipelines)).difference(*sharing))
        pieces = (
            *_make_loaded_pieces(problem, sharing),
            *(_make_healthy_piece(problem, members) for members in _group_by_count(problem, rest)),
        )
        return pieces if len(pieces) < problem.grid.pipelines else (whole,)
    # With failures and unequal reading, who should help whom is left to the search.
    if len(set(problem.grid.microbatches)) > 1:
        return (whole,)
    # With failures: broken pipelines with their peers, and the rest one by one.
    groups = _group_with_peers(problem, dead, params)
    helped = {pipeline for group in groups for pipeline in group}
    rest = [pipeline for pipeline in range(problem.grid.pipelines) if pipeline not in helped]
    if len(groups) == 1 and len(rest) < 2:
        return (whole,)
    return (
        *_make_distinct_pieces(problem, dead, groups),
        *([_make_healthy_piece(problem, rest)] if rest else []),
    )


def _group_by_load(problem: Problem) -> list[tuple[int, ...]] | None:
    """Group pipelines that read too much with their helpers; None if one group has all."""
    counts = problem.grid.microbatches
    share = -(-sum(counts) // len(counts))
    if not problem.sharing or max(counts) <= share:
        return []
    # The most loaded pipeline is relieved first, by as few others as have the time.
    order = sorted(range(len(counts)), key=lambda pipeline: (-counts[pipeline], pipeline))
    helpers = [pipeline for pipeline in order if counts[pipeline] < share]
    groups: list[tuple[int, ...]] = []
    for pipeline in order:
        extra, group = counts[pipeline] - share, [pipeline]
        while extra > 0 and helpers:  # those with most time are last
            group.append(helpers.pop())
            extra -= share - counts[group[-1]]
        if len(group) > 1:
            groups.append(tuple(group))
    return None if sum(map(len, groups)) == len(counts) and len(groups) == 1 else groups


def _make_loaded_pieces(problem: Problem, groups: Sequence[tuple[int, ...]]) -> list[Piece]:
    """Return the subproblems of all groups of healthy pipelines, equal ones once."""
    copies: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for group in groups:
        copies[tuple(problem.grid.microbatches[pipeline] for pipeline in group)].append(group)
    return [
        Piece(problem=extract_pipelines(problem, members[0]), copies=tuple(members))
        for members in copies.values()
    ]


def _group_by_count(problem: Problem, pipelines: Sequence[int]) -> list[list[int]]:
    kinds: dict[int, list[int]] = defaultdict(list)
    for pipeline in pipelines:
        kinds[problem.grid.microbatches[pipeline]].append(pipeline)
    return list(kinds.values())


def _make_healthy_piece(problem: Problem, members: Sequence[int]) -> Piece:
    """Return the subproblem of one healthy pipeline, of which all `members` are copies."""
    return Piece(
        problem=extract_pipelines(problem, members[:1]),
        copies=tuple((pipeline,) for pipeline in members),
    )


def _group_with_peers(problem: Problem, dead: DeadColumns, params: PieceParams) -> list[list[int]]:
    """Divide the broken pipelines into groups with healthy pipelines that help them."""
    healthy = [pipeline for pipeline in range(problem.grid.pipelines) if pipeline not in dead]
    broken = sorted(dead, key=lambda pipeline: (dead[pipeline], pipeline))
    # As many groups as possible, since small subproblems are solved better; there must be enough
    # healthy pipelines for what each group needs at least.
    for count in range(len(broken), 0, -1):
        parts = _divide_broken(dead, broken, count)
        needs = [_count_needed_peers(problem, dead, part) for part in parts]
        if count == 1 or sum(needs) <= len(healthy):
            break
    # What is left of the healthy pipelines is given to groups that would gain from more.
    if count == 1:
        needs = [
            min(len(healthy), max(needs[0], _count_wanted_peers(problem, dead, parts[0], params)))
        ]
    else:
        more = (len(healthy) - sum(needs)) // count
        needs = [
            max(need, min(need + more, _count_wanted_peers(problem, dead, part, params)))
            for need, part in zip(needs, parts, strict=True)
        ]
    groups = []
    for need, part in zip(needs, parts, strict=True):
        groups.append([*part, *healthy[:need]])
        healthy = healthy[need:]
    return groups


def _divide_broken(dead: DeadColumns, broken: Sequence[int], count: int) -> list[list[int]]:
    """Divide the broken pipelines into `count` sets, as many of them alike as possible."""
    # Broken pipelines by their dead columns: sets with the same columns are copies of one
    # subproblem.
    remaining: dict[Columns, list[int]] = defaultdict(list)
    for pipeline in broken:
        remaining[dead[pipeline]].append(pipeline)
    parts: list[list[int]] = []
    while len(parts) < count:
        # Take one pipeline of each of the commonest kinds, for as many sets as these last.
        size = -(-sum(map(len, remaining.values())) // (count - len(parts)))
        commonest = sorted(remaining, key=lambda columns: -len(remaining[columns]))[:size]
        if len(commonest) < size or not remaining[commonest[-1]]:
            return [list(broken[index::count]) for index in range(count)]
        times = min(len(remaining[commonest[-1]]), count - len(parts))
        for _ in range(times):
            if -(-sum(map(len, remaining.values())) // (count - len(parts))) != size:
                break
            parts.append([remaining[columns].pop() for columns in commonest])
    return parts


def _count_needed_peers(problem: Problem, dead: DeadColumns, part: Sequence[int]) -> int:
    """Return the fewest healthy pipelines that must help `part` of the broken pipelines."""
    count, total = problem.grid.microbatches[0], problem.grid.total_microbatches
    need = 0
    for root in sorted(set(problem.reduction_root)):
        # Columns that reduce together hold the same layers, so that their workers can help each
        # other.
        tied = [column for column, first in enumerate(problem.reduction_root) if first == root]
        live = sum(len(problem.live_pipelines_by_column[column]) for column in tied)
        down = sum(column in dead[pipeline] for pipeline in part for column in tied)
        # What each worker may run beyond its own micro-batches, if none is to run more than it
        # must.
        extra = -(-total * len(tied) // live) - count
        if down:
            helpers = -(-down * count // extra) + down
            need = max(need, -(-helpers // len(tied)) - len(part))
    return need


def _count_wanted_peers(
    problem: Problem, dead: DeadColumns, part: Sequence[int], params: PieceParams
) -> int:
    """Return the number of healthy pipelines that should help these broken ones."""
    count = problem.grid.microbatches[0]
    down = sum(len(dead[pipeline]) for pipeline in part)
    ops = count * problem.grid.depth * len(problem.op_kinds)
    # Each helper takes one micro-batch if possible, but the subproblem must not become too large to
    # search well.
    enough = min(down * count, params.largest // ops)
    shedding = min(params.shedding * down * count, params.largest_shedding // ops)
    return max(enough, shedding) if problem.shedding else enough


def _make_distinct_pieces(
    problem: Problem, dead: DeadColumns, groups: Sequence[Sequence[int]]
) -> list[Piece]:
    """Return the subproblems of all groups of pipelines, equal ones once."""
    copies: dict[tuple[Columns, ...], list[tuple[int, ...]]] = defaultdict(list)
    for group in groups:
        copies[tuple(dead.get(pipeline, ()) for pipeline in group)].append(tuple(group))
    return [
        Piece(problem=extract_pipelines(problem, members[0]), copies=tuple(members))
        for members in copies.values()
    ]


# --- Pieces where a layout says who runs what: pipelines that some route joins; equal ones once ---


def renumber_by_runner(problem: Problem) -> tuple[Problem, Mapping[MicroBatch, MicroBatch]]:
    """Return a copy of the problem whose micro-batches belong to the pipelines that run them.

    Also return the original micro-batch of each new one. A micro-batch that several pipelines run
    stays in its own pipeline if that is one of them; otherwise it goes to the first.
    """
    # New numbers follow the original ones, those of several pipelines in turn.
    alone: list[list[MicroBatch]] = [[] for _ in range(problem.grid.pipelines)]
    shared: list[list[MicroBatch]] = [[] for _ in range(problem.grid.pipelines)]
    for batch in sorted(problem.routes, key=lambda batch: (batch.microbatch, batch.pipeline)):
        runners = {visit.worker.pipeline for visit in problem.routes[batch]}
        pipeline = batch.pipeline if batch.pipeline in runners else min(runners)
        (alone if len(runners) == 1 else shared)[pipeline].append(batch)
    # Micro-batches that several pipelines run are spread evenly over the others, so that pipelines
    # with equal counts have equal problems.
    names = {
        MicroBatch(pipeline, number): batch
        for pipeline, both in enumerate(zip(alone, shared, strict=True))
        for number, batch in enumerate(_interleave_evenly(*both))
    }
    routes = {new: problem.routes[batch] for new, batch in sorted(names.items())}
    counts = tuple(len(mine) + len(others) for mine, others in zip(alone, shared, strict=True))
    grid = msgspec.structs.replace(problem.grid, microbatches=counts)
    return msgspec.structs.replace(problem, grid=grid, routes=routes), names


def _interleave_evenly(
    some: Sequence[MicroBatch], others: Sequence[MicroBatch]
) -> list[MicroBatch]:
    """Return the micro-batches `some` in their order, with `others` inserted evenly."""
    merged, count = list(some), len(others)
    for number in reversed(range(count)):
        merged.insert((2 * number + 1) * len(some) // (2 * count), others[number])
    return merged


def find_components(problem: Problem) -> list[list[tuple[int, ...]]]:
    """Return the copies of each different subproblem of a layout.

    A copy is a tuple of pipelines; those at the same index of two copies correspond. Pipelines are
    in one subproblem if a micro-batch of one runs on the other. A pipeline without work joins the
    first busy one. Subproblems of more pipelines come first.
    """
    copies: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    numbers: dict[object, int] = {}
    # Sorted by kind, corresponding pipelines of two copies stand at the same index.
    kind = [
        numbers.setdefault(_pipeline_key(problem, pipeline), len(numbers))
        for pipeline in range(problem.grid.pipelines)
    ]
    for members in _join_pipelines(problem):
        ordered = tuple(sorted(members, key=lambda pipeline: (kind[pipeline], pipeline)))
        copies[tuple(kind[pipeline] for pipeline in ordered), _routes_key(problem, ordered)].append(
            ordered
        )
    return sorted(copies.values(), key=lambda group: (-len(group[0]), group))


def _join_pipelines(problem: Problem) -> list[list[int]]:
    """Return lists of pipelines that must be planned together, because routes join them."""
    # Pipelines are joined by each micro-batch that runs on another pipeline than its own.
    first = component_roots(
        problem.grid.pipelines,
        {
            (batch.pipeline, visit.worker.pipeline)
            for batch, route in problem.routes.items()
            for visit in route
        },
    )
    busy = {first[batch.pipeline] for batch in problem.routes}
    members: dict[int, list[int]] = defaultdict(list)
    for pipeline, root in enumerate(first):
        members[root if root in busy else min(busy)].append(pipeline)
    return list(members.values())


def _pipeline_key(problem: Problem, pipeline: int) -> tuple[object, ...]:
    """Return a pipeline's micro-batches and workers, equal for interchangeable pipelines."""
    return problem.grid.microbatches[pipeline], tuple(
        problem.workers.get(Worker(pipeline, column)) for column in range(problem.grid.columns)
    )


def _routes_key(problem: Problem, pipelines: Sequence[int]) -> tuple[object, ...]:
    """Return a key of these pipelines' routes, equal where only pipelines' numbers differ."""
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    return tuple(
        (slice_, number[worker.pipeline], worker.column)
        for pipeline in pipelines
        for microbatch in range(problem.grid.microbatches[pipeline])
        for slice_, worker in problem.routes[MicroBatch(pipeline, microbatch)]
    )


def extract_pipelines(problem: Problem, pipelines: Sequence[int]) -> Problem:
    """Return the problem of some pipelines alone, which are renumbered in the given order.

    Their routes must not leave these pipelines.
    """
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    grid = msgspec.structs.replace(
        problem.grid,
        pipelines=len(pipelines),
        microbatches=tuple(problem.grid.microbatches[pipeline] for pipeline in pipelines),
    )
    # Micro-batches that share a route go on sharing it.
    renumbered: dict[tuple[Visit, ...], tuple[Visit, ...]] = {}
    routes = {}
    for pipeline in pipelines:
        for microbatch in range(problem.grid.microbatches[pipeline]):
            route = problem.routes[MicroBatch(pipeline, microbatch)]
            if route not in renumbered:
                renumbered[route] = tuple(
                    Visit(visit.slice, Worker(number[visit.worker.pipeline], visit.worker.column))
                    for visit in route
                )
            routes[MicroBatch(number[pipeline], microbatch)] = renumbered[route]
    return msgspec.structs.replace(
        problem,
        grid=grid,
        routes=routes,
        workers={
            Worker(number[pipeline], column): problem.workers[Worker(pipeline, column)]
            for pipeline in pipelines
            for column in range(grid.columns)
            if Worker(pipeline, column) in problem.workers
        },
    )
