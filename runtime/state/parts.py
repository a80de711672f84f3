"""Divide a layer's optimizer state among workers, and say which iteration state is of.

If state is sharded (ZeRO stage 1, Rajbhandari et al., SC 2020), the elements of a range of layers,
in the order of its gradients, are cut into equal parts, one for each worker that reduces the range.
Each worker owns a part, which it steps. It also is the *buddy* of another worker: it keeps a copy
of that one's part and makes the same steps. Buddies are in different failure domains (machines) if
there are several. So no state is lost in a failure that spares one of each pair of owner and buddy.

Elements are those of the trained parameters, in the order of `named_parameters`; those of a layer
count from 0. They are followed by the elements of parameters that are not cut but stored whole by
all holders of the layer: parameters that layers share, which holders of other layers also have, and
parameters of another dtype.

Parameters, optimizer states, copies of others' parts, and state sent between workers have a
version: the iteration that they result from, and whether all of them do. Code that uses state names
the version that it needs, so parts of two iterations are never mixed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker


class VersionError(RuntimeError):
    """Error, in one line, for state that is not that after the expected iteration."""


class Version(NamedTuple):
    """Version of state: the iteration that it results from, and whether all does."""

    after: int
    """Iteration after which the state has these values; -1 before the first one."""
    whole: bool = True
    """True if all of the state has this version. False while any of it may be changing."""

    def require(self, after: int, what: str) -> None:
        """Raise VersionError, naming `what`, unless all state is that after iteration `after`."""
        if self != Version(after):
            found = f"is the state after iteration {self.after}" if self.whole else \
                f"is being changed to the state after iteration {self.after}"
            raise VersionError(f"{what} {found}; expected the state after iteration {after}")


Span = tuple[int, int]
"""Elements [start, stop) of a layer or of a range of layers."""
Parts = Mapping[int, tuple[Span, ...]]
"""Spans of each layer's elements, each stepped by itself wherever it is stored, to the same
bits."""
Domains = Sequence[Sequence[Worker]]
"""Groups of workers that fail together (`runtime.failure_domains`)."""
OriginalMembers = Mapping[LayerRange, Sequence[Worker]]
"""Original members of each range that has lost some, whose parts stay as they were."""


class ElementCounts(NamedTuple):
    """Numbers of trained elements of a layer: `cut` into parts, or stored whole."""

    cut: int
    whole: tuple[int, ...] = ()
    """Number of elements of each parameter that is not cut."""

    @property
    def total(self) -> int:
        """Number of all trained elements of the layer."""
        return self.cut + sum(self.whole)

    @property
    def whole_spans(self) -> tuple[Span, ...]:
        """Spans, within the layer's elements, of the parameters that are stored whole."""
        ends = tuple(accumulate(self.whole, initial=self.cut))
        return tuple(pairwise(ends))


class StatePartition(NamedTuple):
    """Partition of a range's elements into parts, each with an owner and perhaps a buddy. If state
    is not sharded, there is one part, which all members store and step."""

    members: tuple[Worker, ...]
    """Workers that reduce the range, ascending."""
    spans: tuple[Span, ...]
    """Parts, of equal length except for the last ones. One with all elements if not sharded."""
    owners: tuple[int, ...]
    """Index among the members of the owner of each part, which steps it."""
    buddies: tuple[int | None, ...]
    """Index among the members of the buddy of each part. None if it has no copy (yet)."""
    sharded: bool

    @property
    def padded_length(self) -> int:
        """Number of elements, padded to a multiple of the number of parts."""
        return self.spans[0][1] * len(self.spans)

    def own_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return the parts that a member owns; unsharded, the first member owns all."""
        return self._parts_of(worker, self.owners)

    def copied_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return the parts of other members that a member keeps copies of."""
        return self._parts_of(worker, self.buddies)

    def stored_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return all parts that a member stores: its own, and its copies of others."""
        return (*self.own_parts(worker), *self.copied_parts(worker)) if self.sharded else self.spans

    def stepped_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return the parts that a member steps, all if not sharded."""
        return self.own_parts(worker) if self.sharded else self.spans

    def after_losses(self, members: Sequence[Worker]) -> "StatePartition | None":
        """Return the same partition for the remaining members.

        A buddy becomes the owner of a lost member's part. Returns None if neither owner nor buddy
        of some part remains, or if state is not sharded.
        """
        places = {self.members.index(worker): place for place, worker in enumerate(members)}
        keepers = [[places[keeper] for keeper in pair if keeper in places]
                   for pair in zip(self.owners, self.buddies, strict=True)]
        if not self.sharded or not all(keepers):
            return None
        return self._replace(members=tuple(members), owners=tuple(remaining[0] for remaining in keepers),
                             buddies=tuple(remaining[1] if len(remaining) > 1 else None for remaining in keepers))

    def _parts_of(self, worker: Worker, keepers: Sequence[int | None]) -> tuple[Span, ...]:
        """Return the nonempty parts whose keeper, by index in `keepers`, a member is."""
        place = self.members.index(worker)
        return tuple(span for span, keeper in zip(self.spans, keepers, strict=True)
                     if keeper == place and span[0] < span[1])


