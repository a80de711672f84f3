"""Sum gradients at the owners of parts, and gather parameters, if state is sharded.

Gradients of a range are summed part by part, each at its owner. The part's buddy gets the sums
while the owner steps. Then all members gather the parameters that they do not step themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from slipstream.runtime.replay.session import BYTES_TAG, GenerationSession
from slipstream.runtime.replay.torch_groups import Group
from slipstream.runtime.replay.transfers import one_line_errors
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.parts import Span, StatePartition
from slipstream.schedules.layers import LayerRange, layers_text

_KINDS = 3
_REDUCE, _COPY, _GATHER = range(BYTES_TAG + 1, BYTES_TAG + 1 + _KINDS)


class PartExchange:
    """Exchange of gradients and parameters of parts, by one worker in one generation. All methods
    raise CommunicationError."""

    def __init__(self, session: GenerationSession) -> None:
        self._session = session
        self._copies: list[tuple[list[Work], list[tuple[Tensor, Tensor]]]] = []
        """Pending copies of sums: their works, and buffers to copy from and to."""

    def reduce_gradients(self, layers: LayerRange, gradients: Tensor, cut: StatePartition,
                         copies: Mapping[Span, Tensor]) -> None:
        """Sum a range's gradients over its holders, each owner's for its part.

        The sums are in `gradients`. The buffers in `copies` get the sums of the parts of which this
        worker is the buddy. They are complete when `wait_for_copies` returns; until then the
        gradients must not change. Over gloo, sums are always in the order of the members. Over
        NCCL, if members have been lost since the partition was made, each worker gets the sums of
        all parts. Raises CommunicationError.
        """
        group = self._session.sharer_group(layers)
        if group is None:
            return
        place, staged = cut.members.index(self._session.worker), self._session.staged
        sharers = self._session.list_other_sharers(layers)
        if self._session.ordered and _has_all_members(cut):
            with one_line_errors(f"reducing the gradients of {layers_text(layers)}", sharers):
                self._scatter_to_owners(group, place, gradients, cut, copies)
            return
        if self._session.ordered:
            self._session.sum_over_sharers(layers, [gradients])
            self._copies.append(([], [(gradients[slice(*span)], received) for span, received in copies.items()]))
            return
        others = [other for other in range(len(cut.members)) if other != place]
        with one_line_errors(f"reducing the gradients of {layers_text(layers)}", sharers):
            carried = gradients.cpu() if staged else gradients
            parts = [(number, owner, carried[slice(*span)]) for number, owner, span in _nonempty_parts(cut)]
            sent = [group.send([part], owner, _transfer_tag(_REDUCE, number)) for number, owner, part in parts
                    if owner != place]
            own = [(number, part, {other: torch.empty_like(part) for other in others})
                   for number, owner, part in parts if owner == place]
            receives = [group.recv([received], other, _transfer_tag(_REDUCE, number))
                        for number, _, arrived in own for other, received in arrived.items()]
            for work in (*receives, *sent):
                work.wait()
            for number, part, arrived in own:
                _sum_in_order([arrived.get(member, part) for member in range(len(cut.members))], part)
                if staged:
                    gradients[slice(*cut.spans[number])].copy_(part)
            self._send_copies(group, place, cut, parts, copies)

    def _scatter_to_owners(self, group: Group, place: int, gradients: Tensor, cut: StatePartition,
                           copies: Mapping[Span, Tensor]) -> None:
        """Give owners the sums of their parts, and start to copy them to buddies."""
        # This worker is the member with index `place`. Two collectives are used, because
        # point-to-point transfers in one group would wait for each other if buddies form a circle.
        length, count = cut.spans[0][1], len(cut.members)
        total = torch.empty_like(gradients[:length])
        nccl: Any = group  # gloo groups never get here
        nccl._reduce_scatter_base(total, gradients).wait()
        (start, stop), buddy = cut.spans[place], cut.buddies[place]
        own_sums = gradients[start:stop].copy_(total[:stop - start])
        span = next(iter(copies), (0, 0))
        copy = copies.get(span, own_sums[:0])
        gives = [len(own_sums) if other == buddy else 0 for other in range(count)]
        takes = [len(copy) if cut.buddies[other] == place else 0 for other in range(count)]
        self._copies.append(([nccl.alltoall_base(copy, own_sums, takes, gives)], []))

    def _send_copies(self, group: Group, place: int, cut: StatePartition, parts: Sequence[tuple[int, int, Tensor]],
                     copies: Mapping[Span, Tensor]) -> None:
        """Start to send own sums to buddies, and to receive those in `copies`."""
        works, arriving = list[Work](), list[tuple[Tensor, Tensor]]()
        for number, owner, part in parts:
            buddy = cut.buddies[number]
            if owner == place and buddy is not None:
                works.append(group.send([part], buddy, _transfer_tag(_COPY, number)))
            elif buddy == place:
                copy = copies[cut.spans[number]]
                into = torch.empty_like(part) if self._session.staged else copy
                works.append(group.recv([into], owner, _transfer_tag(_COPY, number)))
                arriving += [(into, copy)] if into is not copy else []
        self._copies.append((works, arriving))

    def wait_for_copies(self) -> None:
        """Wait until sums are with the buddies, here and elsewhere. Raises CommunicationError."""
        copies, self._copies = self._copies, []
        with one_line_errors("copying sums of gradients"):
            for works, arriving in copies:
                for work in works:
                    work.wait()
                for source, target in arriving:
                    target.copy_(source)

    def start_gather(self, layers: LayerRange, parameters: Tensor, cut: StatePartition) -> Callable[[], None]:
        """Start to send parts of a range's flat parameters from owners to all others.

        Returns a function that waits until `parameters` contains all parts; until then `parameters`
        must not be used. Both functions raise CommunicationError.
        """
        group = self._session.sharer_group(layers)
        what = f"gathering the parameters of {layers_text(layers)}"
        if group is None:
            return lambda: None
        staged, ordered = self._session.staged, self._session.ordered
        place = cut.members.index(self._session.worker)
        parts = _nonempty_parts(cut)
        missing = [span for _, owner, span in parts if owner != place]
        others = self._session.list_other_sharers(layers)
        with one_line_errors(what, others):
            carried, works = parameters, list[Work]()
            if ordered and _has_all_members(cut):
                carried, length = torch.empty_like(parameters), cut.padded_length // len(cut.members)
                works.append(group._allgather_base(carried, parameters[place * length:(place + 1) * length]))
            else:
                if ordered or staged:  # an abort can leave garbage in it, which must not reach the parts of this worker
                    carried = torch.empty(parameters.shape, dtype=parameters.dtype,
                                          device="cpu" if staged else parameters.device)
                    for span in cut.own_parts(self._session.worker):
                        carried[slice(*span)].copy_(parameters[slice(*span)])
                for number, owner, span in parts:
                    tag, part = _transfer_tag(_GATHER, number), carried[slice(*span)]
                    if ordered:
                        works.append(group.broadcast(part, owner))
                    elif owner != place:
                        works.append(group.recv([part], owner, tag))
                    else:
                        works += [group.send([part], other, tag) for other in range(len(cut.members)) if other != place]

        def finish() -> None:
            with one_line_errors(what, others):
                for work in works:
                    work.wait()
            for span in missing if carried is not parameters else ():
                parameters[slice(*span)].copy_(carried[slice(*span)])

        return finish


class PartReducer:
    """Sums of gradients, and gathering of parameters, of the layers that one worker holds. The
    methods are those of `runtime.replay.seams.Reducer`."""

    def __init__(self, session: GenerationSession, held: HeldLayers) -> None:
        self._session, self._held = session, held
        self._parts = PartExchange(session)

    def sum_gradients(self, layers: LayerRange) -> None:
        """Sum a range's gradients at the owners of its parts, or at all holders."""
        whole = self._held.gradients_to_sum(layers)
        if (cut := self._held.sharded_partition(layers)) is not None:
            gradients, *whole = whole
            self._parts.reduce_gradients(layers, gradients, cut, self._held.copy_buffers(layers))
        self._session.sum_over_sharers(layers, whole)

    def wait_until_unread(self) -> None:
        """Wait until no other worker reads this worker's gradients."""
        self._parts.wait_for_copies()

    def gather_parameters(self, iteration: int) -> None:
        """Gather the parameters of all sharded ranges from their owners, all at once."""
        self._held.optimizer.mark_gathering(iteration)
        for finish in [self._parts.start_gather(*flat) for flat in self._held.flat_parameters()]:
            finish()
        self._held.optimizer.start_copy_steps()

    def mark_gathered(self, iteration: int) -> None:
        """Mark the parameters as those after an iteration."""
        self._held.optimizer.mark_gathered(iteration)


def _has_all_members(cut: StatePartition) -> bool:
    """Return whether no member has been lost, so that each one owns one part."""
    return cut.owners == tuple(range(len(cut.members)))


def _nonempty_parts(cut: StatePartition) -> list[tuple[int, int, Span]]:
    """Return (number, owner, span) of each part that has elements, with the owner's index."""
    return [(number, owner, span) for number, (owner, span) in enumerate(zip(cut.owners, cut.spans, strict=True))
            if span[0] < span[1]]


def _transfer_tag(kind: int, part: int) -> int:
    """Return the tag by which gloo matches the sends and receives of a part."""
    # The part's number is needed because a member can own several parts after others have failed.
    return kind + _KINDS * part


def _sum_in_order(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum tensors in order, in float32 or wider, into `total`."""
    accumulated = parts[0].to(torch.promote_types(total.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        accumulated.add_(part)
    total.copy_(accumulated)
