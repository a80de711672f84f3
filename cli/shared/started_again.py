"""Started again: the process that leads a run, where a signal has ended it that nobody meant, as for want of memory.

`slipstream train` on node 0 is two processes: one that leads the run, and its parent, which does nothing but wait for
it. What has been killed leaves its workers alive, and the next one goes on with them (`runtime.coordinator.take_over`).
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.runtime.launch import Restarts
from slipstream.runtime.processes.parent_death import signal_at_death_of_parent
from slipstream.runtime.run_folder import left_behind

MEANT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that tell a run to end."""


def started_again(folder: Path, say: Callable[[str], None]) -> None:
    """Return in a process of its own, once for each time that it is started; `folder` is that of the run.

    The process that calls this never returns: it ends as the last one of these does. Nothing happens on other systems
    than Linux, where no process ends with its parent.
    """
    if not sys.platform.startswith("linux"):
        return
    restarts, parent, child = Restarts(), os.getpid(), 0

    def pass_on(number: int, _: object) -> None:
        if child:
            os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in MEANT[:2]}
    while True:
        child = os.fork()
        if not child:
            signal_at_death_of_parent(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)
            if os.getppid() != parent:
                os._exit(1)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        if status >= 0:
            os._exit(status)
        killer = signal.Signals(-status)
        pause = None if killer in MEANT or left_behind(folder) is None else restarts.failed()
        if pause is None:
            signal.signal(killer, signal.SIG_DFL)
            os.kill(parent, killer)
        else:
            say(f"node 0 was killed by {killer.name}, and is started again; its workers live")
            time.sleep(pause)
