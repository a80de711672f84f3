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
from slipstream.planner.model.problem import Bound, LayerTicks, LayoutScope, Problem
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

    They have the same live workers with the same memory, and the freedom that `Schedule.scope`
    names. If micro-batches may be cut or layers moved, the bound counts the costs of layers that
    the file records. Older files do not record them: then only the total work and the optimizer
    step of a layer bound the period. With a budget, CP-SAT also tries to prove the claimed bound of
    a small problem, if it exceeds what is proven without a search.

    The schedule must have passed the checker. Raises ContradictionError if its file contradicts
    itself about a value that bounds read (`stated_question`).
    """
    require_consistent(schedule)
    if schedule.scope in IN_PLACE:
        schedule = _with_own_roles(schedule)
    bound, claimed = _bound_without_search(schedule), schedule.lower_bound_ticks
    if budget is None or bound.ticks >= claimed or not _is_searchable(schedule):
        return bound
    from slipstream.planner.search.cpsat import (  # the solver takes a third of a second to load
        BOUND_DESCRIPTION,
        disproves_shorter,
    )

    problem = _problem_in_place(schedule, find_vacant_roles(schedule))
    parts = [piece.problem for piece in decompose(problem)] if pieces_are_independent(problem) else [problem]
    largest = DEFAULTS.cp_sat.largest_proof
    if any(is_provable_by_search(part) and part.host_operation_count <= largest
           and disproves_shorter(part, claimed, budget) for part in parts):
        return Bound(claimed, schedule.scope, BOUND_DESCRIPTION)
    return bound


def _is_searchable(schedule: Schedule) -> bool:
    """Return whether CP-SAT's model includes all schedules of the scope."""
    return schedule.scope in (Scope.OWN, Scope.STAGES) and not schedule.has_overlap \
        and not any(map(schedule.has_moved_layers, schedule.seats))


def _with_own_roles(schedule: Schedule) -> Schedule:
    """Return a copy of the schedule in which workers are named by their roles."""
    if not schedule.moves:
        return schedule
    times, memory, grid = schedule.times, schedule.memory, schedule.grid
    seats = sorted(schedule.seats, key=lambda seat: seat.role)
    slow = tuple(Slow(seat.role, times.per_mille_of[seat.worker]) for seat in seats
                 if seat.worker in times.per_mille_of)
    if memory is not None:
        rooms = [Room(seat.role, (activation_room(schedule, seat) or 0)
                      + weights_of(memory, schedule.held_layers_of_seat(seat))
                      - weights_of(memory, grid.held_layers_by_column[seat.role.column])) for seat in seats]
        unusual = tuple(room for room in rooms if room.capacity != memory.capacity[room.worker.column])
        memory = msgspec.structs.replace(memory, capacity_of=unusual or msgspec.UNSET)
    return msgspec.structs.replace(
        schedule, times=msgspec.structs.replace(times, slow=slow), memory=memory,
        failed=tuple(find_vacant_roles(schedule)),
        seats=tuple(msgspec.structs.replace(seat, worker=seat.role) for seat in seats))


def _bound_without_search(schedule: Schedule) -> Bound:
    """Return the strongest lower bound over the schedule's scope that is proven without CP-SAT."""
    held_elsewhere = any(map(schedule.has_moved_layers, schedule.seats))
    by_layer = schedule.scope is Scope.LAYERS or (schedule.scope is Scope.PLACE
                                                  and (held_elsewhere or not schedule.has_overlap))
    if schedule.times.of_layers and by_layer:
        return _bound_over_layouts(schedule, schedule.times.of_layers)
    if schedule.scope is Scope.PLACEMENT:
        return _bound_over_placements(schedule)
    if schedule.scope is Scope.LAYERS or held_elsewhere:
        ticks = min(schedule.times.optimizer_of_layer, default=0) + math.ceil(shared_ticks(schedule))
        return Bound(ticks, schedule.scope)
    if schedule.scope is Scope.ROLES:
        return roles_bound(_problem_in_place(schedule, ()), schedule.failed)
    bound = strongest_bound(_problem_in_place(schedule, find_vacant_roles(schedule)))
    return Bound(bound.ticks, schedule.scope, bound.counts)


def find_vacant_roles(schedule: Schedule) -> list[Worker]:
    """Return the roles of a schedule that no live worker plays."""
    return [role for role in schedule.grid.workers() if role not in schedule.player_of]


