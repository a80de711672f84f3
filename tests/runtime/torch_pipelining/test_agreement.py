"""Who goes on.

Each process of these tests is a watch and an agreement, in a thread.
"""

import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import msgspec
import pytest

from slipstream.runtime.replay.torch_groups import HashStore
from slipstream.runtime.torch_pipelining.agreement import Agreement, Decision, LeftOutError, Voice
from slipstream.runtime.torch_pipelining.watch import SILENT_SECONDS, Watch, is_dead
from slipstream.schedules.schedule import Worker

SECONDS = 60
SHORT_SECONDS = 2
MANY_DESCRIPTORS = 1100
WORKERS = (Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1))


class Processes:
    """One process a worker; those whose watch is closed are dead."""

    def __init__(self, ranks: int = 1, patience: float = SECONDS) -> None:
        self.store = HashStore()
        names = [f"{worker}:{rank}" for worker in WORKERS for rank in range(ranks)]
        self.watches = {name: Watch("127.0.0.1", lambda: None) for name in names}
        self.agreements = {name: Agreement(self.store, name, ranks, patience) for name in names}
        self.pool = ThreadPoolExecutor(len(names) + 2)

    def voice(self, name: str, committed: int | None = 0) -> Voice:
        return Voice(address=self.watches[name].address, committed=committed)

    def start(self) -> dict[str, Decision]:
        return self.each(
            self.agreements, lambda name: self.agreements[name].start(self.voice(name), WORKERS)
        )

    def each(self, names, call: Callable[[str], Decision]) -> dict[str, Decision]:
        futures: dict[str, Future[Decision]] = {
            name: self.pool.submit(call, name) for name in names
        }
        return {name: future.result(SECONDS) for name, future in futures.items()}

    def kill(self, *names: str) -> None:
        for name in names:
            self.watches.pop(name).close()

    def close(self) -> None:
        self.pool.shutdown()
        self.kill(*self.watches)


@pytest.fixture
def processes():
    processes_ = Processes()
    yield processes_
    processes_.close()


def test_those_that_live_go_on_and_know_who_is_behind(processes):
    before = processes.start()
    processes.kill("0.1:0")
    counts = {"0.0:0": 7, "1.0:0": 8, "1.1:0": 7}
    after = processes.each(
        counts,
        lambda name: processes.agreements[name].go_on(
            processes.voice(name, counts[name]), before[name]
        ),
    )
    assert len({decision.workers for decision in after.values()}) == 1
    decision = after["1.1:0"]
    assert decision.workers == (Worker(0, 0), Worker(1, 0), Worker(1, 1))
    assert decision.latest.committed == 8 and decision.newcomers == ()


def test_a_second_death_during_the_agreement(processes):
    """Two wait for a third, which dies instead of speaking."""
    before = processes.start()
    processes.kill("0.1:0")
    futures = [
        processes.pool.submit(processes.agreements[name].go_on, processes.voice(name), before[name])
        for name in ("0.0:0", "1.0:0")
    ]
    assert not any(future.done() for future in futures)
    processes.kill("1.1:0")
    assert [future.result(SECONDS).workers for future in futures] == [
        (Worker(0, 0), Worker(1, 0))
    ] * 2


def test_a_process_that_is_silent_is_left_out_and_told_so():
    processes = Processes()
    before = processes.start()
    awake = ("0.0:0", "1.0:0", "1.1:0")
    met = threading.Barrier(len(awake))

    def go_on(name: str) -> Decision:
        processes.agreements[name]._patience = SHORT_SECONDS
        met.wait(SECONDS)
        return processes.agreements[name].go_on(processes.voice(name), before[name])

    after = processes.each(awake, go_on)
    assert after["0.0:0"].workers == (Worker(0, 0), Worker(1, 0), Worker(1, 1))
    with pytest.raises(LeftOutError, match=r"the others go on without 0\.1:0"):
        processes.agreements["0.1:0"].go_on(processes.voice("0.1:0"), before["0.1:0"])
    processes.close()


def test_a_worker_that_has_lost_a_rank_is_out():
    processes = Processes(ranks=2)
    before = processes.start()
    processes.kill("0.1:1")
    survivors = [name for name in processes.watches if name != "0.1:0"]
    lost = processes.pool.submit(
        processes.agreements["0.1:0"].go_on, processes.voice("0.1:0"), before["0.1:0"]
    )
    after = processes.each(
        survivors,
        lambda name: processes.agreements[name].go_on(processes.voice(name), before[name]),
    )
    assert after["0.0:1"].workers == (Worker(0, 0), Worker(1, 0), Worker(1, 1))
    with pytest.raises(LeftOutError, match="has lost a rank"):
        lost.result(SECONDS)
    processes.close()


