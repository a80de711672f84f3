"""Fit a schedule that was planned for some failed workers to other failures.

As few layers as possible are loaded. A role that no worker plays is *vacant*. The set of vacant
roles can change in two ways that keep the period:

- interchangeable pipelines swap numbers: no worker changes its role;
- a live worker takes over another role. In its own column it already holds the parameters; in
  another column it must load the layers that it lacks from a peer.

The least number of layers to load depends only on the numbers of vacant roles and of failures in
each column, and any renumbering of pipelines attains it. So pipelines are renumbered first, such
that as many vacant roles as possible are those of failed workers. Then live workers whose own role
is vacant take over the roles of the other failed workers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from slipstream.schedules.layers import layers_in
from slipstream.schedules.memory import activation_room
from slipstream.schedules.schedule import (
    Grid,
    LayerRange,
    OpKind,
    Schedule,
    Seat,
    Worker,
    with_pipeline_numbers,
)
from slipstream.schedules.tables.pattern import (
    Columns,
    columns_by_pipeline,
    dead_column,
    pipeline_classes,
)

# --- What workers must load for the roles that they play ------------------------------------------


def count_layers_to_load(grid: Grid, worker: Worker, role: Worker) -> int:
    """Return how many layers a worker must load before it can play a role.

    The worker has the layers of its own column already. A stage counts as one layer if the job does
    not say how many it has.
    """
    return (
        0
        if worker.column == role.column
        else len(_layers_of_column(grid, role.column) - _layers_of_column(grid, worker.column))
    )


def missing_layers(schedule: Schedule, seat: Seat) -> frozenset[int]:
    """Return the layers that a seat's worker holds and that its own column lacks."""
    if seat.holds is None and seat.worker.column == seat.role.column:
        return frozenset()
    return layers_in(schedule.held_layers_of_seat(seat)) - layers_in(
        schedule.held_layers_of_column(seat.worker.column)
    )


def _layers_of_column(grid: Grid, column: int) -> set[int]:
    return {
        layer for stage in grid.stages_of_column(column) for layer in range(*grid.layers_of(stage))
    }


# --- Holders of a stage on different machines -----------------------------------------------------


Nodes = Sequence[Sequence[Worker]]
"""Workers of each machine, by the machine's number."""


def spread_over_nodes(schedule: Schedule, seats: Sequence[Seat], nodes: Nodes) -> list[Seat]:
    """Swap roles so that fewer holders of equal layers share a machine.

    The result is the seats, sorted by worker; `nodes` has the workers of each machine. Each swap is
    the one that most reduces the number of pairs of holders on one machine, until none reduces it.
    Two seats can swap if the role of one of them is in another column than its worker, the period
    stays, and no more layers are loaded.
    """
    node = {worker: number for number, workers in enumerate(nodes) for worker in workers}
    places = _MachineSpread(schedule, list(seats), node)
    while node:
        swaps = [
            (places.swap_gain(mover, other), mover, other)
            for mover in places.moved_seats()
            for other in range(len(seats))
        ]
        gain, mover, other = max(swaps, default=(0, 0, 0), key=lambda swap: swap[0])
        if gain <= 0:
            break
        places.swap_roles(mover, other)
    return sorted(places.seats, key=lambda seat: seat.worker)


