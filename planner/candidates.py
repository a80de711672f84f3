"""Build the candidates of a search for a job and its failures.

With layers in place, these are the problem as it is, in which live holders may share micro-batches,
and layouts of `planner.layout.fixed`, most of which cut some micro-batches within a stage. If
layers may move, all layouts of `planner.layout` are candidates, too.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import layer_costs, with_shared_state
from slipstream.planner.layout.candidates import generate_layouts
from slipstream.planner.model.bounds import layout_lower_bound
from slipstream.planner.model.from_job import (
    build_layered_problem,
    choose_memory_unit,
    choose_tick,
    count_equal_layers,
    with_layout,
)
from slipstream.planner.model.problem import AllowedLayouts, NoPlanError, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.search.incumbent import CandidateSource, Incumbent, divide_problem
from slipstream.schedules.schedule import LayerCosts, Worker

FROM_CHECKPOINT = "`slipstream plan --layers move --from-checkpoint` takes it from a checkpoint"
"""End of the message about a layer that no live worker holds."""


def build_candidates(
    options: PlanOptions, job: Job, failed: Sequence[Worker], problem: Problem | None
) -> CandidateSource:
    """Return the candidates of a search for a job and its failures.

    The candidates are `problem`, in which layers stay in place (None: it is left out), and layouts
    where these are allowed and can be better. Where they are, raises JobError if a stage has no
    layer, and NoPlanError if no worker is alive, or if layers may not move and some layer has no
    live holder.
    """
    # Layouts are left out where they cannot help, since they share the time of the search.
    alone = options.method not in ("cp-sat", "greedy") or not (
        options.layers == "move" or _can_layouts_gain(options, problem)
    )
    if problem is not None and alone:
        return CandidateSource(first=problem)
    # Two problems of single layers: for layouts, with costs rounded up, and for bounds, down.
    sliced = options.slices
    if problem is not None and options.layers == "fixed":
        sliced = problem.can_cut_stages
    allowed = AllowedLayouts(
        layers=options.layers, sliced=sliced, from_checkpoint=options.from_checkpoint
    )
    layered, lower = (
        build_layered_problem(
            job,
            failed,
            allowed,
            backward=options.backward or "split",
            optimizer=options.optimizer or "staggered",
            holds=dict(options.holds),
            down=down,
        )
        for down in (False, True)
    )
    # The problem in place may count in coarser ticks and units.
    costs = layer_costs(job)
    shared = with_shared_state(job, failed)  # as in both problems
    units = choose_memory_unit(shared) / choose_memory_unit(shared, layer_costs(shared))
    scale = choose_tick(job) / choose_tick(job, costs)
    if problem is not None and options.layers == "fixed":
        lower = msgspec.structs.replace(
            lower, sharing=problem.sharing, parts=count_equal_layers(lower.grid, lower.costs)
        )
    try:
        least = layout_lower_bound(lower)
    except LookupError as error:
        raise NoPlanError(f"{error}; {FROM_CHECKPOINT}") from None
    layered = _with_layer_costs(layered, lower)

    def iterate_layouts(largest_fine: float) -> Iterator[Incumbent]:
        # A generator, as a search may end before it has seen all layouts.
        try:
            for layout in generate_layouts(
                layered, largest_fine=largest_fine, params=options.params.layouts
            ):
                yield divide_problem(
                    with_layout(layered, layout), least, moved=layered.moved_memory(layout.holds)
                )
        except LookupError as error:
            if options.from_checkpoint:
                raise
            raise LookupError(f"{error}; {FROM_CHECKPOINT}") from None

    return CandidateSource(
        first=problem and _with_layer_costs(problem, lower, scale, units),
        layouts=iterate_layouts,
        layered=layered,
        layered_bound=least,
        bound=msgspec.structs.replace(least, ticks=math.floor(least.ticks / scale)),
        units=layered.grid.total_microbatches * layered.grid.depth,
        moving=options.layers == "move",
    )


def _can_layouts_gain(options: PlanOptions, problem: Problem | None) -> bool:
    """Return whether cut stages or unequal memories can make a layout better than `problem`."""
    return problem is not None and (
        problem.has_unequal_memory
        or (options.slices and problem.can_cut_stages and problem.grid.chains == 1)
    )


def _with_layer_costs(
    problem: Problem,
    below: Problem,
    per_tick: Fraction = Fraction(1),
    per_unit: Fraction = Fraction(1),
) -> Problem:
    """Return a copy of `problem` with the layer costs of `below`, in finer units.

    A tick of `problem` has `per_tick` ticks of `below`, and its unit of memory `per_unit` units.
    """
    costs = LayerCosts(
        per_tick=per_tick.as_integer_ratio(),
        per_unit=per_unit.as_integer_ratio(),
        **msgspec.structs.asdict(below.costs),
    )
    return msgspec.structs.replace(
        problem, times=msgspec.structs.replace(problem.times, of_layers=costs)
    )
