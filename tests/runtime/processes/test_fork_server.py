"""The fork server outlives nobody, and says nothing when it goes."""

import subprocess
import sys

from tests.runtime.running import command_environment

KILLED = """
import os, signal, sys
from runtime.processes.fork_server import ForkServer, ProcessSpec
server = ForkServer()
for name in "abc":
    server.start(ProcessSpec(name, "time:sleep", "", os.devnull))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_dies_while_processes_are_started_leaves_neither_them_nor_a_traceback():
    """Their standard error is this pipe: it ends when the last of them has."""
    done = subprocess.run([sys.executable, "-c", KILLED], env=command_environment(), stderr=subprocess.PIPE, text=True,
                          timeout=60, check=False)
    assert done.returncode == -9 and done.stderr == ""
