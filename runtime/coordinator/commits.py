"""What follows when iterations are committed, or no longer are: lines in files, processes that come back."""

import math

from slipstream.runtime.coordinator.commit_log import Committed
from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.coordinator.loss_file import LossFile
from slipstream.runtime.coordinator.news import News
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.coordinator.take_over import Found
from slipstream.runtime.processes.process_manager import ProcessManager


class Commits:
    """Tells all who must know."""

    def __init__(self, run: Run, losses: LossFile, event_log: EventLog, news: News, processes: ProcessManager) -> None:
        self._run = run
        self._losses = losses
        self._event_log = event_log
        self._news = news
        self._processes = processes

    def committed(self, one: Committed) -> None:
        """An iteration is. Raises ForkServerError."""
        self._event_log.iteration = one.iteration + 1
        self._losses.write(one.iteration, one.loss, one.window_seconds, self._event_log.now(), one.gradient_norm,
                           one.evaluation, one.cost_error)
        if one.evaluation is not None:
            self._run.notify(f"validation loss {one.evaluation:.6f} after {one.iteration + 1} iterations")
        self._processes.committed(one.iteration)

    def go_back(self, iteration: int) -> None:
        """The run goes back to an iteration: those from it on are no longer committed."""
        self._event_log.iteration = iteration
        self._losses.go_back(iteration)
        self._news.went_back(iteration)

    def take_over(self, found: Found) -> None:
        """Those of a coordinator that has died are those of this one. Each has a line, for another that may come."""
        count = self._event_log.iteration = found.committed + 1
        losses = found.losses[len(found.losses) - len(found.unwritten):]
        if unknown := sum(map(math.isnan, losses)):
            self._news.note(f"the losses of {unknown} iterations before {count} are not known: node 0 has been started "
                            "anew without the folder that holds them")
        self._losses.go_back(found.unwritten.start)
        for iteration, loss in zip(found.unwritten, losses, strict=True):
            self._losses.write(iteration, loss, None, self._event_log.now())
        self._run.notify(f"node 0 goes on with the {len(found.holds)} workers that it has found; {count} iterations "
                         "are committed")
