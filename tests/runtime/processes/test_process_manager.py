"""Processes of workers that are several."""

import os
import select
import signal

import pytest

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.processes.fork_server_messages import ProcessSpec
from slipstream.runtime.processes.process_manager import NodeProcesses, find_complete_workers
from slipstream.runtime.processes.worker_start import (
    NodeSettings,
    format_process_name,
    parse_process_name,
)
from slipstream.runtime.protocol.authentication import create_secret
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.to_coordinator import WorkerEnded
from slipstream.runtime.protocol.to_node_agent import KillWorker
from slipstream.schedules.schedule import Worker
from tests.runtime.forked import own_fork_server


def test_a_worker_of_which_a_process_is_gone_is_not_gone_on_with():
    with own_fork_server() as server:
        for name in ("0.0", "0.0/1", "1.0", "2.0/1"):
            server.start_process(
                ProcessSpec(name, "tests.runtime.processes.child:sleep", "300", os.devnull)
            )
        assert find_complete_workers(server, 2) == [Worker(0, 0)]
        assert server.list_alive() == ["0.0", "0.0/1"]


@pytest.mark.parametrize("command", [KillWorker(Worker(1, 0)), None])
def test_the_processes_of_a_worker_end_together(command):
    """Where all are killed, and where one ends."""
    config = parse_run_config({}, {"tensor_parallel": 2})
    with own_fork_server() as server:
        settings = NodeSettings(config=config, secret=create_secret(), out="", resume=None)
        local = NodeProcesses(server, Rendezvous("127.0.0.1", 1), [Worker(1, 0)], 0, settings)
        for name in ("1.0", "1.0/1"):
            server.start_process(
                ProcessSpec(name, "tests.runtime.processes.child:sleep", "300", os.devnull)
            )
        if command is None:
            server.kill_process("1.0")
        else:
            local.execute_command(command)
        ended = []
        while not ended:
            select.select([local], [], [], 60)
            ended = local.poll()
        assert ended == [WorkerEnded(Worker(1, 0), -signal.SIGKILL)] and not local.list_alive()


def test_names():
    assert [format_process_name(Worker(1, 2), rank) for rank in range(2)] == ["1.2", "1.2/1"]
    assert parse_process_name("1.2/11") == parse_process_name("1.2") == Worker(1, 2)
