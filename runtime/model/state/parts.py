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

from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

Span = tuple[int, int]
"""Elements [start, stop)."""
Parts = Mapping[int, tuple[Span, ...]]
"""Spans of layers. They are not joined: each is stepped by itself, wherever it is kept, to the same bits."""
Domains = Sequence[Sequence[Worker]]
"""The workers that fail together (`runtime.failure_domains`)."""
CutFor = Mapping[LayerRange, Sequence[Worker]]
"""By whom ranges are cut of which some have gone since: who is left keeps the same parts (`Cut.left`)."""


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
    """The parts: of equal length but for the last ones. Where state is not sharded, one has all."""
    owners: tuple[int, ...]
    """Who steps each part, by the place among the members."""
    buddies: tuple[int | None, ...]
    """Who keeps a copy of it; None: nobody, while it is only on its way there."""
    sharded: bool

    @property
    def length(self) -> int:
        """Elements, with padding behind the end to a multiple of the parts."""
        return self.spans[0][1] * len(self.spans)

    def own(self, worker: Worker) -> tuple[Span, ...]:
        """The parts that a member steps for all; where state is not sharded, the first speaks for all."""
        return self._of(worker, self.owners)

    def copied(self, worker: Worker) -> tuple[Span, ...]:
        """The parts of others of which a member keeps copies."""
        return self._of(worker, self.buddies)

    def kept(self, worker: Worker) -> tuple[Span, ...]:
        """What a member keeps: its own parts, and its copies."""
        return (*self.own(worker), *self.copied(worker)) if self.sharded else self.spans

    def stepped(self, worker: Worker) -> tuple[Span, ...]:
        """What a member steps at once, and sends to others while it trains."""
        return self.own(worker) if self.sharded else self.spans

    def left(self, members: Sequence[Worker]) -> "Cut | None":
        """The same parts once only these members are left: a buddy steps the part of one that is gone.

        None where nobody is left who keeps some part.
        """
        places = {self.members.index(worker): place for place, worker in enumerate(members)}
        keepers = [[places[one] for one in pair if one in places]
                   for pair in zip(self.owners, self.buddies, strict=True)]
        if not self.sharded or not all(keepers):
            return None
        return self._replace(members=tuple(members), owners=tuple(mine[0] for mine in keepers),
                             buddies=tuple(mine[1] if len(mine) > 1 else None for mine in keepers))

    def _of(self, worker: Worker, keepers: Sequence[int | None]) -> tuple[Span, ...]:
        place = self.members.index(worker)
        return tuple(span for span, keeper in zip(self.spans, keepers, strict=True)
                     if keeper == place and span[0] < span[1])


def cut(total: int, members: Sequence[Worker], domains: Domains, *, sharded: bool) -> Cut:
    """Cut so many elements over members; where state is not sharded, each keeps all of them."""
    members = tuple(sorted(members))
    count = len(members)
    if not sharded or count == 1 or not total:
        return Cut(members, ((0, total),), (0,), (None,), sharded=False)
    size = -(-total // count)
    spans = tuple((min(total, place * size), min(total, (place + 1) * size)) for place in range(count))
    buddies = _buddies([next((number for number, one in enumerate(domains) if worker in one), 0)
                        for worker in members])
    return Cut(members, spans, tuple(range(count)), buddies, sharded=True)


def cuts_of(ranges: Mapping[LayerRange, Sequence[Worker]], cut_for: CutFor, elements: Callable[[int], Elements],
            domains: Domains, *, sharded: bool) -> dict[LayerRange, Cut]:
    """How some ranges are cut over those who reduce them; raises ValueError where nobody is left of a part's keepers.
    """
    found = {}
    for layers, members in ranges.items():
        before = cut_for.get(layers)
        one = cut(sum(elements(layer).cut for layer in range(*layers)), before or members, domains, sharded=sharded)
        left = one if before is None else one.left(members)
        if left is None:
            raise ValueError(f"no part of layers {layers} may be kept by nobody")
        found[layers] = left
    return found


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


def parts_of(worker: Worker, cuts: Mapping[LayerRange, Cut], elements: Callable[[int], Elements],
             which: Callable[[Cut, Worker], tuple[Span, ...]] = Cut.kept) -> dict[int, tuple[Span, ...]]:
    """The parts of layers that a member of some cuts keeps, or others: its `Cut.own`, or those of `Cut.stepped`.

    What is not cut is the first member's own; all keep it and step it.
    """
    found: dict[int, tuple[Span, ...]] = {}
    for layers, one in cuts.items():
        for span in which(one, worker):
            for layer, part in in_layers(span, layers, lambda layer: elements(layer).cut):
                found[layer] = (*found.get(layer, ()), part)
        for layer in range(*layers) if which is not Cut.own or worker == one.members[0] else ():
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
