"""Processes of workers that are several."""

import os

from runtime.processes.fork_server_messages import ProcessSpec
from runtime.processes.process_manager import whole_workers
from runtime.processes.worker_start import process_name, worker_named
from schedules.schedule import Worker
from tests.runtime.forked import own_fork_server


def test_a_worker_of_which_a_process_is_gone_is_not_gone_on_with():
    with own_fork_server() as server:
        for name in ("0.0", "0.0/1", "1.0", "2.0/1"):
            server.start(ProcessSpec(name, "tests.runtime.processes.child:sleep", "300", os.devnull))
        assert whole_workers(server, 2) == [Worker(0, 0)]
        assert server.names() == ["0.0", "0.0/1"]


def test_names():
    assert [process_name(Worker(1, 2), rank) for rank in range(2)] == ["1.2", "1.2/1"]
    assert worker_named("1.2/11") == (Worker(1, 2), 11) and worker_named("1.2") == (Worker(1, 2), 0)
