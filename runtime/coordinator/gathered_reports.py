"""Reports of an iteration that the agent of a node has gathered: taken together, and answered together."""

from collections.abc import Collection, Sequence

from slipstream.runtime.coordinator.node_agents import NodeAgents
from slipstream.runtime.coordinator.plausible import Bounds
from slipstream.runtime.coordinator.rank_reports import RankReports
from slipstream.runtime.coordinator.worker_connections import WorkerConnections
from slipstream.runtime.protocol.to_coordinator import Gathered, Ran
from slipstream.runtime.protocol.to_node_agent import GoOn
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.schedules.schedule import Worker


class GatheredReports:
    """Each report is answered the way it came: by its worker's own connection, or by the agent of its node."""

    def __init__(self, workers: WorkerConnections, agents: NodeAgents, reports: RankReports, bounds: Bounds) -> None:
        self._workers = workers
        self._agents = agents
        self._reports = reports
        self._bounds = bounds
        self._node_of: dict[Worker, int] = {}
        """The node whose agent brought the last report of a worker."""
        self._answers: dict[int, list[tuple[tuple[Worker, ...], Acknowledged]]] = {}
        """What agents are to be told because of the present event."""

    def take(self, node: int, here: Collection[Worker], gathered: Gathered, following: int) -> tuple[Ran, ...]:
        """What workers of a node have reported, of those that are there; `answer` answers its agent in any case.

        `following` is the iteration that is to be committed next.
        """
        self._answers[node], found = [], list[Ran]()
        for one in gathered.reports:
            report = one.report
            connection = self._workers.of(report.worker, one.rank) if report.worker in here else None
            if connection is None:
                continue
            wrong = self._bounds.wrong(report, following)
            if wrong is not None:
                connection.cut_off(wrong)
            elif self._workers.hears(connection):
                whole = self._reports.take(report.worker, one.rank, report)
                found += [whole] if isinstance(whole, Ran) else []
        self._node_of.update(dict.fromkeys((one.worker for one in found), node))
        return tuple(found)

    def by_itself(self, worker: Worker) -> None:
        """A worker's last report came over its own connection."""
        self._node_of.pop(worker, None)

    def acknowledge(self, workers: Sequence[Worker], message: Acknowledged) -> None:
        """Tell workers at once, and what goes to agents with `answer`."""
        by_node: dict[int, list[Worker]] = {}
        for worker in workers:
            node = self._node_of.get(worker)
            if node is None:
                self._workers.send(worker, message)
            else:
                by_node.setdefault(node, []).append(worker)
        for node, there in by_node.items():
            self._answers.setdefault(node, []).append((tuple(there), message))

    def answer(self) -> None:
        """Send agents what they are to be told."""
        answers, self._answers = self._answers, {}
        for node, acknowledged in answers.items():
            self._agents.send(node, GoOn(tuple(acknowledged)))
