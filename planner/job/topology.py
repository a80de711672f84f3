"""The `[topology]` table of a job file: which workers share a node (a machine), and so fail together."""

from collections.abc import Iterable, Sequence
from typing import Any

from slipstream.planner.job.toml_table import JobError, TomlTable, count, shortened
from slipstream.schedules.schedule import Worker

Nodes = tuple[tuple[Worker, ...], ...]
"""The workers of each node, ascending; each worker of the job once."""
_FORM = 'a list of nodes, each a list of its workers, such as [["0.0", "0.1"], ["1.0", "1.1"]]'


def read_nodes(table: TomlTable, pipelines: int, stages: int) -> Nodes:
    """The nodes that the table gives, as `workers_per_node` or as `node`. Raises JobError."""
    size, listed = table.take("workers_per_node"), table.take("node")
    table.finish()
    if (size is None) == (listed is None):
        raise JobError(f"topology has {'neither' if size is None else 'both'} of the keys 'workers_per_node' and "
                       "'node'; expected one of them")
    if size is not None:
        return _by_size(count("topology.workers_per_node", size, 1, pipelines * stages), pipelines, stages)
    if not isinstance(listed, list):
        raise JobError(f"topology.node is {shortened(listed)}; expected {_FORM}")
    return _listed(listed, pipelines, stages)


def topology_table(nodes: Nodes, pipelines: int, stages: int) -> dict[str, Any]:
    """The `[topology]` table of a job; empty where it does not say which workers share a node."""
    if not nodes:
        return {}
    if nodes == _by_size(len(nodes[0]), pipelines, stages):
        return {"workers_per_node": len(nodes[0])}
    return {"node": [[str(worker) for worker in node] for node in nodes]}


def workers_of_nodes(nodes: Nodes, numbers: Iterable[int], option: str) -> tuple[Worker, ...]:
    """All workers of these nodes, ascending. Raises JobError that names the option for a node that is not there."""
    chosen = sorted(set(numbers))
    if chosen and not nodes:
        raise JobError(f"{option}: the job file does not say which workers share a node; add [topology] "
                       "workers_per_node = N")
    for number in chosen:
        if not 0 <= number < len(nodes):
            raise JobError(f"{option} {number}: expected a node of the job, 0 to {len(nodes) - 1}")
    return tuple(sorted(worker for number in chosen for worker in nodes[number]))


def require_in_grid(name: str, worker: Worker, pipelines: int, stages: int) -> None:
    """Raise JobError unless the job has this worker."""
    if worker.pipeline >= pipelines or worker.column >= stages:
        raise JobError(f"{name}: the job has no worker {worker}; expected pipeline 0 to {pipelines - 1} and stage 0 to "
                       f"{stages - 1}")


def _by_size(size: int, pipelines: int, stages: int) -> Nodes:
    """Nodes of so many workers, in the order of the grid; the last one may have fewer."""
    workers = _grid(pipelines, stages)
    return tuple(tuple(workers[first:first + size]) for first in range(0, len(workers), size))


def _listed(listed: Sequence[object], pipelines: int, stages: int) -> Nodes:
    node_of: dict[Worker, int] = {}
    for number, names in enumerate(listed):
        path = f"topology.node[{number}]"
        if not isinstance(names, list) or not names:
            raise JobError(f"{path} is {shortened(names)}; expected {_FORM}")
        for name in names:
            worker = _worker(path, name)
            require_in_grid(path, worker, pipelines, stages)
            if worker in node_of:
                raise JobError(f"{path}: worker {worker} is in node {node_of[worker]} already; expected each worker "
                               "once")
            node_of[worker] = number
    for worker in _grid(pipelines, stages):
        if worker not in node_of:
            raise JobError(f"topology.node: worker {worker} is in no node; expected each worker once")
    return tuple(tuple(sorted(worker for worker, of in node_of.items() if of == number))
                 for number in range(len(listed)))


def _worker(path: str, name: object) -> Worker:
    if not isinstance(name, str):
        raise JobError(f"{path} has {shortened(name)}; expected a worker as a text, PIPELINE.STAGE")
    try:
        return Worker.parse(name)
    except ValueError as error:
        raise JobError(f"{path}: {error}") from None


def _grid(pipelines: int, stages: int) -> list[Worker]:
    return [Worker(pipeline, column) for pipeline in range(pipelines) for column in range(stages)]
