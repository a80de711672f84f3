"""Find where a schedule file contradicts itself about the question that its lower bound answers.

The checker ties the times and memory of the slices that ops run, the seats and the routes to the
ops. A bound also reads what no op shows: the costs of single layers (`times.of_layers`), the costs
of stages that are always run in parts, and its own scope. Here these are compared with what the ops
do show, so that no such value can raise a bound by itself.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain

from slipstream.planner.model.from_job import MAX_TICKS
from slipstream.schedules.layers import LayerRange, layers_text
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerCosts, OpKind, Schedule, Scope


class ContradictionError(ValueError):
    """Error of a schedule file that contradicts itself about its job, in one line."""


def require_consistent(schedule: Schedule) -> None:
    """Raise ContradictionError if values that a bound reads contradict ops or each other.

    The schedule must have passed `schedules.check`.
    """
    for rule in (_check_scope, _check_unused_stages, _check_steps, _check_layer_costs):
        for message in rule(schedule):
            raise ContradictionError(message)


# --- The scope includes the schedule itself -------------------------------------------------------


def narrowest_scope(schedule: Schedule) -> Scope:
    """Return the narrowest scope that includes a schedule, by what workers hold and run.

    A worker that plays another role counts as that role, whose layers it holds.
    """
    # From the widest scope to the narrowest: moved layers, then cut micro-batches, then work done
    # for others.
    grid = schedule.grid
    if any(schedule.has_moved_layers(seat) for seat in schedule.seats):
        return Scope.LAYERS
    edges = {edge for layers in grid.layers_by_stage for edge in layers}
    whole = [set(layers) <= edges for layers in schedule.layers_by_slice]
    if not all(
        whole[op.slice or 0]
        for program in schedule.programs
        for op in program
        if op.kind in COMPUTE_KINDS
    ):
        return Scope.PLACE
    return Scope.STAGES if schedule.shed or _has_exchanged_directions(schedule) else Scope.OWN


def _has_exchanged_directions(schedule: Schedule) -> bool:
    """Return whether a bidirectional micro-batch runs at a stage of the other direction."""
    grid, columns = schedule.grid, [stage.column for stage in schedule.grid.stages]
    return grid.chains > 1 and any(
        op.slice not in grid.stages_of_microbatch(op.microbatch)
        or columns[op.slice] != seat.role.column
        for seat in schedule.seats
        for op in schedule.programs[seat.program]
        if op.microbatch is not None and op.slice is not None
    )


def _check_scope(schedule: Schedule) -> Iterator[str]:
    """Yield a message if the scope that a bound states does not include its schedule."""
    scope, narrowest = schedule.scope, narrowest_scope(schedule)
    if scope is Scope.PLACE and narrowest is Scope.LAYERS and schedule.times.of_layers:
        return  # planned for layers where they are now, after an earlier move
    if not scope.is_valid_for(narrowest) or (scope is Scope.PLACEMENT and schedule.failed):
        with_failures = (
            " with failed workers" if scope is Scope.PLACEMENT and schedule.failed else ""
        )
        yield (
            f"bound_scope is '{scope}', but the schedule is one of '{narrowest}'{with_failures}; "
            "expected a scope that includes it"
        )


# --- Stages that no op runs as a whole ------------------------------------------------------------


def _check_unused_stages(schedule: Schedule) -> Iterator[str]:
    """Yield messages for unused stages that cost more than the slices run in their place."""
    # The slices of the ops of each kind: the checker has compared their values with the ops.
    used: dict[OpKind, set[int]] = defaultdict(set)
    for program in schedule.programs:
        for op in program:
            if op.slice is not None:
                used[op.kind].add(op.slice)
    kinds = {
        "forward": OpKind.F,
        "backward_input": OpKind.I,
        "backward_weight": OpKind.W,
        "all_reduce": OpKind.A,
    }
    routes = {
        tuple(schedule.route_of(pipeline, microbatch))
        for pipeline, count in enumerate(schedule.grid.microbatches)
        for microbatch in range(count)
    }
    # A micro-batch passes all layers by its route; all layers are reduced by all A together.
    for name, kind in kinds.items():
        covers = [tuple(used[OpKind.A])] if kind is OpKind.A else routes
        shown = used[kind] | (used[OpKind.B] if kind in (OpKind.I, OpKind.W) else set())
        yield from _check_covered(
            schedule, f"times.{name}", getattr(schedule.times, name), shown, covers
        )
    memory = schedule.memory
    for name in ("activation", "weight_stash") if memory is not None else ():
        yield from _check_covered(
            schedule, f"memory.{name}", getattr(memory, name), used[OpKind.F], routes
        )


def _check_covered(
    schedule: Schedule,
    name: str,
    values: Sequence[int],
    shown: Collection[int],
    covers: Collection[Sequence[int]],
) -> Iterator[str]:
    """Yield messages for stages, not in `shown`, that cost more than slices that replace them."""
    # Stages in `shown` are run themselves. Each of `covers` has slices that together have all
    # layers; the smallest sum over one of them is the limit. Of times that are finer than ticks,
    # each may be rounded by one.
    rounded = _longest_ticks(schedule) // MAX_TICKS
    for stage, layers in enumerate(schedule.grid.layers_by_stage):
        if stage in shown or not values[stage]:
            continue
        limits = []
        for cover in covers:
            met = [slice for slice in cover if _overlap(schedule.layers_of(slice), layers)]
            limits.append(sum(values[slice] + rounded for slice in met))
        limit = min(limits, default=0)
        if values[stage] > limit:
            yield (
                f"{name} of stage {stage}, which no op runs, is {values[stage]}; expected at "
                f"most {limit}, that of the slices run in its place"
            )


def _overlap(first: LayerRange, second: LayerRange) -> bool:
    return first[0] < second[1] and second[0] < first[1]


# --- Optimizer steps ------------------------------------------------------------------------------


def _check_steps(schedule: Schedule) -> Iterator[str]:
    """Yield a message for each column whose optimizer step is not its layers' sum."""
    by_layer = schedule.times.optimizer_of_layer
    if not by_layer:
        return
    for column, ticks in enumerate(schedule.times.optimizer):
        layer_ticks = sum(
            sum(by_layer[first:end]) for first, end in schedule.held_layers_of_column(column)
        )
        if layer_ticks != ticks:
            yield (
                f"times.optimizer_of_layer adds up to {layer_ticks} ticks for the layers of column "
                f"{column}; expected {ticks}, its times.optimizer"
            )