class _MachineSpread:
    """Seats, with each machine's number of holders of equal layers, to try swaps of roles."""

    def __init__(self, schedule: Schedule, seats: list[Seat], node: Mapping[Worker, int]) -> None:
        self._schedule, self.seats, self._node = schedule, seats, node
        self._speed = schedule.times.per_mille_of
        self._count: Counter[tuple[Hashable, Hashable]] = Counter(
            (_held_layers_key(seat), self._machine_of(seat.worker)) for seat in seats
        )

    def moved_seats(self) -> list[int]:
        """Return the indices of the seats whose role is in another column than their worker."""
        return [
            place for place, seat in enumerate(self.seats) if seat.worker.column != seat.role.column
        ]

    def swap_gain(self, first: int, second: int) -> int:
        """Return how many fewer pairs of holders share a machine if two seats swap roles."""
        a, b = self.seats[first], self.seats[second]
        here, there = self._machine_of(a.worker), self._machine_of(b.worker)
        mine, theirs = _held_layers_key(a), _held_layers_key(b)
        if here == there or mine == theirs or not self._can_swap(a, b):
            return 0
        # A holder leaves a machine where it had company, and joins one where it may have some.
        count = self._count
        return (count[mine, here] - 1 - count[mine, there]) + (
            count[theirs, there] - 1 - count[theirs, here]
        )

    def swap_roles(self, first: int, second: int) -> None:
        """Let the workers of two seats swap their roles, programs and held layers."""
        a, b = self.seats[first], self.seats[second]
        for seat, worker in ((a, b.worker), (b, a.worker)):
            self._count[_held_layers_key(seat), self._machine_of(seat.worker)] -= 1
            self._count[_held_layers_key(seat), self._machine_of(worker)] += 1
        self.seats[first] = Seat(b.worker, a.role, a.program, a.holds)
        self.seats[second] = Seat(a.worker, b.role, b.program, b.holds)

    def _can_swap(self, a: Seat, b: Seat) -> bool:
        """Return whether swapping two seats' roles keeps the period and loads no more layers."""
        # The period holds if both are equally fast and have no less room than before.
        speed = self._speed
        if speed.get(a.worker, 1000) != speed.get(b.worker, 1000):
            return False
        swapped = [
            Seat(worker, seat.role, seat.program, seat.holds)
            for seat, worker in ((a, b.worker), (b, a.worker))
        ]
        if any(
            (activation_room(self._schedule, new) or 0)
            < (activation_room(self._schedule, old) or 0)
            for new, old in zip(swapped, (a, b), strict=True)
        ):
            return False
        # A swap must not cost time: no more layers are loaded than before.
        before = sum(len(missing_layers(self._schedule, seat)) for seat in (a, b))
        after = sum(len(missing_layers(self._schedule, seat)) for seat in swapped)
        return after <= before

    def _machine_of(self, worker: Worker) -> Hashable:
        """Return the number of a worker's machine, or the worker itself if none is known."""
        return self._node.get(worker, worker)


def _held_layers_key(seat: Seat) -> Hashable:
    """Return a key that is equal for all seats with the same held layers."""
    return seat.role.column if seat.holds is None else seat.holds


# --- Roles ----------------------------------------------------------------------------------------


A = TypeVar("A", bound=Hashable)
B = TypeVar("B", bound=Hashable)
IdleKind = tuple[int, int, Worker | None]
"""Kind of worker whose own role is vacant, so that it can take over another.

The fields are its column, its time in thousandths of usual, and the worker itself if it has its own
capacity, else None.
"""
WantedRole = tuple[int, int, tuple[LayerRange, ...] | None, int | None]
"""Kind of role whose worker has failed.

The fields are its column, the planned time in thousandths of usual, the held layers if listed, and
the planned memory for activations.
"""
ANY_PIPELINE = -1
"""Pipeline number in a worker's name that stands for any pipeline."""


def preload_solver() -> None:
    """Import what `relabel_schedule` needs, in a tenth of a second, before a call is urgent."""
    import networkx  # noqa: F401


