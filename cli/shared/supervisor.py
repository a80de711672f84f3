"""Supervise the process that leads a run, and restart it after an unintended signal, as for lack of memory.

On node 0, `slipstream train` consists of two processes: one that leads the run, and its parent, which only waits for
it. When the leading process is killed, its workers live on, and the next one adopts them
(`runtime.coordinator.decisions.failover`).
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.runtime.launch import RestartLimit
from slipstream.runtime.processes.parent_death import request_parent_death_signal
from slipstream.runtime.processes.process_title import name_process
from slipstream.runtime.processes.stop_signals import SCHEDULER_SIGNALS, SIGNALS
from slipstream.runtime.run_folder import read_takeover_record

INTENTIONAL_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)
"""Signals, besides those that a run handles, that end it intentionally, so that it is not restarted."""
PASSED_ON = set(SIGNALS)


def fork_supervised(folder: Path, say: Callable[[str], None]) -> None:
    """Fork a child that leads the run in `folder`, restart it when it is killed, and report each restart by `say`.

    This function returns only in the child, once for each start. The calling process never returns: it ends the way the
    last child ended. On systems other than Linux, where no process ends with its parent, nothing is forked and the
    function returns at once.
    """
    if not sys.platform.startswith("linux"):
        return
    restarts, parent = RestartLimit(), os.getpid()
    name_process("node 0's watch", shlex.join(sys.argv[1:]))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    while True:
        child = os.fork()
        if not child:
            request_parent_death_signal(signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if os.getppid() != parent:
                os._exit(1)
            return
        status = _wait_for_child(child)
        if status >= 0:
            os._exit(status)
        if -status in SIGNALS:  # told to end while it handled no signals, as at its very start or end
            os._exit(128 - status)
        pause = None if -status in INTENTIONAL_SIGNALS or read_takeover_record(folder) is None \
            else restarts.count_failure()
        if pause is None:
            with suppress(OSError):  # signals that cannot be caught
                signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.kill(parent, -status)
            os._exit(128 - status)  # the first process of a container is not killed
        say(f"node 0 was killed by {signal.Signals(-status).name}, and is restarted; its workers are alive")
        if (received := signal.sigtimedwait(PASSED_ON, pause)) is not None:
            os._exit(128 + received.si_signo)


def exit_on_signals() -> None:
    """Make signals that schedulers send end this process with status 128 plus the signal's number, until a run takes
    over their handling."""
    for number in SCHEDULER_SIGNALS:
        signal.signal(number, lambda received, _: os._exit(128 + received))


def _wait_for_child(child: int) -> int:
    """Return the exit status of a child once it has ended, or minus the number of the signal that killed it.

    Until then, signals to this process are passed on to the child, except those of a terminal, which reach both anyway.
    """
    while True:
        received = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= 0:
                os.kill(child, received.si_signo)
        elif (ended := os.waitpid(child, os.WNOHANG)) != (0, 0):
            return os.waitstatus_to_exitcode(ended[1])
