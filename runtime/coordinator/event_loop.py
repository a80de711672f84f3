"""Node 0's ears: it hears what all workers report, and whose heart has stopped."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from torch._C._distributed_c10d import TCPStore

from runtime.coordinator.commit_log import Ledger, LedgerError
from runtime.coordinator.coordinator import Conductor, Recovery, RunError
from runtime.processes.fork_server import NurseryError
from runtime.processes.process_manager import Crew
from runtime.protocol.failure_injection import Injection, injected_key
from runtime.protocol.reports import (
    Ended,
    Failed,
    Finished,
    Followed,
    Left,
    Note,
    Paused,
    Ran,
    Ready,
    Report,
    Settled,
    Started,
    Unfollowed,
    next_report,
)
from runtime.worker.heartbeat import beat_key
from schedules.schedule import Worker

POLL_SECONDS = 0.02

Tell = Callable[[Recovery | str], None]
"""Called with a recovery, or with something that went wrong and was survived; `str` of it is one line for people."""
Progress = Callable[[int, float], None]
"""Called with the number and the loss of each iteration that is committed, in order."""


class LossLog:
    """Losses, as iterations commit: into the file and to whoever looks on."""

    def __init__(self, file: TextIO, progress: Progress | None) -> None:
        self._file = file
        self._progress = progress

    def write(self, iteration: int, loss: float) -> None:
        """Enter the next iteration. Raises OSError."""
        self._file.write(json.dumps({"iteration": iteration, "loss": loss if math.isfinite(loss) else None}) + "\n")
        self._file.flush()
        if self._progress is not None:
            self._progress(iteration, loss)


class Hearts:
    """When each worker's heart was last seen to beat, by this machine's clock."""

    def __init__(self, store: TCPStore, timeout_seconds: float) -> None:
        self._store = store
        self._timeout = timeout_seconds
        self._interval = timeout_seconds / 10
        self._looked = time.monotonic()
        self._last: dict[Worker, tuple[int, float]] = {}

    def add(self, worker: Worker) -> None:
        """Watch a worker that has begun to beat."""
        self._last[worker] = -1, time.monotonic()

    def remove(self, worker: Worker) -> None:
        """Watch it no more."""
        self._last.pop(worker, None)

    def stopped(self) -> list[tuple[Worker, float]]:
        """Those that have not beaten for too long, each with the time of its last beat."""
        now = time.monotonic()
        gap = now - self._looked
        if gap < self._interval or not self._last:
            return []
        workers = sorted(self._last)
        counts = [int(count) for count in self._store.multi_get([beat_key(worker) for worker in workers])]
        # While this process did not get to look, as when it was stopped itself, nobody can be blamed.
        excuse = gap if gap > 3 * self._interval else 0.0
        for worker, count in zip(workers, counts, strict=True):
            before, seen = self._last[worker]
            self._last[worker] = (count, now if count != before else seen + excuse)
        self._looked = now
        return [(worker, seen) for worker, (_, seen) in self._last.items() if now - seen > self._timeout]


class Watch:
    """Hears all reports and passes them on, until the workers have left or cannot go on."""

    def __init__(self, conductor: Conductor, ledger: Ledger, store: TCPStore, crew: Crew, out: Path, log: LossLog, *,
                 heartbeat_timeout_seconds: float, injections: tuple[Injection, ...] = (),
                 tell: Tell | None = None) -> None:
        self.left: set[int] = set()
        """Other nodes that know of the end."""
        self.notes: list[str] = []
        self._conductor = conductor
        self._ledger = ledger
        self._store = store
        self._crew = crew
        self._out = out
        self._log = log
        self._hearts = Hearts(store, heartbeat_timeout_seconds)
        self._injections = injections
        self._tell = tell or (lambda _: None)
        self._corpora: dict[str, Worker] = {}

    def until_left(self) -> None:
        """Return when all is done. Raises RunError when there is no way to go on."""
        try:
            while not self._conductor.left:
                self.listen(POLL_SECONDS)
        except (LedgerError, NurseryError, RunError) as error:
            raise RunError(f"{error}; {self._ledger.next_iteration} iterations are committed, their losses are in "
                           f"{self._out / 'losses.jsonl'}") from None

    def listen(self, seconds: float) -> None:
        """Hear what there is to hear; without news from processes here, after that long. Raises RunError."""
        ended = self._crew.poll(seconds)
        # First what they said, then that they are gone: those who end by themselves have told why.
        self._hear_all()
        self._conductor.invite()
        if self._conductor.ask_for_turn():
            self._hear_all()
            self._conductor.check_turn()
        for end in ended:
            self._hear(end)
        for worker, seen in self._hearts.stopped():
            self._lose(worker, f"worker {worker} stopped answering", seen)
            self._crew.expel(worker)

    def _hear_all(self) -> None:
        while (report := next_report(self._store)) is not None:
            self._hear(report)

    def listen_for_leaving(self) -> None:
        """Hear which other nodes know of the end; nothing else matters any more."""
        while (report := next_report(self._store)) is not None:
            if isinstance(report, Left):
                self.left.add(report.node)

    def _hear(self, report: Report) -> None:
        match report:
            case Ran():
                self._commit(self._ledger.ran(report))
            case Settled():
                self._commit(self._ledger.settled(report.order, report.factor))
            case Started():
                recovery = self._conductor.started(report)
                if recovery is not None:
                    self._tell(recovery)
            case Paused():
                if report.settled is not None:
                    self._commit(self._ledger.settled(report.order, report.settled))
                self._conductor.paused(report)
            case Followed():
                self._conductor.followed(report)
            case Unfollowed():
                self._conductor.unfollowed(report)
            case Finished():
                self._conductor.finished(report)
            case Ready():
                self._compare_corpus(report)
                self._hearts.add(report.worker)
                self._conductor.ready(report)
            case Note():
                self.notes.append(report.text)
                self._tell(report.text)
            case Left():
                self.left.add(report.node)
            case Failed():
                log = self._out / "logs" / f"worker-{report.worker}.log"
                self._lose(report.worker, f"worker {report.worker} failed: {report.reason} (see {log})")
            case Ended():
                self._lose(report.worker, self._describe(report))
                self._crew.buried(report.worker, self._conductor.number)

    def _commit(self, committed: Iterator[tuple[int, float]]) -> None:
        for iteration, loss in committed:
            self._log.write(iteration, loss)
            self._crew.committed(iteration, self._conductor.number)

    def _lose(self, worker: Worker, reason: str, since: float | None = None) -> None:
        self._hearts.remove(worker)
        if self._conductor.left:
            return
        injected = [float(self._store.get(injected_key(index))) for index, one in enumerate(self._injections)
                    if one.worker == worker and self._store.check([injected_key(index)])]
        self._conductor.lost(worker, reason, max([*injected, since or 0.0]) or time.monotonic())

    def _compare_corpus(self, report: Ready) -> None:
        self._corpora.setdefault(report.corpus, report.worker)
        if len(self._corpora) > 1:
            raise LedgerError(f"workers {' and '.join(map(str, self._corpora.values()))} read different texts; give "
                              "every node the same training.text")

    def _describe(self, ended: Ended) -> str:
        if ended.status < 0:
            return f"worker {ended.worker} was killed by {signal.Signals(-ended.status).name}"
        log = self._out / "logs" / f"worker-{ended.worker}.log"
        return f"worker {ended.worker} ended with exit status {ended.status} (see {log})"
