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
"""Largest number of pending receives that were started ahead of their ops; each takes memory."""


class _SentTensor(NamedTuple):
    outgoing: Outgoing
    sent_at: tuple[int, int]
    """Index of the program's run, and number of earlier sends to the target in it."""


class Exchange:
    """Carrier of values between one worker's ops, and between it and other workers.

    A worker starts its transfers in the order of its program. In that order workers never wait for
    each other in a circle, even if transfers run strictly one after another, as in an NCCL group
    (`schedules.graph.order_transfers`). Over gloo, receives start ahead of sends, because a tensor
    without a waiting receive takes two more messages.

    An iteration that is discarded and run again counts as two: arguments `iteration` are the
    iteration's number plus the number of runs discarded so far.

    Parameters
    ----------
    forms
        Shapes and dtypes of the inputs of each layer of the schedule, followed by those of the last
        layer's output.
    iterations
        Numbers of the program's runs for which this object is used.
    """

    def __init__(
        self, program: WorkerProgram, session: Transport, forms: Sequence[Form], iterations: range
    ) -> None:
        self._session = session
        self._forms = forms
        self._iterations = iterations
        self._transfers = program.transfers
        self._names = [
            name
            for transfer in self._transfers
            if (name := program.output_of(transfer) or program.input_of(transfer)) is not None
        ]
        self._sends_before = _count_earlier_sends(self._transfers)
        self._round = 0
        """Latest run of the program that had a transfer, counted from 0."""
        # Transfers issued, or receives if `_receive_places` is set.
        self._issued = 0
        self._receive_places: list[int] | None = None
        if not session.ordered:
            self._receive_places = [
                place for place, transfer in enumerate(self._transfers) if transfer.kind in RECEIVES
            ]
        # Keys are numbers of transfers, counted over all iterations: transfers of two iterations
        # may be pending.
        self._arriving: dict[int, Incoming] = {}
        self._ready: dict[int, Tensor] = {}
        # Numbers of the transfers that bring the next inputs.
        self._awaited: dict[ValueName, int] = {}
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
        # The op runs at once; more receives follow later.
        carrier = self._arriving.pop(number).wait_for_tensor()
        self._free_arrived(number)
        return unpack_value(carrier, self._form_of(name))

    def start_receive(self, iteration: int, place: int) -> None:
        """Start the receive at index `place` of the program's transfers, and earlier receives.

        Some later receives start, too, and earlier sends if the transport is `ordered`. Raises
        CommunicationError.
        """
        number = self._transfer_number(iteration, place)
        self._awaited[self._names[place]] = number
        self._issue_up_to(number)

    def start_send(self, iteration: int, place: int) -> None:
        """Start the send at index `place` of the program's transfers.

        Some later receives start, too, and all earlier transfers if the transport is `ordered`.
        Raises CommunicationError.
        """
        number = self._transfer_number(iteration, place)
        self._ready[number] = pack_value(self._local.pop(self._names[place]))
        if self._receive_places is None:
            # Matched by order: all earlier transfers must start first.
            self._issue_up_to(number)
        else:
            # With tags, a send need not wait for the receives before it.
            self._issue_transfer(number)
            self._post_receives()

    def put_zeros(self, name: ValueName) -> None:
        """Store zeros as the output of an op in a discarded run."""
        device = self._session.device
        self.put_output(
            name,
            allocate_value(
                self._form_of(name),
                lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device),
            ),
        )

    def add_iterations(self, iterations: int = 1) -> None:
        """Allow `iterations` more runs, such as the second run of a discarded iteration."""
        self._iterations = range(self._iterations.start, self._iterations.stop + iterations)

    def end_iteration(self) -> None:
        """Wait for the sends of earlier iterations, and free their tensors.

        Raises CommunicationError if one of them has failed.
        """
        # Those arrived long ago. A wait for the tensors that were sent just now could delay the
        # next iteration.
        self._free_sent([sent for sent in self._sent if sent.sent_at[0] < self._round], wait=True)

    def flush(self) -> None:
        """Wait for all sent tensors, when no iteration follows. Raises CommunicationError."""
        self._free_sent([*self._sent], wait=True)

    def free_microbatches(self) -> None:
        """Free all tensors of all micro-batches. The exchange cannot be used afterwards."""
        for tensors in (self._arriving, self._ready, self._awaited, self._local, self._sent):
            tensors.clear()

    def _free_arrived(self, number: int) -> None:
        """Free the sent tensors whose receipt follows from the arrival of transfer `number`."""
        # `frees` counts sends that the peer must have received before it could send this.
        rounds, place = divmod(number, len(self._transfers))
        arrived = self._transfers[place]
        self._free_sent(
            [
                sent
                for sent in self._sent
                if sent.outgoing.target == arrived.peer and sent.sent_at < (rounds, arrived.frees)
            ],
            # NCCL keeps the tensor until a stream waits for it.
            wait=self._session.ordered,
        )

    def _free_sent(self, arrived: Sequence[_SentTensor], *, wait: bool) -> None:
        for sent in arrived:
            if wait:
                sent.outgoing.wait()
            self._sent.remove(sent)

    def _transfer_number(self, iteration: int, place: int) -> int:
        # Counted over all runs, as transfers of two runs may be pending.
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
        while (
            len(self._arriving) < MAX_POSTED_RECEIVES
            and (following := self._next_transfer()) is not None
            and self._transfers[following % len(self._transfers)].kind in RECEIVES
            and (
                self._receive_places is not None or following // len(self._transfers) <= self._round
            )
        ):
            self._issue_transfer(following)
            self._issued += 1

    def _next_transfer(self) -> int | None:
        """Return the number, over all runs, of the next transfer; None if none is left."""
        # With tags, sends start when their tensors are computed, so only receives are in turn.
        order = (
            range(len(self._transfers)) if self._receive_places is None else self._receive_places
        )
        if self._issued >= len(self._iterations) * len(order):
            return None
        rounds, place = divmod(self._issued, len(order))
        return rounds * len(self._transfers) + order[place]

    def _issue_transfer(self, number: int) -> None:
        # The number of a transfer within its program is its tag, alike at both ends.
        rounds, place = divmod(number, len(self._transfers))
        transfer = self._transfers[place]
        assert transfer.peer is not None
        if transfer.kind in RECEIVES:
            # Shape and dtype are known from the form, so no message has to announce them.
            shape, dtype = carrier_form(self._form_of(self._names[place]))
            self._arriving[number] = self._session.receive(
                shape, dtype, transfer.peer, transfer.number
            )
        else:
            outgoing = self._session.send(self._ready.pop(number), transfer.peer, transfer.number)
            self._sent.append(_SentTensor(outgoing, (rounds, self._sends_before[place])))

    def _form_of(self, name: ValueName) -> Form:
        form = self._forms[name.layer]
        return form if name.tensor == "activation" else gradient_form(form)


def _count_earlier_sends(transfers: Sequence[Instruction]) -> list[int]:
    # For each transfer, the sends to the same worker before it, as `Instruction.frees` counts them.
    sends = Counter[Worker | None]()
    counts = []
    for transfer in transfers:
        counts.append(sends[transfer.peer])
        sends[transfer.peer] += transfer.kind not in RECEIVES
    return counts
