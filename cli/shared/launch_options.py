"""Find out which node of a run this process is, from the options of `slipstream train` or the launcher's
environment."""

from msgspec.structs import replace

from slipstream.cli.shared.console import refuse
from slipstream.planner.job.file import Job
from slipstream.runtime.failure_domains import find_domains, shares_of_nodes
from slipstream.runtime.processes.launchers import Launched, launched, of_ranks
from slipstream.runtime.protocol.authentication import HOW, Secret, SecretError, given_secret
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Schedule


def launched_as(nodes: int | None, node: int | None, rendezvous: str | None, ranks: int = 1) -> Launched | None:
    """Return the node of a run that this process is.

    Options take precedence over the environment. Returns None if `ranks` processes were started for each worker and
    this process is not the first of its worker. Exits 2 if options or environment are inconsistent.
    """
    if nodes is None and node is None and rendezvous is None:
        try:
            here = launched()
            return Launched() if here is None else of_ranks(here, ranks)
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
        return Launched()
    try:
        return Launched(node=node, nodes=nodes, master=Rendezvous.parse(rendezvous))
    except ValueError as error:
        refuse(f"--rendezvous: {error}")


def with_machines(job: Job, first: Schedule, here: Launched) -> Job:
    """Return the job with the workers of each machine: of its [topology], or else of the nodes of this run."""
    if job.nodes or here.nodes == 1:
        return job
    node_shares = shares_of_nodes([seat.worker for seat in first.seats], here.nodes, ())
    return replace(job, nodes=find_domains(first.grid, node_shares, here.local.processes, ()).domains)


def given_secret_or_refuse(here: Launched) -> Secret | None:
    """Return the secret given by the environment. Exits 2 if it is missing and several nodes need one."""
    try:
        secret = given_secret()
    except SecretError as error:
        refuse(error)
    if secret is None and here.nodes > 1:
        refuse(f"a run on {here.nodes} nodes needs a secret that all of them have: {HOW} on each")
    return secret
