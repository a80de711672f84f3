"""Started again: the process that leads a run, where a signal has ended it that nobody meant, as for want of memory.

`slipstream train` on node 0 is two processes: one that leads the run, and its parent, which does nothing but wait for
it. What has been killed leaves its workers alive, and the next one goes on with them
(`runtime.coordinator.decisions.failover`).
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.runtime.launch import Restarts
from slipstream.runtime.processes.parent_death import signal_at_death_of_parent
from slipstream.runtime.processes.process_title import name_process
from slipstream.runtime.processes.stop_signals import FROM_SCHEDULERS, SIGNALS
from slipstream.runtime.run_folder import left_behind

MEANT = (signal.SIGHUP, signal.SIGQUIT)
"""Further signals that tell a run to end."""
PASSED_ON = set(SIGNALS)


def started_again(folder: Path, say: Callable[[str], None]) -> None:
    """Return in a process of its own, once for each time that it is started; `folder` is that of the run.

    The process that calls this never returns: it ends as the last one of these does. Nothing happens on other systems
    than Linux, where no process ends with its parent.
    """
    if not sys.platform.startswith("linux"):
        return
    restarts, parent = Restarts(), os.getpid()
    name_process("node 0's watch", shlex.join(sys.argv[1:]))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    while True:
        child = os.fork()
        if not child:
            signal_at_death_of_parent(signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if os.getppid() != parent:
                os._exit(1)
            return
        status = _wait_for(child)
        if status >= 0:
            os._exit(status)
        if -status in SIGNALS:  # told to end while it took over no signals, as at its very beginning or end
            os._exit(128 - status)
        pause = None if -status in MEANT or left_behind(folder) is None else restarts.failed()
        if pause is None:
            with suppress(OSError):  # what cannot be caught
                signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.kill(parent, -status)
            os._exit(128 - status)  # the first process of a container is not killed
        say(f"node 0 was killed by {signal.Signals(-status).name}, and is started again; its workers live")
        if (told := signal.sigtimedwait(PASSED_ON, pause)) is not None:
            os._exit(128 + told.si_signo)


def end_with_status() -> None:
    """Have what schedulers send end this process with status 128 + N, while no run takes it over."""
    for number in FROM_SCHEDULERS:
        signal.signal(number, lambda told, _: os._exit(128 + told))


def _wait_for(child: int) -> int:
    """Its exit status, once it has ended. Until then it gets the signals that this process gets, but those of a
    terminal, which gives them to both."""
    while True:
        told = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        if told.si_signo != signal.SIGCHLD:
            if told.si_code <= 0:
                os.kill(child, told.si_signo)
        elif (ended := os.waitpid(child, os.WNOHANG)) != (0, 0):
            return os.waitstatus_to_exitcode(ended[1])
