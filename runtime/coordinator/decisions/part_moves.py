"""Compute which parts of layers move between workers when the layers that they hold change.

A layer whose state is not sharded is one part, which all its holders keep. For a schedule with
other workers or layers, all affected ranges of layers get a new partition. Workers fetch their new
parts while all train by the current schedule: the state once, then the gradients of each step.
These come in the parts of the present partition, each from the worker that steps it now
(`runtime.moving.received_part`).

After a failure, the remaining holders of a sharded range continue with the parts that they keep,
and buddies step the parts of lost workers (`StatePartition.after_losses`), so no worker waits for
state. These ranges, too, get a new partition while all train.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.to_coordinator import NOTHING_HELD, HeldState
from slipstream.runtime.protocol.to_worker import LayerMove
from slipstream.runtime.state.parts import (
    Domains,
    ElementCounts,
    OriginalMembers,
    Span,
    StatePartition,
    build_partitions,
    parts_of_worker,
    subtract,
)
from slipstream.schedules.layers import LayerRange, layers_in, merge_ranges
from slipstream.schedules.schedule import Schedule, Worker

LayersByWorker = Mapping[Worker, Collection[int]]
"""Layers of the model, by the worker that holds or needs them."""
HeldStateByWorker = Mapping[Worker, HeldState]
"""Layers and parts that each worker holds, as it reports them when it pauses."""
NO_PREVIOUS_OWNERS: OriginalMembers = {}
"""No ranges that keep an earlier partition: all are divided among their present members."""


@dataclass(frozen=True, slots=True)
class PartitionPlanner:
    """Planner that divides each layer's state among its holders, and plans moves of parts."""

    elements: Sequence[ElementCounts]
    """Numbers of trained elements of each layer, on each rank of a worker."""
    placement: Placement
    domains: Domains
    sharded: bool
    """True if holders of a layer keep different parts; False: each keeps all of it."""

    def find_lost_layers(self, keepers: HeldStateByWorker) -> list[int]:
        """Return the layers of which the workers in `keepers` together do not have all elements."""
        # A layer without trained elements has no parts: somebody must hold it as a whole.
        kept = _group_by_layer(keepers)
        held_layers = layers_in(layers for keeper in keepers.values() for layers in keeper.layers)
        lost = []
        for layer, elements in enumerate(self.elements):
            if not elements.total:
                is_lost = layer not in held_layers
            else:
                spans = {span for _, span in kept.get(layer, ())}
                is_lost = merge_ranges(spans) != ((0, elements.total),)
            if is_lost:
                lost.append(layer)
        return lost

    def find_held_states(
        self,
        schedule: Schedule,
        after: int,
        cut_for: OriginalMembers = NO_PREVIOUS_OWNERS,
        which: Callable[[StatePartition, Worker], tuple[Span, ...]] = StatePartition.stored_parts,
    ) -> HeldStateByWorker:
        """Return the layers and parts that each worker of a schedule has.

        The state is the one after the iteration `after`. `cut_for` has the ranges of layers that
        keep an earlier partition, with the members for which it was made. `which` selects a
        worker's parts in a partition; by default, all that it stores.
        """
        cuts = self._partition_schedule(schedule, cut_for)
        states = {}
        for worker, layers in self.placement.held_layers_by_worker(schedule).items():
            parts_by_layer = self._find_parts_of(worker, cuts, which)
            parts = [(layer, *span) for layer, spans in parts_by_layer.items() for span in spans]
            states[worker] = HeldState(_join_layers(layers), tuple(parts), after)
        return states

    def find_preserved_ranges(
        self,
        schedule: Schedule,
        present: Schedule,
        cut_for: OriginalMembers,
        keepers: HeldStateByWorker,
    ) -> OriginalMembers:
        """Return the ranges of layers that keep their partition although members are lost.

        For each such range, the result has the members for which the partition was made; `cut_for`
        has the same for `present`, the schedule before the loss. `keepers` has what workers hold: a
        range keeps its partition if those that `schedule` leaves it hold all their parts of it, but
        not all those of a new one. Unless state is sharded, the result is empty.
        """
        if not self.sharded:
            return NO_PREVIOUS_OWNERS
        # Moving parts would make all wait; with the old partition, buddies take over at once.
        before = {**self.placement.all_reductions(present), **cut_for}
        preserved: dict[LayerRange, Sequence[Worker]] = {}
        for layers, members in self.placement.all_reductions(schedule).items():
            others = before.get(layers, ())
            if (
                set(members) < set(others)
                and not self._has_all_parts({layers: members}, {}, keepers)
                and self._has_all_parts({layers: members}, {layers: others}, keepers)
            ):
                preserved[layers] = tuple(others)
        return preserved

    def _has_all_parts(
        self,
        ranges: Mapping[LayerRange, Sequence[Worker]],
        cut_for: OriginalMembers,
        keepers: HeldStateByWorker,
    ) -> bool:
        """Return whether each member of `ranges` keeps all its parts, partitioned by `cut_for`."""
        # An earlier partition cannot be continued if too many of its members are lost.
        try:
            cuts = _group_by_member(self._partition_ranges(ranges, cut_for))
        except ValueError:
            return False
        return not any(
            subtract(span, _spans_of_layer(keepers.get(worker, NOTHING_HELD), layer))
            for members in ranges.values()
            for worker in members
            for layer, spans in self._find_parts_of(worker, cuts).items()
            for span in spans
        )

    def plan_fetches(
        self,
        schedule: Schedule,
        present: Schedule,
        members: Collection[Worker],
        cut_for: OriginalMembers = NO_PREVIOUS_OWNERS,
    ) -> tuple[LayerMove, ...]:
        """Return the moves that prepare `schedule` while `members` train by `present`.

        A move with optimizer state is of a whole part, from the member that steps the part.
        `cut_for` has the ranges of layers that keep an earlier partition under `present`, each with
        the members for which it was made.
        """
        # Members send only parts that they step, as they have the gradients of no others.
        keepers = self._select_members(
            self.find_held_states(present, 0, cut_for, StatePartition.stored_parts), members
        )
        sources = self._select_members(
            self.find_held_states(present, 0, cut_for, StatePartition.stepped_parts), members
        )
        fetches: dict[tuple[Worker, int, int, int, bool], LayerMove] = {}
        for move in self.plan_moves(schedule, keepers, 0, sources=sources):
            start, stop = move.start, move.stop
            # Gradients follow in whole parts, so the state comes in these, too.
            if move.state:
                start, stop = next(
                    part
                    for part in _spans_of_layer(sources[move.source], move.layer)
                    if part[0] <= move.start < part[1]
                )
            whole = msgspec.structs.replace(move, start=start, stop=stop)
            fetches.setdefault((move.target, move.layer, start, stop, move.state), whole)
        return tuple(fetches.values())

    @staticmethod
    def _select_members(
        states: HeldStateByWorker, members: Collection[Worker]
    ) -> HeldStateByWorker:
        return {worker: state for worker, state in states.items() if worker in members}

    def plan_moves(
        self,
        schedule: Schedule,
        keepers: HeldStateByWorker,
        committed: int,
        fetched: Iterable[LayerMove] = (),
        *,
        cut_for: OriginalMembers = NO_PREVIOUS_OWNERS,
        sources: HeldStateByWorker | None = None,
    ) -> tuple[LayerMove, ...]:
        """Return the moves that give each worker the parts and parameters of its layers.

        No layer may be lost (`find_lost_layers`). Parameters of a layer that a worker holds move
        only if they are not those after the last committed iteration. Workers that are not in the
        schedule send only if the others together lack something.

        Parameters
        ----------
        keepers
            Layers and parts that each worker keeps now.
        committed
            Last committed iteration.
        fetched
            Moves that have been made before.
        cut_for
            Ranges of layers that keep an earlier partition, with the members for which it was made.
        sources
            Parts that each worker may send; None: all that it keeps.
        """
        cuts = self._partition_schedule(schedule, cut_for)
        layers_of = self.placement.held_layers_by_worker(schedule)
        already_fetched = _FetchedParts(fetched)
        # Workers that are not in the schedule may be told to leave, so others send if they can.
        if sources is None:
            sources = keepers
        remaining = self._select_members(sources, layers_of)
        giving = _MoveSources(sources if self.find_lost_layers(remaining) else remaining)
        moves = list[LayerMove]()
        for target, layers in sorted(layers_of.items()):
            kept, needs = keepers.get(target, NOTHING_HELD), self._find_parts_of(target, cuts)
            holds, spans = layers_in(kept.layers), _group_by_layer({target: kept})
            whole = holds if kept.whole_after == committed else ()
            for layer in sorted(layers):
                # Its own parts, with optimizer state, as far as it lacks them.
                has = [
                    *(span for _, span in spans.get(layer, ())),
                    *already_fetched.find_spans(target, layer, state=True),
                ]
                for span in needs.get(layer, ()):
                    for lacking in subtract(span, has):
                        moves += giving.generate_moves(target, layer, lacking, state=True)
                # The parameters of all other elements.
                parameters = [
                    *has,
                    *needs.get(layer, ()),
                    *already_fetched.find_spans(target, layer, state=False),
                ]
                if layer not in whole:
                    for lacking in subtract((0, self.elements[layer].total), parameters):
                        moves += giving.generate_moves(target, layer, lacking, state=False)
                # A layer in which nothing is trained has no elements, but may have buffers.
                if not self.elements[layer].total and layer not in holds and not parameters:
                    holder = min(
                        worker
                        for worker, state in keepers.items()
                        if layer in layers_in(state.layers)
                    )
                    moves.append(LayerMove(target, holder, layer, 0, 0, state=False))
        return tuple(moves)

    def plan_writer_moves(
        self, writers: Mapping[int, Worker], keepers: HeldStateByWorker
    ) -> tuple[LayerMove, ...]:
        """Return the moves that give each layer's writer the parts that it lacks by `keepers`."""
        sources = _MoveSources(keepers)
        return tuple(
            move
            for layer, writer in sorted(writers.items())
            for lacking in subtract(
                (0, self.elements[layer].total), _spans_of_layer(keepers[writer], layer)
            )
            for move in sources.generate_moves(writer, layer, lacking, state=True)
        )

    def build_restored_state(self, layers: Collection[int], iteration: int) -> HeldState:
        """Return the state of a worker that has read layers from the checkpoint of `iteration`."""
        return HeldState(
            _join_layers(layers),
            tuple((layer, 0, self.elements[layer].total) for layer in sorted(layers)),
            iteration - 1,
        )

    def _partition_schedule(
        self, schedule: Schedule, cut_for: OriginalMembers
    ) -> "_PartitionsByMember":
        return _group_by_member(
            self._partition_ranges(self.placement.all_reductions(schedule), cut_for)
        )

    def _partition_ranges(
        self, ranges: Mapping[LayerRange, Sequence[Worker]], cut_for: OriginalMembers
    ) -> dict[LayerRange, StatePartition]:
        return build_partitions(
            ranges, cut_for, self.elements.__getitem__, self.domains, sharded=self.sharded
        )

    def _find_parts_of(
        self,
        worker: Worker,
        cuts: "_PartitionsByMember",
        which: Callable[[StatePartition, Worker], tuple[Span, ...]] = StatePartition.stored_parts,
    ) -> dict[int, tuple[Span, ...]]:
        return parts_of_worker(worker, cuts.get(worker, {}), self.elements.__getitem__, which)


