"""Going back: where a run goes on from when nobody holds some layer any more.

All workers are asked which checkpoints they can read: nodes may have folders of their own. The newest of all is taken.
Before the first checkpoint the run can begin anew, since every worker can build what it begins with.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from runtime.coordinator.layer_moves import Holders
from schedules.schedule import Worker


class GoingBack:
    """Collects which iterations each worker can go back to.

    `ask` asks a worker.
    """

    def __init__(self, ask: Callable[[Worker], None]) -> None:
        self._ask = ask
        self._answers: dict[Worker, Collection[int] | None] = {}
        """None: it has been asked."""

    def answered(self, worker: Worker, iterations: Collection[int]) -> None:
        """A worker has said what it can read."""
        if worker in self._answers:
            self._answers[worker] = iterations

    def lost(self, worker: Worker) -> None:
        """A worker is gone."""
        self._answers.pop(worker, None)

    def forget(self) -> None:
        """Ask anew the next time: checkpoints come and go."""
        self._answers.clear()

    def all_have_answered(self, workers: Collection[Worker]) -> bool:
        """Whether it is known what these workers can read; asks those that have not been asked."""
        for worker in sorted(set(workers) - self._answers.keys()):
            self._answers[worker] = None
            self._ask(worker)
        return all(self._answers[worker] is not None for worker in workers)

    def newest(self, workers: Collection[Worker], iterations: range) -> tuple[int, list[Worker]] | None:
        """The last of these iterations that any of these workers can go back to, and all that can; None: there is none.
        """
        found = {worker: set(self._answers[worker] or ()).intersection(iterations) for worker in workers}
        newest = max((max(mine) for mine in found.values() if mine), default=None)
        return None if newest is None else (newest, sorted(one for one, mine in found.items() if newest in mine))


def who_reads_what(needs: Holders, readers: Collection[Worker]) -> Mapping[Worker, tuple[int, ...]]:
    """The layers that each reader reads: its own, and those that others need who cannot read them."""
    reads = {reader: sorted(needs[reader]) for reader in sorted(readers) if reader in needs}
    count = Counter({reader: len(mine) for reader, mine in reads.items()})
    read = {layer for mine in reads.values() for layer in mine}
    for layer in sorted({layer for mine in needs.values() for layer in mine} - read):
        reader = min(reads, key=lambda worker: (count[worker], worker))
        reads[reader].append(layer)
        count[reader] += 1
    return {reader: tuple(mine) for reader, mine in reads.items()}
