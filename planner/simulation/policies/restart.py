"""Checkpoint and restart (torchrun elastic, Varuna): every failure stops the whole job."""

from collections.abc import Sequence

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.policy import Cause, Phase, Policy, Scenario


class Restart(Policy):
    """Policy that restarts from the last checkpoint on as many whole pipelines as fit."""

    name = "checkpoint-restart"
    title = "checkpoint and restart on whole pipelines"
    source = (
        "torchrun elastic, Varuna; times: Oobleck (SOSP 2023), tools/simulator; interval: Young "
        "(1974)"
    )
    pauses = True
    assumptions = (
        "published times of a restart and of a checkpoint; training pauses for a checkpoint; the "
        "best interval (Young 1974) for the failures of this very trace; newcomers that make a "
        "pipeline more are taken in at the next checkpoint, by a restart; the global batch is kept"
    )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._machines_in_use: dict[int, None] = {}
        """Machines that train, in the order in which they began."""
        self._idle_machines: dict[int, None] = {}
        self._grow_at: float | None = None
        """Time in seconds of the trace of a restart on more pipelines. None: none is due."""
        self._rate = 0.0

    def steady_rate(self, failures: int) -> float:
        """Return the samples per second on as many whole pipelines as the live workers form."""
        return self.throughputs.whole_pipelines_rate(
            (self.scenario.workers - failures) // self.scenario.stages
        )

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Form whole pipelines of the machines in `live`; return the phases from the start."""
        self._idle_machines = dict.fromkeys(sorted(live))
        self._fill_pipelines()
        self._rate = self._current_rate()
        return self.resume_training(self._rate)

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Return the phases after a change.

        The job restarts at once if a machine in use died or it waits for machines, or after the
        next checkpoint if there are idle machines for one more pipeline.
        """
        self._grow_if_due(change.seconds)
        # Only the loss of a machine that trains stops the job.
        used = len(self._machines_in_use)
        self._idle_machines |= dict.fromkeys(change.added)
        for machine in change.removed:
            self._idle_machines.pop(machine, None)
            self._machines_in_use.pop(machine, None)
        died = len(self._machines_in_use) < used
        if died or remaining[0].cause is Cause.WAIT:
            self._grow_at = None
            self._fill_pipelines()
            self._rate = self._current_rate()
            return self.restart(self._rate, remaining)
        return self._phases_until_growth(change.seconds, remaining)

    def _phases_until_growth(self, now: float, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Return phases with a restart at the next checkpoint if more pipelines are possible."""
        before = [phase for phase in remaining if phase.cause is not Cause.RUN]
        # the last phase is the planned restart, which is planned again below
        if self._grow_at is not None:
            before = before[:-1]
        usable = self._count_usable_machines()
        if usable == len(self._machines_in_use):
            self._grow_at = None
            return [*before, self.training_phase(self._rate)]
        begin = now + sum(phase.seconds for phase in before)
        self._grow_at = self._grow_at or self.checkpoints.next_after(begin)
        # Train on the present machines until the checkpoint, restart, then train on more.
        until = self._grow_at - begin
        later = self.throughputs.whole_pipelines_rate(usable // self.scenario.stages)
        return [
            *before,
            self.training_phase(self._rate).with_seconds(until),
            Phase(Cause.RESTART, self.costs.restart_seconds),
            self.training_phase(later),
        ]

    def _grow_if_due(self, now: float) -> None:
        """Use idle machines for more pipelines if their restart is due."""
        if self._grow_at is None or now < self._grow_at:
            return
        self._fill_pipelines()
        self._rate = self._current_rate()
        self._grow_at = None

    def _count_usable_machines(self) -> int:
        """Return the number of live machines in whole pipelines, up to the job's number."""
        stages = self.scenario.stages
        return min(
            self.scenario.workers,
            (len(self._machines_in_use) + len(self._idle_machines)) // stages * stages,
        )

    def _fill_pipelines(self) -> None:
        """Use the live machines of whole pipelines, and leave all others idle."""
        count = self._count_usable_machines()
        # Machines that began last leave first, and are the first to return.
        surplus = [
            self._machines_in_use.popitem()[0] for _ in range(len(self._machines_in_use) - count)
        ]
        self._idle_machines = dict.fromkeys(reversed(surplus)) | self._idle_machines
        for machine in list(self._idle_machines)[: count - len(self._machines_in_use)]:
            del self._idle_machines[machine]
            self._machines_in_use[machine] = None

    def _current_rate(self) -> float:
        return self.throughputs.whole_pipelines_rate(
            len(self._machines_in_use) // self.scenario.stages
        )
