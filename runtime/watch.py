"""Node 0's eye on a run: it hears what all workers report, and finds out why a run fails."""

import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torch._C._distributed_c10d import TCPStore

from runtime.ledger import Ledger, LedgerError
from runtime.nursery import Nursery, NurseryError
from runtime.report import Ended, Failed, Finished, Joined, Left, Ran, Report, next_report
from schedules.schedule import Schedule, Worker

POLL_SECONDS = 0.02
GRACE_SECONDS = 1.0
"""How long after the first sign of a failure its cause is waited for: those who lose a peer often speak first."""

Progress = Callable[[int, float], None]
"""Called with the number and the loss of each iteration that all workers have run, in order."""


class RunError(RuntimeError):
    """A run that ended before its last iteration. The message is one line."""


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


class Watch:
    """Hears all reports until the workers have finished, or finds out why they will not."""

    def __init__(self, schedule: Schedule, store: TCPStore, nursery: Nursery, out: Path, log: LossLog, *,
                 skips: bool = False) -> None:
        self.ledger = Ledger(schedule, skips=skips)
        self.left: set[int] = set()
        """Other nodes that know of the end."""
        self._store = store
        self._nursery = nursery
        self._out = out
        self._log = log
        self._corpora: dict[str, Worker] = {}
        self._failures: list[Failed | Ended] = []
        self._first_failure_seconds = 0.0

    def until_complete(self) -> None:
        """Return when all workers have finished. Raises RunError when one fails."""
        while not self.ledger.complete:
            try:
                self.listen(POLL_SECONDS)
            except (LedgerError, NurseryError) as error:
                raise self._error(str(error)) from None
            cause = self._cause()
            if cause is not None:
                raise self._error(cause)

    def listen(self, seconds: float) -> None:
        """Hear what there is to hear; without news from processes here, after that long."""
        for ended in self._nursery.poll(seconds):
            self._hear(ended)
        while (report := next_report(self._store)) is not None:
            self._hear(report)

    def _hear(self, report: Report) -> None:
        match report:
            case Ran():
                for iteration, loss in self.ledger.ran(report):
                    self._log.write(iteration, loss)
            case Finished():
                self.ledger.finished(report)
            case Joined():
                self._compare_corpus(report)
            case Left():
                self.left.add(report.node)
            case Failed() | Ended():
                if isinstance(report, Failed) or report.status != 0:
                    self._first_failure_seconds = self._first_failure_seconds or time.monotonic()
                    self._failures.append(report)

    def _compare_corpus(self, report: Joined) -> None:
        self._corpora.setdefault(report.corpus, report.worker)
        if len(self._corpora) > 1:
            raise LedgerError(f"workers {' and '.join(map(str, self._corpora.values()))} read different texts; give "
                              "every node the same training.text")

    def _cause(self) -> str | None:
        """What made the run fail, once that is clear: a worker that was killed, or erred, or only lost a peer."""
        if not self._failures:
            return None
        failure = min(self._failures, key=_how_far_from_the_cause)
        waited = time.monotonic() - self._first_failure_seconds
        return self._describe(failure) if _how_far_from_the_cause(failure) == 0 or waited > GRACE_SECONDS else None

    def _describe(self, failure: Failed | Ended) -> str:
        log = self._out / "logs" / f"worker-{failure.worker}.log"
        if isinstance(failure, Failed):
            return f"worker {failure.worker} failed: {failure.reason} (see {log})"
        if failure.status < 0:
            return f"worker {failure.worker} was killed by {signal.Signals(-failure.status).name}"
        return f"worker {failure.worker} ended with exit status {failure.status} (see {log})"

    def _error(self, cause: str) -> RunError:
        return RunError(f"{cause}; {len(self.ledger.losses)} iterations are committed, their losses are in "
                        f"{self._out / 'losses.jsonl'}")


def _how_far_from_the_cause(failure: Failed | Ended) -> int:
    if isinstance(failure, Ended):
        return 0 if failure.status < 0 else 2  # those who exit by themselves have told why
    return 0 if failure.cause == "error" else 1
