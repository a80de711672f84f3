"""Which layers move from which worker to which when roles change."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from runtime.protocol.to_worker import LayerMove
from schedules.schedule import Worker

Holders = Mapping[Worker, Collection[int]]
"""The stages of each worker."""


def stages_without_holder(holds: Holders, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The stages with a layer that no worker holds."""
    held = {layer for mine in holds.values() for layer in _layers(mine, ranges)}
    return [stage for stage, layers in enumerate(ranges) if not held.issuperset(range(*layers))]


def plan_moves(needs: Holders, holds: Holders, ranges: Sequence[tuple[int, int]]) -> tuple[LayerMove, ...]:
    """One move for each layer that a worker needs and lacks, from the holder that sends the fewest layers so far.

    Every stage that is needed must have holders (`stages_without_holder`).
    """
    sent: Counter[Worker] = Counter()
    holders: dict[int, list[Worker]] = defaultdict(list)
    for worker, mine in holds.items():
        for layer in _layers(mine, ranges):
            holders[layer].append(worker)
    moves = []
    for target, needed in sorted(needs.items()):
        for layer in sorted(_layers(needed, ranges) - _layers(holds.get(target, ()), ranges)):
            source = min(holders[layer], key=lambda worker: (sent[worker], worker))
            sent[source] += 1
            moves.append(LayerMove(target, source, layer))
    return tuple(moves)


def _layers(stages: Collection[int], ranges: Sequence[tuple[int, int]]) -> set[int]:
    return {layer for stage in stages for layer in range(*ranges[stage])}
