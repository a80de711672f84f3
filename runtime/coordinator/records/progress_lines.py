"""Progress lines: reports to the users of a run, and what the files and the result of the run keep of them."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from slipstream.runtime.coordinator.decisions.commit_log import Committed
from slipstream.runtime.coordinator.decisions.failover import Found
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.events import LOSSES, CheckpointWritten, LeftOut, Noted, Recovered, Slowed
from slipstream.runtime.protocol.to_coordinator import Ready, Saved
from slipstream.runtime.run_folder import holder
from slipstream.schedules.schedule import Worker

TELL_SECONDS = 30.0
"""Interval of the lines about missing workers."""
TOLD = 8
"""Largest number of workers or nodes that a line names."""
LATELY = 32
"""Number of last notes with which a line is compared before it is repeated."""


class News:
    """Reporter of one run to its users and to its log."""

    def __init__(self, run: Run, log: RunLog) -> None:
        self._run, self._notify = run, run.options.notify
        self._log = log
        self._folder = holder(run.out)
        self._apart = False
        """True if a node was found to write to another folder."""
        self._checkpointed = 0
        """Newest complete checkpoint that has been logged."""
        self.notes: list[str] = []
        self.speed_events: list[SpeedEvent] = []

    def note(self, text: str) -> None:
        """Report a problem that the run has survived."""
        self.notes.append(text)
        self._log.write(Noted(text=text))
        self._notify(text)

    def note_once(self, text: str) -> None:
        """Report a problem that several workers may meet at the same time, unless it has been reported recently."""
        if text not in self.notes[-LATELY:]:
            self.note(text)

    def speed(self, event: SpeedEvent) -> None:
        """Report changes of workers' speeds and what follows from them."""
        self.speed_events.append(event)
        for change in event.changes:
            self._log.write(Recovered(worker=change.worker) if change.factor == 1.0 else
                               Slowed(worker=change.worker, factor=round(change.factor, 3)))
        for worker in event.left_out:
            self._log.write(LeftOut(worker=worker, reason=str(event)))
        self._notify(event)

    def awaited(self, workers: Sequence[Worker], agents: Collection[int], address: str) -> None:
        """Report which workers the first order waits for; `agents` are the other nodes that have connected."""
        if workers:
            self._notify(f"node 0, at {address}, waits for " + who_is_awaited(workers, self._run.shares, agents))

    def saved(self, report: Saved) -> None:
        """Log a checkpoint as complete if a worker has written the last layers that it lacked."""
        if report.complete and report.iteration > self._checkpointed:
            self._checkpointed = report.iteration
            self._log.write(CheckpointWritten(checkpoint=report.iteration, took=round(report.seconds, 3)))

    def committed(self, one: Committed) -> None:
        """Log a committed iteration, and report its validation loss if there is one."""
        self._log.commit(one.iteration, one.loss, one.window_seconds, gradient_norm=one.gradient_norm,
                         evaluation=one.evaluation, cost_error=one.cost_error)
        if one.evaluation is not None:
            self._notify(f"validation loss {one.evaluation:.6f} after {one.iteration + 1} iterations")

    def went_back(self, iteration: int) -> None:
        """Log that iterations from the given one on, and the checkpoints after it, will be written again."""
        self._log.go_back(iteration)
        self._checkpointed = min(self._checkpointed, iteration)

    def took_over(self, found: Found) -> None:
        """Report a failover, and log committed iterations that have no line, for a further coordinator."""
        count = found.committed + 1
        self._log.go_back(found.unwritten.start)
        losses = found.losses[len(found.losses) - len(found.unwritten):]
        if unknown := sum(map(math.isnan, losses)):
            self.note(f"the losses of {unknown} iterations before {count} are not known: node 0 has been started anew "
                      "without the folder that holds them")
        for iteration, loss in zip(found.unwritten, losses, strict=True):
            self._log.commit(iteration, loss)
        self._notify(f"node 0 goes on with the {len(found.kept)} workers that it has found; {count} iterations are "
                     "committed")

    def ready(self, report: Ready) -> None:
        """Report once if a node writes to another folder than node 0, so that no checkpoint is complete."""
        if report.folder != self._folder and not self._apart:
            self._apart = True
            node = next((node for node, share in enumerate(self._run.shares) if report.worker in share), 0)
            self.note(f"node {node} writes to another folder than node 0: checkpoints and parameters of which both "
                      "write layers are complete in neither; give all nodes one --out on a file system they share")

    def how_far(self, count: int) -> str:
        """Return a clause that tells how many iterations are committed and where their losses are."""
        path: Path = self._run.out / LOSSES
        return "no iteration is committed" if count == 0 else f"one iteration is committed, its loss is in {path}" \
            if count == 1 else f"{count} iterations are committed, their losses are in {path}"


def who_is_awaited(awaited: Collection[Worker], shares: Sequence[Sequence[Worker]], agents: Collection[int]) -> str:
    """Return a clause that names the nodes that have not connected and the missing workers of other nodes.

    `shares` are the workers of each node; `agents` are the nodes other than 0 that have connected.
    """
    nodes, workers, awaited = [], [], set(awaited)
    for node, share in enumerate(shares):
        if missing := [worker for worker in share if worker in awaited]:
            if node == 0 or node in agents:
                workers += [f"worker {worker} of node {node}" for worker in missing]
            else:
                nodes.append(f"node {node}")
    apart = [f"{_listed(nodes)}, which {'have' if nodes[1:] else 'has'} not connected"] if nodes else []
    return ", and for ".join([*apart, *([_listed(workers)] if workers else [])])


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:TOLD])
    if names[TOLD:]:
        shown.append(f"{len(names) - TOLD} more")
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else ""
