"""Pass values from op to op, and between workers in an order that cannot deadlock."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.replay.layer_values import (
    Form,
    Value,
    allocate_value,
    carrier_form,
    gradient_form,
    pack_value,
    unpack_value,
)
from slipstream.runtime.replay.seams import Incoming, Outgoing, Transport
from slipstream.schedules.program import RECEIVES, Instruction, ValueName, WorkerProgram
from slipstream.schedules.schedule import Worker

MAX_POSTED_RECEIVES = 4
"""Receives posted early, to overlap with compute, but few enough to save memory."""


class _SentTensor(NamedTuple):
    """A sent tensor that is kept because it may still be in transfer."""

    outgoing: Outgoing
    sent_at: tuple[int, int]
    """Run of the program, from 0, and earlier sends to this target in it."""


class Exchange:
    """Inputs and outputs of one worker's ops, for runs of its program in `iterations`.

    A worker issues its transfers in the order of its program: on every worker, a tensor that must
    be sent before another can arrive is computed by the time the other is needed. So there is no
    cycle of waits, even if transfers run strictly one after the other, as in one NCCL group. Over
    gloo, where they do not, receives are posted ahead of sends: a tensor whose receive is posted
    travels at once, otherwise it takes two more messages.

    If an iteration is discarded and run again, the second run is numbered like the next iteration:
    arguments `iteration` are the iteration's number plus the number of runs discarded so far.

    Parameters
    ----------
    forms
        Shapes and dtypes of the inputs of each layer of the schedule, followed by those of the
        output of the last one.
    """

    def __init__(self, program: WorkerProgram, session: Transport, forms: Sequence[Form],
                 iterations: range) -> None:
        self._session = session
        self._forms = forms
        self._iterations = iterations
        self._transfers = program.transfers
        self._names = [name for one in self._transfers
                       if (name := program.output_of(one) or program.input_of(one)) is not None]
        self._sends_before = _count_earlier_sends(self._transfers)
        self._round = 0
        """Number of the last round with a transfer, counted from the first. A round runs the
        program once."""
        self._issued = 0
        """Number of transfers issued, or of receives if `_receive_places` is given."""
        self._receive_places = None if session.ordered else [
            place for place, one in enumerate(self._transfers) if one.kind in RECEIVES]
        # Keys are numbers of transfers, counted over all iterations: transfers of two iterations may be pending.
        self._arriving: dict[int, Incoming] = {}
        self._ready: dict[int, Tensor] = {}
        self._awaited: dict[ValueName, int] = {}
        """Numbers of the transfers that bring the next inputs."""
        self._local: dict[ValueName, Value] = {}
        self._sent: list[_SentTensor] = []

    def put_output(self, name: ValueName, value: Value) -> None:
        """Store the output of an op for the op or the send that takes it."""
        self._local[name] = value

    def take_input(self, name: ValueName) -> Value:
        """Wait for the input of an op, and return it. Raises CommunicationError."""
        number = self._awaited.pop(name, None)
        if number is None:
            return self._local.pop(name)
        carrier = self._arriving.pop(number).wait_for_tensor()  # the op runs at once; more receives follow later
        self._free_arrived(number)
        return unpack_value(carrier, self._form_of(name))

    def start_receive(self, iteration: int, place: int) -> None:
        """Start the receive that is transfer `place` of the program, and all before it. Raises
        CommunicationError."""
        number = self._transfer_number(iteration, place)
        self._awaited[self._names[place]] = number
        self._issue_up_to(number)

    def start_send(self, iteration: int, place: int) -> None:
        """Start the send that is transfer `place` of the program. It continues while this worker
        computes. Raises CommunicationError."""
        number = self._transfer_number(iteration, place)
        self._ready[number] = pack_value(self._local.pop(self._names[place]))
        if self._receive_places is None:
            self._issue_up_to(number)
        else:
            self._issue_transfer(number)
            self._post_receives()

    def put_zeros(self, name: ValueName) -> None:
        """Store zeros as the output of an op that is skipped."""
        device = self._session.device
        self.put_output(name, allocate_value(self._form_of(name),
                                             lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)))

    def add_iterations(self, iterations: int = 1) -> None:
        """Serve more runs of the schedule, such as the second run of a discarded iteration."""
        self._iterations = range(self._iterations.start, self._iterations.stop + iterations)

    def end_iteration(self) -> None:
        """Release, at the end of an iteration, the tensors that were sent in earlier ones.

        They arrived long ago. A wait for the tensors that were sent just now could delay the next
        iteration. Raises CommunicationError.
        """
        self._free_sent([leaving for leaving in self._sent if leaving.sent_at[0] < self._round], wait=True)

    def flush(self) -> None:
        """Wait for all sent tensors, when no iteration follows. Raises CommunicationError."""
        self._free_sent([*self._sent], wait=True)

    def free_microbatches(self) -> None:
        """Free all tensors of all micro-batches. The exchange cannot be used afterwards."""
        for tensors in (self._arriving, self._ready, self._awaited, self._local, self._sent):
            tensors.clear()

    def _free_arrived(self, number: int) -> None:
        """Free what another worker has received, as its transfer `number` has arrived here."""
        rounds, place = divmod(number, len(self._transfers))
        arrived = self._transfers[place]
        self._free_sent([sent for sent in self._sent
                         if sent.outgoing.target == arrived.peer and sent.sent_at < (rounds, arrived.frees)],
                        wait=self._session.ordered)  # NCCL keeps the tensor until a stream waits for it

    def _free_sent(self, gone: Sequence[_SentTensor], *, wait: bool) -> None:
        for sent in gone:
            if wait:
                sent.outgoing.wait()
            self._sent.remove(sent)

    def _transfer_number(self, iteration: int, place: int) -> int:
        self._round = iteration - self._iterations.start
        return self._round * len(self._transfers) + place

    def _issue_up_to(self, number: int) -> None:
        while (following := self._next_transfer()) is not None and following <= number:
            self._issue_transfer(following)
            self._issued += 1
        self._post_receives()

    def _post_receives(self) -> None:
        """Start the next receives, of which at most `MAX_POSTED_RECEIVES` are pending."""
        # If the group matches transfers by their order (NCCL), stop at the next send and at the end
        # of the iteration, because a host that waits for its device also waits for these receives.
        while (len(self._arriving) < MAX_POSTED_RECEIVES and (following := self._next_transfer()) is not None
               and self._transfers[following % len(self._transfers)].kind in RECEIVES
               and (self._receive_places is not None or following // len(self._transfers) <= self._round)):
            self._issue_transfer(following)
            self._issued += 1

    def _next_transfer(self) -> int | None:
        """Return the number, over all runs, of the next transfer to issue. None if none is left."""
        order = range(len(self._transfers)) if self._receive_places is None else self._receive_places
        if self._issued >= len(self._iterations) * len(order):
            return None
        rounds, place = divmod(self._issued, len(order))
        return rounds * len(self._transfers) + order[place]

    def _issue_transfer(self, number: int) -> None:
        rounds, place = divmod(number, len(self._transfers))
        transfer = self._transfers[place]
        assert transfer.peer is not None
        if transfer.kind in RECEIVES:
            shape, dtype = carrier_form(self._form_of(self._names[place]))
            self._arriving[number] = self._session.receive(shape, dtype, transfer.peer, transfer.number)
        else:
            outgoing = self._session.send(self._ready.pop(number), transfer.peer, transfer.number)
            self._sent.append(_SentTensor(outgoing, (rounds, self._sends_before[place])))

    def _form_of(self, name: ValueName) -> Form:
        form = self._forms[name.layer]
        return form if name.tensor == "activation" else gradient_form(form)


def _count_earlier_sends(transfers: Sequence[Instruction]) -> list[int]:
    sends = Counter[Worker | None]()
    counts = []
    for transfer in transfers:
        counts.append(sends[transfer.peer])
        sends[transfer.peer] += transfer.kind not in RECEIVES
    return counts
