"""Messages between a fork server and its launcher: lines of JSON over a socket."""

import importlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec


class ProcessSpec(msgspec.Struct, frozen=True, tag=True):
    """Request to start a process."""

    name: str
    """Name that no other living process has."""
    target: str
    """`module:function` that is called with the task, and returns the exit status."""
    task: str
    log: str
    """Path of the file for the process's standard output and error."""
    append: bool = False
    """True if the log's present content is kept."""
    imports: tuple[str, ...] = ()
    """Modules that the server itself imports before it forks, because they take long."""


class KillProcess(msgspec.Struct, frozen=True, tag=True):
    """Request to kill a process, if it is alive."""

    name: str


class KillAll(msgspec.Struct, frozen=True, tag=True):
    """Request to kill all processes that have been forked until now."""


class HoldProcesses(msgspec.Struct, frozen=True, tag=True):
    """Request to keep the processes alive for `seconds` after the launcher's death."""

    name: str
    """Name of the socket at which another launcher takes the server over."""
    seconds: float
    note: str
    """Text for the launcher that takes over."""


class CleanUp(msgspec.Struct, frozen=True, tag=True):
    """Request to remove a path when the server ends without `EndServer`, as after a kill."""

    target: str
    """`module:function` that is called with the path, and removes it."""
    path: str


class EndServer(msgspec.Struct, frozen=True, tag=True):
    """Request to kill all processes and to end the server."""


class ServerAdopted(msgspec.Struct, frozen=True, tag=True):
    """First message to a launcher that takes over; a `ProcessStarted` for each process follows."""

    note: str
    """Text that the launcher before left for this one."""
    alive: tuple[str, ...]
    """Names of the processes that are alive."""


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """Report that a process has been forked."""

    name: str
    pid: int


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """Report that a process has ended."""

    name: str
    status: int
    """Exit code, or minus the number of the signal that killed the process."""


Request = ProcessSpec | KillProcess | KillAll | HoldProcesses | CleanUp | EndServer
ServerReport = ProcessStarted | ProcessEnded | ServerAdopted
decode_request: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
decode_report: Callable[[bytes], ServerReport] = msgspec.json.Decoder(ServerReport).decode


class LineReader:
    """Reader that splits the bytes from a socket into complete lines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.closed = False

    def read_lines(self) -> list[bytes]:
        """Read from the socket once, waiting if it is empty; return the lines now complete.

        At the end of the connection, `closed` becomes True.
        """
        try:
            data = os.read(self._descriptor, 65536)
        except ConnectionResetError:  # the other end has closed without reading all
            data = b""
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def get_peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at a Unix socket's other end (Linux)."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    user: int = struct.unpack("3i", credentials)[1]
    return user


def load_target(target: str) -> Callable[[Any], Any]:
    """Return the function that `module:function` names. Raises ImportError or AttributeError."""
    module, _, function = target.partition(":")
    loaded: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return loaded
