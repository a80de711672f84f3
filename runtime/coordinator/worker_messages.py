"""Messages of workers: what each one changes."""

from collections.abc import Iterator

from slipstream.runtime.coordinator.commit_log import CommitLog, CommitLogError
from slipstream.runtime.coordinator.commits import Commits
from slipstream.runtime.coordinator.coordinator import Coordinator
from slipstream.runtime.coordinator.news import News
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.coordinator.stall_watch import StallWatch
from slipstream.runtime.coordinator.worker_connections import WorkerConnections
from slipstream.runtime.errors import RunError
from slipstream.runtime.protocol.to_coordinator import (
    Checkpoints,
    Failed,
    FetchFailed,
    FetchUpToDate,
    Finished,
    Heartbeat,
    Injected,
    Leaving,
    Note,
    Paused,
    Ran,
    Ready,
    Saved,
    SpeedMeasured,
    Started,
    Status,
    ToCoordinator,
    Validated,
)
from slipstream.schedules.schedule import Worker


class WorkerMessages:
    """Handles what workers say that take part, or want to."""

    def __init__(self, run: Run, log: CommitLog, commits: Commits, coordinator: Coordinator, workers: WorkerConnections,
                 news: News, stall: StallWatch) -> None:
        self._run = run
        self._log = log
        self._commits = commits
        self._coordinator = coordinator
        self._workers = workers
        self._news = news
        self._stall = stall
        self._corpora: dict[str, Worker] = {}
        self.injected: dict[int, float] = {}
        """When each failure on purpose happened."""

    def handle(self, worker: Worker, message: ToCoordinator) -> None:
        """Handle a message. Raises CommitLogError, and RunError where a worker's error is all workers'."""
        coordinator = self._coordinator
        match message:
            case Heartbeat():
                pass
            case Ran():
                self._commit(self._log.ran(message))
                coordinator.ran(message)
            case Validated():
                self._commit(self._log.validated(message.order, message.factor))
            case Started():
                recovery = coordinator.started(message)
                if recovery is not None:
                    self._run.notify(recovery)
            case Paused():
                if message.validated is not None:
                    self._commit(self._log.validated(message.order, message.validated))
                coordinator.paused(message)
            case FetchUpToDate():
                coordinator.fetch_up_to_date(message)
            case FetchFailed():
                coordinator.fetch_failed(message)
            case Finished():
                coordinator.finished(message)
            case Ready():
                self._compare_corpus(message)
                self._news.ready(message)
                self._workers.ready(worker)
                coordinator.ready(message)
            case Saved():
                self._news.saved(message)
            case Note():
                self._news.note(message.text)
            case Injected():
                self.injected[message.index] = message.at
            case SpeedMeasured():
                coordinator.speed_measured(message)
            case Status():
                self._stall.answered(message)
            case Checkpoints():
                coordinator.can_read(message)
            case Leaving():
                coordinator.leaving(worker)
            case Failed(everywhere=True):
                raise RunError(message.reason)
            case Failed():
                self._workers.fail(worker, message.reason)

    def failed_on_purpose(self, worker: Worker) -> list[float]:
        """When that happened to a worker."""
        return [at for index, at in self.injected.items() if self._run.injections[index].worker == worker]

    def _commit(self, iterations: Iterator[tuple[int, float]]) -> None:
        if self._commits.committed(iterations, self._coordinator):
            self._stall.progressed()

    def _compare_corpus(self, report: Ready) -> None:
        self._corpora.setdefault(report.corpus, report.worker)
        if len(self._corpora) > 1:
            raise CommitLogError(f"workers {' and '.join(map(str, self._corpora.values()))} read different texts, or "
                                 "know other costs of samples; give every node the same [training] and data")
