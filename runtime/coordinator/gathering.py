"""Gathering: who is waited for before the first order, in one line."""

from collections.abc import Collection, Sequence

from slipstream.schedules.schedule import Worker

TELL_SECONDS = 30.0
"""From one line to the next."""
TOLD = 8
"""Workers or nodes that a line names."""


def who_is_awaited(awaited: Collection[Worker], shares: Sequence[Sequence[Worker]], agents: Collection[int]) -> str:
    """The nodes that have not connected, and the workers of the others that are not ready.

    `shares` are the workers of each node, `agents` the nodes other than 0 that have connected.
    """
    nodes, workers, awaited = [], [], set(awaited)
    for node, share in enumerate(shares):
        if missing := [worker for worker in share if worker in awaited]:
            if node == 0 or node in agents:
                workers += [f"worker {worker} of node {node}" for worker in missing]
            else:
                nodes.append(f"node {node}")
    apart = [f"{_listed(nodes)}, which {'have' if nodes[1:] else 'has'} not connected"] if nodes else []
    return ", and for ".join([*apart, *([_listed(workers)] if workers else [])])


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:TOLD])
    if names[TOLD:]:
        shown.append(f"{len(names) - TOLD} more")
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else ""
