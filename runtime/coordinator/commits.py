"""What follows when iterations are committed, or no longer are: lines in files, processes that come back, decisions."""

import math
from collections.abc import Iterator

from slipstream.runtime.coordinator.commit_log import CommitLog
from slipstream.runtime.coordinator.coordinator import Coordinator
from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.coordinator.loss_file import LossFile
from slipstream.runtime.coordinator.news import News
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.coordinator.take_over import Found
from slipstream.runtime.processes.process_manager import ProcessManager


class Commits:
    """Tells all who must know."""

    def __init__(self, run: Run, log: CommitLog, losses: LossFile, event_log: EventLog, news: News,
                 processes: ProcessManager) -> None:
        self._run = run
        self._log = log
        self._losses = losses
        self._event_log = event_log
        self._news = news
        self._processes = processes

    def committed(self, iterations: Iterator[tuple[int, float]], coordinator: Coordinator) -> bool:
        """Iterations are committed, with their losses. Whether there are any."""
        log, some = self._log, False
        for iteration, loss in iterations:
            self._losses.write(iteration, loss, log.period_seconds, self._event_log.now(), log.gradient_norm,
                               log.evaluation, log.cost_error)
            if log.evaluation is not None:
                self._run.notify(f"validation loss {log.evaluation:.6f} after {iteration + 1} iterations")
            self._processes.committed(iteration)
            coordinator.committed()
            some = True
        return some

    def go_back(self, iteration: int) -> None:
        """The run goes back to an iteration: those from it on are no longer committed."""
        self._losses.go_back(iteration)
        self._news.went_back(iteration)

    def take_over(self, found: Found) -> None:
        """Those of a coordinator that has died are those of this one. Each has a line, for another that may come."""
        first, count = self._run.setup.first_iteration, found.committed + 1
        losses = list(self._run.losses or ())[:count - first]
        unwritten = range(first + len(losses), count)
        unknown = len(unwritten) - (found.loss is not None)
        if unknown > 0:
            self._news.note(f"the losses of {unknown} iterations before {count} are not known: node 0 has been started "
                            "anew without the folder that holds them")
        self._losses.go_back(unwritten.start)
        for iteration in unwritten:
            losses.append(found.loss if iteration == found.committed and found.loss is not None else math.nan)
            self._losses.write(iteration, losses[-1], None, self._event_log.now())
        self._log.take_over(losses, found.factor)
        self._run.notify(f"node 0 goes on with the {len(found.holds)} workers that it has found; {count} iterations "
                         "are committed")
