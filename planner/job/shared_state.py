"""The memory that optimizer state takes where all who hold a stage share it (`[training] shard_optimizer`).

Each keeps a part, and a copy of another one's: of n holders min(1, 2 / n) of the whole. So whoever is left when some
are down keeps more, and has less room for activations.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from msgspec.structs import replace

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import added, exact
from slipstream.schedules.schedule import Worker

COPIES = 2
"""Of each part: the owner's and its buddy's."""
FINE = 1000
"""What is added is rounded up to such a part of the job's unit: thirds of a byte would need a very fine one."""


def share(holders: int) -> Fraction:
    """What each of so many holders keeps of the whole."""
    return min(Fraction(1), Fraction(COPIES, holders))


def with_shared_state(job: Job, failed: Sequence[Worker]) -> Job:
    """A job while some workers are down: whoever holds their stages keeps more state, and has that much less room.

    Layers that move are taken to have as many holders as their stage has left.
    """
    memory = job.memory
    if memory is None or not memory.state or not failed:
        return job
    weights, less = list(memory.weights), [0.0] * job.stages
    for stage, state in enumerate(memory.state):
        columns = [column for other, column in enumerate(job.columns) if other % job.depth == stage % job.depth]
        holders = job.pipelines * len(columns)
        left = max(1, holders - sum(columns.count(worker.column) for worker in failed))
        more = math.ceil(FINE * exact(state) * (share(left) - share(holders))) / FINE
        less[job.columns[stage]] += more
        if weights:
            weights[stage] = added(weights[stage], more)
    return replace(job, memory=replace(
        memory, weights=tuple(weights),
        capacity=tuple(added(room, -more) for room, more in zip(memory.capacity, less, strict=True)),
        capacity_of=tuple((worker, added(room, -less[worker.column])) for worker, room in memory.capacity_of)))
