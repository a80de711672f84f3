"""Open and reach torch's key-value store, in which members of process groups find each other."""

from datetime import timedelta

from torch.distributed import DistError

from slipstream.runtime.errors import describe_reason
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError, open_listener
from slipstream.runtime.replay.torch_groups import TCPStore

CONNECT_TIMEOUT = timedelta(seconds=60)


def host_store(rendezvous: Rendezvous | None = None) -> tuple[TCPStore, Rendezvous]:
    """Open torch's key-value store in this process; return it and its address.

    The store listens at `rendezvous`, by default at a free port on loopback. Raises
    RendezvousError if it cannot listen there.
    """
    listener, opened = open_listener(rendezvous)
    # torch takes over the open listener, so no other program can get the port in between.
    try:
        return TCPStore(
            opened.host,
            opened.port,
            is_master=True,
            wait_for_workers=False,
            timeout=CONNECT_TIMEOUT,
            master_listen_fd=listener.detach(),
        ), opened
    except DistError as error:
        raise RendezvousError(f"cannot listen at {opened}: {describe_reason(error)}") from None


def connect_store(rendezvous: Rendezvous, timeout: timedelta = CONNECT_TIMEOUT) -> TCPStore:
    """Connect to a key-value store, and wait up to `timeout` for it to open.

    `timeout` also limits later waits for a key. Raises RendezvousError if the store does not open.
    """
    try:
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
    except DistError as error:
        raise RendezvousError(
            f"cannot reach torch's store at {rendezvous} within {timeout.total_seconds():.0f} s: "
            f"{describe_reason(error)}"
        ) from None
