"""Find node 0 by the key-value store that torchrun's processes share."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, DistStoreError

from slipstream.runtime.errors import first_line
from slipstream.runtime.processes.launch_environment import LaunchInfo
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError
from slipstream.runtime.protocol.store import connect_store
from slipstream.runtime.replay.torch_groups import TCPStore

PROGRESS_SECONDS = 30.0
"""Interval between the lines that a waiting node prints."""


def open_common_store(rank: int) -> TCPStore:
    """Open the key-value store at MASTER_ADDR, which torchrun's agent or rank 0 hosts.

    Without MASTER_ADDR and MASTER_PORT, the address is 127.0.0.1:29500. Raises DistError of torch
    if the store cannot be reached.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "29500")),
        is_master=rank == 0 and not agent,
        wait_for_workers=False,
        multi_tenant=True,
    )


def announce_node_0(here: LaunchInfo, opened: Rendezvous) -> None:
    """Put `opened`, where node 0 listens, into torchrun's store, if there is one.

    Raises RendezvousError if torchrun is gone.
    """
    if here.agent:
        assert here.master is not None
        try:
            connect_store(here.master).set(_store_key(here), str(opened))
        except DistError as error:
            raise RendezvousError(
                f"torchrun at {here.master} is gone: {first_line(error)}"
            ) from None


def find_node_0(
    here: LaunchInfo, timeout_seconds: float, waiting: Callable[[str], None] = lambda _: None
) -> Rendezvous:
    """Return the address where node 0 listens, from torchrun's store if there is one.

    Without such a store, return `here.master`, which must not be None. Until the address is in the
    store, `waiting` gets a line of text every 30 s. Raises RendezvousError if the address is not
    there after `timeout_seconds`, or cannot be read.
    """
    assert here.master is not None
    if not here.agent:
        return here.master
    deadline = time.monotonic() + timeout_seconds
    store = connect_store(here.master, timedelta(seconds=timeout_seconds))
    try:
        while not store.check([_store_key(here)]):
            waiting(f"waiting for node 0's address in torchrun's store at {here.master}")
            # Wait in short spans, to print lines between them.
            left = deadline - time.monotonic()
            with suppress(DistStoreError):
                store.wait(
                    [_store_key(here)], timedelta(seconds=max(0.001, min(left, PROGRESS_SECONDS)))
                )
            if left <= 0:
                raise RendezvousError(
                    f"node 0 has not put its address into torchrun's store at {here.master} in "
                    f"{timeout_seconds:.0f} s"
                )
        return Rendezvous.parse(store.get(_store_key(here)).decode())
    except (DistError, ValueError) as error:
        raise RendezvousError(
            f"cannot read node 0's address from torchrun's store at {here.master}: "
            f"{first_line(error)}"
        ) from None


def _store_key(here: LaunchInfo) -> str:
    return f"slipstream/{here.attempt}"
