"""Prove again the lower bound that a schedule file states, from the file alone."""

import math
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from slipstream.planner.budget import Budget
from slipstream.planner.model.assumptions import is_provable_by_search, pieces_are_independent
from slipstream.planner.model.bounds import layout_lower_bound, strongest_bound
from slipstream.planner.model.bounds_placements import placement_bound
from slipstream.planner.model.bounds_roles import roles_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import (
    build_held_problem,
    build_problem_of_layers,
    count_equal_layers,
    layers_in_place,
)
from slipstream.planner.model.problem import AllowedLayouts, Bound, LayerTicks, Problem
from slipstream.planner.overlapped import keep_column_minimum, min_exposed_ticks
from slipstream.planner.params import DEFAULTS
from slipstream.planner.report import shared_ticks
from slipstream.planner.stated_question import require_consistent
from slipstream.schedules.memory import activation_room, weights_of
from slipstream.schedules.schedule import LayerCosts, Room, Schedule, Scope, Slow, Worker

IN_PLACE = (Scope.OWN, Scope.STAGES, Scope.PLACE)
"""Scopes in which workers keep the layers that they hold in the schedule."""


def proven_bound(schedule: Schedule, budget: Budget | None = None) -> Bound:
    """Prove and return a lower bound on the period of all alternatives to a schedule.

    The alternatives have the same live workers with the same memory, and the freedom that
    `Schedule.scope` names. If micro-batches may be cut or layers moved, the bound counts the costs
    of layers that the file records; for older files without them, if layers moved, only the total
    work and the optimizer step of a layer. Over placements it is then 0. With a budget, CP-SAT also
    tries to prove the bound that the file states, if the problem is small, of whole stages in
    place, and the stated bound exceeds the one proven without a search.

    The schedule must have passed the checker. Raises ContradictionError if its file contradicts
    itself about a value that bounds read (`stated_question`).
    """
    require_consistent(schedule)
    if schedule.scope in IN_PLACE:
        schedule = _with_own_roles(schedule)
    # A search is worth its time only if it can confirm more than the formulas prove.
    bound, claimed = _bound_without_search(schedule), schedule.lower_bound_ticks
    if budget is None or bound.ticks >= claimed or not _is_searchable(schedule):
        return bound
    from slipstream.planner.search.cpsat import (  # the solver takes a third of a second to load
        BOUND_DESCRIPTION,
        disproves_shorter,
    )

    # A bound of an independent part is one of the whole.
    problem = _problem_in_place(schedule, find_vacant_roles(schedule))
    parts = [problem]
    if pieces_are_independent(problem):
        parts = [piece.problem for piece in decompose(problem)]
    largest = DEFAULTS.cp_sat.largest_proof
    if any(
        is_provable_by_search(part)
        and part.host_operation_count <= largest
        and disproves_shorter(part, claimed, budget)
        for part in parts
    ):
        return Bound(claimed, schedule.scope, BOUND_DESCRIPTION)
    return bound


def _is_searchable(schedule: Schedule) -> bool:
    """Return whether CP-SAT's model includes all schedules for which the bound shall hold."""
    # The model has neither cut micro-batches, nor overlapping reductions, nor moved layers.
    return (
        schedule.scope in (Scope.OWN, Scope.STAGES)
        and not schedule.has_overlap
        and not any(map(schedule.has_moved_layers, schedule.seats))
    )


def _with_own_roles(schedule: Schedule) -> Schedule:
    """Return a copy of the schedule in which workers are named by their roles."""
    if not schedule.moves:
        return schedule
    # A slow worker makes the role slow that it plays.
    times, memory, grid = schedule.times, schedule.memory, schedule.grid
    seats = sorted(schedule.seats, key=lambda seat: seat.role)
    slow = tuple(
        Slow(seat.role, times.per_mille_of[seat.worker])
        for seat in seats
        if seat.worker in times.per_mille_of
    )
    if memory is not None:
        # A role has the room that its player has beside the weights of the role's own layers.
        rooms = []
        for seat in seats:
            room = (
                (activation_room(schedule, seat) or 0)
                + weights_of(memory, schedule.held_layers_of_seat(seat))
                - weights_of(memory, grid.held_layers_by_column[seat.role.column])
            )
            if room != memory.capacity[seat.role.column]:
                rooms.append(Room(seat.role, room))
        memory = msgspec.structs.replace(memory, capacity_of=tuple(rooms) or msgspec.UNSET)
    return msgspec.structs.replace(
        schedule,
        times=msgspec.structs.replace(times, slow=slow),
        memory=memory,
        failed=tuple(find_vacant_roles(schedule)),
        seats=tuple(msgspec.structs.replace(seat, worker=seat.role) for seat in seats),
    )


def _bound_without_search(schedule: Schedule) -> Bound:
    """Return the strongest lower bound over the schedule's scope that is proven without CP-SAT."""
    # With layers in place and overlapping reductions, the problem of whole stages has the larger
    # bound: it counts the reductions that no compute can hide.
    held_elsewhere = any(map(schedule.has_moved_layers, schedule.seats))
    by_layer = schedule.scope is Scope.LAYERS or (
        schedule.scope is Scope.PLACE and (held_elsewhere or not schedule.has_overlap)
    )
    if schedule.times.of_layers and by_layer:
        return _bound_over_layouts(schedule, schedule.times.of_layers)
    if schedule.scope is Scope.PLACEMENT:
        return _bound_over_placements(schedule)
    # Older files do not say what layers cost: all work, shared evenly, and one optimizer step.
    if schedule.scope is Scope.LAYERS or held_elsewhere:
        ticks = min(schedule.times.optimizer_of_layer, default=0) + math.ceil(
            shared_ticks(schedule)
        )
        return Bound(ticks, schedule.scope)
    if schedule.scope is Scope.ROLES:
        return roles_bound(_problem_in_place(schedule, ()), schedule.failed)
    bound = strongest_bound(_problem_in_place(schedule, find_vacant_roles(schedule)))
    return Bound(bound.ticks, schedule.scope, bound.counts)


