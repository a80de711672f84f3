"""Show a run of `slipstream train`: progress, result, exit status; and restart node 0.

On node 0, `slipstream train` consists of two processes: one that leads the run, and its parent,
which only waits for it. When the leading process is killed, as for lack of memory, its workers live
on; the parent starts another one, which adopts them (`runtime.coordinator.decisions.failover`).
"""

import math
import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from slipstream.cli.shared.console import duration, err, exit_negative, refuse
from slipstream.cli.shared.summaries import run_time
from slipstream.planner.job.file import JobError
from slipstream.planner.model.problem import NoPlanError
from slipstream.runtime.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.config import ConfigError
from slipstream.runtime.coordinator.records.writer_thread import WriterThread
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import (
    LOSSES,
    Event,
    FetchAbandoned,
    FetchBegun,
    FetchProgressed,
    HandedOver,
    OrderGiven,
    Phase,
    Started,
)
from slipstream.runtime.launch import RestartLimit, RunResult
from slipstream.runtime.placement import PlacementError
from slipstream.runtime.processes.process_attributes import (
    name_process,
    request_parent_death_signal,
)
from slipstream.runtime.processes.stop_signals import SCHEDULER_SIGNALS, SIGNALS, RunStopped
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.run_folder import FolderError, read_takeover_record
from slipstream.schedules.codec import ScheduleError

RECENT_ITERATIONS = 10
"""Number of iterations over which the throughput is averaged."""


class RunProgress:
    """Progress of a run in numbers and as text, updated by its events and commits.

    Parameters
    ----------
    tokens
        Number of tokens in a sample; None if samples do not consist of tokens.
    """

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._workers = self._samples = self._live = self._iterations = self._done = 0
        self._fault_free: float | None = None
        self._planned: float | None = None
        self._phase: Phase | None = None
        self._fetched: float | None = None
        """Share of layers that the present fetch has copied; None if there is no fetch."""
        self._fetch = 0
        self._committed: deque[float] = deque(maxlen=RECENT_ITERATIONS + 1)
        """Times at which the last iterations of the present generation were committed."""

    def observe(self, event: Event) -> None:
        """Update totals, phase, live workers and copied layers by an event of the run."""
        match event:
            case Started():
                self._workers, self._samples, self._fault_free = (
                    event.workers,
                    event.samples,
                    event.fault_free_period,
                )
                self._iterations, self._done = event.iterations, event.iteration
            case OrderGiven():
                self._live, self._planned, self._phase, self._fetched = (
                    event.live,
                    event.planned_period,
                    event.phase,
                    None,
                )
                self._committed.clear()
            # Fetches of workers that return do not concern the others.
            case FetchBegun() if event.purpose == "settle":
                self._fetch, self._fetched = event.fetch, 0.0
            case FetchProgressed() if event.fetch == self._fetch and self._fetched is not None:
                self._fetched = event.share
            case FetchAbandoned() | HandedOver() if event.fetch == self._fetch:
                self._fetched = None

    def record_commit(self, iteration: int) -> None:
        """Record that an iteration was committed now."""
        self._done = iteration + 1
        self._committed.append(time.monotonic())

    @property
    def phase(self) -> str:
        """Phase of the run; while layers move, "settling" and the share fetched; "" at first."""
        return (
            f"settling {self._fetched:.0%}".replace("%", " %")
            if self._fetched is not None
            else self._phase or ""
        )

    @property
    def throughput(self) -> float | None:
        """Throughput of the last iterations, in tokens (or else samples) per second.

        The value is None until the present generation has committed two iterations.
        """
        seconds = self._iteration_seconds
        return None if seconds is None else (self._tokens or 1) * self._samples / seconds

    @property
    def seconds_left(self) -> float | None:
        """Time to the run's end at the speed of the last iterations; None if unknown."""
        seconds = self._iteration_seconds
        return None if seconds is None else seconds * (self._iterations - self._done)

    @property
    def _iteration_seconds(self) -> float | None:
        # Two commits bound one iteration; the time before a generation's first one is a recovery.
        if len(self._committed) < 2 or self._committed[-1] <= self._committed[0]:
            return None
        return (self._committed[-1] - self._committed[0]) / (len(self._committed) - 1)

    def __str__(self) -> str:
        if self._phase is None:
            return ""
        parts = [self.phase, f"{self._live} of {self._workers} workers"]
        rate, seconds_left = self.throughput, self.seconds_left
        unit = "samples/s" if self._tokens is None else "tokens/s"
        parts += [] if rate is None else [f"{_format_count(rate)} {unit}"]
        parts += [] if not seconds_left else [f"{run_time(seconds_left)} left"]
        if self._fault_free and self._planned:
            parts.append(f"planned {100 * self._fault_free / self._planned:.0f} % of fault-free")
        return ", ".join(parts)


