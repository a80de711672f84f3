"""Define schedules as plain, frozen data that planner, checker, runtime and command line share.

A model is a sequence of layers. A *slice* is a range of layers that one worker runs for one
micro-batch; usually it is a stage. The *route* of a micro-batch is the slices that it passes, in
order: together they cover all layers, and each is run by a worker that holds its layers.

Times are integer ticks of `tick_seconds` each; intervals are half-open, [start, end). Memory is
counted in integer multiples of `Memory.unit`. A program is stored once, and shared by every worker
that runs it. Its ops therefore name the pipeline of a micro-batch only if it differs from the
pipeline of the role that runs them.

Parts of a schedule are defined elsewhere, but can be imported from here: `schedules.grid` defines
the shape of a job, and `schedules.ops` ops with their ticks and memory.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Literal, TypeVar

import msgspec

from slipstream.schedules.grid import (
    MAX_MICROBATCHES,
    MAX_WORKERS,
    Grid,
    HeldLayers,
    Speeds,
    Ticks,
    TickSeconds,
    VirtualStage,
    Worker,
)
from slipstream.schedules.layers import LayerRange, layers_text
from slipstream.schedules.ops import (
    COMPUTE_KINDS,
    LayerCosts,
    Memory,
    Op,
    OpKind,
    Program,
    ProgramOp,
    Room,
    Seat,
    Slow,
    Times,
    compute_period_ticks,
    place_ops,
    with_pipeline_numbers,
)

__all__ = [
    "COMPUTE_KINDS",
    "MAX_MICROBATCHES",
    "MAX_WORKERS",
    "BackwardMode",
    "Grid",
    "HeldLayers",
    "LayerCosts",
    "LayerRange",
    "Memory",
    "NoScheduleError",
    "Op",
    "OpKind",
    "OptimizerMode",
    "Origin",
    "Program",
    "ProgramOp",
    "Room",
    "Schedule",
    "Scope",
    "Seat",
    "Slow",
    "Speeds",
    "Status",
    "Times",
    "VirtualStage",
    "Worker",
    "compute_period_ticks",
    "place_ops",
    "with_pipeline_numbers",
]

T = TypeVar("T")


class NoScheduleError(RuntimeError):
    """Error of one line: no schedule exists for the given failures and speeds of workers.

    The line gives the reason. It is empty if the run has no planner for this case.
    """


Origin = Literal["own", "rerouted", "shed"]
"""Relation of a worker to a micro-batch that it runs.

