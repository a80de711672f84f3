"""Define the address at which node 0 listens, and listen there."""

import errno
import os
import socket

import msgspec

from slipstream.runtime.errors import describe_reason

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
"""Number of connections that may wait to be accepted: all workers connect at once."""


class RendezvousError(RuntimeError):
    """Error, in one line: this process cannot listen or connect, or has lost its connection."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Address at which node 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Rendezvous":
        """Parse `HOST:PORT`, the port above 0. Otherwise raises ValueError that names the text."""
        host, colon, port = text.rpartition(":")
        # IPv6 addresses may stand in brackets, as in URLs.
        host = host.strip("[]")
        if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(
                f"{text!r} is not an address: write HOST:PORT, for example 10.0.0.1:29500"
            )
        return cls(host, int(port))


def open_listener(rendezvous: Rendezvous | None = None) -> tuple[socket.socket, Rendezvous]:
    """Listen, by default at a free loopback port; return the socket and the address.

    Port 0 stands for any free port. Raises RendezvousError if this process cannot listen there.
    """
    requested = rendezvous or Rendezvous(LOOPBACK, 0)
    try:
        listener = _listen_at_first_address(requested)
    except OSError as error:
        raise RendezvousError(f"cannot listen at {requested}: {describe_reason(error)}") from None
    # Port 0 stands for any free one; the socket knows which one it got.
    return listener, Rendezvous(requested.host, listener.getsockname()[1])


def _listen_at_first_address(wanted: Rendezvous) -> socket.socket:
    """Return a socket at the first of the host's addresses that this machine has."""
    first: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(
        wanted.host, wanted.port, type=socket.SOCK_STREAM
    ):
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            # If all addresses fail, the first error is the most likely reason.
            first = first or error
    raise first or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