def _exposed_reduction_ticks(schedule: Schedule) -> tuple[int, ...]:
    """Return, by stage, the ticks of reduction that cannot overlap compute."""
    told = schedule.times.of_layers
    if not told:
        return (0,) * len(schedule.grid.stages)
    return keep_column_minimum(schedule.grid,
                               [math.floor(min(told.all_reduce[slice(*layers)]) / Fraction(*told.per_tick))
                                for layers in schedule.grid.layers_by_stage])


def _problem_in_place(schedule: Schedule, failed: Sequence[Worker]) -> Problem:
    """Return the problem of a schedule with layers in place and `failed` workers down."""
    grid, scope = schedule.grid, schedule.scope
    slow = tuple(slow_worker for slow_worker in schedule.times.slow if slow_worker.worker in schedule.seat_of)
    reduced = _exposed_reduction_ticks(schedule) if schedule.has_overlap else schedule.times.all_reduce
    return build_held_problem(
        name=schedule.job, tick_seconds=schedule.tick_seconds, grid=grid,
        times=msgspec.structs.replace(schedule.times, slow=slow, all_reduce=reduced), memory=schedule.memory,
        holds=layers_in_place(grid, failed), backward=schedule.backward, optimizer=schedule.optimizer,
        sharing=scope is not Scope.OWN,
        parts=() if scope in (Scope.OWN, Scope.STAGES) else _parts_per_stage(schedule))


def _parts_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return the number of layers of each stage of equal layers, 0 for others."""
    if schedule.times.of_layers:
        return count_equal_layers(schedule.grid, _to_layer_ticks(schedule.times.of_layers))
    return tuple(int(end - first == 1) for first, end in schedule.grid.layers_by_stage)


def _to_layer_ticks(told: LayerCosts) -> LayerTicks:
    return LayerTicks(**{name: getattr(told, name) for name in LayerTicks.__struct_fields__})


def _bound_over_placements(schedule: Schedule) -> Bound:
    """Return a lower bound over all placements, 0 ticks without costs of layers."""
    layer_costs, times = schedule.times.of_layers, schedule.times
    if not layer_costs:
        return Bound(0, Scope.PLACEMENT)
    last = schedule.grid.depth
    input_free = not times.backward_input[0] and bool(times.backward_weight[0]) and any(times.backward_input[1:last])
    bound = placement_bound(_layer_problem(schedule, layer_costs), input_free=input_free)
    return msgspec.structs.replace(bound, ticks=math.floor(bound.ticks / Fraction(*layer_costs.per_tick)))


def _bound_over_layouts(schedule: Schedule, told: LayerCosts) -> Bound:
    """Return a lower bound over all layouts, for the layers' times and memory in `told`."""
    bound = layout_lower_bound(_layer_problem(schedule, told))
    beyond = min_exposed_ticks(schedule) if schedule.has_overlap else 0
    return msgspec.structs.replace(bound, ticks=math.floor(bound.ticks / Fraction(*told.per_tick)) + beyond)


def _layer_problem(schedule: Schedule, told: LayerCosts) -> Problem:
    """Return the problem of a schedule in ticks that are fine enough for single layers."""
    grid, memory = schedule.grid, schedule.memory
    per_tick, per_unit = Fraction(*told.per_tick), Fraction(*told.per_unit)
    costs = _to_layer_ticks(told)
    if schedule.has_overlap:  # reductions may go on beside all compute but the last
        costs = msgspec.structs.replace(costs, all_reduce=(0,) * grid.layer_count)
    if memory is not None:
        rooms = tuple(Room(one.worker, math.ceil(one.capacity * per_unit)) for one in memory.capacity_of or ())
        memory = msgspec.structs.replace(memory, capacity_of=rooms or msgspec.UNSET,
                                         capacity=tuple(math.ceil(room * per_unit) for room in memory.capacity))
    shared = schedule.scope is Scope.PLACE and all(seat.holds is None for seat in schedule.seats)
    return build_problem_of_layers(
        costs, msgspec.structs.replace(schedule.times, transfer=math.floor(schedule.times.transfer * per_tick)), memory,
        name=schedule.job, tick_seconds=schedule.tick_seconds, grid=grid,
        holds={worker: schedule.held_layers(worker) for worker in schedule.members}, backward=schedule.backward,
        optimizer=schedule.optimizer, question=LayoutScope(layers="fixed" if schedule.scope is Scope.PLACE else "move"),
        sharing=shared, parts=count_equal_layers(grid, costs) if shared else ())
