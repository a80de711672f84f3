"""Which of several processes `slipstream train` is: by its options, or by what a launcher has told it."""

from dataclasses import dataclass
from datetime import timedelta

from cli.console import refuse
from runtime.cluster.launchers import ALONE, Launched, Machine, announce, find, launched, to_open
from runtime.cluster.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One node of a run."""

    node: int = 0
    nodes: int = 1
    machine: Machine = ALONE
    given: Rendezvous | None = None
    """By --rendezvous."""
    here: Launched | None = None

    def to_open(self) -> Rendezvous | None:
        """Where node 0 listens; None: on a free port of loopback."""
        return self.given if self.here is None else to_open(self.here)

    def announce(self, opened: Rendezvous) -> None:
        """Node 0 listens. Raises RendezvousError."""
        if self.here is not None:
            announce(self.here, opened)

    def find(self, timeout: timedelta) -> Rendezvous:
        """Where the others reach node 0. Raises RendezvousError."""
        if self.here is not None:
            return find(self.here, timeout)
        assert self.given is not None
        return self.given


def part(nodes: int | None, node: int | None, rendezvous: str | None) -> Part:
    """What this process is; exits 2 when options or environment make no sense. Options count more."""
    if nodes is None and node is None and rendezvous is None:
        try:
            here = launched()
        except ValueError as error:
            refuse(error)
        return Part() if here is None else Part(node=here.node, nodes=here.nodes, machine=here.machine, here=here)
    nodes, node = nodes or 1, node or 0
    if node >= nodes:
        refuse(f"--node {node}: expected 0 to {nodes - 1}, with --nodes {nodes}")
    if rendezvous is None:
        if nodes > 1:
            refuse("--nodes needs --rendezvous HOST:PORT, an address of node 0 that the others can reach")
        return Part()
    try:
        return Part(node=node, nodes=nodes, given=Rendezvous.parse(rendezvous))
    except ValueError as error:
        refuse(f"--rendezvous: {error}")
