"""Parts: which worker keeps which part of a layer's optimizer state.

Where state is sharded (ZeRO stage 1, Rajbhandari et al., SC 2020), the elements of a range of layers, in the order of
its gradients, are cut into equal parts, one for each worker that reduces the range. Each steps its own part, and keeps
a copy of another one's: it is that one's *buddy*, and makes the same steps. Buddies are in different failure domains
(machines) where there are such. So whatever fails that has not both of two buddies, all state is left.

Elements are those of the trained parameters, in the order of `named_parameters`; those of a layer count from 0. Behind
them are those of parameters that are not cut, but kept whole by all who hold the layer: what layers share, which others
hold, too, and what is of another dtype.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from schedules.layers import LayerRange
from schedules.schedule import Worker

Span = tuple[int, int]
"""Elements [start, stop)."""
Parts = Mapping[int, tuple[Span, ...]]
"""Spans of layers. They are not joined: each is stepped by itself, wherever it is kept, to the same bits."""
Domains = Sequence[Sequence[Worker]]
"""The workers that fail together (`runtime.failure_domains`)."""


class Elements(NamedTuple):
    """How many elements of a layer are trained."""

    cut: int
    whole: tuple[int, ...] = ()
    """Of each parameter that is not cut."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.cut + sum(self.whole)

    @property
    def whole_spans(self) -> tuple[Span, ...]:
        """Where the parameters are that are not cut."""
        ends = tuple(accumulate(self.whole, initial=self.cut))
        return tuple(pairwise(ends))


class Cut(NamedTuple):
    """How the elements of a range of layers are cut."""

    members: tuple[Worker, ...]
    """Who reduces the range, ascending."""
    spans: tuple[Span, ...]
    """The own part of each: of equal length but for the last ones. Where state is not sharded, the first has all."""
    wards: tuple[tuple[int, ...], ...]
    """Of whose parts each keeps a copy, by their places among the members."""
    sharded: bool

    @property
    def length(self) -> int:
        """Elements, with padding behind the end to a multiple of the members."""
        return self.spans[0][1] * (len(self.members) if self.sharded else 1)

    def own(self, worker: Worker) -> Span:
        """The part of a member."""
        return self.spans[self.members.index(worker)]

    def kept(self, worker: Worker) -> tuple[Span, ...]:
        """What a member keeps: its own part, and those of which it has copies."""
        place = self.members.index(worker)
        return tuple(span for one in (place, *self.wards[place]) if (span := self.spans[one])[0] < span[1])


def cut(total: int, members: Sequence[Worker], domains: Domains, *, sharded: bool) -> Cut:
    """Cut so many elements over members; where state is not sharded, each keeps all of them."""
    members = tuple(sorted(members))
    count = len(members)
    if not sharded or count == 1 or not total:
        return Cut(members, ((0, total), *((0, 0),) * (count - 1)), ((), *((0,),) * (count - 1)), sharded=False)
    size = -(-total // count)
    spans = tuple((min(total, place * size), min(total, (place + 1) * size)) for place in range(count))
    buddies = _buddies([next((number for number, one in enumerate(domains) if worker in one), 0)
                        for worker in members])
    return Cut(members, spans, tuple((buddies.index(place),) for place in range(count)), sharded=True)


def _buddies(domains: Sequence[int]) -> tuple[int, ...]:
    """The place of each one's buddy: each is one's, in another domain wherever that can be.

    In an order by domains, whoever stands as far ahead as the largest domain is long is in another one.
    """
    order = sorted(range(len(domains)), key=lambda place: (domains[place], place))
    ahead = max(Counter(domains).values()) % len(order) or 1
    buddy = {place: order[(index + ahead) % len(order)] for index, place in enumerate(order)}
    return tuple(buddy[place] for place in range(len(order)))


def in_layers(span: Span, layers: LayerRange, elements: Callable[[int], int]) -> Iterator[tuple[int, Span]]:
    """A span of a range of layers as spans of its layers, which have so many elements each."""
    begins = 0
    for layer in range(*layers):
        start, stop = max(span[0] - begins, 0), min(span[1] - begins, elements(layer))
        if start < stop:
            yield layer, (start, stop)
        begins += elements(layer)


def parts_of(worker: Worker, cuts: Mapping[LayerRange, Cut], elements: Callable[[int], Elements], *, own: bool = False
             ) -> dict[int, tuple[Span, ...]]:
    """The parts of layers that a member of some cuts keeps, or those of them that are its own.

    What is not cut is the first member's own.
    """
    found: dict[int, tuple[Span, ...]] = {}
    for layers, one in cuts.items():
        for span in (one.own(worker),) if own else one.kept(worker):
            for layer, part in in_layers(span, layers, lambda layer: elements(layer).cut):
                found[layer] = (*found.get(layer, ()), part)
        for layer in range(*layers) if not own or worker == one.members[0] else ():
            if whole := elements(layer).whole_spans:
                found[layer] = (*found.get(layer, ()), *whole)
    return found


def without(span: Span, others: Iterable[Span]) -> tuple[Span, ...]:
    """What is left of a span."""
    left, (start, stop) = [], span
    for first, end in sorted(others):
        if first > start:
            left.append((start, min(first, stop)))
        start = max(start, end)
        if start >= stop:
            break
    if start < stop:
        left.append((start, stop))
    return tuple(one for one in left if one[0] < one[1])


def common(one: Span, other: Span) -> Span | None:
    """What is in both; None: nothing."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None
