"""Starting by torchrun, srun, mpirun or variables set by hand: which node this is, how many there are, where node 0 is.

Each process that is started so becomes a *node* of `runtime.launch`, with its share of the workers: one worker where
there are as many processes as workers. The node's process outlives its workers, and can start them again.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, DistStoreError

from slipstream.runtime.errors import first_line
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError, connect_store

TELL_SECONDS = 30.0
"""How often a node that waits says so."""
DEFAULT_PORT = 29500
"""torch's own; only where MASTER_PORT is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProcess:
    """Which of the processes of its machine, which share the GPUs, this one is."""

    rank: int = 0
    processes: int = 1


ALONE = LocalProcess()


class GpuShare(NamedTuple):
    """The GPUs of a machine that one process may use."""

    first: int
    """Those before it belong to the workers of other processes."""
    workers: int
    """Of all processes of the machine: as many GPUs are needed for each worker to have one of its own."""


def gpu_share(shares: Sequence[int], node: int, local: LocalProcess) -> GpuShare:
    """Which GPUs the workers of a node take; `shares` is the number of workers of each node.

    The processes of a machine are taken to be neighbours in rank, as torchrun, srun and mpirun start them by default.
    """
    first = max(0, node - local.rank)
    return GpuShare(sum(shares[first:node]), sum(shares[first:first + local.processes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What torchrun, srun, mpirun or a user have set for this process; by default, it is alone."""

    node: int = 0
    nodes: int = 1
    local: LocalProcess = ALONE
    master: Rendezvous | None = None
    """Node 0's address. Node 0 listens at its port, unless torchrun's agent does (`agent`); None: one node alone.
    """
    agent: bool = False
    """Whether torchrun's store is there, which holds the address where node 0 listens."""
    tied: bool = False
    """Whether it was started by an agent of torchrun or a daemon of mpirun: one that is killed tells nobody."""
    attempt: str = "0"
    """Which of torchrun's attempts to run this is."""


_MOST = 2**20
"""Processes of a run."""
_SLURM_COUNT = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,5})\))?")
_FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables of torchrun and those who write its names by hand, of mpirun (Open MPI), and of srun. The first that are
there count: within SLURM, mpirun starts a daemon on each machine by srun, and processes inherit the daemon's variables.
"""


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """What the environment says; None where it names no process, or one alone.

    Raises ValueError that names the variable that is missing or makes no sense.
    """
    for rank, size, local_rank, local_size in _FAMILIES:
        if rank not in environment or size not in environment:
            continue
        nodes = _number(environment, size, 1, _MOST)
        if nodes == 1:
            continue
        host = environment.get("MASTER_ADDR")
        if not host:
            raise ValueError(f"{rank} and {size} say that this is one of {nodes} processes: set MASTER_ADDR to the "
                             "address of the first one, or say --nodes 1")
        master = Rendezvous(host, _number(environment, "MASTER_PORT", 1, 2**16 - 1, DEFAULT_PORT))
        index = _number(environment, local_rank, 0, nodes - 1, 0)
        beside = max(index + 1, _local_size(environment, local_size))
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Launched(node=_number(environment, rank, 0, nodes - 1), nodes=nodes,
                        local=LocalProcess(rank=index, processes=beside), master=master, agent=agent,
                        tied=agent or rank.startswith("OMPI"),
                        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return None


def of_ranks(here: Launched, ranks: int) -> Launched | None:
    """The node that so many neighbouring processes are, which were started for one worker: the first of them is it, and
    starts all ranks of the worker; None: this is another one, with nothing to do.

    Raises ValueError where they cannot be workers whose ranks are on one machine.
    """
    if here.nodes % ranks or here.local.processes % ranks:
        raise ValueError(f"{here.nodes} processes were started, {here.local.processes} of them on this machine; "
                         f"expected a multiple of --ranks-per-worker, {ranks}, on each")
    node, rank = divmod(here.node, ranks)
    local = LocalProcess(rank=here.local.rank // ranks, processes=here.local.processes // ranks)
    return None if rank else replace(here, node=node, nodes=here.nodes // ranks, local=local)


def announce(here: Launched, opened: Rendezvous) -> None:
    """Put node 0's address into torchrun's store, where there is one. Raises RendezvousError."""
    if here.agent:
        assert here.master is not None
        try:
            connect_store(here.master).set(_key(here), str(opened))
        except DistError as error:
            raise RendezvousError(f"torchrun at {here.master} is gone: {first_line(error)}") from None


def find(here: Launched, timeout_seconds: float, waiting: Callable[[str], None] = lambda _: None) -> Rendezvous:
    """Where node 0 listens, once it does; `waiting` is called now and then until then. Raises RendezvousError."""
    assert here.master is not None
    if not here.agent:
        return here.master
    deadline = time.monotonic() + timeout_seconds
    store = connect_store(here.master, timedelta(seconds=timeout_seconds))
    try:
        while not store.check([_key(here)]):
            waiting(f"waiting for node 0 to say to torchrun at {here.master} where it is")
            left = deadline - time.monotonic()
            with suppress(DistStoreError):
                store.wait([_key(here)], timedelta(seconds=max(0.001, min(left, TELL_SECONDS))))
            if left <= 0:
                raise RendezvousError(f"node 0 has not said to torchrun at {here.master} where it is, in "
                                      f"{timeout_seconds:.0f} s")
        return Rendezvous.parse(store.get(_key(here)).decode())
    except (DistError, ValueError) as error:
        raise RendezvousError(f"node 0 has not said to torchrun at {here.master} where it is: "
                              f"{first_line(error)}") from None


def to_open(here: Launched) -> Rendezvous | None:
    """Where node 0 listens: at its own address, at a port that is free where the agent has its; None: on loopback."""
    return None if here.master is None else Rendezvous(here.master.host, 0 if here.agent else here.master.port)


def _key(here: Launched) -> str:
    return f"slipstream/{here.attempt}"


def _local_size(environment: Mapping[str, str], name: str) -> int:
    """How many processes this machine has; srun has one text for all machines, `4(x2),3` for 4, 4 and 3."""
    if not name.startswith("SLURM"):
        return _number(environment, name, 1, _MOST, 1)
    text = environment.get(name, "1")
    parts = [_SLURM_COUNT.fullmatch(part) for part in text.split(",")]
    sizes = [size for part in parts if part for size in [int(part[1])] * int(part[2] or 1)]
    if not all(parts) or 0 in sizes:
        raise ValueError(f"{name} is {text!r}; expected the number of processes of each machine, such as '4(x2),3'")
    machine = _number(environment, "SLURM_NODEID", 0, len(sizes) - 1, 0)
    return sizes[machine]


def _number(environment: Mapping[str, str], name: str, least: int, most: int, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise ValueError(f"{name} is {text!r}; expected a whole number from {least} to {most}")
    return int(text)