def relabel_schedule(
    schedule: Schedule, failed: Iterable[Worker], *, held_elsewhere: bool = False, nodes: Nodes = ()
) -> Schedule | None:
    """Return a copy of a schedule for as many other failed workers; None if impossible.

    Pipelines are renumbered, and live workers take over the roles of failed ones, whose layers they
    then hold. This is impossible in two cases. First, if a column has no live worker left to load
    its parameters from; `held_elsewhere` says that other workers, which changed roles before, or a
    checkpoint have them. Second, if the role of a fast worker would go to a slower one, or to one
    with less memory. A schedule in which workers have moved already can only get other pipeline
    numbers.

    If `nodes` has the workers of each machine, the holders of a stage are spread over machines as
    far as no more layers are loaded. The result passes `schedules.check` if `schedule` does, and
    has the same period. Its lower bound may be less if roles go to faster workers, and is 0 if one
    goes to a worker with more memory. Raises ValueError if the number of failed workers differs, or
    if workers have moved and the failures have another pattern.
    """
    down = tuple(sorted(set(failed)))
    if len(down) != len(schedule.failed):
        raise ValueError(
            f"{len(down)} failed workers for a schedule with {len(schedule.failed)} roles without "
            "a worker"
        )
    if not held_elsewhere and dead_column(down, schedule.grid) is not None:
        return None
    renumbered = renumber_pipelines(schedule, down)
    # Workers that moved have loaded layers already: only the names of pipelines can change.
    if schedule.moves:
        if {
            Worker(renumbered[worker.pipeline], worker.column) for worker in schedule.failed
        } != set(down):
            raise ValueError(
                "a schedule with moved workers can be relabelled for another order of its "
                "interchangeable pipelines alone"
            )
        return _with_numbers(schedule, down, renumbered)
    vacant = {Worker(renumbered[role.pipeline], role.column) for role in schedule.failed}
    moves = _assign_roles(schedule, renumbered, vacant, set(down))
    if moves is None:
        return None
    # All roles that are still filled as planned, and those that were taken over.
    players = {
        role: role for role in schedule.grid.workers() if role not in vacant and role not in moves
    } | moves
    return _with_players(schedule, down, renumbered, players, nodes)


# --- Which pipeline is which ----------------------------------------------------------------------


def renumber_pipelines(schedule: Schedule, failed: Sequence[Worker]) -> dict[int, int]:
    """Return new pipeline numbers, by old number, that put vacant roles on failed workers.

    As many vacant roles as possible become those of failed workers. Only interchangeable pipelines
    swap their numbers.
    """
    vacant, lost = columns_by_pipeline(schedule.failed), columns_by_pipeline(failed)
    members: dict[int, list[int]] = defaultdict(list)
    for pipeline, kind in enumerate(
        pipeline_classes(schedule.grid, schedule.times, schedule.memory)
    ):
        members[kind].append(pipeline)
    numbers: dict[int, int] = {}
    for pipelines in members.values():
        numbers |= _match_pipelines(pipelines, vacant, lost)
    return numbers


def _match_pipelines(
    pipelines: Sequence[int], vacant: Mapping[int, Columns], lost: Mapping[int, Columns]
) -> dict[int, int]:
    """Return new numbers, by old number, that match `vacant` with `lost` columns of pipelines."""
    # The pipelines by the columns of their vacant roles, and by those of their failed workers.
    sources, targets = defaultdict(list), defaultdict(list)
    numbers = {}
    for pipeline in pipelines:
        # A pipeline that fits keeps its number, so that its workers change nothing.
        if vacant.get(pipeline) == lost.get(pipeline):
            numbers[pipeline] = pipeline
        else:
            sources[vacant.get(pipeline, ())].append(pipeline)
            targets[lost.get(pipeline, ())].append(pipeline)
    # Equal columns are matched first; for the rest, as many columns as possible should coincide.
    pairs = [
        (columns, columns, min(len(sources[columns]), len(targets[columns])))
        for columns in sorted(set(sources) & set(targets))
    ]
    supply = Counter({columns: len(rest) for columns, rest in sources.items()})
    demand = Counter({columns: len(rest) for columns, rest in targets.items()})
    for columns, _, count in pairs:
        supply[columns] -= count
        demand[columns] -= count
    rest = solve_transport(
        supply,
        demand,
        lambda vacant_columns, lost_columns: -len(set(vacant_columns) & set(lost_columns)),
    )
    assert rest is not None
    for vacant_columns, lost_columns, count in [*pairs, *rest]:
        for _ in range(count):
            numbers[sources[vacant_columns].pop(0)] = targets[lost_columns].pop(0)
    return numbers