# --- Costs of single layers -----------------------------------------------------------------------


def _check_layer_costs(schedule: Schedule) -> Iterator[str]:
    """Yield messages where the stated costs of layers contradict the costs of slices."""
    costs = schedule.times.of_layers
    if not costs:
        return
    for name in LAYER_COST_RULES:
        yield from LAYER_COST_RULES[name](schedule, costs, name)


LayerCostRule = Callable[[Schedule, LayerCosts, str], Iterator[str]]
"""Function that yields messages about one field of `LayerCosts`, given by its name."""


def _check_times(schedule: Schedule, costs: LayerCosts, name: str) -> Iterator[str]:
    """Yield messages where a slice's layers do not add up to its compute time."""
    if name != "forward" and schedule.scope is Scope.PLACEMENT:
        # In another placement, what is first may have no I, and stages may be recomputed: only
        # the sum counts here.
        layer_values = tuple(
            map(sum, zip(costs.backward_input, costs.backward_weight, strict=True))
        )
        shown = tuple(
            map(
                sum, zip(schedule.times.backward_input, schedule.times.backward_weight, strict=True)
            )
        )
        yield from _compare(
            schedule,
            "backward_input and backward_weight",
            layer_values,
            shown,
            Fraction(*costs.per_tick),
            2,
        )
        return
    yield from _compare(
        schedule,
        name,
        getattr(costs, name),
        getattr(schedule.times, name),
        Fraction(*costs.per_tick),
    )


def _check_reductions(schedule: Schedule, costs: LayerCosts, name: str) -> Iterator[str]:
    """Yield messages where a slice's layers contradict the time of its reduction."""
    per_tick, values = Fraction(*costs.per_tick), getattr(costs, name)
    if not schedule.has_overlap:
        yield from _compare(
            schedule, name, values, schedule.times.all_reduce, per_tick, below=False
        )
        return
    # Reductions that overlap compute may share their latency, so that a slice takes less than the
    # sum of its layers, but no less than any one of them.
    for slice, (first, end) in enumerate(schedule.layers_by_slice):
        longest = max(values[first:end])
        if longest > schedule.times.all_reduce[slice] * per_tick:
            yield _message(
                schedule, name, slice, longest, schedule.times.all_reduce[slice] * per_tick
            )


