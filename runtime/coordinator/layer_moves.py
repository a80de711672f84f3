"""Which layers move from which worker to which when what they must hold changes."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from slipstream.runtime.protocol.to_worker import Move
from slipstream.schedules.schedule import Worker

Holders = Mapping[Worker, Collection[int]]
"""The layers of the model that each worker holds."""


def layers_without_holder(holds: Holders, layers: int) -> list[int]:
    """The layers of a model of so many that no worker holds."""
    held = {layer for mine in holds.values() for layer in mine}
    return [layer for layer in range(layers) if layer not in held]


def plan_moves(needs: Holders, holds: Holders) -> tuple[Move, ...]:
    """One move for each layer that a worker needs and lacks, from the holder that sends the fewest layers so far.

    Every layer must have a holder (`layers_without_holder`).
    """
    sent: Counter[Worker] = Counter()
    holders: dict[int, list[Worker]] = defaultdict(list)
    for worker, mine in holds.items():
        for layer in mine:
            holders[layer].append(worker)
    moves = []
    for target, needed in sorted(needs.items()):
        for layer in sorted(set(needed).difference(holds.get(target, ()))):
            source = min(holders[layer], key=lambda worker: (sent[worker], worker))
            sent[source] += 1
            moves.append(Move(target, source, layer))
    return tuple(moves)
