"""Which parts of layers move from which worker to which when what workers must hold changes.

A layer whose state is not sharded is one part, which all keep that hold it. For a schedule with other workers or
layers, all ranges that they concern are cut anew. What each is to keep then it fetches while all train by the present
schedule: the state once, then the gradients of each step, in whole parts of those who step them now
(`runtime.model.state.followed_part`). After a failure, whoever is left of the holders of a sharded range goes on with
the parts that it keeps, and buddies step those of who is gone (`Cut.left`): nobody waits for state. Then they are cut
anew, too, while all train.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from slipstream.runtime.model.state.parts import Cut, CutFor, Domains, Elements, Span, cuts_of, parts_of, without
from slipstream.runtime.protocol.to_coordinator import NOTHING_KEPT, Kept
from slipstream.runtime.protocol.to_worker import Move
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.layers import LayerRange, joined_ranges, layers_in
from slipstream.schedules.schedule import Schedule, Worker

Holders = Mapping[Worker, Collection[int]]
"""The layers of the model that each worker holds."""
Keepers = Mapping[Worker, Kept]
"""What each worker holds that has paused."""
AS_THEY_ARE: CutFor = {}
"""All ranges are cut for those who reduce them."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How one run cuts the state of its layers."""

    elements: Sequence[Elements]
    """Of each layer of the model, on each rank."""
    placement: Placement
    domains: Domains
    sharded: bool
    """Whether workers that hold a layer keep different parts; else each keeps all of it."""

    def lost(self, keepers: Keepers) -> list[int]:
        """The layers of which nobody keeps some element, or, where nothing of them is trained, that nobody holds."""
        kept, held = _by_layer(keepers), layers_in(layers for one in keepers.values() for layers in one.layers)
        return [layer for layer, its in enumerate(self.elements) if (
            joined_ranges({span for _, span in kept.get(layer, ())}) != ((0, its.total),) if its.total
            else layer not in held)]

    def keepers(self, schedule: Schedule, after: int, cut_for: CutFor = AS_THEY_ARE,
                which: Callable[[Cut, Worker], tuple[Span, ...]] = Cut.kept) -> Keepers:
        """What each worker of a schedule keeps that trains by it, after an iteration."""
        cuts = self._cuts(schedule, cut_for)
        return {worker: Kept(_ranges(layers), tuple(
                    (layer, *span) for layer, spans in self._parts_of(worker, cuts, which).items() for span in spans),
                    after)
                for worker, layers in self.placement.held_by(schedule).items()}

    def left(self, schedule: Schedule, present: Schedule, cut_for: CutFor, keepers: Keepers) -> CutFor:
        """For a schedule of which some members of the present one are gone: the ranges that need not be cut anew now,
        as who is left keeps all parts of it; with those by whom they are cut."""
        if not self.sharded:
            return AS_THEY_ARE
        before = {**self.placement.reduced_by_all(present), **cut_for}
        found: dict[LayerRange, Sequence[Worker]] = {}
        for layers, members in self.placement.reduced_by_all(schedule).items():
            others = before.get(layers, ())
            if set(members) < set(others) and not self._keep_all({layers: members}, {}, keepers) \
                    and self._keep_all({layers: members}, {layers: others}, keepers):
                found[layers] = tuple(others)
        return found

    def _keep_all(self, ranges: Mapping[LayerRange, Sequence[Worker]], cut_for: CutFor, keepers: Keepers) -> bool:
        """Whether those who reduce some ranges keep all that they are to keep of them."""
        try:
            cuts = _by_member(self._cut(ranges, cut_for))
        except ValueError:
            return False
        return not any(without(span, _spans(keepers.get(worker, NOTHING_KEPT), layer)) for members in ranges.values()
                       for worker in members for layer, spans in self._parts_of(worker, cuts).items() for span in spans)

    def fetched(self, schedule: Schedule, present: Schedule, members: Collection[Worker],
                cut_for: CutFor = AS_THEY_ARE) -> tuple[Move, ...]:
        """What each worker of a schedule is to fetch for it, while members train by the present one."""
        keepers, sources = ({worker: kept for worker, kept in self.keepers(present, 0, cut_for, which).items()
                             if worker in members} for which in (Cut.kept, Cut.stepped))
        found: dict[tuple[Worker, int, int, int, bool], Move] = {}
        for move in self.moves(schedule, keepers, 0, sources=sources):
            start, stop = next(its for its in _spans(sources[move.source], move.layer)
                               if its[0] <= move.start < its[1]) if move.state else (move.start, move.stop)
            whole = msgspec.structs.replace(move, start=start, stop=stop)
            found.setdefault((move.target, move.layer, start, stop, move.state), whole)
        return tuple(found.values())

    def moves(self, schedule: Schedule, keepers: Keepers, committed: int, fetched: Iterable[Move] = (), *,
              cut_for: CutFor = AS_THEY_ARE, sources: Keepers | None = None) -> tuple[Move, ...]:
        """What each worker of a schedule lacks: of state, what it is to keep, and of parameters, all of its layers.

        It has the parameters of the layers that it holds if these are those after the last committed iteration.
        Nothing may be `lost`. Who is not in the schedule gives only what nobody else has. What has been fetched is
        there. `sources` are what each gives, by default all that it keeps.
        """
        cuts, held, there = self._cuts(schedule, cut_for), self.placement.held_by(schedule), _Fetched(fetched)
        given = keepers if sources is None else sources
        members = {worker: kept for worker, kept in given.items() if worker in held}
        giving, found = _Sources(given if self.lost(members) else members), list[Move]()
        for target, layers in sorted(held.items()):
            kept, needs = keepers.get(target, NOTHING_KEPT), self._parts_of(target, cuts)
            holds, spans = layers_in(kept.layers), _by_layer({target: kept})
            whole = holds if kept.whole_after == committed else ()
            for layer in sorted(layers):
                has = [*(span for _, span in spans.get(layer, ())), *there.of(target, layer, state=True)]
                for span in needs.get(layer, ()):
                    for lacking in without(span, has):
                        found += giving.moves(target, layer, lacking, state=True)
                parameters = [*has, *needs.get(layer, ()), *there.of(target, layer, state=False)]
                for lacking in () if layer in whole else without((0, self.elements[layer].total), parameters):
                    found += giving.moves(target, layer, lacking, state=False)
                if not self.elements[layer].total and layer not in holds and not parameters:  # nothing is trained
                    holder = min(worker for worker, mine in keepers.items() if layer in layers_in(mine.layers))
                    found.append(Move(target, holder, layer, 0, 0, state=False))
        return tuple(found)

    def to_writers(self, writers: Mapping[int, Worker], keepers: Keepers) -> tuple[Move, ...]:
        """What those who write whole layers lack of them."""
        sources = _Sources(keepers)
        return tuple(move for layer, writer in sorted(writers.items())
                     for lacking in without((0, self.elements[layer].total), _spans(keepers[writer], layer))
                     for move in sources.moves(writer, layer, lacking, state=True))

    def read(self, layers: Collection[int], iteration: int) -> Kept:
        """What a worker holds that has read layers as they were before an iteration."""
        return Kept(_ranges(layers), tuple((layer, 0, self.elements[layer].total) for layer in sorted(layers)),
                    iteration - 1)

    def _cuts(self, schedule: Schedule, cut_for: CutFor) -> "_Cuts":
        return _by_member(self._cut(self.placement.reduced_by_all(schedule), cut_for))

    def _cut(self, ranges: Mapping[LayerRange, Sequence[Worker]], cut_for: CutFor) -> dict[LayerRange, Cut]:
        return cuts_of(ranges, cut_for, self.elements.__getitem__, self.domains, sharded=self.sharded)

    def _parts_of(self, worker: Worker, cuts: "_Cuts",
                  which: Callable[[Cut, Worker], tuple[Span, ...]] = Cut.kept) -> dict[int, tuple[Span, ...]]:
        return parts_of(worker, cuts.get(worker, {}), self.elements.__getitem__, which)


