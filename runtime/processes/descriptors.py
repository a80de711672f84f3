"""File descriptors: how many this process may have open, and how many node 0 of a run needs."""

import resource

from slipstream.runtime.config import ConfigError

OWN = 256
"""Files, pipes and libraries of a launcher, whatever the number of workers."""


def needed_by_node_0(processes: int, nodes: int) -> int:
    """Each process of a worker connects to the coordinator and to torch's key-value store, each node's agent once."""
    return 2 * processes + nodes + OWN


def require_descriptors(number: int) -> None:
    """Raise this process's limit, and so that of those that it starts, to what the system allows.

    Raises ConfigError where that is less than this number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, number) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if hard != resource.RLIM_INFINITY and hard < number:
        raise ConfigError(f"this process may open {hard} files and connections, and node 0 of this run needs {number}; "
                          f"allow more, with ulimit -Hn {number} as root, LimitNOFILE= of a systemd unit, or --ulimit "
                          "nofile of a container")