# --- Who plays what -------------------------------------------------------------------------------


def _assign_roles(
    schedule: Schedule, numbers: Mapping[int, int], vacant: set[Worker], failed: set[Worker]
) -> dict[Worker, Worker] | None:
    """Return who takes over each failed worker's role, by role; None if impossible."""
    # Only `schedule` has the pipelines' old numbers. Nobody takes over a role in `vacant`.
    # Equal roles and equal workers are counted, not listed: the assignment stays small.
    speed, memory = schedule.times.per_mille_of, schedule.memory
    limits = (memory.capacity_of if memory else None) or ()
    own_room = {limit.worker for limit in limits}
    seats = {Worker(numbers[seat.role.pipeline], seat.role.column): seat for seat in schedule.seats}
    unfilled: dict[WantedRole, list[Worker]] = defaultdict(list)
    idle_workers: dict[IdleKind, list[Worker]] = defaultdict(list)
    for role in sorted(failed - vacant):
        planned = seats[role]
        unfilled[
            role.column, speed.get(role, 1000), planned.holds, activation_room(schedule, planned)
        ].append(role)
    for worker in sorted(vacant - failed):
        idle_workers[
            worker.column, speed.get(worker, 1000), worker if worker in own_room else None
        ].append(worker)

    def loading_cost(have: IdleKind, want: WantedRole) -> int | None:
        (column, pace, named), (wanted, needed, holds, least) = have, want
        seat = Seat(named or Worker(ANY_PIPELINE, column), Worker(ANY_PIPELINE, wanted), 0, holds)
        # A slower worker, or one with less memory, would not keep the period.
        if pace > needed or (least is not None and (activation_room(schedule, seat) or 0) < least):
            return None
        return len(missing_layers(schedule, seat))

    supply = {kind: len(workers) for kind, workers in idle_workers.items()}
    demand = {kind: len(roles) for kind, roles in unfilled.items()}
    pairs = solve_transport(supply, demand, loading_cost)
    if pairs is None:
        return None
    return {
        unfilled[want].pop(0): idle_workers[have].pop(0)
        for have, want, count in pairs
        for _ in range(count)
    }


def solve_transport(
    supply: Mapping[A, int], demand: Mapping[B, int], cost: Callable[[A, B], int | None]
) -> list[tuple[A, B, int]] | None:
    """Assign every unit of supply to a unit of demand at the least total cost.

    `supply` and `demand` have the number of units of each kind; their sums must be equal. `cost`
    returns the cost of a unit of one kind for a unit of the other, or None if the pair is
    forbidden. The result is triples (kind of supply, kind of demand, number of units) in the order
    of the mappings; None if there is no solution.
    """
    have = [(kind, count) for kind, count in supply.items() if count]
    want = [(kind, count) for kind, count in demand.items() if count]
    if not have and not want:
        return []
    import networkx as nx  # see `preload_solver`

    # The transportation problem as a min-cost flow between kinds, so its size does not grow with
    # units.
    graph: nx.DiGraph[tuple[str, int]] = nx.DiGraph()
    for left, (_, count) in enumerate(have):
        graph.add_node(("have", left), demand=-count)
    for right, (_, count) in enumerate(want):
        graph.add_node(("want", right), demand=count)
    for left, (a, _) in enumerate(have):
        for right, (b, _) in enumerate(want):
            if (price := cost(a, b)) is not None:
                graph.add_edge(("have", left), ("want", right), weight=price)
    try:
        flow = nx.min_cost_flow(graph)
    except nx.NetworkXUnfeasible:
        return None
    return [
        (a, b, count)
        for left, (a, _) in enumerate(have)
        for right, (b, _) in enumerate(want)
        if (count := flow[("have", left)].get(("want", right), 0))
    ]


# --- The schedule ---------------------------------------------------------------------------------