class _FetchedParts:
    """Index of fetched parts by target, layer, and whether optimizer state came with them."""

    def __init__(self, moves: Iterable[LayerMove]) -> None:
        self._spans: dict[tuple[Worker, int, bool], list[Span]] = {}
        for move in moves:
            self._spans.setdefault((move.target, move.layer, move.state), []).append(
                (move.start, move.stop)
            )

    def find_spans(self, target: Worker, layer: int, *, state: bool) -> Sequence[Span]:
        return self._spans.get((target, layer, state), ())


class _MoveSources:
    """Generator of moves of layers' elements, from the keepers that send the fewest so far."""

    def __init__(self, keepers: HeldStateByWorker) -> None:
        self._kept = _group_by_layer(keepers)
        self._sent: Counter[Worker] = Counter()

    def generate_moves(
        self, target: Worker, layer: int, span: Span, *, state: bool
    ) -> Iterator[LayerMove]:
        # Parts of several keepers may cover the span; take the next piece from one that has it.
        start, stop = span
        while start < stop:
            source, (_, end) = min(
                (
                    (worker, kept_span)
                    for worker, kept_span in self._kept[layer]
                    if worker != target and kept_span[0] <= start < kept_span[1]
                ),
                key=lambda pair: (self._sent[pair[0]], pair),
            )
            end = min(end, stop)
            self._sent[source] += end - start
            yield LayerMove(target, source, layer, start, end, state)
            start = end


_PartitionsByMember = Mapping[Worker, Mapping[LayerRange, StatePartition]]
"""Partitions in which each worker is a member, by worker and range of layers."""


def _group_by_member(cuts: Mapping[LayerRange, StatePartition]) -> _PartitionsByMember:
    grouped: dict[Worker, dict[LayerRange, StatePartition]] = {}
    for layers, partition in cuts.items():
        for worker in partition.members:
            grouped.setdefault(worker, {})[layers] = partition
    return grouped


def _join_layers(layers: Collection[int]) -> tuple[LayerRange, ...]:
    return merge_ranges((layer, layer + 1) for layer in layers)


def _group_by_layer(keepers: HeldStateByWorker) -> dict[int, list[tuple[Worker, Span]]]:
    spans: dict[int, list[tuple[Worker, Span]]] = {}
    for worker, kept in keepers.items():
        for layer, start, stop in kept.parts:
            spans.setdefault(layer, []).append((worker, (start, stop)))
    return spans


def _spans_of_layer(kept: HeldState, layer: int) -> list[Span]:
    return [(start, stop) for part_layer, start, stop in kept.parts if part_layer == layer]
