"""What ops take: time in ticks, and room on a worker."""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from slipstream.schedules.grid import Worker
from slipstream.schedules.layers import total, totals
from slipstream.schedules.ops import OpKind, Seat


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A worker whose compute ops take `per_mille` / 1000 of the usual time, rounded up to a tick."""

    worker: Worker
    per_mille: int


class LayerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What each layer costs at least, one value a layer: what bounds for all layouts count.

    Layers may need finer units than whole stages: `per_tick` of them are a tick of the schedule, and `per_unit` a unit
    of its memory, as fractions (numerator, denominator).
    """

    per_tick: tuple[int, int] = (1, 1)
    per_unit: tuple[int, int] = (1, 1)
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    optimizer: tuple[int, ...]
    all_reduce: tuple[int, ...]
    activation: tuple[int, ...]
    """0 where memory is unlimited; so are the next."""
    weight_stash: tuple[int, ...]
    weights: tuple[int, ...]


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Durations in ticks: one a slice, stages first; `optimizer` one a column; `transfer` one hop between workers."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    all_reduce: tuple[int, ...]
    optimizer: tuple[int, ...]
    transfer: int
    slow: tuple[Slow, ...] = ()
    optimizer_of_layer: tuple[int, ...] = ()
    """One a layer: the O of a seat with `holds` takes the sum over what it holds."""
    of_layers: LayerCosts | msgspec.UnsetType = msgspec.UNSET
    """A file has this key only where the bound is one for layouts, too."""
    overlap: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether A occupies the links of its workers, one A at a time, and leaves their compute to other ops; else it
    occupies both. A file has this key only where it does."""

    def duration_ticks(self, kind: OpKind, where: int, worker: Worker) -> int:
        """How long an op takes on a physical worker: the one place where durations are looked up.

        `where` is the slice; for O, the column whose role the worker plays (see also `optimizer_ticks`).
        """
        if kind is OpKind.O:
            return self.optimizer[where]
        if kind is OpKind.A:
            return self.all_reduce[where]
        if kind is OpKind.B:
            return self.duration_ticks(OpKind.I, where, worker) + self.duration_ticks(OpKind.W, where, worker)
        ticks = _per_slice(self, kind)[where]
        return -(-ticks * self.per_mille_of.get(worker, 1000) // 1000)

    def optimizer_ticks(self, seat: Seat) -> int:
        """How long the O of a live worker takes: by its column, or by the layers that it holds."""
        if seat.holds is None:
            return self.optimizer[seat.role.column]
        return total(self._optimizer_before, seat.holds)

    @cached_property
    def _optimizer_before(self) -> tuple[int, ...]:
        return totals(self.optimizer_of_layer)

    @cached_property
    def per_mille_of(self) -> Mapping[Worker, int]:
        """The slow workers, each with its share of the usual time."""
        return {slow.worker: slow.per_mille for slow in self.slow}


def _per_slice(times: Times, kind: OpKind) -> tuple[int, ...]:
    if kind is OpKind.F:
        return times.forward
    return times.backward_input if kind is OpKind.I else times.backward_weight


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A worker that has another capacity than its column."""

    worker: Worker
    capacity: int


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Room on a worker, in multiples of `unit`."""

    unit: float
    capacity: tuple[int, ...]
    """One a column: what a worker has for activations beside the layers of its own stages."""
    activation: tuple[int, ...]
    """One a slice, stages first: held from F start to I end, per micro-batch."""
    weight_stash: tuple[int, ...]
    """One a slice, stages first: held from I end to W end, per micro-batch."""
    weights: tuple[int, ...] = ()
    """One a layer: parameters, gradients and the optimizer's state, for seats with `holds`."""
    capacity_of: tuple[Room, ...] | msgspec.UnsetType = msgspec.UNSET
    """Workers that have another one; a file has this key only where there are any."""

    def beside(self, worker: Worker, column: int) -> int:
        """The room of a worker beside the layers of a column, which may be the one of a role that it plays."""
        return self._capacity_of.get(worker, self.capacity[column])

    @cached_property
    def _capacity_of(self) -> Mapping[Worker, int]:
        return {one.worker: one.capacity for one in self.capacity_of or ()}

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """The weights of the first 0, 1, 2 ... layers."""
        return totals(self.weights)