`own`: the micro-batch is of the worker's own pipeline. `rerouted`: it is of another pipeline, in
which the worker for it is down. `shed`: it is of another pipeline, in which the worker for it is
alive.
"""


# --- The question that a bound on the period answers: among which schedules none is shorter -------


class Scope(StrEnum):
    """Set of schedules for which a lower bound is proven: none has a shorter period.

    Scopes differ in what workers may hold and run. `OWN` to `LAYERS` are ordered from the narrowest
    to the widest: a bound for a wider one also holds for a narrower one. `PLACEMENT` is outside of
    this order: of the others, its bounds hold for `OWN` only.
    """

    OWN = "own micro-batches"
    """Workers keep their layers and run them for their own pipelines.

    Of other pipelines they run only micro-batches of failed workers.
    """
    STAGES = "whole stages"
    """Workers keep their layers; any holder of a stage may run any micro-batch."""
    PLACE = "layers in place"
    """Workers keep their layers; slices may begin and end within a stage."""
    ROLES = "roles"
    """As many roles as failures are vacant; any live workers may play the others."""
    LAYERS = "any layers"
    """Any live worker may hold any layers."""
    PLACEMENT = "any placement"
    """No worker has failed, and pipelines run their own micro-batches.

    Workers may hold any virtual stages of their pipelines, and may recompute activations.
    """

    def is_valid_for(self, narrower: "Scope") -> bool:
        """Return whether a bound that is proven for this scope also holds for `narrower`."""
        # Outside the order: of the other scopes, it includes the schedules of `OWN` alone.
        if Scope.PLACEMENT in (self, narrower):
            return narrower in (self, Scope.OWN)
        return _WIDTH[narrower] <= _WIDTH[self]

    @property
    def description(self) -> str:
        """Words for the schedules of this scope, to follow "no schedule is shorter"."""
        return _WORDS[self]


_WIDTH = {scope: width for width, scope in enumerate(Scope)}
"""Place of each scope, from the narrowest to the widest; not used for PLACEMENT."""
_WORDS = {
    Scope.OWN: "with layers and micro-batches in place",
    Scope.STAGES: "with whole stages in place",
    Scope.PLACE: "with layers in place",
    Scope.ROLES: "for any assignment of roles",
    Scope.LAYERS: "for any placement of layers",
    Scope.PLACEMENT: "whatever the placement",
}


# --- Schedules ------------------------------------------------------------------------------------


BackwardMode = Literal["split", "fused"]
OptimizerMode = Literal["staggered", "synchronous"]
Status = Literal["optimal", "feasible"]


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Schedule of one iteration of all live workers, repeated every `period_ticks`."""

    job: str
    tick_seconds: TickSeconds
    grid: Grid
    slices: tuple[LayerRange, ...] = ()
    """Ranges of layers that workers run and that are no stages, numbered after the stages."""
    times: Times
    memory: Memory | None
    backward: BackwardMode
    optimizer: OptimizerMode
    failed: tuple[Worker, ...]
    """Workers that are down, sorted."""
    seats: tuple[Seat, ...]
    """Live workers, sorted, each with its role and the number of its program."""
    programs: tuple[Program, ...]
    period_ticks: Ticks
    lower_bound_ticks: Ticks
    """Proven lower bound: no schedule of `scope` has a shorter period."""
    status: Status
    method: str
    bound_scope: Scope | msgspec.UnsetType = msgspec.UNSET
    """Scope of the lower bound; unset in older files."""

    def __repr__(self) -> str:
        """Return one line about the schedule, without its ops."""
        names = [*map(str, self.failed[:8]), *(["..."] if len(self.failed) > 8 else [])]
        down = f"{', '.join(names)} down, " if names else ""
        return (
            f"Schedule({self.job!r}: {self.grid.pipelines} pipelines x {self.grid.columns} stages, "
            f"{down}period {self.seconds(self.period_ticks):.6g} s, {self.status})"
        )

    @cached_property
    def scope(self) -> Scope:
        """Scope of the lower bound; if unset, derived from failures, slices and held layers."""
        if self.bound_scope is not msgspec.UNSET:
            return self.bound_scope
        # An older file does not say, so what this schedule itself needs decides.
        if any(seat.holds is not None for seat in self.seats):
            return Scope.LAYERS
        if self.slices:
            return Scope.PLACE
        if self.failed or self.times.slow or len(set(self.grid.microbatches)) > 1:
            return Scope.STAGES
        return Scope.OWN

    def with_bound(self, ticks: int, scope: Scope | msgspec.UnsetType) -> "Schedule":
        """Return a copy with another lower bound, which is proven for the schedules of `scope`.

        `ticks` must not exceed the period. If both are equal, the copy's status is `optimal`, else
        `feasible`.
        """
        assert ticks <= self.period_ticks, (
            f"a bound of {ticks} ticks is above the period of {self.period_ticks}"
        )
        return msgspec.structs.replace(
            self,
            lower_bound_ticks=ticks,
            bound_scope=scope,
            status="optimal" if ticks == self.period_ticks else "feasible",
        )

    @cached_property
    def seat_of(self) -> Mapping[Worker, Seat]:
        """Seat of each live worker: its role, program and held layers."""
        return {seat.worker: seat for seat in self.seats}

    @property
    def has_overlap(self) -> bool:
        """True if reductions overlap with compute."""
        return self.times.overlap is True

    @property
    def members(self) -> tuple[Worker, ...]:
        """Live workers, sorted."""
        return tuple(seat.worker for seat in self.seats)

    @cached_property
    def player_of(self) -> Mapping[Worker, Worker]:
        """Worker that plays each role; vacant roles are missing."""
        return {seat.role: seat.worker for seat in self.seats}

    @property
    def moves(self) -> tuple[Seat, ...]:
        """Seats of workers that play another role than their own.

        If the role is in another column, the worker must load layers.
        """
        return tuple(seat for seat in self.seats if seat.worker != seat.role)

    @cached_property
    def equivalence_class_of(self) -> Mapping[Worker, int]:
        """Number of each live worker's class, such that workers of one class behave equally.

        They run the same ops at the same times and speed. Classes are numbered from 0 in the order
        of their first workers. Even thousands of workers usually have few classes.
        """
        numbers: dict[tuple[object, ...], int] = {}
        class_of = {}
        for seat in self.seats:
            speed = self.times.per_mille_of.get(seat.worker)
            # All that determines a worker's ops, apart from its pipeline's number.
            features = (seat.program, speed, seat.role.column, seat.holds)
            class_of[seat.worker] = numbers.setdefault(features, len(numbers))
        return class_of

    @property
    def representative_seats(self) -> list[Seat]:
        """First seat of each class of equivalent workers (`equivalence_class_of`)."""
        first: dict[int, Seat] = {}
        for seat in self.seats:
            first.setdefault(self.equivalence_class_of[seat.worker], seat)
        return list(first.values())

    def compute_for_each(self, value: Callable[[Worker], T]) -> dict[Worker, T]:
        """Return what the function `value` returns for each live worker, by worker.

        `value` is called once for each class of equivalent workers, so its result must depend on a
        worker's ops alone, and not on the number of its pipeline.
        """
        values = [value(seat.worker) for seat in self.representative_seats]
        return {worker: values[number] for worker, number in self.equivalence_class_of.items()}

    def ops(self, worker: Worker) -> list[Op]:
        """Return the ops of a live worker, in program order. Raises KeyError for another one."""
        seat = self.seat_of[worker]
        return list(place_ops(self.programs[seat.program], seat, self.times))

    def all_ops(self) -> Iterator[Op]:
        """Iterate over the ops of all live workers, worker by worker."""
        for seat in self.seats:
            yield from place_ops(self.programs[seat.program], seat, self.times)

    def ops_on_compute(self, worker: Worker) -> list[Op]:
        """Return a live worker's ops in order, without A if reductions overlap with compute."""
        return [op for op in self.ops(worker) if not (self.has_overlap and op.kind is OpKind.A)]

    def seconds(self, ticks: int) -> float:
        """Convert ticks to seconds."""
        return ticks * self.tick_seconds

    @property
    def gap(self) -> float | None:
        """Relative gap, period / bound - 1; None if only the bound is 0."""
        if not self.lower_bound_ticks:
            return None if self.period_ticks else 0.0
        return self.period_ticks / self.lower_bound_ticks - 1

    def origin(self, op: Op) -> Origin:
        """Return whose work an op is, as in `Origin`. An op without micro-batch is `own`."""
        if (
            op.pipeline is None
            or op.microbatch is None
            or op.slice is None
            or op.pipeline == self.seat_of[op.worker].role.pipeline
        ):
            return "own"
        is_down = self.is_own_worker_down(op.pipeline, op.microbatch, op.slice)
        return "rerouted" if is_down else "shed"

    @property
    def rerouted(self) -> int:
        """Number of pairs (micro-batch, slice) run elsewhere because their worker is down."""
        return self._foreign_slice_counts[True]

    @property
    def shed(self) -> int:
        """Number of pairs (micro-batch, slice) run elsewhere although their worker is alive."""
        return self._foreign_slice_counts[False]

    @cached_property
    def _foreign_slice_counts(self) -> Mapping[bool, int]:
        """Number of pairs (micro-batch, slice) run elsewhere, by whether their worker is down."""
        count = {True: 0, False: 0}
        # A program's ops name the pipeline only if it may be another than its worker's.
        foreign_ops: list[list[ProgramOp]] = []
        for program in self.programs:
            ops = [op for op in program if op.kind is OpKind.F and op.pipeline is not None]
            foreign_ops.append(ops)
        for seat in self.seats:
            for op in foreign_ops[seat.program]:
                if op.pipeline != seat.role.pipeline:
                    assert op.pipeline is not None
                    assert op.microbatch is not None and op.slice is not None
                    count[self.is_own_worker_down(op.pipeline, op.microbatch, op.slice)] += 1
        return count

    # --- Slices, holdings and routes --------------------------------------------------------------

    def layers_of(self, slice: int) -> LayerRange:
        """Return the layers of a slice, by its number: stages first, then `slices`."""
        return self.layers_by_slice[slice]

    @cached_property
    def layers_by_slice(self) -> tuple[LayerRange, ...]:
        """Layers of each slice, by its number: stages first, then `slices`."""
        return self.grid.layers_by_stage + self.slices

    def slice_text(self, slice: int) -> str:
        """Return text that names a slice: `stage 3`, or `layers 4 to 6`."""
        if slice < len(self.grid.stages):
            return f"stage {slice}"
        return layers_text(self.layers_of(slice))

    def op_text(self, op: Op) -> str:
        """Return text that names an op, with the stage or the layers of its slice."""
        if op.slice is None:
            return str(op)
        microbatch = "" if op.microbatch is None else f"micro-batch {op.pipeline}.{op.microbatch}, "
        return f"{op.kind}({microbatch}{self.slice_text(op.slice)}) on {op.worker}"

    def held_layers(self, worker: Worker) -> tuple[LayerRange, ...]:
        """Return the layers that a live worker holds, as ascending ranges that do not touch."""
        return self.held_layers_of_seat(self.seat_of[worker])

    def held_layers_of_seat(self, seat: Seat) -> tuple[LayerRange, ...]:
        """Return the layers that a seat's worker holds, as ascending ranges that do not touch."""
        return self.held_layers_of_column(seat.role.column) if seat.holds is None else seat.holds

    def held_layers_of_column(self, column: int) -> tuple[LayerRange, ...]:
        """Return the layers of a column's stages, as ascending ranges that do not touch."""
        return self.grid.held_layers_by_column[column]

    def has_moved_layers(self, seat: Seat) -> bool:
        """Return whether a seat's worker holds other layers than those of its role's stages."""
        return seat.holds is not None and seat.holds != self.held_layers_of_column(seat.role.column)

    def route_of(self, pipeline: int, microbatch: int) -> Sequence[int]:
        """Return the slices that a micro-batch passes, in order.

        If there is a `common_route`, it is that; else the result is empty if no worker runs the
        micro-batch.
        """
        return self.common_route or self.routes.get((pipeline, microbatch), ())

    @cached_property
    def common_route(self) -> Sequence[int]:
        """Numbers of all stages, if every micro-batch passes these in order; else empty."""
        if self.slices or self.grid.chains > 1:
            return ()
        return self.grid.stages_of_microbatch(0)

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Slices that each micro-batch (pipeline, number) passes, sorted by layers."""
        visited: dict[tuple[int, int], list[int]] = defaultdict(list)
        for seat in self.seats:
            for op in self.programs[seat.program]:
                if op.kind is OpKind.F:
                    assert op.microbatch is not None and op.slice is not None
                    visited[
                        seat.role.pipeline if op.pipeline is None else op.pipeline, op.microbatch
                    ].append(op.slice)
        # Many micro-batches share a route, which is then one object.
        unique_routes: dict[tuple[int, ...], tuple[int, ...]] = {}
        routes = {}
        for microbatch, slices in visited.items():
            slices.sort(key=lambda slice: (self.layers_by_slice[slice], slice))
            route = tuple(slices)
            routes[microbatch] = unique_routes.setdefault(route, route)
        return routes

    def is_own_worker_down(self, pipeline: int, microbatch: int, slice: int) -> bool:
        """Return whether a micro-batch's own pipeline lacks a worker for a slice.

        That is so if the role of any worker with layers of this slice is vacant. A worker of
        another pipeline that runs the slice then runs it *re-routed*, else *shed*.
        """
        chain = microbatch % self.grid.chains
        key = (pipeline, chain, slice)
        is_down = self._own_is_down
        if key not in is_down:
            # If layers have moved, a slice may be of several stages, and so of several columns.
            first, end = self.layers_of(slice)
            stages = (
                stage
                for stage in self.grid.stages_of_microbatch(chain)
                if self.grid.layers_of(stage)[0] < end and first < self.grid.layers_of(stage)[1]
            )
            columns = (self.grid.stages[stage].column for stage in stages)
            is_down[key] = any(Worker(pipeline, column) not in self.player_of for column in columns)
        return is_down[key]

    @cached_property
    def _own_is_down(self) -> dict[tuple[int, int, int], bool]:
        """Answers of `is_own_worker_down` so far, by pipeline, chain and slice."""
        return {}