def _with_numbers(
    schedule: Schedule, failed: tuple[Worker, ...], numbers: Mapping[int, int]
) -> Schedule:
    """Return a copy with new pipeline `numbers`, which the workers in `failed` have already."""
    seats = sorted(
        (
            Seat(
                Worker(numbers[seat.worker.pipeline], seat.worker.column),
                Worker(numbers[seat.role.pipeline], seat.role.column),
                seat.program,
                seat.holds,
            )
            for seat in schedule.seats
        ),
        key=lambda seat: seat.worker,
    )
    return _with_ordered_programs(msgspec.structs.replace(schedule, failed=failed), seats, numbers)


def _with_ordered_programs(
    schedule: Schedule, seats: Iterable[Seat], numbers: Mapping[int, int]
) -> Schedule:
    """Return a copy with `seats`, numbered already, and programs with new pipeline `numbers`."""
    order: dict[int, int] = {}
    ordered = tuple(
        msgspec.structs.replace(seat, program=order.setdefault(seat.program, len(order)))
        for seat in seats
    )
    programs = tuple(with_pipeline_numbers(schedule.programs[index], numbers) for index in order)
    return msgspec.structs.replace(schedule, seats=ordered, programs=programs)


def _with_players(
    schedule: Schedule,
    failed: tuple[Worker, ...],
    numbers: Mapping[int, int],
    players: Mapping[Worker, Worker],
    nodes: Nodes,
) -> Schedule:
    """Return a copy with new pipeline `numbers` and `players` by role, spread over `nodes`."""
    seats = spread_over_nodes(
        schedule,
        sorted(_reassigned_seats(schedule, numbers, players), key=lambda seat: seat.worker),
        nodes,
    )
    players = {seat.role: seat.worker for seat in seats}
    relabelled = _with_ordered_programs(
        msgspec.structs.replace(schedule, failed=failed), seats, numbers
    )
    # Where a worker has more room than its role, another schedule may be shorter: no bound holds.
    roomier = any(_has_more_room(schedule, seat) for seat in seats)
    bound = 0 if roomier else _converted_bound(schedule, players)
    return relabelled.with_bound(bound, schedule.scope)


def _reassigned_seats(
    schedule: Schedule, numbers: Mapping[int, int], players: Mapping[Worker, Worker]
) -> Iterable[Seat]:
    """Iterate over the seats, with new pipeline numbers and new workers for the roles."""
    for seat in schedule.seats:
        role = Worker(numbers[seat.role.pipeline], seat.role.column)
        yield Seat(players[role], role, seat.program, seat.holds)


def _has_more_room(schedule: Schedule, seat: Seat) -> bool:
    """Return whether a seat's worker has more memory for activations than its role's own worker."""
    planned = Seat(seat.role, seat.role, seat.program, seat.holds)
    return (activation_room(schedule, seat) or 0) > (activation_room(schedule, planned) or 0)


def _converted_bound(schedule: Schedule, players: Mapping[Worker, Worker]) -> int:
    """Return the schedule's lower bound in ticks, lowered to hold at the players' speeds."""
    speed, stages = schedule.times.per_mille_of, len(schedule.grid.stages)
    pairs = {
        (role, player)
        for role, player in players.items()
        if speed.get(role, 1000) != speed.get(player, 1000)
    }
    # With all times multiplied by the largest factor by which an op is now faster than planned, a
    # schedule at the new speeds is one of the planned job, for which the bound holds.
    bound = schedule.lower_bound_ticks
    for role, player in pairs:
        for slice in (
            *schedule.grid.stages_of_column(role.column),
            *range(stages, stages + len(schedule.slices)),
        ):
            for kind in (OpKind.F, OpKind.I, OpKind.W):
                planned = schedule.times.duration_ticks(kind, slice, role)
                real = schedule.times.duration_ticks(kind, slice, player)
                if real:
                    bound = min(bound, -(-schedule.lower_bound_ticks * real // planned))
    return bound
