"""Which layers move from whom to whom when roles change."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from runtime.orders import Move
from schedules.schedule import Worker

Holders = Mapping[Worker, Collection[int]]
"""The stages of each worker."""


def orphaned(stages: int, holds: Holders) -> list[int]:
    """The stages that nobody holds."""
    held = {stage for mine in holds.values() for stage in mine}
    return [stage for stage in range(stages) if stage not in held]


def plan_moves(needs: Holders, holds: Holders, ranges: Sequence[tuple[int, int]]) -> tuple[Move, ...]:
    """One move for each layer that a worker needs and lacks, dealt to those that hold it so that all send alike.

    Every stage that is needed must be held by someone (`orphaned`).
    """
    sent: Counter[Worker] = Counter()
    moves = []
    for target, needed in sorted(needs.items()):
        for stage in sorted(set(needed) - set(holds.get(target, ()))):
            holders = sorted(worker for worker, mine in holds.items() if stage in mine)
            for layer in range(*ranges[stage]):
                source = min(holders, key=lambda worker: (sent[worker], worker))
                sent[source] += 1
                moves.append(Move(target, source, layer))
    return tuple(moves)