def _format_count(number: float) -> str:
    """Format a number as an integer or, below 100, with three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


@dataclass(frozen=True, slots=True)
class ProgressDisplay:
    """Progress bar on stderr, and lines for iterations and changes, printed by a thread."""

    bar: Progress
    task: TaskID
    progress: RunProgress
    write: WriterThread

    def show_commit(self, iteration: int, loss: float) -> None:
        """Show a committed iteration, in a log with what the bar would show."""
        self.write(partial(self._print_commit, iteration, loss))

    def show_event(self, event: Event) -> None:
        """Update the progress bar after an event of the run."""
        self.write(partial(self._update_bar, event))

    def show_message(self, news: object) -> None:
        """Print `news`, about a change of workers or a problem, as a line."""
        self.write(lambda: self.bar.console.print(str(news), style="yellow", soft_wrap=True))

    def _print_commit(self, iteration: int, loss: float) -> None:
        self.progress.record_commit(iteration)
        self.bar.update(
            self.task, completed=iteration + 1, description=f"loss {loss:.4f}, {self.progress}"
        )
        state = f"  {self.progress}" if self.bar.disable else ""
        self.bar.console.print(f"iteration {iteration:>6}  loss {loss:.6f}{state}", soft_wrap=True)

    def _update_bar(self, event: Event) -> None:
        self.progress.observe(event)
        self.bar.update(self.task, description=str(self.progress) or None)


@contextmanager
def show_progress(iterations: int, tokens: int | None) -> Iterator[ProgressDisplay]:
    """Show a run's progress on stderr, and yield the display to report it to.

    The run has `iterations` in all; a sample has `tokens` tokens, or None if it has other content.
    """
    what = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)
    )
    # A narrow terminal cuts what comes last.
    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), what)
    with (
        Progress(
            *columns, console=err, transient=True, expand=True, disable=not err.is_terminal
        ) as bar,
        WriterThread() as write,
    ):
        if bar.disable:  # a log: the first iteration may be a minute away
            write(lambda: err.print("starting the workers"))
        yield ProgressDisplay(
            bar, bar.add_task("starting the workers", total=iterations), RunProgress(tokens), write
        )


@contextmanager
def call_in_thread(
    tell: Callable[..., object], complain: Callable[[str], None] = lambda _: None
) -> Iterator[Callable[..., None]]:
    """Yield a function that has `tell` called in a thread, without waiting for it.

    The end of the context waits for all calls, unless one hangs; then `complain` gets the errors of
    the thread.
    """
    with WriterThread(complain) as write:

        def call_later(*what: Any) -> None:
            write(partial(tell, *what))

        yield call_later


def build_answer(result: RunResult) -> dict[str, object]:
    """Return the JSON answer of `slipstream train`: times in seconds, losses None unless finite."""
    losses: list[float | None] = []
    for loss in result.losses:
        losses.append(loss if math.isfinite(loss) else None)
    return {
        "iterations": len(losses),
        "losses": losses,
        "parameter_digest": result.parameter_digest,
        "first_iteration": result.first_iteration,
        "recoveries": [
            {
                "iteration": recovery.iteration,
                "dead": list(map(str, recovery.dead)),
                "returned": list(map(str, recovery.returned)),
                "reasons": list(recovery.reasons),
                "live": recovery.live,
                "nodes": list(recovery.nodes),
                "seconds": recovery.seconds,
                "broken": recovery.broken,
                "commit_gap_seconds": recovery.commit_gap_seconds,
                "went_back_to": recovery.went_back_to,
                "repeated": recovery.repeated,
            }
            for recovery in result.recoveries
        ],
        "slow_workers": [
            {
                "worker": str(change.worker),
                "factor": change.factor,
                "since": change.since,
                "iteration": event.iteration,
                "left_out": change.worker in event.left_out,
                "rescheduled": event.changed,
                "planned_period_before": event.present_seconds,
                "planned_period": event.planned_seconds,
                "measured_period": seconds,
            }
            for event, seconds in zip(
                result.speed_events, result.speed_periods_seconds, strict=True
            )
            for change in event.changes
        ],
        "measured_period": result.measured_period_seconds,
        "planned_period": result.planned_period_seconds,
    }


def summary_text(result: RunResult) -> str:
    """Return a run's result in lines: losses, periods, changes of workers, where files are."""
    # A run that was done before has no losses of its own.
    lines = []
    if result.losses and result.measured_period_seconds is not None:
        count = len(result.losses)
        lines.append(
            f"{count} iteration{'s' * (count > 1)}, loss {result.losses[0]:.4f} -> "
            f"{result.losses[-1]:.4f}"
        )
        lines.append(
            f"period {duration(result.measured_period_seconds)} measured, "
            f"{duration(result.planned_period_seconds)} planned with the job file's times"
        )
    if result.recoveries:
        worst = max(recovery.seconds for recovery in result.recoveries)
        gap = max(recovery.commit_gap_seconds or 0.0 for recovery in result.recoveries)
        times = "once" if len(result.recoveries) == 1 else f"{len(result.recoveries)} times"
        lines.append(
            f"the workers changed {times}, the longest pause was {duration(worst)}"
            + (f"; at most {duration(gap)} from one committed iteration to the next" if gap else "")
        )
    lines.append(f"parameters {result.parameter_digest[:16]}, everything in {result.out}")
    return "\n".join(lines)


