"""What ops hand to ops: on the same worker directly, between workers in an order that cannot deadlock."""

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
"""Receives posted before an op needs them: enough to overlap with computing, few enough to take little memory."""


TensorKind = Literal["activation", "gradient"]


class TensorName(NamedTuple):
    """An activation on its way into the F of `slice`, or a gradient into its I or B."""

    kind: TensorKind
    slice: int
    pipeline: int
    microbatch: int


class _Leaving(NamedTuple):
    """What was sent and is kept: it may not have gone yet."""

    outgoing: Outgoing
    taken: tuple[int, int]
    """The round and the place in its target's program of the op that takes it."""


class Exchange:
    """What one worker takes and gives, in `iterations` rounds of the same schedule.

    A worker issues its transfers in the order of their numbers (`schedules.parts`). That order extends the order of the
    ops: what must be sent before a tensor can arrive has been produced by the time that is needed, on every worker.
    So there is no cycle of waiting, even where transfers run strictly one after the other, as on one NCCL session.
    Where they do not, over gloo, receives are posted ahead of sends: what finds its receive posted travels at once,
    else it takes two more messages.

    Parameters
    ----------
    forms
        Of what goes into each layer of the schedule, and then of what comes out of the last.
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
            TensorName(one.tensor, one.slice, one.pipeline, one.microbatch): place
            for place, one in enumerate(self._mine)}
        self._round = 0
        """The last one of which anything was taken or given, counted from the first."""
        self._issued = 0
        """Transfers, in this order; with `_ahead`, receives only."""
        self._ahead = None if session.ordered else [place for place, one in enumerate(self._mine)
                                                  if one.target == worker]
        # By the number of the transfer, counted over all iterations: those of two iterations may be under way.
        self._arriving: dict[int, Arriving] = {}
        self._ready: dict[int, Tensor] = {}
        self._local: dict[TensorName, Value] = {}
        self._leaving: list[_Leaving] = []

    def give(self, iteration: int, name: TensorName, value: Value) -> None:
        """Pass on what an op produced; a send goes on while the worker computes. Raises CommunicationError."""
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
        """Wait for what an op needs. Raises CommunicationError."""
        number = self._number(iteration, name)
        if number is None:
            return self._local.pop(name)
        self._issue_through(number)
        carrier = self._arriving.pop(number).take()  # the op runs at once: more are posted before the next wait
        self._free_until(number)
        return unpacked(carrier, self._form(name.kind, name.slice))

    def give_empty(self, iteration: int, name: TensorName) -> None:
        """Pass on zeros, for an op that is not run. Raises CommunicationError."""
        device = self._session.device
        form = self._form(name.kind, name.slice)
        self.give(iteration, name, made(form, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)))

    def more(self, iterations: int = 1) -> None:
        """There will be more iterations than was said."""
        self._iterations = range(self._iterations.start, self._iterations.stop + iterations)

    def end_iteration(self) -> None:
        """Let go of what is left of what the iteration before this one sent. Raises CommunicationError.

        That has long arrived: waiting for what was sent just now could hold up the next iteration.
        """
        self._free([left for left in self._leaving if left.taken[0] < self._round], wait=True)

    def flush(self) -> None:
        """Wait until all that was sent has gone, at the end of the run. Raises CommunicationError."""
        self._free([*self._leaving], wait=True)

    def let_go(self) -> None:
        """Free all tensors that are kept. Nothing is passed on after that."""
        for kept in (self._arriving, self._ready, self._local, self._leaving):
            kept.clear()

    def _free_until(self, number: int) -> None:
        """Free what had gone before its target made what has come: all that target took up to then."""
        rounds, place = divmod(number, len(self._mine))
        source, made = self._mine[place].source, (rounds, self._mine[place].made)
        self._free([left for left in self._leaving if left.outgoing.target == source and left.taken <= made],
                   wait=self._session.ordered)  # NCCL holds the tensor until a stream waits for it

    def _free(self, gone: Sequence[_Leaving], *, wait: bool) -> None:
        for left in gone:
            if wait:
                left.outgoing.wait()
            self._leaving.remove(left)

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
        """Post the receives that come next. Where transfers are ordered, as far as no send stands before them, and not
        beyond the iteration: a host that waits for its device waits for them, too."""
        while (len(self._arriving) < LOOKAHEAD and (following := self._next()) is not None
               and self._crossing(following).target == self._worker
               and (self._ahead is not None or following // len(self._mine) <= self._round)):
            self._issue(following)
            self._issued += 1

    def _next(self) -> int | None:
        """The number of the transfer to be issued next; None when that was the last."""
        order = range(len(self._mine)) if self._ahead is None else self._ahead
        if self._issued >= len(self._iterations) * len(order):
            return None
        rounds, place = divmod(self._issued, len(order))
        return rounds * len(self._mine) + order[place]

    def _issue(self, number: int) -> None:
        one = self._crossing(number)
        if one.source == self._worker:
            taken = number // len(self._mine), one.taken
            outgoing = self._session.send(self._ready.pop(number), one.target, one.number)
            self._leaving.append(_Leaving(outgoing, taken))
        else:
            shape, dtype = carrier_form(self._form(one.tensor, one.slice))
            self._arriving[number] = self._session.receive(shape, dtype, one.source, one.number)

    def _crossing(self, number: int) -> Crossing:
        return self._mine[number % len(self._mine)]

    def _form(self, kind: TensorKind, slice: int) -> Form:
        """That of what the ops of a slice take."""
        first, end = self._schedule.layers_of(slice)
        return self._forms[first] if kind == "activation" else gradient_form(self._forms[end])
