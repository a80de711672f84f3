"""The coordinator's address, and torch's key-value store, which holds the addresses of process groups."""

import contextlib
import socket
import struct
import sys
from datetime import timedelta

import msgspec
from torch.distributed import DistError

from slipstream.runtime.errors import reason_of
from slipstream.runtime.torch_private import TCPStore

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
BACKLOG = 4096
"""Connections that may wait to be accepted: all workers come at once."""


class RendezvousError(RuntimeError):
    """Nobody can listen at an address, or node 0 cannot be reached there, or is gone. The message is one line."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where node 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Rendezvous":
        """Read `HOST:PORT`. Raises ValueError that names the text."""
        host, colon, port = text.rpartition(":")
        host = host.strip("[]")
        if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"{text!r} is not an address: write HOST:PORT, for example 10.0.0.1:29500")
        return cls(host, int(port))


def listen(rendezvous: Rendezvous | None = None) -> tuple[socket.socket, Rendezvous]:
    """Open the coordinator's listening socket, on a free port of loopback unless told otherwise.

    Raises RendezvousError.
    """
    wanted = rendezvous or Rendezvous(LOOPBACK, 0)
    family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
    try:
        listener = socket.create_server((wanted.host, wanted.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RendezvousError(f"cannot listen at {wanted}: {reason_of(error)}") from None
    return listener, Rendezvous(wanted.host, listener.getsockname()[1])


def host_store(rendezvous: Rendezvous | None = None) -> tuple[TCPStore, Rendezvous]:
    """Open torch's key-value store, on a free port of loopback unless told otherwise. Raises RendezvousError."""
    listener, opened = listen(rendezvous)
    try:
        return TCPStore(opened.host, opened.port, is_master=True, wait_for_workers=False, timeout=TIMEOUT,
                        master_listen_fd=listener.detach()), opened
    except DistError as error:
        raise RendezvousError(f"cannot listen at {opened}: {reason_of(error)}") from None


def connect_store(rendezvous: Rendezvous, timeout: timedelta = TIMEOUT) -> TCPStore:
    """Reach a key-value store, waiting for it to open. Raises RendezvousError."""
    try:
        return TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)
    except DistError as error:
        raise RendezvousError(f"cannot reach torch's store at {rendezvous} within {timeout.total_seconds():.0f} s: "
                              f"{reason_of(error)}") from None


def address_towards(rendezvous: Rendezvous) -> str:
    """This machine's address on the network of node 0, where other workers reach it. Raises OSError."""
    family = socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, rendezvous.port))
        return str(probe.getsockname()[0])


def interface_towards(rendezvous: Rendezvous) -> str | None:
    """The network interface by which this machine reaches node 0; None where it cannot be told.

    Gloo by default listens on the address of the host's name, which on many machines other machines cannot reach.
    """
    if not sys.platform.startswith("linux") or ":" in rendezvous.host:
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = socket.inet_aton(address_towards(rendezvous))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24] == address:  # SIOCGIFADDR
                    return name
    return None
