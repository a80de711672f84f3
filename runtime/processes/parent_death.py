"""The death of a process's parent, of which only Linux tells."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def signal_at_death_of_parent(number: signal.Signals) -> None:
    """Have the system send this process a signal when its parent dies, where it can do that (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
