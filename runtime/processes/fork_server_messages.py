"""What a fork server and its launcher say to each other: lines of JSON, over a socket of the same user."""

import importlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec


class ProcessSpec(msgspec.Struct, frozen=True, tag=True):
    """A process to be started."""

    name: str
    """No other that lives has it."""
    target: str
    """`module:function`, called with the task's bytes; what it returns is the exit status."""
    task: str
    log: str
    """Where the process's standard output and error go."""
    append: bool = False
    """Whether what the log holds already stays."""
    imports: tuple[str, ...] = ()
    """Modules of this program that take long to import: the server does so once for all."""


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a process, if it lives."""

    name: str


class KillAll(msgspec.Struct, frozen=True, tag=True):
    """Kill the processes that were forked until now."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Should the launcher die, wait for another one that connects to a socket, and give it a note."""

    name: str
    seconds: float
    note: str


class CleanUp(msgspec.Struct, frozen=True, tag=True):
    """Remove something when the server ends without having been told to: its launcher has been killed."""

    target: str
    """`module:function`, called with the path. It finds out whether anybody uses that."""
    path: str


class End(msgspec.Struct, frozen=True, tag=True):
    """Kill all, and end."""


class Adopted(msgspec.Struct, frozen=True, tag=True):
    """The first news to a launcher that has taken over; those that live follow, each as started."""

    note: str
    alive: tuple[str, ...]


class Started(msgspec.Struct, frozen=True, tag=True):
    """A process has begun."""

    name: str
    pid: int


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """A process is gone."""

    name: str
    status: int
    """As in subprocess, the exit code or minus the signal."""


Request = ProcessSpec | Kill | KillAll | Hold | CleanUp | End
News = Started | ProcessEnded | Adopted
decode_request: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
decode_news: Callable[[bytes], News] = msgspec.json.Decoder(News).decode


class Lines:
    """Whole lines from a socket, as they come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.closed = False

    def read(self) -> list[bytes]:
        """Read once; blocks unless the socket is ready."""
        try:
            data = os.read(self._descriptor, 65536)
        except ConnectionResetError:  # the other end is gone, and has not read all
            data = b""
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def user_of(connection: socket.socket) -> int:
    """Who is at the other end of a Unix socket (Linux)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def load_target(target: str) -> Callable[[Any], Any]:
    """What `module:function` names."""
    module, _, function = target.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return found
