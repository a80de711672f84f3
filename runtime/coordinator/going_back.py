"""Going back: where a run goes on from when nobody holds some layer any more.

All workers are asked which checkpoints they can read: nodes may have folders of their own. The newest of all is taken.
Before the first checkpoint the run can begin anew, since every worker can build what it begins with.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from slipstream.runtime.coordinator.context import CoordinatorContext
from slipstream.runtime.coordinator.layer_moves import Holders, plan_moves
from slipstream.runtime.coordinator.orders import Orders
from slipstream.runtime.coordinator.planning import NoScheduleError
from slipstream.runtime.coordinator.schedule_choice import ScheduleChoice
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import WentBack
from slipstream.runtime.protocol.to_worker import ReportCheckpoints
from slipstream.schedules.schedule import Worker

ANSWER_SECONDS = 30.0
"""To look which checkpoints there are. Whoever takes longer has a file system that hangs, and reads none."""


class ReadableCheckpoints:
    """Collects which iterations each worker can go back to.

    `ask` asks a worker.
    """

    def __init__(self, ask: Callable[[Worker], None]) -> None:
        self._ask = ask
        self._answers: dict[Worker, Collection[int]] = {}
        self._asked: dict[Worker, float] = {}
        """When each was asked that lives."""

    def answered(self, worker: Worker, iterations: Collection[int]) -> None:
        """A worker has said what it can read."""
        if worker in self._asked:
            self._answers[worker] = iterations

    def lost(self, worker: Worker) -> None:
        """A worker is gone."""
        self._answers.pop(worker, None)
        self._asked.pop(worker, None)

    def forget(self) -> None:
        """Ask anew the next time: checkpoints come and go."""
        self._answers.clear()
        self._asked.clear()

    def all_have_answered(self, workers: Collection[Worker]) -> bool:
        """Whether it is known what these workers can read, or will not be; asks those that have not been asked."""
        now = time.monotonic()
        for worker in sorted(set(workers) - self._asked.keys()):
            self._asked[worker] = now
            self._ask(worker)
        return all(worker in self._answers or now - self._asked[worker] > ANSWER_SECONDS for worker in workers)

    def newest(self, workers: Collection[Worker], iterations: range) -> tuple[int, list[Worker]] | None:
        """The last of these iterations that any of these workers can go back to, and all that can; None: there is none.
        """
        found = {worker: set(self._answers.get(worker, ())).intersection(iterations) for worker in workers}
        newest = max((max(mine) for mine in found.values() if mine), default=None)
        return None if newest is None else (newest, sorted(one for one, mine in found.items() if newest in mine))


class GoingBack:
    """Has the workers of one run go back."""

    def __init__(self, context: CoordinatorContext, orders: Orders, choice: ScheduleChoice) -> None:
        self._context = context
        self._orders = orders
        self._choice = choice
        self.checkpoints = ReadableCheckpoints(lambda worker: context.send(worker, ReportCheckpoints()))

    def give_order(self, missing: int) -> None:
        """Nobody holds a layer: go back to the newest checkpoint that a live worker can read, or to the beginning.

        Nothing happens where an answer of a worker, or a schedule, has to come first. A run that is told to end ends
        here: that checkpoint is what it goes on from. Raises RunError where nobody is left, or there is no schedule.
        """
        context, state = self._context, self._context.state
        everyone = state.everyone
        reasons = context.lost.reasons_of(missing, state.members, state.ready)
        held = any(missing in layers for layers in state.holds.values())
        why = f"optimizer state of layer {missing} is lost with two workers that both kept it: {reasons}" if held else \
            f"stage {context.placement.stage_of(state.grid, missing)} has no live worker left: {reasons}"
        if state.stopping:
            self._orders.leave(why)
            return
        if not everyone:
            raise RunError(why)
        if not self.checkpoints.all_have_answered(everyone):
            return
        possible = range(context.iterations.start, context.log.next_iteration + 1)
        nothing = f"{why}; no live worker can read a checkpoint, or build what the run began with"
        if self.checkpoints.newest(everyone, possible) is None:
            raise RunError(nothing)
        try:
            schedule = self._choice.from_checkpoint(everyone)
        except NoScheduleError as error:
            raise RunError(", and ".join(filter(None, (why, str(error))))) from None
        if schedule is None:
            return
        back = self.checkpoints.newest(schedule.seat_of, possible)  # who has nothing to do has nothing to give, either
        if back is None:
            raise RunError(nothing)
        iteration, readers = back
        self._forget_from(iteration, why)
        needs = context.placement.held_by(schedule)
        reads = who_reads_what(needs, readers)
        partition = context.partition
        if partition is None:
            self._orders.train(schedule, plan_moves(needs, reads), restore=reads)
            return
        kept = {reader: partition.read(layers, iteration) for reader, layers in reads.items()}
        self._orders.train(schedule, (), part_moves=partition.moves(schedule, kept, reads, iteration - 1),
                           restore=reads)

    def _forget_from(self, iteration: int, why: str) -> None:
        """Iterations from this one on are no longer committed."""
        context = self._context
        lost = context.log.next_iteration - iteration
        context.recovery.begin()
        context.recovery.went_back(iteration, lost)
        context.log.go_back(iteration)
        context.listeners.went_back(iteration)
        context.events.write(WentBack(lost=lost, reason=why))
        self.checkpoints.forget()


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
