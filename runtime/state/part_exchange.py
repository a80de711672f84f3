"""Sum gradients at the owners of parts, and gather parameters, if state is sharded.

Gradients of a range are summed part by part, each at its owner. The part's buddy gets the sums
while the owner steps. Then all holders gather the parameters that they do not step themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class _PendingCopies(NamedTuple):
    works: list[Work]
    staged: list[tuple[Tensor, Tensor]]
    """Pairs of a tensor, to be copied once it has arrived, and its target."""


class _OwnedPart(NamedTuple):
    number: int
    owner: int
    """Index of the owner among the partition's members."""
    span: Span


class PartExchange:
    """Exchange of gradients and parameters of parts, by one worker in one generation.

    In all methods `cut` is the partition of the range. All methods raise CommunicationError.
    """

    def __init__(self, session: GenerationSession) -> None:
        self._session = session
        self._copies: list[_PendingCopies] = []

    def reduce_gradients(
        self,
        layers: LayerRange,
        gradients: Tensor,
        cut: StatePartition,
        copies: Mapping[Span, Tensor],
    ) -> None:
        """Sum a range's gradients over its holders; each owner gets the sum of its part.

        The sums replace the values in `gradients`. The buffers in `copies` get the sums of the
        parts of which this worker is the buddy; they are complete when `wait_for_copies` returns.
        Until then the gradients must not change. With a single holder, nothing is done.
        """
        # Over gloo, sums are always in the order of the members. Over NCCL, if members have been
        # lost since the partition was made, each worker gets the sums of all parts.
        group = self._session.sharer_group(layers)
        if group is None:
            return
        place = cut.members.index(self._session.worker)
        sharers = self._session.list_other_sharers(layers)
        if self._session.ordered and not _has_all_members(cut):
            self._session.sum_over_sharers(layers, [gradients])
            sums = [(gradients[slice(*span)], buffer) for span, buffer in copies.items()]
            self._copies.append(_PendingCopies([], sums))
            return
        with one_line_errors(f"reducing the gradients of {layers_text(layers)}", sharers):
            if self._session.ordered:
                self._scatter_to_owners(group, place, gradients, cut, copies)
            else:
                self._send_to_owners(group, place, gradients, cut, copies)

    def _send_to_owners(
        self,
        group: Group,
        place: int,
        gradients: Tensor,
        cut: StatePartition,
        copies: Mapping[Span, Tensor],
    ) -> None:
        """Sum gradients over gloo at the owners of parts; start to copy sums to buddies."""
        staged = self._session.staged
        carried = gradients.cpu() if staged else gradients
        others = [other for other in range(len(cut.members)) if other != place]
        # All transfers are started before any is waited for.
        works = list[Work]()
        arriving: dict[int, dict[int, Tensor]] = {}
        for number, owner, span in _nonempty_parts(cut):
            part, tag = carried[slice(*span)], _transfer_tag(_REDUCE, number)
            if owner != place:
                works.append(group.send([part], owner, tag))
                continue
            arriving[number] = {other: torch.empty_like(part) for other in others}
            for other, received in arriving[number].items():
                works.append(group.recv([received], other, tag))
        for work in works:
            work.wait()

        for number, received_from in arriving.items():
            elements = slice(*cut.spans[number])
            part = carried[elements]
            members = range(len(cut.members))
            # The order of the members, not of arrival, gives the same bits each time.
            _sum_in_order([received_from.get(member, part) for member in members], part)
            if staged:
                gradients[elements].copy_(part)
        self._send_copies(group, place, cut, carried, copies)

    def _scatter_to_owners(
        self,
        group: Group,
        place: int,
        gradients: Tensor,
        cut: StatePartition,
        copies: Mapping[Span, Tensor],
    ) -> None:
        """Sum gradients over NCCL at owners, and start to copy the sums to buddies."""
        # Two collectives are used, because point-to-point transfers in one group would wait for
        # each other if buddies form a circle.
        length, count = cut.spans[0][1], len(cut.members)
        total = torch.empty_like(gradients[:length])
        nccl: Any = group  # gloo groups never get here
        nccl._reduce_scatter_base(total, gradients).wait()
        (start, stop), buddy = cut.spans[place], cut.buddies[place]
        own_sums = gradients[start:stop].copy_(total[: stop - start])
        span = next(iter(copies), (0, 0))
        copy = copies.get(span, own_sums[:0])
        # All but one member get nothing, and all but one send nothing.
        gives, takes = [0] * count, [0] * count
        if buddy is not None:
            gives[buddy] = len(own_sums)
        if place in cut.buddies:
            takes[cut.buddies.index(place)] = len(copy)
        work = nccl.alltoall_base(copy, own_sums, takes, gives)
        self._copies.append(_PendingCopies([work], []))

    def _send_copies(
        self,
        group: Group,
        place: int,
        cut: StatePartition,
        sums: Tensor,
        copies: Mapping[Span, Tensor],
    ) -> None:
        """Start to send own parts of `sums` to buddies, and to receive others' in `copies`."""
        pending = _PendingCopies([], [])
        for number, owner, span in _nonempty_parts(cut):
            part, buddy, tag = sums[slice(*span)], cut.buddies[number], _transfer_tag(_COPY, number)
            if owner == place and buddy is not None:
                pending.works.append(group.send([part], buddy, tag))
            elif buddy == place:
                buffer = copies[span]
                # Gloo reaches a GPU's memory only through the host's.
                received = torch.empty_like(part) if self._session.staged else buffer
                pending.works.append(group.recv([received], owner, tag))
                if received is not buffer:
                    pending.staged.append((received, buffer))
        self._copies.append(pending)

    def wait_for_copies(self) -> None:
        """Wait until the copies of sums that this worker sends and receives have arrived."""
        copies, self._copies = self._copies, []
        with one_line_errors("copying sums of gradients"):
            for pending in copies:
                for work in pending.works:
                    work.wait()
                for source, target in pending.staged:
                    target.copy_(source)

    def start_gather(
        self, layers: LayerRange, parameters: Tensor, cut: StatePartition
    ) -> Callable[[], None]:
        """Start to send parts of a range's flat parameters from owners to all others.

        Returns a function that waits until `parameters` contains all parts; until then `parameters`
        must not be used. That function raises CommunicationError, too.
        """
        group = self._session.sharer_group(layers)
        what = f"gathering the parameters of {layers_text(layers)}"
        if group is None:
            return lambda: None
        staged, ordered = self._session.staged, self._session.ordered
        place = cut.members.index(self._session.worker)
        parts = _nonempty_parts(cut)
        others = [other for other in range(len(cut.members)) if other != place]
        sharers = self._session.list_other_sharers(layers)
        with one_line_errors(what, sharers):
            carried, works = parameters, list[Work]()
            # Each member owns its own part, so one collective gathers all.
            if ordered and _has_all_members(cut):
                carried = torch.empty_like(parameters)
                length = cut.padded_length // len(cut.members)
                own_part = parameters[place * length : (place + 1) * length]
                works.append(group._allgather_base(carried, own_part))
            else:
                # An abort can leave garbage in it, which must not reach the parts of this worker.
                if ordered or staged:
                    device = "cpu" if staged else parameters.device
                    carried = torch.empty(parameters.shape, dtype=parameters.dtype, device=device)
                    for span in cut.own_parts(self._session.worker):
                        carried[slice(*span)].copy_(parameters[slice(*span)])
                # After losses a member may own several parts, or gloo is used: one transfer a part.
                for number, owner, span in parts:
                    tag, part = _transfer_tag(_GATHER, number), carried[slice(*span)]
                    if ordered:
                        works.append(group.broadcast(part, owner))
                    elif owner != place:
                        works.append(group.recv([part], owner, tag))
                    else:
                        works += [group.send([part], other, tag) for other in others]

        def finish() -> None:
            with one_line_errors(what, sharers):
                for work in works:
                    work.wait()
            if carried is parameters:
                return
            for part in parts:
                if part.owner != place:
                    parameters[slice(*part.span)].copy_(carried[slice(*part.span)])

        return finish


