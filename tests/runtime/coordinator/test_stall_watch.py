import pytest

from slipstream.runtime.coordinator.connections import stall_watch
from slipstream.runtime.coordinator.connections.stall_watch import STATUS_ANSWER_SECONDS, StallWatch
from slipstream.runtime.protocol.to_coordinator import WorkerStatus
from slipstream.schedules.schedule import Worker

A = Worker(0, 0)
B = Worker(1, 0)
C = Worker(0, 1)
HELD = {A: {0, 1}, B: {0, 1}, C: {2}}
INTERVAL = 1.0


class World:
    """A watch with a timeout of 10 s, whose clock is turned by hand."""

    def __init__(self):
        self.now, self.asked = 100.0, []
        self.watch = None

    def monotonic(self):
        return self.now

    def look(self, seconds, planning=False):
        """What it says within so many seconds."""
        said = []
        for _ in range(round(seconds / INTERVAL)):
            self.now += INTERVAL
            stall = self.watch.check_progress(HELD, INTERVAL, planning=planning)
            said += [] if stall is None else [stall]
        return said


@pytest.fixture
def world(monkeypatch):
    world_ = World()
    monkeypatch.setattr(stall_watch, "time", world_)
    world_.watch = StallWatch(10.0, world_.asked.append)
    return world_


def test_who_has_hung_is_told_and_named_before_those_who_wait(world):
    assert world.look(10) == [] == world.asked
    world.look(1)
    assert world.asked == [A, C, B]
    for status in (
        WorkerStatus(A, "iteration 3, F: receiving from worker 1.0", 9.0, waits=True),
        WorkerStatus(B, "iteration 3, W", 9.5, waits=False),
        WorkerStatus(C, "iteration 3, F", 0.1, waits=False),
    ):
        world.watch.add_status(status)
    (stall,) = world.look(1)
    assert str(stall) == (
        "nothing has been committed for 12 s; worker 1.0: iteration 3, W (10 s); worker 0.1: "
        "iteration 3, F; worker 0.0: iteration 3, F: receiving from worker 1.0 (9 s)"
    )
    assert [member.worker for member in stall.find_culprits(HELD)] == [B]
    assert world.look(10) == [] and world.look(3), "said again after the next timeout"


def test_nobody_is_given_up_where_all_of_some_layers_are_busy_for_so_long(world):
    world.look(11)
    for worker in (A, B):
        world.watch.add_status(WorkerStatus(worker, "iteration 0, F", 10.5, waits=False))
    world.watch.add_status(WorkerStatus(C, "waits", 10.5, waits=True))
    (stall,) = world.look(1)
    assert stall.find_culprits(HELD) == []


def test_who_does_not_answer_is_waited_for_only_a_moment(world):
    world.look(11)
    world.watch.add_status(WorkerStatus(A, "waits for the next order", 0.0, waits=True))
    (stall,) = world.look(STATUS_ANSWER_SECONDS + 1, planning=True)
    assert str(stall).endswith(
        "worker 1.0 does not answer; node 0: plans a schedule for the workers that are left"
    )


def test_progress_and_time_in_which_this_process_did_not_run_count_as_none(world):
    world.look(8)
    world.watch.restart_timeout()
    assert world.look(9) == [] == world.asked
    world.now += 500
    assert world.look(9) == [] == world.asked
    world.look(3)
    assert world.asked


def answers(world, *statuses):
    """The report after members have said what they wait for.

    Nothing has been committed for long.
    """
    world.look(11)
    for worker, seconds, awaited in statuses:
        world.watch.add_status(
            WorkerStatus(worker, "receiving", seconds, waits=True, awaited=awaited)
        )
    (stall,) = world.look(1)
    return stall


def test_members_that_wait_for_each_other_are_named_and_not_who_waits_for_them(world):
    # None of them computes, so that nobody hangs, and a connection between two of them carries
    # nothing.
    stall = answers(world, (A, 19.0, (B,)), (B, 19.0, (A,)), (C, 19.0, (A,)))
    assert stall.find_culprits(HELD) == [] and [
        member.worker for member in stall.find_circle()
    ] == [A, B]


@pytest.mark.parametrize("seconds", [[19.0, 9.0, 19.0], [19.0, 19.0, 19.0]])
def test_nobody_is_named_whose_wait_ends_with_that_of_another(world, seconds):
    # C waits for node 0, or all wait for who has not waited for long: their transfers may only be
    # slow.
    a, b, c = seconds
    waits_of_b, waits_of_c = ((C,), ()) if b > 10 else ((A,), (B,))
    stall = answers(world, (A, a, (B,)), (B, b, waits_of_b), (C, c, waits_of_c))
    assert stall.find_circle() == []
