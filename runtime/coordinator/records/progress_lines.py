"""Report progress to users, and keep it for files and the result."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from slipstream.runtime.coordinator.decisions.commit_log import CommittedIteration
from slipstream.runtime.coordinator.decisions.failover import FailoverResult
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.events import LOSSES, CheckpointWritten, LeftOut, Noted, Recovered, Slowed
from slipstream.runtime.protocol.to_coordinator import CheckpointSaved, Ready
from slipstream.runtime.run_folder import read_lock_holder
from slipstream.schedules.schedule import Worker

REPORT_INTERVAL_SECONDS = 30.0
"""Seconds from one line about missing workers to the next."""
MAX_NAMES = 8
"""Largest number of workers or nodes that a line names."""
RECENT_NOTES = 32
"""Number of the last notes to users that a new note must not repeat."""


class RunReporter:
    """Reporter that tells a run's users and its log what happens."""

    def __init__(self, run: RunSpec, log: RunLog) -> None:
        self._run, self._notify = run, run.request.options.notify
        self._log = log
        self._folder = read_lock_holder(run.request.out)
        self._apart = False
        """True if another node's worker writes to another folder than node 0."""
        self._checkpointed = 0
        """Iteration of the newest complete checkpoint that has been logged; 0 before the first."""
        self.notes: list[str] = []
        self.speed_events: list[SpeedEvent] = []

    def report_note(self, text: str) -> None:
        """Report a problem that the run survives to users, log and result."""
        self.notes.append(text)
        self._log.write(Noted(text=text))
        self._notify(text)

    def report_note_once(self, text: str) -> None:
        """Report a problem that several workers may meet, unless it was reported recently."""
        if text not in self.notes[-RECENT_NOTES:]:
            self.report_note(text)

    def report_speed_event(self, event: SpeedEvent) -> None:
        """Report changes of workers' speeds and what follows from them."""
        self.speed_events.append(event)
        for change in event.changes:
            self._log.write(
                Recovered(worker=change.worker)
                if change.factor == 1.0
                else Slowed(worker=change.worker, factor=round(change.factor, 3))
            )
        for worker in event.left_out:
            self._log.write(LeftOut(worker=worker, reason=str(event)))
        self._notify(event)

    def report_awaited(
        self, workers: Sequence[Worker], agents: Collection[int], address: str
    ) -> None:
        """Report to users that node 0 waits for `workers`; without any, do nothing.

        `agents` are the other nodes that are connected, and `address` is where node 0 listens.
        """
        if workers:
            awaited = describe_awaited(workers, self._run.facts.shares, agents)
            self._notify(f"node 0, at {address}, waits for {awaited}")

    def log_checkpoint(self, report: CheckpointSaved) -> None:
        """Log that a checkpoint is complete, if this `report` is the first to say so."""
        if report.complete and report.iteration > self._checkpointed:
            self._checkpointed = report.iteration
            self._log.write(
                CheckpointWritten(checkpoint=report.iteration, took=round(report.seconds, 3))
            )

    def log_iteration(self, commit: CommittedIteration) -> None:
        """Log a committed iteration; report slowdowns that begin in it, and validation loss."""
        iteration = commit.iteration
        self._log.write_iteration(
            iteration,
            commit.loss,
            commit.window_seconds,
            gradient_norm=commit.gradient_norm,
            evaluation=commit.evaluation,
            cost_error=commit.cost_error,
        )
        # A slowdown for a rehearsal is announced, lest a user looks for its cause.
        for slowdown in self._run.request.resilience.slowdowns:
            if slowdown.iteration == iteration:
                speed = f"takes {slowdown.factor:g} times as long"
                if slowdown.factor == 1.0:
                    speed = "is as fast as usual"
                text = f"worker {slowdown.worker} {speed} from iteration {iteration} on, on purpose"
                self._log.write(Noted(text=text))
                self._notify(text)
        if commit.evaluation is not None:
            self._notify(
                f"validation loss {commit.evaluation:.6f} after {iteration + 1} iterations"
            )

    def log_rollback(self, iteration: int) -> None:
        """Log that the run went back to `iteration`: this and later ones are written again."""
        self._log.drop_iterations_from(iteration)
        self._checkpointed = min(self._checkpointed, iteration)

    def report_failover(self, result: FailoverResult) -> None:
        """Report a failover; log the iterations that the dead coordinator has not logged."""
        # The workers know more than the files: the last losses may not have been written.
        count = result.committed + 1
        self._log.drop_iterations_from(result.unwritten.start)
        losses = result.losses[len(result.losses) - len(result.unwritten) :]
        if unknown := sum(map(math.isnan, losses)):
            self.report_note(
                f"the losses of {unknown} iterations before {count} are not known: node 0 has been "
                "started anew without the folder that holds them"
            )
        for iteration, loss in zip(result.unwritten, losses, strict=True):
            self._log.write_iteration(iteration, loss)
        self._notify(
            f"node 0 continues with the {len(result.kept)} workers that it has found; {count} "
            "iterations are committed"
        )

    def check_folder(self, report: Ready) -> None:
        """Report, once in a run, that a worker writes to another folder than node 0."""
        # Nodes may share no file system; their checkpoints are then incomplete in each folder.
        if report.folder != self._folder and not self._apart:
            self._apart = True
            node = next(
                (
                    node
                    for node, share in enumerate(self._run.facts.shares)
                    if report.worker in share
                ),
                0,
            )
            self.report_note(
                f"node {node} writes to another folder than node 0: checkpoints and parameters of "
                "which both write layers are complete in neither; give all nodes one --out on a "
                "file system they share"
            )

    def describe_progress(self, count: int) -> str:
        """Return a clause: `count` iterations are committed, and which file has their losses."""
        path: Path = self._run.request.out / LOSSES
        if count == 0:
            return "no iteration is committed"
        if count == 1:
            return f"one iteration is committed, its loss goes to {path}"
        return f"{count} iterations are committed, their losses go to {path}"


def describe_awaited(
    awaited: Collection[Worker], shares: Sequence[Sequence[Worker]], agents: Collection[int]
) -> str:
    """Return a clause that names the `awaited` workers.

    `shares` has the workers of each node, and `agents` are the nodes that are connected to node 0.
    A node that is not connected is named instead of its workers.
    """
    # Users start whole nodes: they need not know which workers a missing one has.
    nodes, workers, awaited = [], [], set(awaited)
    for node, share in enumerate(shares):
        if missing := [worker for worker in share if worker in awaited]:
            if node == 0 or node in agents:
                workers += [f"worker {worker} of node {node}" for worker in missing]
            else:
                nodes.append(f"node {node}")
    clauses = []
    if nodes:
        have = "have" if nodes[1:] else "has"
        clauses.append(f"{_join_names(nodes)}, which {have} not connected")
    if workers:
        clauses.append(_join_names(workers))
    return ", and for ".join(clauses)


def _join_names(names: Sequence[str]) -> str:
    shown = list(names[:MAX_NAMES])
    if names[MAX_NAMES:]:
        shown.append(f"{len(names) - MAX_NAMES} more")
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else ""
