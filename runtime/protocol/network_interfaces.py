"""Choose the network interface by which workers pass tensors and layers to each other.

GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME may name the interface; the default is the one by which
this machine reaches node 0. Gloo's own default is the address of the host's name, which on many
machines other machines cannot reach.
"""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from slipstream.runtime.protocol.rendezvous import Rendezvous

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
"""Variable that names NCCL's interfaces: by prefix, as `=NAME`, or excluded as `^PREFIX`."""
_IPV6 = Path("/proc/net/if_inet6")
_GET_ADDRESS = 0x8915
"""Request code SIOCGIFADDR of Linux."""


class Interface(NamedTuple):
    """Network interface of this machine, and one of its addresses."""

    name: str
    address: str


def find_address_towards(rendezvous: Rendezvous) -> str:
    """Return this machine's address towards node 0. Raises OSError if no way there is found."""
    first: OSError | None = None
    for family, kind, _, _, address in socket.getaddrinfo(
        rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind) as probe:
            try:
                # Connecting a datagram socket sends nothing: the system only chooses the way.
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                first = first or error
    raise first or OSError(f"{rendezvous.host} has no address")


def configure_interface(
    rendezvous: Rendezvous, environment: MutableMapping[str, str] = os.environ
) -> str:
    """Make gloo and NCCL use one network interface, and return its address.

    `environment` is set, unless it names interfaces already. If none is found, gloo's variable
    becomes empty, and the address is that towards node 0. Raises OSError as `find_address_towards`
    does.
    """
    towards = find_address_towards(rendezvous)
    chosen = choose_interface(list_interfaces(), environment, towards)
    name = "" if chosen is None else chosen.name
    environment.setdefault(GLOO_VARIABLE, name)
    if name:
        # Without the sign NCCL takes the first with this prefix.
        environment.setdefault(NCCL_VARIABLE, f"={name}")
    return towards if chosen is None else chosen.address


def choose_interface(
    interfaces: Iterable[Interface], environment: Mapping[str, str], towards: str
) -> Interface | None:
    """Return the interface that gloo's variable names, else NCCL's, else that of `towards`.

    `towards` is one of this machine's addresses, and its interface the one that has it. Of an
    interface with several addresses, one of the same family is preferred. Names that no interface
    has are skipped. Returns None if there is no such interface.
    """
    # Those of that family first: an IPv6 address has colons.
    interfaces = sorted(
        interfaces, key=lambda interface: (":" in interface.address) != (":" in towards)
    )
    # Gloo takes whole names. NCCL takes prefixes, whole names after `=`, or exclusions after `^`.
    exact = environment.get(GLOO_VARIABLE, "").split(",")
    by_nccl = environment.get(NCCL_VARIABLE, "")
    prefixes = [] if by_nccl.startswith("^") else by_nccl.removeprefix("=").split(",")
    for name in filter(None, exact):
        for interface in interfaces:
            if interface.name == name:
                return interface
    for prefix in filter(None, prefixes):
        for interface in interfaces:
            if interface.name == prefix or (
                not by_nccl.startswith("=") and interface.name.startswith(prefix)
            ):
                return interface
    return next((interface for interface in interfaces if interface.address == towards), None)


def list_interfaces() -> list[Interface]:
    """Return this machine's interfaces with their addresses; none except on Linux.

    These are one IPv4 address per interface, and all IPv6 ones that are not link-local.
    """
    interfaces: list[Interface] = []
    if not sys.platform.startswith("linux"):
        return interfaces
    import fcntl

    # IPv4: the standard library lists names alone, so each address is asked for.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(
                    probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15])
                )
                interfaces.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    # IPv6: the kernel lists all addresses in a file, which is missing without IPv6.
    with contextlib.suppress(OSError):
        for line in _IPV6.read_text(encoding="utf-8").splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if not address.is_link_local:
                interfaces.append(Interface(name, str(address)))
    return interfaces
