"""Pass values from op to op: directly on one worker, and between workers in an order that cannot deadlock."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.model.layer_values import (
    Form,
    Value,
    allocate_value,
    carrier_form,
    gradient_form,
    pack_value,
    unpack_value,
)
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.transfers import IncomingTensor, OutgoingTensor
from slipstream.schedules.schedule import Schedule
from slipstream.schedules.worker_programs import Crossing, crossings_of

MAX_POSTED_RECEIVES = 4
"""Number of receives posted before an op needs them: enough to overlap with compute, and few enough to save memory."""


TensorKind = Literal["activation", "gradient"]


class TensorName(NamedTuple):
    """Name of an activation that is the input of the F of `slice`, or of a gradient that is the input of its I or B."""

    kind: TensorKind
    slice: int
    pipeline: int
    microbatch: int


class _SentTensor(NamedTuple):
    """A sent tensor that is kept because it may still be in transfer."""

    outgoing: OutgoingTensor
    taken_at: tuple[int, int]
    """Run of the schedule, counted from 0, and index in the target's program, of the op that takes the tensor."""


class Exchange:
    """Inputs and outputs of one worker's ops, for one run of a schedule in each iteration of the range `iterations`.

    A worker issues its transfers in the order of their numbers (`schedules.worker_programs`), which is consistent with
    the order of the ops: on every worker, a tensor that must be sent before another can arrive is computed by the time
    the other is needed. So there is no cycle of waits, even if transfers run strictly one after the other, as in one
    NCCL group. Over gloo, where they do not, receives are posted ahead of sends: a tensor whose receive is posted
    travels at once, otherwise it takes two more messages.

    If an iteration is discarded and run again, the second run is numbered like the next iteration: arguments
    `iteration` are the iteration's number plus the number of runs discarded so far.

    Parameters
    ----------
    forms
        Shapes and dtypes of the inputs of each layer of the schedule, followed by those of the output of the last one.
    """

    def __init__(self, schedule: Schedule, session: GenerationSession, forms: Sequence[Form],
                 iterations: range) -> None:
        self._worker = worker = session.worker
        self._session = session
        self._schedule = schedule
        self._forms = forms
        self._iterations = iterations
        self._crossings = crossings_of(schedule, worker)
        self._place: Mapping[TensorName, int] = {
            TensorName(crossing.tensor, crossing.slice, crossing.pipeline, crossing.microbatch): place
            for place, crossing in enumerate(self._crossings)}
        self._round = 0
        """Number of the last round with an input or output, counted from the first; a round runs the schedule once."""
        self._issued = 0
        """Number of transfers issued in the order of their numbers; if `_receive_places` is given, it counts only
        receives."""
        self._receive_places = None if session.ordered else [place for place, crossing in enumerate(self._crossings)
                                                  if crossing.target == worker]
        # Keys are numbers of transfers, counted over all iterations: transfers of two iterations may be pending.
        self._arriving: dict[int, IncomingTensor] = {}
        self._ready: dict[int, Tensor] = {}
        self._local: dict[TensorName, Value] = {}
        self._sent: list[_SentTensor] = []

    def put_output(self, iteration: int, name: TensorName, value: Value) -> None:
        """Pass the output of an op to the op that takes it as its input `name`, on this worker or another one. A send
        continues while this worker computes. Raises CommunicationError."""
        number = self._transfer_number(iteration, name)
        if number is None:
            self._local[name] = value
            return
        self._ready[number] = pack_value(value)
        if self._receive_places is None:
            self._issue_up_to(number)
        else:
            self._issue_transfer(number)
            self._post_receives()

    def take_input(self, iteration: int, name: TensorName) -> Value:
        """Wait for the input of an op, and return it. Raises CommunicationError."""
        number = self._transfer_number(iteration, name)
        if number is None:
            return self._local.pop(name)
        self._issue_up_to(number)
        carrier = self._arriving.pop(number).wait_for_tensor()  # the op runs at once; more receives follow later
        self._free_arrived(number)
        return unpack_value(carrier, self._input_form(name.kind, name.slice))

    def put_zeros(self, iteration: int, name: TensorName) -> None:
        """Pass on zeros as the output of an op that is skipped. Raises CommunicationError."""
        device = self._session.device
        form = self._input_form(name.kind, name.slice)
        self.put_output(iteration, name,
                        allocate_value(form, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)))

    def add_iterations(self, iterations: int = 1) -> None:
        """Let the exchange serve `iterations` more runs of the schedule, such as the second run of a discarded
        iteration."""
        self._iterations = range(self._iterations.start, self._iterations.stop + iterations)

    def end_iteration(self) -> None:
        """Release, at the end of an iteration, the tensors that were sent in earlier ones. Raises CommunicationError.

        They arrived long ago. A wait for the tensors that were sent just now could delay the next iteration.
        """
        self._free_sent([leaving for leaving in self._sent if leaving.taken_at[0] < self._round], wait=True)

    def flush(self) -> None:
        """Wait until all sent tensors are transferred, when no iteration follows in this generation or evaluation.
        Raises CommunicationError."""
        self._free_sent([*self._sent], wait=True)

    def free_microbatches(self) -> None:
        """Free all tensors of all micro-batches. The exchange cannot be used afterwards."""
        for tensors in (self._arriving, self._ready, self._local, self._sent):
            tensors.clear()

    def _free_arrived(self, number: int) -> None:
        """Free the tensors that another worker must have received from this one, because its transfer number `number`
        has arrived here.

        That worker took the tensors as inputs before it computed what it sent. Transfers are numbered over all runs of
        the schedule.
        """
        rounds, place = divmod(number, len(self._crossings))
        source, produced = self._crossings[place].source, (rounds, self._crossings[place].made)
        self._free_sent([sent for sent in self._sent if sent.outgoing.target == source and sent.taken_at <= produced],
                        wait=self._session.ordered)  # NCCL keeps the tensor until a stream waits for it

    def _free_sent(self, gone: Sequence[_SentTensor], *, wait: bool) -> None:
        for sent in gone:
            if wait:
                sent.outgoing.wait()
            self._sent.remove(sent)

    def _transfer_number(self, iteration: int, name: TensorName) -> int | None:
        place = self._place.get(name)
        self._round = iteration - self._iterations.start
        return None if place is None else (iteration - self._iterations.start) * len(self._crossings) + place

    def _issue_up_to(self, number: int) -> None:
        while (following := self._next_transfer()) is not None and following <= number:
            self._issue_transfer(following)
            self._issued += 1
        self._post_receives()

    def _post_receives(self) -> None:
        """Start the next receives, of which at most `MAX_POSTED_RECEIVES` are pending.

        If the group matches transfers by their order (NCCL), stop at the next send and at the end of the iteration,
        because a host that waits for its device also waits for these receives.
        """
        while (len(self._arriving) < MAX_POSTED_RECEIVES and (following := self._next_transfer()) is not None
               and self._crossing_at(following).target == self._worker
               and (self._receive_places is not None or following // len(self._crossings) <= self._round)):
            self._issue_transfer(following)
            self._issued += 1

    def _next_transfer(self) -> int | None:
        """Return the number, counted over all runs of the schedule, of the next transfer to issue; None if all were
        issued."""
        order = range(len(self._crossings)) if self._receive_places is None else self._receive_places
        if self._issued >= len(self._iterations) * len(order):
            return None
        rounds, place = divmod(self._issued, len(order))
        return rounds * len(self._crossings) + order[place]

    def _issue_transfer(self, number: int) -> None:
        crossing = self._crossing_at(number)
        if crossing.source == self._worker:
            taken = number // len(self._crossings), crossing.taken
            outgoing = self._session.send(self._ready.pop(number), crossing.target, crossing.number)
            self._sent.append(_SentTensor(outgoing, taken))
        else:
            shape, dtype = carrier_form(self._input_form(crossing.tensor, crossing.slice))
            self._arriving[number] = self._session.receive(shape, dtype, crossing.source, crossing.number)

    def _crossing_at(self, number: int) -> Crossing:
        return self._crossings[number % len(self._crossings)]

    def _input_form(self, kind: TensorKind, slice: int) -> Form:
        """Return shapes and dtypes of the inputs of a slice's F, or of its I or B if `kind` is "gradient"."""
        first, end = self._schedule.layers_of(slice)
        return self._forms[first] if kind == "activation" else gradient_form(self._forms[end])
