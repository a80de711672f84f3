"""Divide the optimizer state of layers among workers, and keep versions of state.

If state is sharded (ZeRO stage 1, Rajbhandari et al., SC 2020), the elements of a range of layers,
in the order of its gradients, are cut into equal parts, one for each worker that reduces the range.
Each worker owns a part, which it steps, and is the *buddy* of another worker: it keeps a copy of
that worker's part, and makes the same steps. Buddies are in different failure domains if there are
several, so no state is lost in a failure that spares one of each pair.

Elements of a layer are those of its trained parameters, in the order of `named_parameters`, from 0.
They are followed by those of parameters that are not cut but stored whole by all holders:
parameters that layers share, those of another dtype, and those stepped by a rule.

All state has a version: the iteration that it results from, and whether all of it does. Code that
uses state names the version that it needs, so parts of two iterations are never mixed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker


class VersionError(RuntimeError):
    """Error, in one line, for state of another iteration than the expected one."""


class Version(NamedTuple):
    """Version of some state: the iteration from whose step all or some of it results."""

    after: int
    """Iteration after which the state has these values; -1: before the first one."""
    whole: bool = True
    """True if all of the state has this version. False while any of it may be changing."""

    def require(self, after: int, what: str) -> None:
        """Raise VersionError, naming `what`, unless all state is that after iteration `after`."""
        if self != Version(after):
            found = (
                f"is the state after iteration {self.after}"
                if self.whole
                else f"is being changed to the state after iteration {self.after}"
            )
            raise VersionError(f"{what} {found}; expected the state after iteration {after}")


Span = tuple[int, int]
"""Elements [start, stop) of a layer or of a range of layers."""
Parts = Mapping[int, tuple[Span, ...]]
"""Spans of elements by layer, which can be stepped separately with the same result."""
Domains = Sequence[Sequence[Worker]]
"""Groups of workers that fail together (`runtime.failure_domains`)."""
OriginalMembers = Mapping[LayerRange, Sequence[Worker]]
"""Ranges of layers that have lost members, each with its original members."""


class ElementCounts(NamedTuple):
    """Numbers of a layer's trained elements that are cut into parts, and that are not."""

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
    """Partition of the elements of a range of layers into parts.

    Each part has an owner and perhaps a buddy. Without sharding there is one part, which all
    members store and step.
    """

    members: tuple[Worker, ...]
    """Workers that reduce the range, ascending."""
    spans: tuple[Span, ...]
    """Parts, of equal length except for the last ones."""
    owners: tuple[int, ...]
    """Owner of each part, which steps it, as an index of `members`."""
    buddies: tuple[int | None, ...]
    """Buddy of each part, as an index of `members`; None if there is none."""
    sharded: bool

    @property
    def padded_length(self) -> int:
        """Number of elements, padded to a multiple of the number of parts."""
        return self.spans[0][1] * len(self.spans)

    def own_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return the parts that a member owns; without sharding, the first member owns all."""
        return self._parts_of(worker, self.owners)

    def copied_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return the parts of which a member is the buddy, and so keeps copies."""
        return self._parts_of(worker, self.buddies)

    def stored_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return all parts that a member stores: owned and copied ones; all without sharding."""
        return (*self.own_parts(worker), *self.copied_parts(worker)) if self.sharded else self.spans

    def stepped_parts(self, worker: Worker) -> tuple[Span, ...]:
        """Return the parts that a member steps: those it owns; all without sharding."""
        return self.own_parts(worker) if self.sharded else self.spans

    def after_losses(self, members: Sequence[Worker]) -> "StatePartition | None":
        """Return the same partition for the remaining members.

        A buddy becomes the owner of a lost member's part. Returns None if some part is lost, or if
        state is not sharded.
        """
        if not self.sharded:
            return None
        new_places = {self.members.index(worker): place for place, worker in enumerate(members)}
        owners, buddies = list[int](), list[int | None]()
        for pair in zip(self.owners, self.buddies, strict=True):
            # Owner first: whoever of the two is left steps the part, and the other copies it.
            keepers = [new_places[keeper] for keeper in pair if keeper in new_places]
            if not keepers:
                return None
            owners.append(keepers[0])
            buddies.append(keepers[1] if len(keepers) > 1 else None)
        return self._replace(members=tuple(members), owners=tuple(owners), buddies=tuple(buddies))

    def _parts_of(self, worker: Worker, keepers: Sequence[int | None]) -> tuple[Span, ...]:
        place = self.members.index(worker)
        return tuple(
            span
            for span, keeper in zip(self.spans, keepers, strict=True)
            if keeper == place and span[0] < span[1]
        )


def build_partition(
    total: int, members: Sequence[Worker], domains: Domains, *, sharded: bool
) -> StatePartition:
    """Return a partition of `total` elements over the members of a range of layers.

    If `sharded`, each member owns one part, whose buddy is in another failure domain if possible.
    Else, or for one member or no elements, everything is one part, which is not sharded.
    """
    # One member, or all if state is not sharded, has everything in one part.
    members = tuple(sorted(members))
    count = len(members)
    if not sharded or count == 1 or not total:
        return StatePartition(members, ((0, total),), (0,), (None,), sharded=False)
    # Rounded up, so that the last parts may be shorter, or empty.
    size = -(-total // count)
    spans = tuple(
        (min(total, place * size), min(total, (place + 1) * size)) for place in range(count)
    )
    domain_of = {worker: number for number, workers in enumerate(domains) for worker in workers}
    buddies = _assign_buddies([domain_of.get(worker, 0) for worker in members])
    return StatePartition(members, spans, tuple(range(count)), buddies, sharded=True)


def build_partitions(
    ranges: Mapping[LayerRange, Sequence[Worker]],
    cut_for: OriginalMembers,
    elements: Callable[[int], ElementCounts],
    domains: Domains,
    *,
    sharded: bool,
) -> dict[LayerRange, StatePartition]:
    """Return the partition of each range of layers over the members that hold it.

    `cut_for` has ranges that stay cut for their original members; lost members' parts go to their
    buddies. `elements` returns the numbers of a layer's elements; `domains` and `sharded` are those
    of `build_partition`. Raises ValueError if neither owner nor buddy of some part remains, or if a
    range in `cut_for` is not sharded.
    """
    cuts = {}
    for layers, members in ranges.items():
        # State moves only if a range is cut anew, so after a loss it stays cut as it was.
        before = cut_for.get(layers)
        initial = build_partition(
            sum(elements(layer).cut for layer in range(*layers)),
            before or members,
            domains,
            sharded=sharded,
        )
        remaining = initial if before is None else initial.after_losses(members)
        if remaining is None:
            raise ValueError(
                f"layers {layers}: of some part neither owner nor buddy is left; expected one"
            )
        cuts[layers] = remaining
    return cuts


def _assign_buddies(domains: Sequence[int]) -> tuple[int, ...]:
    # In the circle of members sorted by domain, the buddy is n places ahead, where n is the number
    # of members of the largest domain: it is in another domain if that is possible.
    order = sorted(range(len(domains)), key=lambda place: (domains[place], place))
    ahead = max(Counter(domains).values()) % len(order) or 1
    buddy = {place: order[(index + ahead) % len(order)] for index, place in enumerate(order)}
    return tuple(buddy[place] for place in range(len(order)))


def split_by_layer(
    span: Span, layers: LayerRange, elements: Callable[[int], int]
) -> Iterator[tuple[int, Span]]:
    """Divide a span of a range's elements; yield each layer with the span within it.

    `elements` returns the number of elements of a layer.
    """
    begins = 0
    for layer in range(*layers):
        start, stop = max(span[0] - begins, 0), min(span[1] - begins, elements(layer))
        if start < stop:
            yield layer, (start, stop)
        begins += elements(layer)


def parts_of_worker(
    worker: Worker,
    cuts: Mapping[LayerRange, StatePartition],
    elements: Callable[[int], ElementCounts],
    which: Callable[[StatePartition, Worker], tuple[Span, ...]] = StatePartition.stored_parts,
) -> dict[int, tuple[Span, ...]]:
    """Return, by layer, the spans that a member stores under `cuts`, or that `which` selects.

    `which` is another method of `StatePartition`: `own_parts` or `stepped_parts`. `elements`
    returns the numbers of a layer's elements. Parameters that are not cut are owned by the first
    member; all members store and step them.
    """
    parts: dict[int, tuple[Span, ...]] = {}
    for layers, partition in cuts.items():
        for span in which(partition, worker):
            for layer, part in split_by_layer(span, layers, lambda layer: elements(layer).cut):
                parts[layer] = (*parts.get(layer, ()), part)
        # Parameters that are not cut follow.
        if which is StatePartition.own_parts and worker != partition.members[0]:
            continue
        for layer in range(*layers):
            if whole_spans := elements(layer).whole_spans:
                parts[layer] = (*parts.get(layer, ()), *whole_spans)
    return parts


def subtract(span: Span, others: Iterable[Span]) -> tuple[Span, ...]:
    """Return a span's elements that are in no span of `others`, as ascending spans."""
    remaining, (start, stop) = [], span
    # All elements before `start` are treated.
    for first, end in sorted(others):
        if first > start:
            remaining.append((start, min(first, stop)))
        start = max(start, end)
        if start >= stop:
            break
    if start < stop:
        remaining.append((start, stop))
    return tuple(rest for rest in remaining if rest[0] < rest[1])


def intersect(first: Span, second: Span) -> Span | None:
    """Return the intersection of two spans; None if it is empty."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None
