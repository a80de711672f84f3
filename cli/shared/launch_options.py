"""Find out which node of a run this process is, from the options of `slipstream train` or the launcher's
environment."""

from msgspec.structs import replace

from slipstream.cli.shared.console import refuse
from slipstream.planner.job.file import Job
from slipstream.runtime.failure_domains import divide_workers_by_node, find_domains
from slipstream.runtime.processes.launch_environment import LaunchInfo, group_ranks, read_launch_info
from slipstream.runtime.protocol.authentication import SECRET_REMEDY, Secret, SecretError, read_secret
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Schedule


def find_own_node(nodes: int | None, node: int | None, rendezvous: str | None, ranks: int = 1) -> LaunchInfo | None:
    """Return which node of a run this process is, and how many there are.

    Options take precedence over the environment. Returns None if `ranks` processes were started for each worker and
    this process is not the first of its worker. Exits 2 if options or environment are inconsistent.
    """
    if nodes is None and node is None and rendezvous is None:
        try:
            here = read_launch_info()
            return LaunchInfo() if here is None else group_ranks(here, ranks)
        except ValueError as error:
            refuse(error)
    if node and nodes is None:
        refuse(f"--node {node} needs --nodes, how many there are, and --rendezvous HOST:PORT, an address of node 0")
    nodes, node = nodes or 1, node or 0
    if node >= nodes:
        refuse(f"--node {node}: expected 0 to {nodes - 1}, with --nodes {nodes}")
    if rendezvous is None:
        if nodes > 1:
            refuse("--nodes needs --rendezvous HOST:PORT, an address of node 0 that the others can reach")
        return LaunchInfo()
    try:
        return LaunchInfo(node=node, nodes=nodes, master=Rendezvous.parse(rendezvous))
    except ValueError as error:
        refuse(f"--rendezvous: {error}")


def with_machines(job: Job, first: Schedule, here: LaunchInfo) -> Job:
    """Return the job with a topology that says which workers share a machine.

    It is the job's own [topology], or else follows from how the nodes of this run (`here`) share the workers of the
    `first` schedule.
    """
    if job.nodes or here.nodes == 1:
        return job
    node_shares = divide_workers_by_node([seat.worker for seat in first.seats], here.nodes, ())
    return replace(job, nodes=find_domains(first.grid, node_shares, here.local.processes, ()).domains)


def read_secret_or_refuse(here: LaunchInfo) -> Secret | None:
    """Return the secret given by the environment. Exits 2 if it is missing and several nodes need one."""
    try:
        secret = read_secret()
    except SecretError as error:
        refuse(error)
    if secret is None and here.nodes > 1:
        refuse(f"a run on {here.nodes} nodes needs a secret that all of them have: {SECRET_REMEDY} on each")
    return secret