def find_vacant_roles(schedule: Schedule) -> list[Worker]:
    """Return the vacant roles of a schedule: those that no live worker plays."""
    return [role for role in schedule.grid.workers() if role not in schedule.player_of]


def _exposed_reduction_ticks(schedule: Schedule) -> tuple[int, ...]:
    """Return, by stage, the ticks of reduction that no compute can hide."""
    layer_costs = schedule.times.of_layers
    if not layer_costs:
        return (0,) * len(schedule.grid.stages)
    # Some layer is reduced after a worker's last W: at best the one that takes the least time. Only
    # one stage of each column has a value, its smallest.
    return keep_column_minimum(
        schedule.grid,
        [
            math.floor(
                min(layer_costs.all_reduce[slice(*layers)]) / Fraction(*layer_costs.per_tick)
            )
            for layers in schedule.grid.layers_by_stage
        ],
    )


def _problem_in_place(schedule: Schedule, failed: Sequence[Worker]) -> Problem:
    """Return the problem of a schedule with layers in place and `failed` workers down."""
    grid, scope = schedule.grid, schedule.scope
    # The file may say that a failed worker is slow, which no bound may count.
    slow = tuple(
        slow_worker for slow_worker in schedule.times.slow if slow_worker.worker in schedule.seat_of
    )
    reduced = (
        _exposed_reduction_ticks(schedule) if schedule.has_overlap else schedule.times.all_reduce
    )
    return build_held_problem(
        name=schedule.job,
        tick_seconds=schedule.tick_seconds,
        grid=grid,
        times=msgspec.structs.replace(schedule.times, slow=slow, all_reduce=reduced),
        memory=schedule.memory,
        holds=layers_in_place(grid, failed),
        backward=schedule.backward,
        optimizer=schedule.optimizer,
        sharing=scope is not Scope.OWN,
        parts=() if scope in (Scope.OWN, Scope.STAGES) else _parts_per_stage(schedule),
    )


def _parts_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return, by stage, the number of its layers, or 0 if they cost different amounts."""
    if schedule.times.of_layers:
        return count_equal_layers(schedule.grid, _to_layer_ticks(schedule.times.of_layers))
    # Without costs of layers, only a stage of a single layer is known to be of equal ones.
    return tuple(int(end - first == 1) for first, end in schedule.grid.layers_by_stage)


def _to_layer_ticks(layer_costs: LayerCosts) -> LayerTicks:
    return LayerTicks(**{name: getattr(layer_costs, name) for name in LayerTicks.__struct_fields__})


def _bound_over_placements(schedule: Schedule) -> Bound:
    """Return a lower bound over all placements; 0 ticks without costs of layers."""
    layer_costs, times = schedule.times.of_layers, schedule.times
    if not layer_costs:
        return Bound(0, Scope.PLACEMENT)
    # A first stage without I leaves its whole backward to W, since its input needs no gradient.
    last = schedule.grid.depth
    input_free = (
        not times.backward_input[0]
        and bool(times.backward_weight[0])
        and any(times.backward_input[1:last])
    )
    bound = placement_bound(_layer_problem(schedule, layer_costs), input_free=input_free)
    return msgspec.structs.replace(
        bound, ticks=math.floor(bound.ticks / Fraction(*layer_costs.per_tick))
    )


def _bound_over_layouts(schedule: Schedule, layer_costs: LayerCosts) -> Bound:
    """Return a lower bound over all layouts of a job whose layers have these costs."""
    bound = layout_lower_bound(_layer_problem(schedule, layer_costs))
    beyond = min_exposed_ticks(schedule) if schedule.has_overlap else 0
    return msgspec.structs.replace(
        bound, ticks=math.floor(bound.ticks / Fraction(*layer_costs.per_tick)) + beyond
    )


def _layer_problem(schedule: Schedule, layer_costs: LayerCosts) -> Problem:
    """Return the problem of a schedule in ticks that are fine enough for single layers."""
    grid, memory = schedule.grid, schedule.memory
    per_tick, per_unit = Fraction(*layer_costs.per_tick), Fraction(*layer_costs.per_unit)
    costs = _to_layer_ticks(layer_costs)
    if schedule.has_overlap:  # reductions may run during all compute but the last
        costs = msgspec.structs.replace(costs, all_reduce=(0,) * grid.layer_count)
    if memory is not None:
        rooms = tuple(
            Room(room.worker, math.ceil(room.capacity * per_unit))
            for room in memory.capacity_of or ()
        )
        memory = msgspec.structs.replace(
            memory,
            capacity_of=rooms or msgspec.UNSET,
            capacity=tuple(math.ceil(capacity * per_unit) for capacity in memory.capacity),
        )
    # With layers in place, micro-batches may also be shared and cut.
    shared = schedule.scope is Scope.PLACE and all(seat.holds is None for seat in schedule.seats)
    return build_problem_of_layers(
        costs,
        msgspec.structs.replace(
            schedule.times, transfer=math.floor(schedule.times.transfer * per_tick)
        ),
        memory,
        name=schedule.job,
        tick_seconds=schedule.tick_seconds,
        grid=grid,
        holds={worker: schedule.held_layers(worker) for worker in schedule.members},
        backward=schedule.backward,
        optimizer=schedule.optimizer,
        question=AllowedLayouts(layers="fixed" if schedule.scope is Scope.PLACE else "move"),
        sharing=shared,
        parts=count_equal_layers(grid, costs) if shared else (),
    )
