"""Count the file descriptors that node 0 of a run needs, and raise this process's limit on them."""

import resource

from slipstream.runtime.config import ConfigError

LAUNCHER_DESCRIPTORS = 256
"""Number of files, pipes and libraries that a launcher opens, whatever the number of workers."""


def count_node_0_descriptors(processes: int, nodes: int) -> int:
    """Return the number of file descriptors that node 0 needs. Each process of a worker connects to the coordinator and
    to torch's key-value store; each node's agent connects once."""
    return 2 * processes + nodes + LAUNCHER_DESCRIPTORS


def raise_descriptor_limit(number: int) -> None:
    """Raise this process's limit on file descriptors to the maximum that the system allows. Child processes inherit the
    limit. Raises ConfigError if the maximum is less than `number`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = max(soft, number) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if hard != resource.RLIM_INFINITY and hard < number:
        raise ConfigError(f"this process may open {hard} files and connections, and node 0 of this run needs {number}; "
                          f"allow more, with ulimit -Hn {number} as root, LimitNOFILE= of a systemd unit, or --ulimit "
                          "nofile of a container")
