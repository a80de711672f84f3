"""Plans are made beside the event loop, which goes on meanwhile."""

import asyncio
import os
import resource
import signal
import socket
import time
from pathlib import Path

import pytest

from slipstream.runtime.coordinator.planning import background
from slipstream.runtime.coordinator.planning.background import (
    PlannerDiedError,
    run_in_process,
    run_in_thread,
)
from slipstream.runtime.errors import RunError
from slipstream.schedules.schedule import NoScheduleError
from tests.jobs import grid
from tests.runtime.running import schedule_for

FIRST = schedule_for(grid(2, 2, 2), [])
HERE = os.getpid()


def answer(how, work):
    """Of one piece of work."""

    async def script():
        future = asyncio.get_running_loop().create_future()
        how(work, future.set_result)
        return await asyncio.wait_for(future, 60)

    return asyncio.run(script())


@pytest.mark.parametrize("how", [run_in_thread, run_in_process])
def test_answers_and_errors_come_back(how):
    class Odd(Exception):
        def __init__(self, first, two):
            super().__init__(f"{first} and {two}")

    def fail(error):
        raise error

    assert answer(how, lambda: (FIRST, {FIRST.seats[0].worker: b"text"})) == (
        FIRST,
        {FIRST.seats[0].worker: b"text"},
    )
    for error in (NoScheduleError("none"), RunError("another job")):
        found = answer(how, lambda error=error: fail(error))
        assert type(found) is type(error) and str(found) == str(error)
    found = answer(how, lambda: fail(Odd(1, 2)))
    assert isinstance(found, Exception) and "1 and 2" in str(found)


def test_a_process_that_hangs_is_not_waited_for(monkeypatch):
    """As one may that was forked while another thread held a lock."""
    monkeypatch.setattr(background, "AWAITED_TIMEOUT_SECONDS", 0.2)

    def work():
        if os.getpid() != HERE:
            time.sleep(60)
        return "done here"

    assert answer(run_in_process, work) == "done here"


def test_a_process_answers_beside_many_connections():
    # Those of 1,000 workers take up the low descriptors, which are all that select.select knows.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        assert answer(run_in_process, lambda: "found") == "found"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_plans_and_leaves_nothing_open(tmp_path):
    # Else a connection that node 0 ends would stay open, and a worker would not notice that it was
    # given up.
    (ours, theirs), asked = socket.socketpair(), tmp_path / "asked"

    def work():
        deadline = time.monotonic() + 60
        while not asked.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return os.getpid(), [descriptor.name for descriptor in Path("/proc/self/fd").iterdir()]

    async def script():
        future = asyncio.get_running_loop().create_future()
        run_in_process(work, future.set_result)
        theirs.close()
        ours.settimeout(60)
        assert await asyncio.to_thread(ours.recv, 1) == b""
        assert not future.done()
        asked.touch()
        process, descriptors = await asyncio.wait_for(future, 60)
        assert process != HERE and set(descriptors) <= {"0", "1", "2", "3", "4"}
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)

    asyncio.run(script())
    ours.close()


def test_a_fork_that_fails_leaves_nothing_open(monkeypatch):
    def refuse():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [answer(run_in_process, lambda: "found") for _ in range(5)] == ["found"] * 5
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_process_that_dies_has_no_answer():
    found = answer(run_in_process, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert isinstance(found, PlannerDiedError) and str(found).endswith("signal 9")


def test_what_is_awaited_goes_first():
    def niceness(*, awaited):
        return answer(
            lambda work, done: run_in_process(work, done, awaited=awaited), lambda: os.nice(0)
        )

    assert niceness(awaited=False) > niceness(awaited=True) == os.nice(0)
