"""Which parts of layers move from which worker to which, where workers keep parts of layers' optimizer states."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.coordinator.layer_moves import Holders
from runtime.model.parts import Domains, Span, cut, parts_of, without
from runtime.protocol.to_coordinator import Kept
from runtime.protocol.to_worker import PartMove
from runtime.replay.placement import Placement
from schedules.layers import joined
from schedules.schedule import Schedule, Worker

Keepers = Mapping[Worker, Kept]
"""What each worker keeps that has paused."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How one run cuts the state of its layers."""

    elements: Sequence[int]
    """Of each layer of the model: how many are trained, on each rank."""
    placement: Placement
    domains: Domains
    sharded: bool
    """Whether workers that hold a layer keep different parts; else each keeps all of it."""

    def lost(self, keepers: Keepers) -> list[int]:
        """The layers of which nobody keeps some element."""
        kept = _by_layer(keepers)
        return [layer for layer, count in enumerate(self.elements) if count
                and joined(span for _, span in kept.get(layer, ())) != ((0, count),)]

    def moves(self, schedule: Schedule, keepers: Keepers, holds: Holders, committed: int) -> tuple[PartMove, ...]:
        """What each worker of a schedule lacks: of state, what it is to keep, and of parameters, all of its layers.

        It has the parameters of the layers that it holds if these are those after the last committed iteration.
        Nothing may be lost. Who is not in the schedule gives only what nobody else has.
        """
        sharers = self.placement.reduced_by_all(schedule)
        cuts = {layers: cut(sum(self.elements[slice(*layers)]), members, self.domains, sharded=self.sharded)
                for layers, members in sharers.items()}
        held = self.placement.held_by(schedule)
        members = {worker: kept for worker, kept in keepers.items() if worker in held}
        sources, found = _Sources(keepers if self.lost(members) else members), list[PartMove]()
        for target, layers in sorted(held.items()):
            mine, kept = {one: its for one, its in cuts.items() if target in its.members}, keepers.get(target)
            needs = parts_of(target, mine, self.elements.__getitem__)
            whole = holds.get(target, ()) if kept is not None and kept.whole_after == committed else ()
            for layer in sorted(layers):
                has = _spans(kept, layer)
                for span in needs.get(layer, ()):
                    for lacking in without(span, has):
                        found += sources.moves(target, layer, lacking, state=True)
                for lacking in () if layer in whole else without((0, self.elements[layer]),
                                                                 [*has, *needs.get(layer, ())]):
                    found += sources.moves(target, layer, lacking, state=False)
        return tuple(found)

    def to_writers(self, writers: Mapping[int, Worker], keepers: Keepers) -> tuple[PartMove, ...]:
        """What those who write whole layers lack of them."""
        sources = _Sources(keepers)
        return tuple(move for layer, writer in sorted(writers.items())
                     for lacking in without((0, self.elements[layer]), _spans(keepers.get(writer), layer))
                     for move in sources.moves(writer, layer, lacking, state=True))

    def read(self, layers: Collection[int], iteration: int) -> Kept:
        """What a worker keeps that has read layers as they were before an iteration."""
        return Kept(tuple((layer, 0, self.elements[layer]) for layer in sorted(layers)), iteration - 1)


class _Sources:
    """Gives the moves of spans, each from who sends the fewest elements so far."""

    def __init__(self, keepers: Keepers) -> None:
        self._kept = _by_layer(keepers)
        self._sent: Counter[Worker] = Counter()

    def moves(self, target: Worker, layer: int, span: Span, *, state: bool) -> Iterator[PartMove]:
        start, stop = span
        while start < stop:
            source, (_, end) = min(((worker, its) for worker, its in self._kept[layer]
                                    if worker != target and its[0] <= start < its[1]),
                                   key=lambda one: (self._sent[one[0]], one))
            end = min(end, stop)
            self._sent[source] += end - start
            yield PartMove(target, source, layer, start, end, state)
            start = end


def _by_layer(keepers: Keepers) -> dict[int, list[tuple[Worker, Span]]]:
    found: dict[int, list[tuple[Worker, Span]]] = {}
    for worker, kept in keepers.items():
        for layer, start, stop in kept.parts:
            found.setdefault(layer, []).append((worker, (start, stop)))
    return found


def _spans(kept: Kept | None, layer: int) -> list[Span]:
    return [] if kept is None else [(start, stop) for one, start, stop in kept.parts if one == layer]
