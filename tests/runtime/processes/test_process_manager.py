"""Processes of workers that are several."""

import os
import select
import signal

import pytest

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.processes.fork_server_messages import ProcessSpec
from slipstream.runtime.processes.found_workers import FoundWorker, find_workers
from slipstream.runtime.processes.process_manager import NodeProcesses, ProcessManager
from slipstream.runtime.processes.worker_start import NodeSettings, process_name, worker_named
from slipstream.runtime.protocol.authentication import new_secret
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.to_coordinator import Ended
from slipstream.runtime.protocol.to_node_agent import KillWorker
from slipstream.schedules.schedule import Worker
from tests.runtime.forked import own_fork_server


def test_a_worker_of_which_a_process_is_gone_is_not_gone_on_with():
    """Unless it can go on without it, or does already."""
    with own_fork_server() as server:
        for name in ("0.0", "0.0/1", "1.0", "2.0/1", "0.1-1"):
            server.start(ProcessSpec(name, "tests.runtime.processes.child:sleep", "300", os.devnull))
        assert find_workers(server, 2) == {
            Worker(0, 0): FoundWorker((), whole=True), Worker(1, 0): FoundWorker((), whole=False, without=1),
            Worker(2, 0): FoundWorker((), whole=False, without=0), Worker(0, 1): FoundWorker((1,), whole=True)}
        assert server.names() == ["0.0", "0.0/1", "0.1-1"]


def test_what_is_found_of_workers_of_four():
    with own_fork_server() as server:
        for name in ("0.0/1", "0.0/2", "0.0/3", "1.0", "1.0/2", "2.0/1-3", "3.0-3-0", "4.0-3-0", "4.0/1-3-0"):
            server.start(ProcessSpec(name, "tests.runtime.processes.child:sleep", "300", os.devnull))
        assert find_workers(server, 4) == {
            Worker(0, 0): FoundWorker((), whole=False, without=0), Worker(1, 0): FoundWorker((), whole=False),
            Worker(2, 0): FoundWorker((3,), whole=False, without=0), Worker(3, 0): FoundWorker((3, 0), whole=False),
            Worker(4, 0): FoundWorker((3, 0), whole=True)}
        assert server.names() == ["4.0-3-0", "4.0/1-3-0"]


@pytest.mark.parametrize(("lives", "degradable", "after"), [
    (["0.0", "0.0/1", "1.0"], [0], ["0.0", "0.0/1", "1.0-1"]), (["0.0-0", "1.0"], [0], ["0.0-0", "1.0-1"]),
    (["0.0-0", "1.0"], [], ["0.0-0", "1.0", "1.0/1"])])
def test_a_node_0_that_is_started_anew_has_its_workers_go_on_without_lost_ranks(lives, degradable, after, tmp_path):
    (tmp_path / "logs").mkdir()
    with own_fork_server() as server:
        for name in lives:
            server.start(ProcessSpec(name, "tests.runtime.processes.child:sleep", "300", os.devnull))
        found = find_workers(server, 2)
        settings = NodeSettings(config=parse_run_config({}, {"tensor_parallel": 2}), secret=new_secret(),
                                out=str(tmp_path))
        workers = [Worker(0, 0), Worker(1, 0)]
        local = NodeProcesses(server, Rendezvous("127.0.0.1", 1), workers, 0, settings,
                              lost={worker: one.lost for worker, one in found.items()})
        manager = ProcessManager(local, dict.fromkeys(workers, 0), absent=[
            worker for worker in workers if not found[worker].whole], degradable=degradable,
            without={worker: one.without for worker, one in found.items() if one.without is not None})
        manager.start_missing()
        assert server.names() == after


@pytest.mark.parametrize(("command", "without"), [
    (KillWorker(Worker(1, 0), 1), 1), (KillWorker(Worker(1, 0)), None), (None, 0)])
def test_whose_end_a_workers_is(command, without):
    """That of a process that hangs, of nobody where all are killed, else that of the first to end."""
    config = parse_run_config({}, {"tensor_parallel": 2})
    with own_fork_server() as server:
        settings = NodeSettings(config=config, secret=new_secret(), out="", resume=None)
        local = NodeProcesses(server, Rendezvous("127.0.0.1", 1), [Worker(1, 0)], 0, settings)
        for name in ("1.0", "1.0/1"):
            server.start(ProcessSpec(name, "tests.runtime.processes.child:sleep", "300", os.devnull))
        if command is None:
            server.kill("1.0")
        else:
            local.do(command)
        ended = []
        while not ended:
            select.select([local], [], [], 60)
            ended = local.poll()
        assert ended == [Ended(Worker(1, 0), -signal.SIGKILL, without)] and not local.alive()


def test_names():
    assert [process_name(Worker(1, 2), rank) for rank in range(2)] == ["1.2", "1.2/1"]
    assert worker_named("1.2/11") == (Worker(1, 2), 11, ()) and worker_named("1.2") == (Worker(1, 2), 0, ())
    for without in ((), (3,), (3, 0)):
        assert worker_named(process_name(Worker(1, 2), 1, without)) == (Worker(1, 2), 1, without)
