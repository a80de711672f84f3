import os
import signal

import pytest

from slipstream.runtime.processes.child_processes import ChildError, ChildProcesses
from slipstream.runtime.processes.fork_server import ForkServer
from tests import patience
from tests.runtime.processes.child import Life
from tests.runtime.running import wait_until_gone


def start(fork_server: ForkServer | None, *lives: Life) -> ChildProcesses:
    return ChildProcesses("tests.runtime.processes.child:live", lives, fork_server)


def test_answers_come_in_the_order_of_tasks(fork_server):
    with start(fork_server, Life(0.2), Life(0.0)) as children:
        assert children.collect_results(patience.SECONDS) == [b"done", b"done"]


def test_the_one_that_failed_is_named_not_those_that_are_ended_for_it(fork_server):
    with start(fork_server, Life(300), Life(0.0, "first\nno room", 1), Life(300)) as children:
        with pytest.raises(ChildError, match=r"^no room$"):
            children.collect_results(patience.SECONDS)
        pids = list(children.fork_server.pids.values())
    assert len(pids) == 2
    wait_until_gone(pids)


def test_one_that_says_nothing_is_named_by_its_status(fork_server):
    with (
        start(fork_server, Life(0.0, "", 3)) as children,
        pytest.raises(ChildError, match=r"^a process ended with status 3$"),
    ):
        children.collect_results(patience.SECONDS)


def test_waiting_has_an_end(fork_server):
    with start(fork_server, Life(300)) as children:
        while not children.fork_server.pids:
            children.fork_server.poll(60)
        pids = list(children.fork_server.pids.values())
        with pytest.raises(TimeoutError):
            children.collect_results(0.5)
    wait_until_gone(pids)


def test_a_task_that_raises_is_told_by_the_last_line(fork_server):
    with (
        ChildProcesses("tests.runtime.processes.child:nothing", [Life(0)], fork_server) as children,
        pytest.raises(ChildError, match=r"^AttributeError: module .* has no attribute 'nothing'$"),
    ):
        children.collect_results(patience.SECONDS)


def test_without_the_fork_server_there_is_no_answer():
    """One of its own."""
    with start(None, Life(300)) as children:
        while not children.fork_server.pids:
            children.fork_server.poll(60)
        pids = list(children.fork_server.pids.values())
        os.kill(children.fork_server._process.pid, signal.SIGKILL)
        with pytest.raises(ChildError, match=r"^the process that starts the workers has died$"):
            children.collect_results(patience.SECONDS)
        wait_until_gone(pids)
