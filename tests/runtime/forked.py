"""Fork servers for tests that need one of their own.

They are forked where torch is imported already, in milliseconds.
"""

import gc
import os
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from slipstream.runtime.processes.fork_server import (
    AdoptedForkServer,
    ForkServer,
    build_environment,
)
from slipstream.runtime.processes.fork_server_messages import ServerAdopted
from slipstream.runtime.processes.stop_signals import SCHEDULER_SIGNALS
from slipstream.runtime.worker.fork_server_process import _Server
from tests.runtime.launchers import START_SECONDS, Launcher

HIGHEST = 4096
"""Above all descriptors of a launcher."""


class Where(msgspec.Struct):
    """What a fork server finds when it starts."""

    address: str
    environment: dict[str, str]
    folder: str


class ForkedServer(AdoptedForkServer):
    """Forked by the servant of all launchers.

    It has this process's environment and working directory of now.
    """

    def __init__(self, *imports: str) -> None:
        name = f"slipstream-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}-test")
            listener.listen(1)
            listener.settimeout(START_SECONDS)
            task = Where(f"{name}-test", build_environment(), str(Path.cwd()))
            self._process = Launcher(
                f"{__name__}:connect",
                msgspec.json.encode(task).decode(),
                log=os.devnull,
                imports=imports,
            )
            connection, _ = listener.accept()
        connection.setblocking(True)
        super().__init__(connection, name)


def own_fork_server(*imports: str) -> ForkServer:
    """One for a test of its own. It has imported these modules, so that not each worker must."""
    return ForkedServer(*imports) if sys.platform.startswith("linux") else ForkServer()


def connect(task: str) -> None:
    """In the process of a `ForkedServer`."""
    where = msgspec.json.decode(task, type=Where)
    os.environ.clear()
    os.environ.update(where.environment)
    os.chdir(where.folder)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{where.address}")
    serve(connection)


def fork_server_of_launcher() -> ForkServer:
    """For a launcher that is itself forked: it has torch, and one thread.

    It ends as one that was started does.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return ForkServer()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            os.setsid()
            # With those, the launcher would not be seen to have died.
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, HIGHEST)
            serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return AdoptedForkServer(ours, f"slipstream-{secrets.token_hex(16)}")


def serve(connection: socket.socket) -> None:
    """Be a fork server, at the other end of a connection, to the end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_SIGNALS)
    os.dup2(connection.fileno(), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    connection.close()
    os.write(0, msgspec.json.encode(ServerAdopted("", ())) + b"\n")
    gc.freeze()
    _Server().serve()
    os._exit(0)
