"""What each worker runs."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from slipstream.schedules.layers import joined_ranges, layers_text
from slipstream.schedules.precedence import OpKey, op_key
from slipstream.schedules.rules.case import Case, Route, Violation, listed
from slipstream.schedules.schedule import LayerRange, Op, OpKind, Worker


def each_once(case: Case) -> Iterator[Violation]:
    """Each micro-batch passes every layer once, by slices that tile them; F, I and W (or F and B) of each run once."""
    if case.whole_stages:
        return
    yield from _foreign_ops(case)
    tiling: dict[Route, str] = {}
    for pipeline, microbatch in case.microbatches():
        route = case.route(pipeline, microbatch)
        if route not in tiling:
            tiling[route] = _not_tiled(case, route)
        if tiling[route]:
            yield Violation("each-once", f"micro-batch {pipeline}.{microbatch}: {tiling[route]}")
        for slice in route:
            for kind in case.kinds:
                if (kind, slice, pipeline, microbatch) not in case.ops:
                    yield Violation("each-once", f"{kind}(micro-batch {pipeline}.{microbatch}, "
                                    f"{case.schedule.slice_text(slice)}) is run by nobody")


def _foreign_ops(case: Case) -> Iterator[Violation]:
    """Ops that no micro-batch needs."""
    schedule, kinds, seen = case.schedule, case.kinds, dict[OpKey, Op]()
    for op in case.compute():
        kind, slice, pipeline, microbatch = key = op_key(op)
        if kind not in kinds:
            yield Violation("each-once", f"{case.text(op)}: a schedule with {schedule.backward} backward has no "
                            f"{kind}", op)
        elif not 0 <= microbatch < schedule.grid.microbatches[pipeline]:
            yield Violation("each-once", f"{case.text(op)}: pipeline {pipeline} has only "
                            f"{schedule.grid.microbatches[pipeline]} micro-batches", op)
        elif (OpKind.F, slice, pipeline, microbatch) not in case.ops:
            yield Violation("each-once", f"{case.text(op)}: the micro-batch runs no F there", op)
        elif key in seen:
            yield Violation("each-once", f"{case.text(op)} at {case.at(op.start_ticks)} runs a second time; it ran on "
                            f"{seen[key].worker} at {case.at(seen[key].start_ticks)}", op)
        seen.setdefault(key, op)


def _not_tiled(case: Case, route: Route) -> str:
    """Where the slices of a route leave a layer out or pass one twice, in words; empty where they tile all layers."""
    reached, before = 0, None
    for slice in route:
        first, end = case.schedule.layers_of(slice)
        if first > reached:
            return f"nobody runs F of {layers_text((reached, first))}"
        if first < reached:
            assert before is not None
            twice = layers_text((first, min(end, reached)))
            return f"F of {twice} runs in {case.schedule.slice_text(before)} and in {case.schedule.slice_text(slice)}"
        reached, before = end, slice
    layers = case.schedule.grid.layer_count
    return f"nobody runs F of {layers_text((reached, layers))}" if reached < layers else ""


def closing(case: Case) -> Iterator[Violation]:
    """The As of a live worker tile exactly the layers that it holds; it runs one O, its last op."""
    for worker, ops in case.programs.items():
        yield from _reductions_of(case, worker)
        steps = [op for op in ops if op.kind is OpKind.O]
        if len(steps) != 1:
            yield Violation("closing", f"worker {worker} runs O {len(steps)} times; expected 1", worker=worker)
        elif ops[-1] is not steps[0]:
            yield Violation("closing", f"{case.text(ops[-1])} comes after {steps[0]}, which ends the iteration",
                            ops[-1], worker)


def only_forwards(case: Case) -> Iterator[Violation]:
    """Forwards alone: nobody runs an A or an O."""
    for worker, ops in case.programs.items():
        other = next((op for op in ops if op.kind in (OpKind.A, OpKind.O)), None)
        if other is not None:
            yield Violation("only-forwards", f"{case.text(other)} is among forwards alone", other, worker)


def _reductions_of(case: Case, worker: Worker) -> Iterator[Violation]:
    """The As of one worker."""
    held, ranges = case.schedule.holds(worker), sorted(case.reductions[worker], key=lambda reduced: reduced[0])
    if held == tuple(layers for layers, _ in ranges):
        return
    for (before, one), (after, other) in pairwise(ranges):
        if after[0] < before[1]:
            yield Violation("closing", f"worker {worker} runs {_reduction(case, one)} and {_reduction(case, other)}; "
                            f"expected one A of {layers_text((after[0], min(after[1], before[1])))}", other, worker)
    for layers, op in ranges:
        if not case.covers(held, layers):
            yield Violation("closing", f"worker {worker} runs {_reduction(case, op)}, but holds {listed(held)}", op,
                            worker)
    missing = _without(held, [layers for layers, _ in ranges])
    if missing:
        yield Violation("closing", f"worker {worker} runs no A of {listed(missing)}; it holds {listed(held)}",
                        worker=worker)


def _reduction(case: Case, op: Op) -> str:
    assert op.slice is not None
    return f"A({case.schedule.slice_text(op.slice)})"


def _without(ranges: Sequence[LayerRange], others: Sequence[LayerRange]) -> list[LayerRange]:
    """The layers of `ranges` that are in none of the others. Both ascending; `ranges` do not touch."""
    left, gone = [], joined_ranges(others)
    for first, end in ranges:
        for low, high in gone:
            if low < end and first < high:
                if first < low:
                    left.append((first, low))
                first = max(first, high)
        if first < end:
            left.append((first, end))
    return left


def reduced_together(case: Case) -> Iterator[Violation]:
    """Whoever holds any layer of an A's range runs an A with exactly that range: all As of a layer are of one range."""
    one_of: dict[LayerRange, Op] = {}
    for reduced in case.reductions.values():
        for layers, op in reduced:
            one_of.setdefault(layers, op)
    for before, after in pairwise(case.reduced_ranges):
        if after[0] < before[1]:
            op, other = one_of[after], one_of[before]
            shared = layers_text((after[0], min(after[1], before[1])))
            yield Violation("reduced-together", f"{case.text(op)} and {case.text(other)} both reduce {shared}, but not "
                            "the same layers; all that hold a layer reduce it in one range", op)
