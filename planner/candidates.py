"""Build the candidates of a search for a job and its failures.

With layers in place, these are the problem as it is, in which live holders share micro-batches, and
layouts that cut some micro-batches within a stage (`planner.layout.fixed`). If layers may move, all
layouts of `planner.layout` are candidates, too.
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
from slipstream.planner.model.problem import LayoutScope, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.search.incumbent import CandidateSource, Incumbent, divide_problem
from slipstream.schedules.schedule import LayerCosts, Worker


def build_candidates(options: PlanOptions, job: Job, failed: Sequence[Worker],
                     problem: Problem | None) -> CandidateSource:
    """Return the candidates of a search for a job and its failures.

    They are `problem`, in which layers stay in place (None if it has no plan), and layouts, if they
    are allowed and can be better.
    """
    alone = options.method not in ("cp-sat", "greedy") \
        or not (options.layers == "move" or _can_layouts_gain(options, problem))
    if problem is not None and alone:
        return CandidateSource(first=problem)
    sliced = options.slices if problem is None or options.layers == "move" else problem.can_cut_stages
    layout_scope = LayoutScope(layers=options.layers, sliced=sliced, from_checkpoint=options.from_checkpoint)
    layered, lower = (
        build_layered_problem(job, failed, layout_scope, backward=options.backward or "split",
                              optimizer=options.optimizer or "staggered", holds=dict(options.holds), down=down)
        for down in (False, True))
    costs = layer_costs(job)
    shared = with_shared_state(job, failed)  # as in both problems
    units = choose_memory_unit(shared) / choose_memory_unit(shared, layer_costs(shared))
    scale = choose_tick(job) / choose_tick(job, costs)
    if problem is not None and options.layers == "fixed":
        lower = msgspec.structs.replace(lower, sharing=problem.sharing,
                                        parts=count_equal_layers(lower.grid, lower.costs))
    least, layered = layout_lower_bound(lower), _with_layer_costs(layered, lower)

    def iterate_layouts(largest_fine: float) -> Iterator[Incumbent]:
        try:
            for layout in generate_layouts(layered, largest_fine=largest_fine, params=options.params.layouts):
                yield divide_problem(with_layout(layered, layout), least, moved=layered.moved_memory(layout.holds))
        except LookupError as error:
            if options.from_checkpoint:
                raise
            raise LookupError(f"{error}; `slipstream plan --layers move --from-checkpoint` takes it from a checkpoint"
                              ) from None

    return CandidateSource(first=problem and _with_layer_costs(problem, lower, scale, units), layouts=iterate_layouts,
                           layered=layered, layered_bound=least,
                           bound=msgspec.structs.replace(least, ticks=math.floor(least.ticks / scale)),
                           units=layered.grid.total_microbatches * layered.grid.depth, moving=options.layers == "move")


def _can_layouts_gain(options: PlanOptions, problem: Problem | None) -> bool:
    """Return whether layouts in place can be better than the problem as it is."""
    return problem is not None and (
        problem.has_unequal_room or (options.slices and problem.can_cut_stages and problem.grid.chains == 1))


def _with_layer_costs(problem: Problem, below: Problem, per_tick: Fraction = Fraction(1),
                      per_unit: Fraction = Fraction(1)) -> Problem:
    """Return a copy of the problem that records the costs of single layers of `below`."""
    costs = LayerCosts(per_tick=per_tick.as_integer_ratio(), per_unit=per_unit.as_integer_ratio(),
                       **msgspec.structs.asdict(below.costs))
    return msgspec.structs.replace(problem, times=msgspec.structs.replace(problem.times, of_layers=costs))
