"""Pass values from op to op: directly on one worker, and between workers in an order that cannot deadlock."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.model.passed import Form, Value, carrier_form, gradient_form, made, packed, unpacked
from slipstream.runtime.replay.session import Session
from slipstream.runtime.replay.transfers import Arriving, Outgoing
from slipstream.schedules.parts import Crossing, crossings_of
from slipstream.schedules.schedule import Schedule

LOOKAHEAD = 4
"""Number of receives posted before an op needs them: enough to overlap with compute, and few enough to save memory."""


TensorKind = Literal["activation", "gradient"]


class TensorName(NamedTuple):
    """Name of an activation that is the input of the F of `slice`, or of a gradient that is the input of its I or B."""

    kind: TensorKind
    slice: int
    pipeline: int
    microbatch: int


class _Leaving(NamedTuple):
    """A sent tensor that is kept because it may still be in transfer."""

    outgoing: Outgoing
    taken: tuple[int, int]
    """Round, and place in the target's program, of the op that takes the tensor."""


class Exchange:
    """Inputs and outputs of one worker's ops, for `iterations` rounds of the same schedule.

    A worker issues its transfers in the order of their numbers (`schedules.parts`), which is consistent with the order
    of the ops: on every worker, a tensor that must be sent before another can arrive is computed by the time the other
    is needed. So there is no cycle of waits, even if transfers run strictly one after the other, as in one NCCL group.
    Over gloo, where they do not, receives are posted ahead of sends: a tensor whose receive is posted travels at once,
    otherwise it takes two more messages.

    Parameters
    ----------
    forms
        Forms of the inputs of each layer of the schedule, followed by the form of the output of the last one.
    """

    def __init__(self, schedule: Schedule, session: Session, forms: Sequence[Form],
                 iterations: range) -> None:
        self._worker = worker = session.worker
        self._session = session
        self._schedule = schedule
        self._forms = forms
        self._iterations = iterations
        self._mine = crossings_of(schedule, worker)
        self._place: Mapping[TensorName, int] = {
            TensorName(crossing.tensor, crossing.slice, crossing.pipeline, crossing.microbatch): place
            for place, crossing in enumerate(self._mine)}
        self._round = 0
        """Last round with an input or output, counted from the first."""
        self._issued = 0
        """Number of transfers issued in the order of their numbers; if `_ahead` is given, it counts only receives."""
        self._ahead = None if session.ordered else [place for place, crossing in enumerate(self._mine)
                                                  if crossing.target == worker]
        # Keys are numbers of transfers, counted over all iterations: transfers of two iterations may be pending.
        self._arriving: dict[int, Arriving] = {}
        self._ready: dict[int, Tensor] = {}
        self._local: dict[TensorName, Value] = {}
        self._leaving: list[_Leaving] = []

    def give(self, iteration: int, name: TensorName, value: Value) -> None:
        """Pass on the output of an op; a send continues while the worker computes. Raises CommunicationError."""
        number = self._number(iteration, name)
        if number is None:
            self._local[name] = value
            return
        self._ready[number] = packed(value)
        if self._ahead is None:
            self._issue_through(number)
        else:
            self._issue(number)
            self._look_ahead()

    def take(self, iteration: int, name: TensorName) -> Value:
        """Wait for the input of an op, and return it. Raises CommunicationError."""
        number = self._number(iteration, name)
        if number is None:
            return self._local.pop(name)
        self._issue_through(number)
        carrier = self._arriving.pop(number).take()  # the op runs at once; more receives follow later
        self._free_until(number)
        return unpacked(carrier, self._form(name.kind, name.slice))

    def give_empty(self, iteration: int, name: TensorName) -> None:
        """Pass on zeros as the output of an op that is skipped. Raises CommunicationError."""
        device = self._session.device
        form = self._form(name.kind, name.slice)
        self.give(iteration, name, made(form, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)))

    def more(self, iterations: int = 1) -> None:
        """Add iterations to those that were announced."""
        self._iterations = range(self._iterations.start, self._iterations.stop + iterations)

    def end_iteration(self) -> None:
        """Release the tensors that were sent in the iteration before this one. Raises CommunicationError.

        They arrived long ago. A wait for the tensors that were sent just now could delay the next iteration.
        """
        self._free([leaving for leaving in self._leaving if leaving.taken[0] < self._round], wait=True)

    def flush(self) -> None:
        """Wait until all sent tensors are transferred, at the end of the run. Raises CommunicationError."""
        self._free([*self._leaving], wait=True)

    def let_go(self) -> None:
        """Free all tensors. The exchange cannot be used afterwards."""
        for tensors in (self._arriving, self._ready, self._local, self._leaving):
            tensors.clear()

    def _free_until(self, number: int) -> None:
        """Free sent tensors that have arrived, as transfer `number` proves: its source took them before it made the
        tensor."""
        rounds, place = divmod(number, len(self._mine))
        source, produced = self._mine[place].source, (rounds, self._mine[place].made)
        self._free([sent for sent in self._leaving if sent.outgoing.target == source and sent.taken <= produced],
                   wait=self._session.ordered)  # NCCL keeps the tensor until a stream waits for it

    def _free(self, gone: Sequence[_Leaving], *, wait: bool) -> None:
        for sent in gone:
            if wait:
                sent.outgoing.wait()
            self._leaving.remove(sent)

    def _number(self, iteration: int, name: TensorName) -> int | None:
        place = self._place.get(name)
        self._round = iteration - self._iterations.start
        return None if place is None else (iteration - self._iterations.start) * len(self._mine) + place

    def _issue_through(self, number: int) -> None:
        while (following := self._next()) is not None and following <= number:
            self._issue(following)
            self._issued += 1
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Post the next receives.

        If transfers are ordered, stop at the next send and at the end of the iteration, because a host that waits for
        its device also waits for these receives.
        """
        while (len(self._arriving) < LOOKAHEAD and (following := self._next()) is not None
               and self._crossing(following).target == self._worker
               and (self._ahead is not None or following // len(self._mine) <= self._round)):
            self._issue(following)
            self._issued += 1

    def _next(self) -> int | None:
        """Return the number of the next transfer to issue; None if all were issued."""
        order = range(len(self._mine)) if self._ahead is None else self._ahead
        if self._issued >= len(self._iterations) * len(order):
            return None
        rounds, place = divmod(self._issued, len(order))
        return rounds * len(self._mine) + order[place]

    def _issue(self, number: int) -> None:
        crossing = self._crossing(number)
        if crossing.source == self._worker:
            taken = number // len(self._mine), crossing.taken
            outgoing = self._session.send(self._ready.pop(number), crossing.target, crossing.number)
            self._leaving.append(_Leaving(outgoing, taken))
        else:
            shape, dtype = carrier_form(self._form(crossing.tensor, crossing.slice))
            self._arriving[number] = self._session.receive(shape, dtype, crossing.source, crossing.number)

    def _crossing(self, number: int) -> Crossing:
        return self._mine[number % len(self._mine)]

    def _form(self, kind: TensorKind, slice: int) -> Form:
        """Return the form of the inputs of a slice's ops."""
        first, end = self._schedule.layers_of(slice)
        return self._forms[first] if kind == "activation" else gradient_form(self._forms[end])
