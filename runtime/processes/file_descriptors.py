"""Count the file descriptors that node 0 needs, and raise this process's limit on them."""

import resource

from slipstream.runtime.config import ConfigError
from slipstream.runtime.placement import Placement
from slipstream.schedules.crossings import crossings_by_worker
from slipstream.schedules.graph import pipeline_groups
from slipstream.schedules.schedule import Schedule

LAUNCHER_DESCRIPTORS = 256
"""Descriptors of files, pipes and libraries that a launcher opens for itself."""
SPARE_CONNECTIONS = 2
"""Factor on communicators' connections, because new ones open before old ones close."""


def count_node_0_descriptors(processes: int, nodes: int, communicators: int = 0) -> int:
    """Return the number of file descriptors that node 0 needs.

    `processes` counts the processes of all workers, and `communicators` the ends of all NCCL
    communicators (`count_communicator_ends`).
    """
    # Each process of a worker connects to the coordinator and to torch's key-value store, each
    # node's agent once, and each end of a communicator to the store.
    return 2 * processes + nodes + SPARE_CONNECTIONS * communicators + LAUNCHER_DESCRIPTORS


def count_communicator_ends(schedule: Schedule, placement: Placement, ranks: int) -> int:
    """Return how many ends all NCCL communicators of a schedule have together.

    Each process in a communicator is an end; each worker has `ranks` processes.
    """
    # One communicator for each two workers and direction, one for each set of workers that sum
    # gradients, both for each rank, and one for the ranks of each worker.
    pairs = {
        (crossing.source, crossing.target)
        for group in pipeline_groups(schedule)
        for crossings in crossings_by_worker(schedule, group).values()
        for crossing in crossings
    }
    members = {
        tuple(workers)
        for workers in placement.all_reductions(schedule).values()
        if len(workers) > 1
    }
    between = 2 * len(pairs) + sum(map(len, members))
    return ranks * (between + (len(schedule.seats) if ranks > 1 else 0))


def raise_descriptor_limit(number: int) -> None:
    """Raise this process's limit on file descriptors to the system's maximum.

    If there is no maximum, raise it to `number`. Child processes inherit the limit. Raises
    ConfigError if the maximum is less than `number`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Systems may refuse a soft limit as high as an infinite hard one.
    target = max(soft, number) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if hard != resource.RLIM_INFINITY and hard < number:
        raise ConfigError(
            f"this process may open {hard} files and connections, and node 0 of this run needs "
            f"{number}; allow more, with ulimit -Hn {number} as root, LimitNOFILE= of a systemd "
            "unit, or --ulimit nofile of a container"
        )
