"""Moves of parts: computes which parts of layers move between which workers when the layers that workers hold change.

A layer whose state is not sharded is one part, which all its holders keep. For a schedule with other workers or layers,
all affected ranges of layers get a new partition. Workers fetch their new parts while all train by the current
schedule: the state once, then the gradients of each step, in whole parts of the workers that step them now
(`runtime.model.state.followed_part`). After a failure, the remaining holders of a sharded range continue with the parts
that they keep, and buddies step the parts of lost workers (`Cut.left`), so no worker waits for state. These ranges,
too, get a new partition while all train.
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
"""Layers of the model that each worker holds."""
Keepers = Mapping[Worker, Kept]
"""Layers and parts that each worker holds, as it reports them when it pauses."""
AS_THEY_ARE: CutFor = {}
"""Empty mapping: every range of layers is partitioned among the workers that reduce it now."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Planner that divides the state of a run's layers among their holders, and finds the moves between them."""

    elements: Sequence[Elements]
    """Number of elements of each layer of the model on each rank."""
    placement: Placement
    domains: Domains
    sharded: bool
    """True if the holders of a layer keep different parts; otherwise each keeps all of it."""

    def lost(self, keepers: Keepers) -> list[int]:
        """Return the layers with an element that no worker keeps, and untrained layers that no worker holds."""
        kept, held = _by_layer(keepers), layers_in(layers for keeper in keepers.values() for layers in keeper.layers)
        return [layer for layer, elements in enumerate(self.elements) if (
            joined_ranges({span for _, span in kept.get(layer, ())}) != ((0, elements.total),) if elements.total
            else layer not in held)]

    def keepers(self, schedule: Schedule, after: int, cut_for: CutFor = AS_THEY_ARE,
                which: Callable[[Cut, Worker], tuple[Span, ...]] = Cut.kept) -> Keepers:
        """Return what each worker that trains by a schedule keeps after an iteration."""
        cuts = self._cuts(schedule, cut_for)
        return {worker: Kept(_ranges(layers), tuple(
                    (layer, *span) for layer, spans in self._parts_of(worker, cuts, which).items() for span in spans),
                    after)
                for worker, layers in self.placement.held_by(schedule).items()}

    def left(self, schedule: Schedule, present: Schedule, cut_for: CutFor, keepers: Keepers) -> CutFor:
        """Return the ranges that keep their partition after members are lost, each with its former members.

        The `schedule` is for the members that remain of the `present` one. They must keep all parts of such a range.
        """
        if not self.sharded:
            return AS_THEY_ARE
        before = {**self.placement.reduced_by_all(present), **cut_for}
        preserved: dict[LayerRange, Sequence[Worker]] = {}
        for layers, members in self.placement.reduced_by_all(schedule).items():
            others = before.get(layers, ())
            if set(members) < set(others) and not self._keep_all({layers: members}, {}, keepers) \
                    and self._keep_all({layers: members}, {layers: others}, keepers):
                preserved[layers] = tuple(others)
        return preserved

    def _keep_all(self, ranges: Mapping[LayerRange, Sequence[Worker]], cut_for: CutFor, keepers: Keepers) -> bool:
        """Return whether the workers that reduce some ranges already keep all that they need to keep of them."""
        try:
            cuts = _by_member(self._cut(ranges, cut_for))
        except ValueError:
            return False
        return not any(without(span, _spans(keepers.get(worker, NOTHING_KEPT), layer)) for members in ranges.values()
                       for worker in members for layer, spans in self._parts_of(worker, cuts).items() for span in spans)

    def fetched(self, schedule: Schedule, present: Schedule, members: Collection[Worker],
                cut_for: CutFor = AS_THEY_ARE) -> tuple[Move, ...]:
        """Return the moves that a schedule needs, to be made while members train by the schedule `present`."""
        keepers, sources = ({worker: kept for worker, kept in self.keepers(present, 0, cut_for, which).items()
                             if worker in members} for which in (Cut.kept, Cut.stepped))
        fetches: dict[tuple[Worker, int, int, int, bool], Move] = {}
        for move in self.moves(schedule, keepers, 0, sources=sources):
            start, stop = next(part for part in _spans(sources[move.source], move.layer)
                               if part[0] <= move.start < part[1]) if move.state else (move.start, move.stop)
            whole = msgspec.structs.replace(move, start=start, stop=stop)
            fetches.setdefault((move.target, move.layer, start, stop, move.state), whole)
        return tuple(fetches.values())

    def moves(self, schedule: Schedule, keepers: Keepers, committed: int, fetched: Iterable[Move] = (), *,
              cut_for: CutFor = AS_THEY_ARE, sources: Keepers | None = None) -> tuple[Move, ...]:
        """Return the moves that give each worker of a schedule the parts that it keeps and all its parameters.

        A worker already has the parameters of the layers that it holds if they are those after the iteration
        `committed`. No layer may be `lost`. A worker that is not in the schedule sends only what no other worker has.
        Moves in `fetched` have been made. `sources` are the parts that each worker may send, by default all that it
        keeps.
        """
        cuts, held, already_fetched = self._cuts(schedule, cut_for), self.placement.held_by(schedule), _Fetched(fetched)
        given = keepers if sources is None else sources
        members = {worker: kept for worker, kept in given.items() if worker in held}
        giving, found = _Sources(given if self.lost(members) else members), list[Move]()
        for target, layers in sorted(held.items()):
            kept, needs = keepers.get(target, NOTHING_KEPT), self._parts_of(target, cuts)
            holds, spans = layers_in(kept.layers), _by_layer({target: kept})
            whole = holds if kept.whole_after == committed else ()
            for layer in sorted(layers):
                has = [*(span for _, span in spans.get(layer, ())), *already_fetched.of(target, layer, state=True)]
                for span in needs.get(layer, ()):
                    for lacking in without(span, has):
                        found += giving.moves(target, layer, lacking, state=True)
                parameters = [*has, *needs.get(layer, ()), *already_fetched.of(target, layer, state=False)]
                for lacking in () if layer in whole else without((0, self.elements[layer].total), parameters):
                    found += giving.moves(target, layer, lacking, state=False)
                if not self.elements[layer].total and layer not in holds and not parameters:  # nothing is trained
                    holder = min(worker for worker, holding in keepers.items() if layer in layers_in(holding.layers))
                    found.append(Move(target, holder, layer, 0, 0, state=False))
        return tuple(found)

    def to_writers(self, writers: Mapping[int, Worker], keepers: Keepers) -> tuple[Move, ...]:
        """Return the moves that provide the writers of whole layers with the parts that they lack."""
        sources = _Sources(keepers)
        return tuple(move for layer, writer in sorted(writers.items())
                     for lacking in without((0, self.elements[layer].total), _spans(keepers[writer], layer))
                     for move in sources.moves(writer, layer, lacking, state=True))

    def read(self, layers: Collection[int], iteration: int) -> Kept:
        """Return what a worker holds after it has read layers in the state before an iteration."""
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
    """Parts that have been fetched, by target."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self._spans: dict[tuple[Worker, int, bool], list[Span]] = {}
        for move in moves:
            self._spans.setdefault((move.target, move.layer, move.state), []).append((move.start, move.stop))

    def of(self, target: Worker, layer: int, *, state: bool) -> Sequence[Span]:
        return self._spans.get((target, layer, state), ())


class _Sources:
    """Generator of moves that takes each span from the worker that has sent the fewest elements so far."""

    def __init__(self, keepers: Keepers) -> None:
        self._kept = _by_layer(keepers)
        self._sent: Counter[Worker] = Counter()

    def moves(self, target: Worker, layer: int, span: Span, *, state: bool) -> Iterator[Move]:
        start, stop = span
        while start < stop:
            source, (_, end) = min(((worker, kept_span) for worker, kept_span in self._kept[layer]
                                    if worker != target and kept_span[0] <= start < kept_span[1]),
                                   key=lambda pair: (self._sent[pair[0]], pair))
            end = min(end, stop)
            self._sent[source] += end - start
            yield Move(target, source, layer, start, end, state)
            start = end


_Cuts = Mapping[Worker, Mapping[LayerRange, Cut]]
"""Partitions that each worker is a member of, by range of layers."""


def _by_member(cuts: Mapping[LayerRange, Cut]) -> _Cuts:
    grouped: dict[Worker, dict[LayerRange, Cut]] = {}
    for layers, partition in cuts.items():
        for worker in partition.members:
            grouped.setdefault(worker, {})[layers] = partition
    return grouped


def _ranges(layers: Collection[int]) -> tuple[LayerRange, ...]:
    return joined_ranges((layer, layer + 1) for layer in layers)


def _by_layer(keepers: Keepers) -> dict[int, list[tuple[Worker, Span]]]:
    spans: dict[int, list[tuple[Worker, Span]]] = {}
    for worker, kept in keepers.items():
        for layer, start, stop in kept.parts:
            spans.setdefault(layer, []).append((worker, (start, stop)))
    return spans


def _spans(kept: Kept, layer: int) -> list[Span]:
    return [(start, stop) for part_layer, start, stop in kept.parts if part_layer == layer]
