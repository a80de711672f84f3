"""What torch prints by itself is kept out of what users read."""

import shlex
import subprocess
import sys

import pytest

from tests import patience
from tests.runtime.running import command_environment

pytestmark = pytest.mark.slow

LOST_STORE = """
import subprocess, sys
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.store import connect_store
code = ("from slipstream.runtime.protocol.store import host_store as host; s, at = host()\\n"
        "print(at.port, flush=True); input()")
command, pipe = [sys.executable, "-c", code], subprocess.PIPE
server = subprocess.Popen(command, stdin=pipe, stdout=pipe)
store = connect_store(Rendezvous("127.0.0.1", int(server.stdout.readline())))
store.set("key", "value")
server.kill()
server.wait()
try:
    store.get("key")
except RuntimeError:
    print("lost")
"""


def test_a_store_that_is_gone_is_an_exception_and_no_page_of_frames():
    environment = command_environment()
    environment.pop("TORCH_CPP_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, "-c", LOST_STORE],
        capture_output=True,
        text=True,
        timeout=patience.SECONDS,
        env=environment,
    )
    assert (done.stdout, done.stderr) == ("lost\n", "")


NAMELESS = (
    "ip link set lo up && ip address add 10.77.0.1/32 dev lo && hostname nowhere && mount "
    "--bind /dev/null "
    "/etc/hosts && mount --bind /dev/null /etc/resolv.conf && exec "
)
"""Commands in namespaces of its own.

That machine knows the name of no machine, not even its own.
"""
MEETING = """
from datetime import timedelta
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
server, client = (TCPStore("10.77.0.1", 29500, is_master=master, wait_for_workers=False)
                  for master in (True, False))
ProcessGroupGloo(PrefixStore("0", client), 0, 1, timedelta(seconds=20))
"""


def nameless(code):
    environment = command_environment()
    environment.pop("TORCH_CPP_LOG_LEVEL", None)
    return subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--net",
            "--uts",
            "--mount",
            "sh",
            "-c",
            NAMELESS + shlex.join([sys.executable, "-c", code]),
        ],
        capture_output=True,
        text=True,
        timeout=patience.SECONDS,
        env=environment,
    )


@pytest.mark.parametrize("program", ["slipstream.runtime.api", "slipstream.cli.train"])
def test_without_a_name_server_nothing_is_said_of_names(program):
    try:
        torch_alone = nameless(MEETING)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if torch_alone.returncode:
        pytest.skip(f"no namespaces can be made here: {torch_alone.stderr.strip()}")
    assert "hostname of the client socket cannot be retrieved" in torch_alone.stderr
    done = nameless(f"import {program}" + MEETING)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