@contextmanager
def exit_on_errors(goes_on: Callable[[], str] = str, folder: Path | None = None) -> Iterator[None]:
    """Turn an error within the context into one line on stderr and an exit status.

    The status is 1 after RunError and NoPlanError, 128 + number after a signal, and 2 after errors
    of input and files. After the first two, the line ends with the result of `goes_on`, a clause on
    how to resume the run, but not after a Ctrl-C before or after the run. After a signal, it also
    says of how many iterations the run's `folder` has the training losses (None: it does not).
    """
    try:
        yield
    except (
        JobError,
        ConfigError,
        PlacementError,
        RendezvousError,
        CheckpointError,
        FolderError,
        ScheduleError,
    ) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or '--out'}: cannot be used: {error.strerror}")
    # These may come after the run has begun: what it has saved can be resumed.
    except (RunError, NoPlanError) as error:
        exit_negative(f"{error}{goes_on()}")
    except RunStopped as stopped:
        err.print(
            f"slipstream: {stopped}; all workers are gone{_describe_losses(folder)}{goes_on()}",
            style="yellow",
            soft_wrap=True,
        )
        raise typer.Exit(128 + stopped.number) from None
    # During a run, Ctrl-C is RunStopped; before and after it, there is nothing new to resume.
    except KeyboardInterrupt:
        err.print(
            f"slipstream: interrupted; all workers are gone{_describe_losses(folder)}",
            style="yellow",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None


def _describe_losses(folder: Path | None) -> str:
    """Return a clause on how many iterations' losses a run's folder has; "" for None."""
    if folder is None:
        return ""
    count = 0
    with suppress(OSError):
        count = (folder / LOSSES).read_bytes().count(b"\n")
    return (
        f", and {folder / LOSSES} has the losses of {count or 'no'} iteration{'s' * (count != 1)}"
    )


INTENTIONAL_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that a run does not handle, and after which it is not started again."""
PASSED_ON = set(SIGNALS)
"""Signals that the parent passes on to the process that leads the run."""


def fork_supervised(folder: Path, say: Callable[[str], None]) -> None:
    """Fork a child that leads the run in `folder`, and another if it is killed.

    The function returns in each child; the calling process waits, tells of each restart by `say`,
    and ends the way the last child ends. No other child is forked before the run has workers, after
    signals that ask the run to end, or after too many restarts. On systems other than Linux, where
    no process ends with its parent, nothing is forked, and the function returns at once.
    """
    if not sys.platform.startswith("linux"):
        return
    restarts, parent = RestartLimit(), os.getpid()
    name_process("node 0's watch", shlex.join(sys.argv[1:]))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    while True:
        child = os.fork()
        # The child must not outlive its parent, whose end would otherwise leave the run unseen.
        if not child:
            request_parent_death_signal(signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if os.getppid() != parent:
                os._exit(1)
            return
        status = _wait_for_child(child)
        if status >= 0:
            os._exit(status)
        # Told to end while it handled no signals, as at its very start or end.
        if -status in SIGNALS:
            os._exit(128 - status)
        # A signal that was meant ends the parent, too; so does one before the run had workers.
        pause = (
            None
            if -status in INTENTIONAL_SIGNALS or read_takeover_record(folder) is None
            else restarts.count_failure()
        )
        if pause is None:
            with suppress(OSError):  # signals that cannot be caught
                signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.kill(parent, -status)
            os._exit(128 - status)  # the first process of a container is not killed
        say(
            f"node 0 was killed by {signal.Signals(-status).name}, and is restarted; its workers "
            "are alive"
        )
        if (received := signal.sigtimedwait(PASSED_ON, pause)) is not None:
            os._exit(128 + received.si_signo)


def exit_on_signals() -> None:
    """Exit with status 128 + number at schedulers' signals, until a run handles them."""
    for number in SCHEDULER_SIGNALS:
        signal.signal(number, lambda received, _: os._exit(128 + received))


def _wait_for_child(child: int) -> int:
    """Return a child's exit status, or minus the number of the signal that killed it."""
    while True:
        # What a process sends to this one alone is passed on; a terminal's goes to both anyway.
        received = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= 0:
                os.kill(child, received.si_signo)
        elif (ended := os.waitpid(child, os.WNOHANG)) != (0, 0):
            return os.waitstatus_to_exitcode(ended[1])
