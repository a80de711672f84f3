"""Reports that a node's agent puts together.

Tested is also what becomes of them where it does not answer.
"""

import select
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from slipstream.runtime.protocol.node_reports import ReportGatherer, ReportSender
from slipstream.runtime.protocol.to_coordinator import GatheredReports, IterationReport, RankReport
from slipstream.runtime.protocol.to_node_agent import ReportsAcknowledged
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker import iteration_reports
from slipstream.runtime.worker.iteration_reports import IterationReports
from slipstream.schedules.measured_trace import MeasuredOp
from slipstream.schedules.schedule import OpKind, Worker

ONE = Worker(0, 0)
OTHER = Worker(0, 1)


@pytest.fixture
def node(monkeypatch):
    """An agent, a worker of two processes and one of one.

    What these say to node 0 themselves is kept.
    """
    with ExitStack() as stack:
        agent, direct, senders = stack.enter_context(ReportGatherer()), [], []
        for number, rank in enumerate((0, 1, 0)):
            with monkeypatch.context() as other_process:
                other_process.setattr("os.getpid", lambda number=number: number)
                senders.append(ReportSender(rank, direct.append, agent.address))
            stack.callback(senders[-1].list_sockets()[0].close)
        yield SimpleNamespace(agent=agent, direct=direct, reporters=senders)


def ran(worker: Worker, iteration: int, **more) -> IterationReport:
    return IterationReport(worker, 3, iteration, 1.0, 0.1, **more)


def test_what_comes_while_node_0_answers_is_one_message(node):
    first, second, third = node.reporters
    first.send(ran(ONE, 7))
    assert node.agent.collect_reports() == [GatheredReports((RankReport(0, ran(ONE, 7)),))]
    third.send(ran(OTHER, 7))
    second.send(ran(ONE, 7))
    assert node.agent.collect_reports() == []
    # a worker is acknowledged once all of its processes have reported
    node.agent.forward_answer(ReportsAcknowledged(()))
    assert node.agent.collect_reports() == [
        GatheredReports((RankReport(0, ran(OTHER, 7)), RankReport(1, ran(ONE, 7))))
    ]
    go_on = Acknowledged(3, 7)
    node.agent.forward_answer(ReportsAcknowledged((((ONE, OTHER), go_on),)))
    assert [reporter.read_acknowledgements() for reporter in node.reporters] == [[go_on]] * 3
    assert not node.direct and not node.agent.collect_reports()
    assert not select.select(first.list_sockets(), [], [], 0)[0]


def test_a_report_that_no_datagram_holds_goes_to_node_0(node):
    ops = (MeasuredOp(ONE, OpKind.F, 0, 0, 0, 0.0, 1.0),) * 10_000
    node.reporters[0].send(ran(ONE, 7, ops=ops))
    assert [len(report.ops) for report in node.direct] == [
        10_000
    ] and not node.agent.collect_reports()


def test_without_an_agent_reports_go_to_node_0(node):
    alone = ReportSender(0, node.direct.append, None)
    alone.send(ran(ONE, 7))
    assert (
        node.direct == [ran(ONE, 7)]
        and alone.read_acknowledgements() == []
        and alone.list_sockets() == []
    )


@pytest.mark.parametrize("left", ["its folder", "nothing"])
def test_a_worker_whose_agent_went_before_it_was_ready_reports_to_node_0(left, tmp_path):
    with ReportGatherer() as agent:
        address = agent.address
    if left == "its folder":  # as of an agent that was killed
        address = str(tmp_path / "agent")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
            killed.bind(address)
    direct = []
    sender = ReportSender(0, direct.append, address)
    assert not sender.gathered
    sender.send(ran(ONE, 7))
    assert direct == [ran(ONE, 7)]
    assert sender.list_sockets() == sender.read_acknowledgements() == []


def test_an_agent_that_has_gone_or_does_not_answer_is_not_waited_for(node, monkeypatch):
    # Its worker reports to node 0 itself from then on, and what was answered twice does no harm.
    monkeypatch.setattr(iteration_reports, "AGENT_ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(iteration_reports, "ANSWER_SECONDS", 0.02)
    reports = IterationReports(
        SimpleNamespace(
            order=SimpleNamespace(first_iteration=7),
            activity=SimpleNamespace(doing="", set_activity=lambda _: None),
            context=SimpleNamespace(
                reporter=node.reporters[0], injector=SimpleNamespace(fail_if_due=lambda *_: None)
            ),
        )
    )
    node.reporters[0].send(ran(ONE, 7))
    reports._open = ran(ONE, 7)
    with pytest.raises(CommunicationError, match="node 0 has not answered"):
        reports.wait_until_acknowledged()
    assert node.direct == [ran(ONE, 7)]
    node.reporters[0].send(ran(ONE, 8))
    assert node.direct == [ran(ONE, 7), ran(ONE, 8)]
    reports._open = ran(ONE, 8)
    for iteration in (7, 8):
        reports.handle_acknowledgement(Acknowledged(3, iteration))
    reports.wait_until_acknowledged()
    node.agent.__exit__()
    node.reporters[2].send(ran(OTHER, 8))
    assert node.direct[-1] == ran(OTHER, 8)
