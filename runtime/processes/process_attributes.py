"""Set this process's name, and the signal that it gets when its parent dies."""

import contextlib
import ctypes
import signal
import sys
from pathlib import Path

PROGRAM = "slipstream"
PR_SET_NAME = 15
_ARGUMENTS_START = 45
"""Field of /proc/self/stat, after the name, with the address where the arguments start."""
_ARGUMENTS_END = 46
"""Field of /proc/self/stat, after the name, with the address where the arguments end."""


def name_process(role: str, details: str = "") -> None:
    """Set the title that ps shows, `slipstream ROLE: DETAILS` (Linux only).

    It is cut to the length of the process's arguments. As the name that top shows, ROLE is set,
    with hyphens for spaces, of which Linux keeps 15 bytes.
    """
    if not sys.platform.startswith("linux"):
        return
    title = f"{PROGRAM} {role}" + (f": {details}" if details else "")
    # Hyphens, not spaces: programs that split /proc/PID/stat at spaces would not find the parent of
    # this process. SLURM's proctrack/linuxproc is one: it would neither signal nor kill it.
    ctypes.CDLL(None).prctl(PR_SET_NAME, role.replace(" ", "-").encode())
    # ps and nvidia-smi show the arguments: overwrite them in memory, no longer than they were.
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
        if 0 < start < end:
            ctypes.memmove(
                start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start
            )


PR_SET_PDEATHSIG = 1


def request_parent_death_signal(number: signal.Signals) -> None:
    """Have the system send this process a signal when its parent dies (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