class _Fetched:
    """What has been fetched, by its target."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self._spans: dict[tuple[Worker, int, bool], list[Span]] = {}
        for move in moves:
            self._spans.setdefault((move.target, move.layer, move.state), []).append((move.start, move.stop))

    def of(self, target: Worker, layer: int, *, state: bool) -> Sequence[Span]:
        return self._spans.get((target, layer, state), ())


class _Sources:
    """Gives the moves of spans, each from who sends the fewest elements so far."""

    def __init__(self, keepers: Keepers) -> None:
        self._kept = _by_layer(keepers)
        self._sent: Counter[Worker] = Counter()

    def moves(self, target: Worker, layer: int, span: Span, *, state: bool) -> Iterator[Move]:
        start, stop = span
        while start < stop:
            source, (_, end) = min(((worker, its) for worker, its in self._kept[layer]
                                    if worker != target and its[0] <= start < its[1]),
                                   key=lambda one: (self._sent[one[0]], one))
            end = min(end, stop)
            self._sent[source] += end - start
            yield Move(target, source, layer, start, end, state)
            start = end


_Cuts = Mapping[Worker, Mapping[LayerRange, Cut]]
"""Of each worker, those that it is a member of."""


def _by_member(cuts: Mapping[LayerRange, Cut]) -> _Cuts:
    found: dict[Worker, dict[LayerRange, Cut]] = {}
    for layers, one in cuts.items():
        for worker in one.members:
            found.setdefault(worker, {})[layers] = one
    return found


def _ranges(layers: Collection[int]) -> tuple[LayerRange, ...]:
    return joined_ranges((layer, layer + 1) for layer in layers)


def _by_layer(keepers: Keepers) -> dict[int, list[tuple[Worker, Span]]]:
    found: dict[int, list[tuple[Worker, Span]]] = {}
    for worker, kept in keepers.items():
        for layer, start, stop in kept.parts:
            found.setdefault(layer, []).append((worker, (start, stop)))
    return found


def _spans(kept: Kept, layer: int) -> list[Span]:
    return [(start, stop) for one, start, stop in kept.parts if one == layer]
