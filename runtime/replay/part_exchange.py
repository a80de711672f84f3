"""Exchange of parts, where optimizer state is sharded: sums of gradients go to who steps them, parameters to all.

Gradients of a range are summed part by part, each at its owner; its buddy gets the sums while the owner steps. Then all
gather the parameters that they do not step themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import Work

from runtime.model.parts import Cut, Span
from runtime.replay.communication import BYTES_TAG, Communicator
from runtime.replay.transfers import told_in_one_line
from schedules.layers import LayerRange, layers_text

_REDUCE, _COPY, _GATHER = range(BYTES_TAG + 1, BYTES_TAG + 4)


class PartExchange:
    """That of one worker in one generation, as one of the ranks that this process stands for. All methods raise
    CommunicationError."""

    def __init__(self, communicator: Communicator, own_rank: int = 0) -> None:
        self._communicator = communicator
        self._own_rank = own_rank
        self._copies: list[tuple[list[Work], Tensor, Tensor, tuple[Span, ...]]] = []
        """Of sums of gradients, on their way: the gradients, what carries them, and what is kept of them."""

    def reduce(self, layers: LayerRange, gradients: Tensor, cut: Cut) -> None:
        """Sum the gradients of a range over its sharers, each part at its owner. Its buddy has the sums once
        `wait_for_copies` has returned, and until then the gradients must not change.

        Over gloo, sums are always in the order of the members. Raises CommunicationError.
        """
        group = self._communicator.sharers_of(layers, self._own_rank)
        place = cut.members.index(self._communicator.worker)
        if group is None:
            return
        if self._communicator.ordered:
            self._communicator.sum_over_sharers(layers, [gradients], self._own_rank)
            return
        with told_in_one_line(f"reducing the gradients of {layers_text(layers)}"):
            carried = gradients.cpu() if self._communicator.staged else gradients
            parts = [carried[first:end] for first, end in cut.spans]
            others = [other for other in range(len(parts)) if other != place]
            sent = [group.send([parts[other]], other, _REDUCE) for other in others if len(parts[other])]
            arrived = [parts[place] if other == place else torch.empty_like(parts[place])
                       for other in range(len(parts))]
            got = [group.recv([arrived[other]], other, _REDUCE) for other in others if len(parts[place])]
            for work in (*got, *sent):
                work.wait()
            total = arrived[0].to(torch.promote_types(carried.dtype, torch.float32), copy=True)
            for part in arrived[1:]:
                total.add_(part)
            parts[place].copy_(total)
            works = [group.send([parts[place]], other, _COPY) for other, wards in enumerate(cut.wards)
                     if place in wards and len(parts[place])]
            works += [group.recv([parts[ward]], ward, _COPY) for ward in cut.wards[place] if len(parts[ward])]
        self._copies.append((works, gradients, carried, cut.kept(self._communicator.worker)))

    def wait_for_copies(self) -> None:
        """Wait until each has the sums of what it keeps copies of. Raises CommunicationError."""
        copies, self._copies = self._copies, []
        with told_in_one_line("copying sums of gradients"):
            for works, gradients, carried, kept in copies:
                for work in works:
                    work.wait()
                for first, end in kept if self._communicator.staged else ():
                    gradients[first:end].copy_(carried[first:end])

    def gather(self, layers: LayerRange, parameters: Tensor, cut: Cut) -> Callable[[], None]:
        """Start to bring each member's own part of a range's parameters to all sharers that do not keep it, who step it
        themselves; what waits for those of the others. Both raise CommunicationError."""
        group = self._communicator.sharers_of(layers, self._own_rank)
        what = f"gathering the parameters of {layers_text(layers)}"
        if group is None:
            return lambda: None
        worker, staged, ordered = self._communicator.worker, self._communicator.staged, self._communicator.ordered
        place, (first, end) = cut.members.index(worker), cut.own(worker)
        lacking = [(other, span) for other, span in enumerate(cut.spans)
                   if other not in (place, *cut.wards[place]) and span[0] < span[1]]
        carried = torch.empty(parameters.shape, dtype=parameters.dtype) if staged else \
            torch.empty_like(parameters) if ordered else parameters
        with told_in_one_line(what):
            if ordered:
                length = cut.length // len(cut.members)
                works = [group._allgather_base(carried, parameters[place * length:(place + 1) * length])]
            else:
                if staged:
                    carried[first:end].copy_(parameters[first:end])
                works = [group.send([carried[first:end]], other, _GATHER) for other, wards in enumerate(cut.wards)
                         if place not in (other, *wards) and first < end]
                works += [group.recv([carried[start:stop]], other, _GATHER) for other, (start, stop) in lacking]

        def finish() -> None:
            with told_in_one_line(what):
                for work in works:
                    work.wait()
            for _, (start, stop) in lacking if carried is not parameters else ():
                parameters[start:stop].copy_(carried[start:stop])

        return finish
