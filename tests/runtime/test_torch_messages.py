"""What torch prints by itself is kept out of what users read."""

import subprocess
import sys

from tests.runtime.running import command_environment

LOST_STORE = """
import subprocess, sys
from runtime.protocol.rendezvous import Rendezvous, connect_store
code = "from runtime.protocol.rendezvous import host_store as host; s, at = host(); print(at.port, flush=True); input()"
server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
    done = subprocess.run([sys.executable, "-c", LOST_STORE], capture_output=True, text=True, timeout=100,
                          env=environment)
    assert (done.stdout, done.stderr) == ("lost\n", "")