def build_partition(total: int, members: Sequence[Worker], domains: Domains, *, sharded: bool) -> StatePartition:
    """Return a partition of `total` elements over members.

    If state is not sharded, or there is one member, the only part is all elements, which each
    member stores. Owner and buddy of a part are in different `domains`, if possible.
    """
    members = tuple(sorted(members))
    count = len(members)
    if not sharded or count == 1 or not total:
        return StatePartition(members, ((0, total),), (0,), (None,), sharded=False)
    size = -(-total // count)
    spans = tuple((min(total, place * size), min(total, (place + 1) * size)) for place in range(count))
    buddies = _assign_buddies([next((number for number, workers in enumerate(domains) if worker in workers), 0)
                               for worker in members])
    return StatePartition(members, spans, tuple(range(count)), buddies, sharded=True)


def build_partitions(ranges: Mapping[LayerRange, Sequence[Worker]], cut_for: OriginalMembers,
                     elements: Callable[[int], ElementCounts],
                     domains: Domains, *, sharded: bool) -> dict[LayerRange, StatePartition]:
    """Return the partition of each range of layers over the members that hold it.

    A range in `cut_for` is cut for the original members named there, and lost members' parts go to
    their buddies. Owner and buddy are in different `domains`, if possible. The function `elements`
    returns the numbers of a layer's elements. Raises ValueError if neither owner nor buddy of some
    part remains.
    """
    cuts = {}
    for layers, members in ranges.items():
        before = cut_for.get(layers)
        initial = build_partition(sum(elements(layer).cut for layer in range(*layers)), before or members, domains,
                                  sharded=sharded)
        remaining = initial if before is None else initial.after_losses(members)
        if remaining is None:
            raise ValueError(f"layers {layers}: of some part neither owner nor buddy is left; expected one")
        cuts[layers] = remaining
    return cuts


def _assign_buddies(domains: Sequence[int]) -> tuple[int, ...]:
    """Return the index of each member's buddy, from its failure domain."""
    # Each member is the buddy of one other, in another domain if possible: in the circle of members
    # sorted by domain, the buddy is n places ahead, where n is the number of members of the largest
    # domain.
    order = sorted(range(len(domains)), key=lambda place: (domains[place], place))
    ahead = max(Counter(domains).values()) % len(order) or 1
    buddy = {place: order[(index + ahead) % len(order)] for index, place in enumerate(order)}
    return tuple(buddy[place] for place in range(len(order)))


def split_by_layer(span: Span, layers: LayerRange, elements: Callable[[int], int]) -> Iterator[tuple[int, Span]]:
    """Yield a span of a range's elements as pairs of layer and span. The function `elements`
    returns the number of a layer's elements that are cut into parts."""
    begins = 0
    for layer in range(*layers):
        start, stop = max(span[0] - begins, 0), min(span[1] - begins, elements(layer))
        if start < stop:
            yield layer, (start, stop)
        begins += elements(layer)


def parts_of_worker(worker: Worker, cuts: Mapping[LayerRange, StatePartition], elements: Callable[[int], ElementCounts],
                    which: Callable[[StatePartition, Worker],
                                    tuple[Span, ...]] = StatePartition.stored_parts) -> dict[int, tuple[Span, ...]]:
    """Return, by layer, the spans that a member stores under `cuts`, or that `which` selects.

    `which` is `StatePartition.own_parts` or `stepped_parts`. Parameters that are not cut are owned
    by the first member; all members store and step them.
    """
    parts: dict[int, tuple[Span, ...]] = {}
    for layers, cut_of_range in cuts.items():
        for span in which(cut_of_range, worker):
            for layer, part in split_by_layer(span, layers, lambda layer: elements(layer).cut):
                parts[layer] = (*parts.get(layer, ()), part)
        for layer in range(*layers) if which is not StatePartition.own_parts or worker == cut_of_range.members[0] \
                else ():
            if whole := elements(layer).whole_spans:
                parts[layer] = (*parts.get(layer, ()), *whole)
    return parts


def subtract(span: Span, others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the elements of a span that are in no other, as ascending spans."""
    remaining, (start, stop) = [], span
    for first, end in sorted(others):
        if first > start:
            remaining.append((start, min(first, stop)))
        start = max(start, end)
        if start >= stop:
            break
    if start < stop:
        remaining.append((start, stop))
    return tuple(rest for rest in remaining if rest[0] < rest[1])


def intersect(one: Span, other: Span) -> Span | None:
    """Return the intersection of two spans; None if it is empty."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None