def test_a_worker_returns_without_state(processes):
    before = processes.start()
    processes.kill("0.1:0")
    survivors = ("0.0:0", "1.0:0", "1.1:0")
    second = processes.each(
        survivors,
        lambda name: processes.agreements[name].go_on(processes.voice(name, 3), before[name]),
    )
    processes.watches["0.1:0"] = Watch("127.0.0.1", lambda: None)
    returned = Agreement(processes.store, "0.1:0", 1, SECONDS)
    assert returned.has_begun()
    joining = processes.pool.submit(returned.join, processes.voice("0.1:0", None))
    while processes.agreements["0.0:0"].count_joiners() == 0:
        assert not joining.done()
    while not returned.store.check(["joiner/1"]):
        assert not joining.done()
    third = processes.each(
        survivors,
        lambda name: processes.agreements[name].go_on(processes.voice(name, 4), second[name]),
    )
    decision = joining.result(SECONDS)
    assert decision == third["1.1:0"] and decision.workers == WORKERS
    assert (
        decision.newcomers == (Worker(0, 1),)
        and decision.latest.committed == 4
        and returned.number == 3
    )


def start_again(processes: Processes) -> dict[str, bool]:
    """Start all processes anew, on the store of those before.

    Returns which of them are to join.
    """
    processes.kill(*processes.watches)
    processes.watches = {name: Watch("127.0.0.1", lambda: None) for name in processes.agreements}
    processes.agreements = {
        name: Agreement(processes.store, name, 1, SECONDS) for name in processes.agreements
    }
    return {name: agreement.has_begun() for name, agreement in processes.agreements.items()}


def test_a_run_begins_where_all_processes_of_an_earlier_one_are_dead(processes):
    """torchrun starts all processes anew with the store that they had."""
    before = processes.start()
    assert not any(start_again(processes).values())
    after = processes.start()
    assert after["0.0:0"].workers == WORKERS
    assert after["0.0:0"].voices.keys() == before["0.0:0"].voices.keys()
    agreement = Agreement(processes.store, "0.1:0", 1, SECONDS)
    assert agreement.has_begun() and agreement.store.check(["decision/1"])


def test_a_run_that_never_began_is_left_by_all(processes):
    # Two processes have spoken when all are started anew; another one, slower, looks at that run
    # first.
    for name in ("0.0:0", "0.1:0"):
        processes.store.set(f"slipstream 1/voice/1/{name}", "of a process that is dead")
    slow = processes.pool.submit(
        processes.agreements["1.1:0"].start, processes.voice("1.1:0"), WORKERS
    )
    while not processes.store.check(["slipstream 1/voice/1/1.1:0"]):
        assert not slow.done()
    others = [name for name in processes.agreements if name != "1.1:0"]
    decisions = processes.each(
        others, lambda name: processes.agreements[name].start(processes.voice(name), WORKERS)
    )
    assert slow.result(SECONDS) == decisions["0.0:0"] and decisions["0.0:0"].workers == WORKERS


def test_who_comes_first_after_a_failed_start_begins_no_run_with_the_dead(processes):
    # At the start before, 1.1 never came, and the others have ended: now it comes first.
    gone = Watch("127.0.0.1", lambda: None)
    gone.close()
    voice = msgspec.json.encode(Voice(address=gone.address, committed=0)).decode()
    others = [name for name in processes.agreements if name != "1.1:0"]
    for name in others:
        processes.store.set(f"slipstream 1/voice/1/{name}", voice)
    first = processes.pool.submit(
        processes.agreements["1.1:0"].start, processes.voice("1.1:0"), WORKERS
    )
    while not processes.store.check(["slipstream 1/decision/1"]):
        assert not first.done()
    decisions = processes.each(
        others, lambda name: processes.agreements[name].start(processes.voice(name), WORKERS)
    )
    assert first.result(SECONDS) == decisions["0.0:0"]
    assert decisions["0.0:0"].voices == {
        name: processes.voice(name) for name in processes.agreements
    }


def test_whoever_does_not_start_is_named():
    processes = Processes(patience=0.2)
    with pytest.raises(TimeoutError, match=r"0.1:0, 1.0:0, 1.1:0 did not start in 0.2 s"):
        processes.agreements["0.0:0"].start(processes.voice("0.0:0"), WORKERS)
    processes.close()


