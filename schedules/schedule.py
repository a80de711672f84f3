"""What a schedule is: plain, frozen data, shared by planner, checker, runtime and command line.

The model is a row of layers. A *slice* is a range of layers that one worker runs for one micro-batch; a stage is the
usual one. What a micro-batch passes is its *route*: slices that tile all layers, each on a worker that holds them.

Times are integer ticks (`tick_seconds` says how long one is), intervals half-open [start, end). Memory is counted in
integer multiples of `Memory.unit`. A program is stored once and shared by every worker that runs it, so its ops name
the pipeline of a micro-batch only where it differs from the pipeline of the role that runs it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from slipstream.schedules.costs import Memory, Slow, Times
from slipstream.schedules.grid import Grid, VirtualStage, Worker
from slipstream.schedules.layers import LayerRange, layers_text
from slipstream.schedules.ops import COMPUTE_KINDS, Op, OpKind, Origin, Program, ProgramOp, Seat
from slipstream.schedules.scope import Scope

__all__ = [
    "COMPUTE_KINDS",
    "BackwardMode",
    "Grid",
    "LayerRange",
    "Memory",
    "Op",
    "OpKind",
    "OptimizerMode",
    "Origin",
    "Program",
    "ProgramOp",
    "Schedule",
    "Scope",
    "Seat",
    "Slow",
    "Status",
    "Times",
    "VirtualStage",
    "Worker",
    "period_ticks",
    "place",
]

BackwardMode = Literal["split", "fused"]
OptimizerMode = Literal["staggered", "synchronous"]
Status = Literal["optimal", "feasible"]


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """One iteration of every live worker. Repeats every `period_ticks`; its rules are those of `schedules.check`."""

    job: str
    tick_seconds: float
    grid: Grid
    slices: tuple[LayerRange, ...] = ()
    """Slices beyond the stages, all different."""
    times: Times
    memory: Memory | None
    backward: BackwardMode
    optimizer: OptimizerMode
    failed: tuple[Worker, ...]
    """Physical workers that are down, sorted."""
    seats: tuple[Seat, ...]
    """Every live worker, sorted."""
    programs: tuple[Program, ...]
    period_ticks: int
    lower_bound_ticks: int
    """Proven: no schedule has a smaller period, of those that `scope` tells."""
    status: Status
    method: str
    bound_scope: Scope | msgspec.UnsetType = msgspec.UNSET
    """Which question the bound answers; files of before do not say."""

    @cached_property
    def scope(self) -> Scope:
        """Which question the bound answers; the narrowest that it can be where a file does not say."""
        if self.bound_scope is not msgspec.UNSET:
            return self.bound_scope
        if any(seat.holds is not None for seat in self.seats):
            return Scope.LAYERS
        if self.slices:
            return Scope.PLACE
        return Scope.STAGES if self.failed or self.times.slow or len(set(self.grid.microbatches)) > 1 else Scope.OWN

    def with_bound(self, ticks: int, scope: Scope | msgspec.UnsetType) -> "Schedule":
        """The same schedule with another proven bound."""
        assert ticks <= self.period_ticks, f"a bound of {ticks} ticks is above the period of {self.period_ticks}"
        return msgspec.structs.replace(self, lower_bound_ticks=ticks, bound_scope=scope,
                                       status="optimal" if ticks == self.period_ticks else "feasible")

    @cached_property
    def seat_of(self) -> Mapping[Worker, Seat]:
        """Seats by physical worker."""
        return {seat.worker: seat for seat in self.seats}

    @property
    def overlaps(self) -> bool:
        """Whether reductions go on beside compute."""
        return self.times.overlap is True

    @property
    def members(self) -> tuple[Worker, ...]:
        """All live workers, sorted."""
        return tuple(seat.worker for seat in self.seats)

    @cached_property
    def player_of(self) -> Mapping[Worker, Worker]:
        """The physical worker that plays each role; a role that no worker plays is down."""
        return {seat.role: seat.worker for seat in self.seats}

    @property
    def moves(self) -> tuple[Seat, ...]:
        """Seats whose worker plays a role other than its own: it must load that role's layers."""
        return tuple(seat for seat in self.seats if seat.worker != seat.role)

    def ops(self, worker: Worker) -> list[Op]:
        """The ops of one live worker in program order, in place."""
        seat = self.seat_of[worker]
        return list(place(self.programs[seat.program], seat, self.times))

    def all_ops(self) -> Iterator[Op]:
        """The ops of all live workers, worker by worker."""
        for seat in self.seats:
            yield from place(self.programs[seat.program], seat, self.times)

    def occupying(self, worker: Worker) -> list[Op]:
        """The ops that occupy a worker's compute, one after the other: all, but A where reductions go on beside."""
        return [op for op in self.ops(worker) if not (self.overlaps and op.kind is OpKind.A)]

    def seconds(self, ticks: int) -> float:
        """Ticks as seconds."""
        return ticks * self.tick_seconds

    @property
    def gap(self) -> float:
        """How far the period can at most be from the best possible one: period / bound - 1."""
        return self.period_ticks / self.lower_bound_ticks - 1 if self.lower_bound_ticks else 0.0

    def origin(self, op: Op) -> Origin:
        """Whose micro-batch a worker runs: one of its role's pipeline, or one re-routed or shed to it."""
        if op.pipeline is None or op.microbatch is None or op.slice is None or \
                op.pipeline == self.seat_of[op.worker].role.pipeline:
            return "own"
        return "rerouted" if self.own_is_down(op.pipeline, op.microbatch, op.slice) else "shed"

    @property
    def rerouted(self) -> int:
        """Slices of micro-batches that a worker of another pipeline runs because their own worker is down."""
        return self._foreign[True]

    @property
    def shed(self) -> int:
        """Slices of micro-batches that a worker of another pipeline runs although their own worker is alive."""
        return self._foreign[False]

    @cached_property
    def _foreign(self) -> Mapping[bool, int]:
        count = {True: 0, False: 0}
        for seat in self.seats:
            for op in self.programs[seat.program]:
                if op.kind is OpKind.F and op.pipeline not in (None, seat.role.pipeline):
                    assert op.pipeline is not None and op.microbatch is not None and op.slice is not None
                    count[self.own_is_down(op.pipeline, op.microbatch, op.slice)] += 1
        return count

    # --- Slices, holdings and routes ----------------------------------------------------------------------------------

    def layers_of(self, slice: int) -> LayerRange:
        """The layers of a slice: a stage, or one of `slices`."""
        return self.layers_by_slice[slice]

    @cached_property
    def layers_by_slice(self) -> tuple[LayerRange, ...]:
        """The layers of each slice, stages first."""
        return self.grid.layers_by_stage + self.slices

    def slice_text(self, slice: int) -> str:
        """`stage 3` or, for a slice that is no stage, `layers 4 to 6`."""
        return f"stage {slice}" if slice < len(self.grid.stages) else layers_text(self.layers_of(slice))

    def op_text(self, op: Op) -> str:
        """An op in words, with the stage or the layers of its slice."""
        if op.slice is None:
            return str(op)
        microbatch = "" if op.microbatch is None else f"micro-batch {op.pipeline}.{op.microbatch}, "
        return f"{op.kind}({microbatch}{self.slice_text(op.slice)}) on {op.worker}"

    def holds(self, worker: Worker) -> tuple[LayerRange, ...]:
        """The layers that a live worker holds, as ascending ranges that do not touch."""
        return self.holds_of(self.seat_of[worker])

    def holds_of(self, seat: Seat) -> tuple[LayerRange, ...]:
        """The layers that the worker of a seat holds, as ascending ranges that do not touch."""
        return self.holds_of_column(seat.role.column) if seat.holds is None else seat.holds

    def holds_of_column(self, column: int) -> tuple[LayerRange, ...]:
        """The layers of a column's stages, as ascending ranges that do not touch."""
        return self.grid.held_by_column[column]

    def holds_others(self, seat: Seat) -> bool:
        """Whether the worker of a seat holds other layers than those of its role's stages."""
        return seat.holds is not None and seat.holds != self.holds_of_column(seat.role.column)

    def path(self, pipeline: int, microbatch: int) -> Sequence[int]:
        """The slices of a micro-batch's route, in order; empty for one that no worker runs."""
        if not self.slices and self.grid.chains == 1:
            return self.grid.path(microbatch)
        return self.routes.get((pipeline, microbatch), ())

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """The slices that each micro-batch (pipeline, number) passes, in the order of their layers."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for seat in self.seats:
            for op in self.programs[seat.program]:
                if op.kind is OpKind.F:
                    assert op.microbatch is not None and op.slice is not None
                    found[seat.role.pipeline if op.pipeline is None else op.pipeline, op.microbatch].append(op.slice)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # many micro-batches share a route
        return {microbatch: known.setdefault(route, route) for microbatch, slices in found.items()
                for route in [tuple(sorted(slices, key=lambda slice: (self.layers_by_slice[slice], slice)))]}

    def own_is_down(self, pipeline: int, microbatch: int, slice: int) -> bool:
        """Whether a worker of the micro-batch's own pipeline that would run these layers by its column is down.

        A worker of another pipeline that runs the slice runs it *re-routed* then, else *shed*.
        """
        chain = microbatch % self.grid.chains
        key = (pipeline, chain, slice)
        known = self._own_is_down
        if key not in known:
            first, end = self.layers_of(slice)
            own = (stage for stage in self.grid.path(chain) if self.grid.layers_of(stage)[0] < end
                   and first < self.grid.layers_of(stage)[1])
            known[key] = any(Worker(pipeline, self.grid.stages[stage].column) not in self.player_of for stage in own)
        return known[key]

    @cached_property
    def _own_is_down(self) -> dict[tuple[int, int, int], bool]:
        return {}


def place(program: Program, seat: Seat, times: Times) -> Iterator[Op]:
    """Turn a stored program into the ops of one live worker."""
    own, worker = seat.role.pipeline, seat.worker
    cost: dict[tuple[OpKind, int | None], int] = {}
    for op in program:
        key = (op.kind, op.slice)
        if key not in cost:
            cost[key] = times.optimizer_ticks(seat) if op.slice is None else \
                times.duration_ticks(op.kind, op.slice, worker)
        pipeline = None if op.microbatch is None else own if op.pipeline is None else op.pipeline
        yield Op(op.kind, op.slice, pipeline, op.microbatch, worker, op.start_ticks, op.start_ticks + cost[key])


def period_ticks(ops: Iterable[Op]) -> int:
    """Steady-state period: the longest busy window (first start to last end) of any worker. 0 without ops."""
    first: dict[Worker, int] = {}
    last: dict[Worker, int] = {}
    for op in ops:
        first[op.worker] = min(first.get(op.worker, op.start_ticks), op.start_ticks)
        last[op.worker] = max(last.get(op.worker, op.end_ticks), op.end_ticks)
    return max((last[worker] - first[worker] for worker in first), default=0)