class PartReducer:
    """Reducer (`replay.seams.Reducer`) that sums gradients and gathers parameters by parts.

    Methods that communicate or wait raise CommunicationError.
    """

    def __init__(self, session: GenerationSession, holding: HeldLayers) -> None:
        self._session, self._holding = session, holding
        self._parts = PartExchange(session)

    def sum_gradients(self, layers: LayerRange) -> None:
        """Sum a range's gradients over its holders.

        What is cut into parts is summed at the owners of the parts, the rest at all holders.
        """
        whole = self._holding.gradients_to_sum(layers)
        if (cut := self._holding.sharded_partition(layers)) is not None:
            # The first tensor has the gradients that are cut into parts.
            gradients, *whole = whole
            copies = self._holding.copy_buffers(layers)
            self._parts.reduce_gradients(layers, gradients, cut, copies)
        self._session.sum_over_sharers(layers, whole)

    def wait_until_unread(self) -> None:
        """Wait until no other worker still reads this worker's gradients."""
        self._parts.wait_for_copies()

    def gather_parameters(self, iteration: int) -> None:
        """Gather all sharded ranges' parameters, as they are after `iteration`, from their owners.

        Then this worker's copies of others' parts, in the background, make the steps that have been
        committed.
        """
        self._holding.optimizer.mark_gathering(iteration)
        # All ranges are started before any is waited for.
        for finish in [self._parts.start_gather(*flat) for flat in self._holding.flat_parameters()]:
            finish()
        self._holding.optimizer.start_copy_steps()

    def mark_gathered(self, iteration: int) -> None:
        """Record that all elements of the parameters are those after an iteration."""
        self._holding.optimizer.mark_gathered(iteration)


def _has_all_members(cut: StatePartition) -> bool:
    return cut.owners == tuple(range(len(cut.members)))


def _nonempty_parts(cut: StatePartition) -> list[_OwnedPart]:
    return [
        _OwnedPart(number, owner, span)
        for number, (owner, span) in enumerate(zip(cut.owners, cut.spans, strict=True))
        if span[0] < span[1]
    ]


def _transfer_tag(kind: int, part: int) -> int:
    """Return gloo's tag for a part's transfers of a kind: `_REDUCE`, `_COPY` or `_GATHER`."""
    # The part's number is needed because a member can own several parts after others have failed.
    return kind + _KINDS * part


def _sum_in_order(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum tensors one after the other, in float32 or wider, into `total`."""
    accumulated = parts[0].to(torch.promote_types(total.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        accumulated.add_(part)
    total.copy_(accumulated)
