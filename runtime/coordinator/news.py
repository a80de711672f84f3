"""News: what people are told of a run, and what its files and its result keep of that."""

from collections.abc import Collection, Sequence
from pathlib import Path

from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.coordinator.gathering import who_is_awaited
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.coordinator.slow_workers import SpeedEvent
from slipstream.runtime.events import LOSSES, CheckpointWritten, LeftOut, Noted, Recovered, Slowed
from slipstream.runtime.protocol.to_coordinator import Ready, Saved
from slipstream.runtime.run_folder import holder
from slipstream.schedules.schedule import Worker


class News:
    """Those of one run."""

    def __init__(self, run: Run, events: EventLog) -> None:
        self._run = run
        self._events = events
        self._folder = holder(run.out)
        self._apart = False
        """Whether a node has another folder."""
        self._checkpointed = 0
        """The newest complete checkpoint of which the event log was told."""
        self.notes: list[str] = []
        self.speed_events: list[SpeedEvent] = []

    def note(self, text: str) -> None:
        """Something went wrong and was survived."""
        self.notes.append(text)
        self._events.write(Noted(text=text))
        self._run.notify(text)

    def speed(self, event: SpeedEvent) -> None:
        """What was found out about the workers' speeds."""
        self.speed_events.append(event)
        for change in event.changes:
            self._events.write(Recovered(worker=change.worker) if change.factor == 1.0 else
                               Slowed(worker=change.worker, factor=round(change.factor, 3)))
        for worker in event.left_out:
            self._events.write(LeftOut(worker=worker, reason=str(event)))
        self._run.notify(event)

    def awaited(self, workers: Sequence[Worker], agents: Collection[int], address: str) -> None:
        """For whom node 0 waits before the first order; `agents` are the other nodes that are there."""
        if workers:
            self._run.notify(f"node 0, at {address}, waits for " + who_is_awaited(workers, self._run.shares, agents))

    def saved(self, report: Saved) -> None:
        """A worker has written its layers, perhaps the last ones that a checkpoint lacked."""
        if report.complete and report.iteration > self._checkpointed:
            self._checkpointed = report.iteration
            self._events.write(CheckpointWritten(checkpoint=report.iteration, took=round(report.seconds, 3)))

    def went_back(self, iteration: int) -> None:
        """The run goes back to an iteration: checkpoints of later ones are written anew."""
        self._checkpointed = min(self._checkpointed, iteration)

    def ready(self, report: Ready) -> None:
        """Note once, of the first node that it is true of, that what is written does not come together."""
        if report.folder != self._folder and not self._apart:
            self._apart = True
            node = next((node for node, share in enumerate(self._run.shares) if report.worker in share), 0)
            self.note(f"node {node} writes to another folder than node 0: checkpoints and parameters of which both "
                      "write layers are complete in neither; give all nodes one --out on a file system they share")

    def how_far(self, count: int) -> str:
        """That so many iterations are committed, as a clause."""
        path: Path = self._run.out / LOSSES
        return "no iteration is committed" if count == 0 else f"one iteration is committed, its loss is in {path}" \
            if count == 1 else f"{count} iterations are committed, their losses are in {path}"