def test_whoever_has_no_others_to_wait_for_starts_whatever_the_time():
    processes = Processes(patience=0)
    decision = processes.agreements["0.0:0"].start(processes.voice("0.0:0"), WORKERS[:1])
    assert decision.workers == WORKERS[:1]
    processes.close()


def test_the_system_asks_whether_the_machine_of_a_watched_process_is_there():
    watching, watched = Watch("127.0.0.1", lambda: None), Watch("127.0.0.1", lambda: None)
    watching.follow(watched.address, lambda: None)
    assert watching._followed.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if sys.platform == "linux":
        limit = watching._followed.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == 1000 * SILENT_SECONDS
    watching.close()
    watched.close()


@pytest.fixture
def many_descriptors():
    """So many open descriptors that new ones are too large for select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MANY_DESCRIPTORS + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"only {hard} descriptors are allowed")
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY_DESCRIPTORS)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_death_is_noticed_by_a_process_with_many_descriptors():
    checked, lost = threading.Event(), threading.Event()
    watching, watched = Watch("127.0.0.1", checked.set), Watch("127.0.0.1", lambda: None)
    assert checked.wait(SECONDS)
    watching.follow(watched.address, lost.set)
    assert not is_dead(watched.address)
    watched.close()
    assert lost.wait(SECONDS) and is_dead(watched.address)
    watching.close()


@contextmanager
def no_descriptors():
    """Let no further descriptor be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, hard))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)


def await_turns(checked: threading.Event) -> None:
    """Wait until a watch has had a whole turn.

    The first to end may have begun before.
    """
    for _ in range(2):
        checked.clear()
        assert checked.wait(SECONDS)


def test_a_watch_outlives_a_want_of_descriptors():
    checked, lost = threading.Event(), threading.Event()
    watch, other = Watch("127.0.0.1", checked.set), Watch("127.0.0.1", lambda: None)
    host, port = watch.address.split()
    with socket.socket() as late:
        with no_descriptors():
            late.connect((host, int(port)))
            await_turns(checked)
            assert not watch._accepted
            # Nothing is said of the other process.
            with pytest.raises(OSError, match="Too many open files"):
                watch.follow(other.address, lost.set)
        while not watch._accepted:
            await_turns(checked)
    watch.follow(other.address, lost.set)
    assert not lost.is_set()
    other.close()
    assert lost.wait(SECONDS)
    watch.close()


def test_a_watch_does_not_wait_for_a_connection_that_has_gone():
    watch = Watch("127.0.0.1", lambda: None)
    watch._take(watch._listener, None)
    assert not watch._accepted
    watch.close()


def test_a_watch_checks_although_a_socket_of_it_is_closed():
    checked, closed = threading.Event(), socket.socket()
    closed.close()
    watch = Watch("127.0.0.1", checked.set)
    with watch._lock:
        watch._accepted.append(closed)
    await_turns(checked)
    watch.close()


def test_a_death_is_noticed_and_slowness_is_not_one():
    lost = threading.Event()
    watch, other = Watch("127.0.0.1", lambda: None), Watch("127.0.0.1", lambda: None)
    watch.follow(other.address, lost.set)
    assert not is_dead(other.address) and not lost.is_set()
    other.close()
    assert lost.wait(SECONDS) and is_dead(other.address)
    again = threading.Event()
    watch.follow(other.address, again.set)
    assert again.is_set()
    watch.close()


def test_a_worker_of_two_ranks_returns_when_both_have_asked():
    processes = Processes(ranks=2)
    before = processes.start()
    processes.kill("0.1:0", "0.1:1")
    names_left = [*processes.watches]

    def go_on(then: dict[str, Decision]) -> dict[str, Decision]:
        return processes.each(
            names_left,
            lambda name: processes.agreements[name].go_on(processes.voice(name), then[name]),
        )

    then, joining = go_on(before), []
    for rank in range(2):
        name = f"0.1:{rank}"
        processes.watches[name] = Watch("127.0.0.1", lambda: None)
        returned = Agreement(processes.store, name, 2, SECONDS)
        joining.append(processes.pool.submit(returned.join, processes.voice(name, None)))
        while not returned.store.check([f"joiner/{rank + 1}"]):
            assert not joining[-1].done()
        then = go_on(then)
        assert (Worker(0, 1) in then["0.0:0"].workers) == (rank == 1)
    assert all(future.result(SECONDS) == then["0.0:0"] for future in joining)
    processes.close()
