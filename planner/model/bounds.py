"""Prove lower bounds on the period with layers in place, and choose the best.

Each lemma of docs/bounds.md is valid separately, under assumptions that `planner.model.assumptions`
tests; the largest bound counts. All lemmas hold for any order of ops and for both backward modes.
Times of a schedule with slices, and so its bounds, need not be whole numbers of the problem's
ticks.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from slipstream.planner.model.assumptions import (
    is_single_stage,
    is_synchronous,
    runs_own_microbatches,
    runs_whole_units,
)
from slipstream.planner.model.bounds_chunks import chunk_bounds
from slipstream.planner.model.bounds_layouts import period_bound, ticks_of_work
from slipstream.planner.model.bounds_passage import compute_whole_fill, passage_bounds
from slipstream.planner.model.bounds_stage import (
    busiest_window,
    count_microbatches_at,
    fill_and_drain_bound,
    scarce_stage_bound,
)
from slipstream.planner.model.problem import Bound, Problem
from slipstream.schedules.schedule import Scope, Worker

NamedBound = tuple[Fraction, str]
"""Lower bound on the period in ticks, and words that say what it counts."""


def lower_bound(problem: Problem) -> int:
    """Return the best proven lower bound on the period, in ticks: `strongest_bound`."""
    return strongest_bound(problem).ticks


def strongest_bound(problem: Problem) -> Bound:
    """Return the best proven lower bound on the period, in whole ticks, with its scope.

    It is rounded up, or down if micro-batches may be cut. It is 0 if the problem has a layout;
    `layout_lower_bound` bounds the problem from which the layout was made.
    """
    if problem.assigned:
        return Bound(0, Scope.LAYERS)
    ticks, counts = exact_bound(problem)
    return Bound(
        (math.floor if problem.can_cut_stages else math.ceil)(ticks), problem.bound_scope, counts
    )


def exact_bound(problem: Problem) -> NamedBound:
    """Return the best bound with layers in place, unrounded, and text on what it counts."""
    return max(_bounds_in_place(problem), key=lambda bound: bound[0])


def layout_lower_bound(below: Problem) -> Bound:
    """Return a lower bound on the period for all layouts that a problem allows.

    The costs of the problem, `below`, are rounded down. If workers share micro-batches in it,
    layers are in place, and `exact_bound` counts, too. Raises LookupError if layers may not move
    and some layer has no live holder.
    """
    bound = period_bound(below)
    if below.sharing:
        ticks, counts = exact_bound(below)
        bound |= Bound(math.ceil(ticks), bound.scope, counts)
    return bound


def _bounds_in_place(problem: Problem) -> list[NamedBound]:
    bounds = _work_bounds(problem)
    for stage in filter(
        lambda stage: is_single_stage(problem, stage), range(len(problem.grid.stages))
    ):
        # Stages whose workers hold nothing else: what such a worker does and waits for.
        column = problem.column_of[stage]
        window = busiest_window(problem, stage)
        bounds.append((window, f"work and round trips of the busiest worker of column {column}"))
        bounds.append(
            (
                scarce_stage_bound(problem, stage),
                f"the wait of column {column} for fewer workers at other stages",
            )
        )
        bounds.append(
            (
                fill_and_drain_bound(problem, stage),
                f"the way to stage {stage}, its work, and the way back",
            )
        )
        if is_synchronous(problem):
            bounds.append(
                (
                    _earliest_forward(problem, stage) + window,
                    f"the way to column {column}, and its work",
                )
            )
    # Bounds that look at all stages.
    bounds += [
        (
            Fraction(ticks),
            f"how micro-batches pass stage {stage} and come back to it, one after the other",
        )
        for stage, ticks in enumerate(passage_bounds(problem))
    ]
    bounds += chunk_bounds(problem)
    if (whole := compute_whole_fill(problem)) is not None:
        bounds.append(
            (Fraction(whole.period), "work, and what whole forwards leave of the round trips")
        )
    return bounds


def _work_bounds(problem: Problem) -> list[NamedBound]:
    """Return the bounds of lemma 1: of columns' shared work, and of busiest workers."""
    bounds = []
    for first in sorted(set(problem.reduction_root)):
        # Columns with copies of the same stages share their work.
        columns = [column for column, tied in enumerate(problem.reduction_root) if tied == first]
        stages = [stage for column in columns for stage in problem.grid.stages_of_column(column)]
        if not stages:
            continue
        # With a synchronous optimizer, all windows begin with the first op of the job.
        reach = 0
        if is_synchronous(problem):
            reach = min(_earliest_forward(problem, stage) for stage in stages)
        work = reach + column_work(problem, columns)
        bounds.append((work, f"the work of column {first}, shared by its live workers"))
        if runs_own_microbatches(problem):
            bounds += [
                (
                    reach + _busiest_own_work(problem, column),
                    f"the work of the busiest worker of column {column}",
                )
                for column in columns
                if problem.live_pipelines_by_column[column]
            ]
    return bounds


def _earliest_forward(problem: Problem, stage: int) -> int:
    """Return the earliest tick at which an F of a stage can start."""
    forward_ticks, _ = problem.min_path_ticks
    return forward_ticks[stage] - forward_ticks[stage - problem.grid.original_stage(stage)]


def column_work(problem: Problem, columns: Sequence[int]) -> Fraction:
    """Return the least ticks that the busiest worker of these columns needs.

    The columns hold the same layers. The ticks are an even share, by speed, of their work, and the
    closing ticks (lemmas 1 and 20 of docs/bounds.md).
    """
    units = [
        (_least_work(problem, stage), count_microbatches_at(problem, stage))
        for column in columns
        for stage in problem.grid.stages_of_column(column)
    ]
    slowness = [
        problem.workers[Worker(pipeline, column)].per_mille
        for column in columns
        for pipeline in problem.live_pipelines_by_column[column]
    ]
    ticks = ticks_of_work(sum(work * count for work, count in units), slowness)
    # Lemma 20: workers run whole units, so their work is a multiple of what units have in common.
    if runs_whole_units(problem) and (common := math.gcd(*(work for work, _ in units))):
        ticks = Fraction(math.ceil(ticks / common) * common)
    return ticks + min(map(problem.column_closing_ticks, columns))


def _least_work(problem: Problem, stage: int) -> int:
    """Return the least ticks of all ops of a micro-batch at a stage."""
    ticks = []
    for copy in problem.copies_of(stage):
        ticks.append(sum(problem.usual_ticks(kind, copy) for kind in problem.op_kinds))
    return min(ticks)


def _busiest_own_work(problem: Problem, column: int) -> Fraction:
    """Return the most ticks of a column's worker for its own micro-batches, A and O."""
    grid, longest = problem.grid, 0
    for pipeline in problem.live_pipelines_by_column[column]:
        worker, work = Worker(pipeline, column), 0
        for stage in grid.stages_of_column(column):
            # With two directions, micro-batches take them in turn.
            count = len(range(stage // grid.depth, grid.microbatches[pipeline], grid.chains))
            work += count * sum(problem.op_ticks(kind, stage, worker) for kind in problem.op_kinds)
        longest = max(longest, work)
    return Fraction(problem.column_closing_ticks(column) + longest)


def window_bound(problem: Problem, column: int) -> int:
    """Return a lower bound, in ticks, on the busy window of a column's busiest worker."""
    stages = [
        stage for stage in problem.grid.stages_of_column(column) if is_single_stage(problem, stage)
    ]
    return math.ceil(
        busiest_window(problem, stages[0]) if stages else column_work(problem, [column])
    )
