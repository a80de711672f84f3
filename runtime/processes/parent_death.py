"""Ask the system for a signal when the parent process dies, which only Linux offers."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def request_parent_death_signal(number: signal.Signals) -> None:
    """Ask the system to send this process a signal when its parent dies. Does nothing on systems other than Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
