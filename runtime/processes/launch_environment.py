"""Read this node's number, their count and node 0's address from the environment.

torchrun, srun or mpirun have set them. Each process that is started so becomes a *node* of
`runtime.launch`, with its share of the workers: one worker if there are as many processes as
workers. The node's process outlives its workers, and can start them again.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slipstream.runtime.protocol.rendezvous import Rendezvous

DEFAULT_PORT = 29500
"""Default port of torch, used only if MASTER_PORT is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProcess:
    """Rank of this node's process among the `processes` on its machine, which share GPUs."""

    rank: int = 0
    processes: int = 1


ONLY_PROCESS = LocalProcess()


class GpuShare(NamedTuple):
    """Place of a node's workers among all those that share a machine's GPUs."""

    first: int
    """Index of the first GPU for this node; earlier ones are for other nodes."""
    processes: int
    """Number of all workers' processes on the machine, which want a GPU each."""


def compute_gpu_share(shares: Sequence[int], node: int, local: LocalProcess) -> GpuShare:
    """Return where the GPUs of a node begin, and how many processes share the machine.

    `shares` has the number of workers' processes on each node. The nodes of a machine must have
    consecutive numbers, as torchrun, srun and mpirun start them by default.
    """
    first = max(0, node - local.rank)
    return GpuShare(sum(shares[first:node]), sum(shares[first : first + local.processes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """What a launcher or user has set for this node's process. By default, it is the only one."""

    node: int = 0
    nodes: int = 1
    local: LocalProcess = ONLY_PROCESS
    master: Rendezvous | None = None
    """Address of node 0, or of torchrun's agent if `agent`. None: a single node."""
    agent: bool = False
    """True if torchrun's agent has a store, from which nodes learn where node 0 listens."""
    tied: bool = False
    """True if torchrun's agent or mpirun's daemon is the parent, and may kill without warning."""
    attempt: str = "0"
    """Number of torchrun's attempt to run the job; each attempt has keys of its own."""


_MAX_PROCESSES = 2**20
"""Largest number of processes in a run."""
_SLURM_COUNT = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,5})\))?")
_VARIABLE_FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables of torchrun, also set by hand, of mpirun (Open MPI), and of srun."""
# The first family that is set counts: within SLURM, mpirun starts a daemon on each machine by srun,
# and processes inherit the daemon's variables.


def read_launch_info(environment: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    """Read what torchrun, srun, mpirun or a user has set; None for a single process.

    Raises ValueError, naming the variable, if one is missing or invalid.
    """
    for rank, size, local_rank, local_size in _VARIABLE_FAMILIES:
        if rank not in environment or size not in environment:
            continue
        nodes = _read_number(environment, size, 1, _MAX_PROCESSES)
        if nodes == 1:
            continue
        # Without node 0's address, the processes cannot find each other.
        host = environment.get("MASTER_ADDR")
        if not host:
            raise ValueError(
                f"{rank} and {size} say that this is one of {nodes} processes: set MASTER_ADDR to "
                "the address of the first one, or pass --nodes 1"
            )
        master = Rendezvous(
            host, _read_number(environment, "MASTER_PORT", 1, 2**16 - 1, DEFAULT_PORT)
        )
        # Users who set the variables by hand may leave out those of this machine.
        index = _read_number(environment, local_rank, 0, nodes - 1, 0)
        local_processes = max(index + 1, _read_local_size(environment, local_size))
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return LaunchInfo(
            node=_read_number(environment, rank, 0, nodes - 1),
            nodes=nodes,
            local=LocalProcess(rank=index, processes=local_processes),
            master=master,
            agent=agent,
            tied=agent or rank.startswith("OMPI"),
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    return None


def group_ranks(here: LaunchInfo, ranks: int) -> LaunchInfo | None:
    """Return the node that this process is, if a worker was started as `ranks` processes.

    The first process of each worker becomes the node that starts all its ranks; for the others,
    which have nothing to do, the result is None. Raises ValueError unless the processes, in all and
    on this machine, are a multiple of `ranks`.
    """
    if here.nodes % ranks or here.local.processes % ranks:
        raise ValueError(
            f"{here.nodes} processes were started, {here.local.processes} of them on this machine; "
            f"expected a multiple of --ranks-per-worker, {ranks}, on each"
        )
    node, rank = divmod(here.node, ranks)
    local = LocalProcess(rank=here.local.rank // ranks, processes=here.local.processes // ranks)
    return None if rank else replace(here, node=node, nodes=here.nodes // ranks, local=local)


def choose_listen_address(here: LaunchInfo) -> Rendezvous | None:
    """Return the address where node 0 is to listen; None for a single node.

    The port is 0, any free one, if torchrun's agent listens at the port that is set.
    """
    if here.master is None:
        return None
    # torchrun's agent itself listens at the port that is set: any free one is used.
    return Rendezvous(here.master.host, 0 if here.agent else here.master.port)


def _read_local_size(environment: Mapping[str, str], name: str) -> int:
    """Return the number of processes on this machine, from variable `name`."""
    # SLURM's variable has one value for all machines: `4(x2),3` for 4, 4 and 3 processes.
    if not name.startswith("SLURM"):
        return _read_number(environment, name, 1, _MAX_PROCESSES, 1)
    text = environment.get(name, "1")
    parts = [_SLURM_COUNT.fullmatch(part) for part in text.split(",")]
    sizes = list[int]()
    for part in filter(None, parts):
        sizes += [int(part[1])] * int(part[2] or 1)
    if not all(parts) or 0 in sizes:
        raise ValueError(
            f"{name} is {text!r}; expected the number of processes of each machine, such as "
            "'4(x2),3'"
        )
    # SLURM numbers the machines of a job step in the same order as their sizes.
    machine = _read_number(environment, "SLURM_NODEID", 0, len(sizes) - 1, 0)
    return sizes[machine]


def _read_number(
    environment: Mapping[str, str], name: str, lowest: int, highest: int, default: int | None = None
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (
        text.isascii() and text.isdecimal() and len(text) < 20 and lowest <= int(text) <= highest
    ):
        raise ValueError(f"{name} is {text!r}; expected a whole number from {lowest} to {highest}")
    return int(text)