def _check_steps_of_layers(schedule: Schedule, costs: LayerCosts, name: str) -> Iterator[str]:
    """Yield messages where layers' optimizer steps exceed what the schedule states."""
    # Layers may cost less than the columns, as costs are rounded down, but not more.
    per_tick, values = Fraction(*costs.per_tick), getattr(costs, name)
    for column, ticks in enumerate(schedule.times.optimizer):
        layer_ticks = sum(
            sum(values[first:end]) for first, end in schedule.held_layers_of_column(column)
        )
        if layer_ticks > ticks * per_tick:
            yield (
                f"times.of_layers.{name} is {layer_ticks} for the layers of column {column}; "
                f"expected at most {float(ticks * per_tick):g}, as its times.optimizer says"
            )
    for layer, ticks in enumerate(schedule.times.optimizer_of_layer):
        if values[layer] > ticks * per_tick:
            yield (
                f"times.of_layers.{name} is {values[layer]} for layer {layer}; expected at "
                f"most {float(ticks * per_tick):g}, as times.optimizer_of_layer says"
            )


def _check_memory(schedule: Schedule, costs: LayerCosts, name: str) -> Iterator[str]:
    """Yield messages where a slice's layers do not add up to its activation memory."""
    memory = schedule.memory
    if memory is not None and not (name == "weight_stash" and schedule.backward == "fused"):
        yield from _compare(
            schedule,
            name,
            getattr(costs, name),
            getattr(memory, name),
            Fraction(*costs.per_unit),
            below=schedule.scope is not Scope.PLACEMENT,
        )


def _check_weights(schedule: Schedule, costs: LayerCosts, name: str) -> Iterator[str]:
    """Yield messages where layers' weights contradict those that the memory rule counts."""
    # Both are the same weight, rounded up to the one unit and down to the other.
    per_unit, memory = Fraction(*costs.per_unit), schedule.memory
    for layer, shown in enumerate(memory.weights if memory is not None else ()):
        weights = getattr(costs, name)[layer]
        if not (shown - 1) * per_unit - 1 < weights <= shown * per_unit:
            yield (
                f"times.of_layers.{name} is {weights} for layer {layer}; expected "
                f"{float(shown * per_unit):g}, as memory.weights says"
            )


LAYER_COST_RULES: Mapping[str, LayerCostRule] = {
    "forward": _check_times,
    "backward_input": _check_times,
    "backward_weight": _check_times,
    "optimizer": _check_steps_of_layers,
    "all_reduce": _check_reductions,
    "activation": _check_memory,
    "weight_stash": _check_memory,
    "weights": _check_weights,
}
"""Rule for each field of `LayerCosts` but the units."""


def _compare(
    schedule: Schedule,
    name: str,
    layer_values: Sequence[int],
    shown: Sequence[int],
    per: Fraction,
    values: int = 1,
    *,
    below: bool = True,
) -> Iterator[str]:
    """Yield a message for each slice whose layers' sum contradicts its value in `shown`."""
    # A unit of `shown` has `per` units of `layer_values`. A sum must not exceed the slice's value;
    # with `below`, it must not be less either, except for the rounding of `values` values. Ticks
    # may have been divided after costs were rounded to them, to no less than that.
    off = max(Fraction(1), Fraction(_longest_ticks(schedule), MAX_TICKS))
    reduced = _only_reduced_slices(schedule)
    for slice, (first, end) in enumerate(schedule.layers_by_slice):
        if slice in reduced and name != "all_reduce":
            continue
        total, limit = sum(layer_values[first:end]), shown[slice] * per
        least = limit - values * off * (per + end - first)
        if total > limit or (below and total <= least):
            yield _message(schedule, name, slice, total, limit)


def _only_reduced_slices(schedule: Schedule) -> set[int]:
    """Return the slices, other than stages, at which no micro-batch runs."""
    # Their times of compute may be missing.
    run = {op.slice for program in schedule.programs for op in program if op.kind is OpKind.F}
    return set(range(len(schedule.grid.stages), len(schedule.layers_by_slice))) - run


def _longest_ticks(schedule: Schedule) -> int:
    """Return the ticks of the longest op, on the slowest worker, or transfer."""
    times = schedule.times
    by_slice = (times.forward, times.backward_input, times.backward_weight, times.all_reduce)
    slowest = max([1000, *times.per_mille_of.values()])
    return max(chain(*by_slice, times.optimizer, (times.transfer,)), default=0) * slowest // 1000


def _message(schedule: Schedule, name: str, slice: int, stated: int, limit: Fraction) -> str:
    return (
        f"times.of_layers says {stated} for {name} of "
        f"{layers_text(schedule.layers_of(slice))}; expected {float(limit):g}, that of "
        f"{schedule.slice_text(slice)} in its units"
    )
