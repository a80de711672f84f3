"""What the coordinator makes of what workers say, of their silence, and of their ends."""

import asyncio
import contextlib
import gc
import socket
import time

import pytest

from slipstream.runtime.coordinator.connections import stall_watch
from slipstream.runtime.coordinator.connections.worker_connections import CHECKS_PER_TIMEOUT
from slipstream.runtime.coordinator.decisions import next_order
from slipstream.runtime.coordinator.decisions.transition import WorkerLost
from slipstream.runtime.errors import RunError
from slipstream.runtime.protocol import to_node_agent, to_worker
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_coordinator import (
    Injected,
    IterationReport,
    JoinNode,
    JoinWorker,
    Note,
    Paused,
    Ready,
    WorkerEnded,
    WorkerFailed,
    WorkerStatus,
)
from slipstream.runtime.protocol.to_node_agent import NodeTaken
from slipstream.runtime.run_folder import hold_folder_lock, read_lock_holder
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator import talking
from tests.runtime.coordinator.holding import holding
from tests.runtime.coordinator.talking import (
    HEARTBEAT_TIMEOUT_SECONDS,
    JOB,
    SOON,
    WORKERS,
    Talker,
    World,
    setup_with,
)
from tests.runtime.running import schedule_for, tiny
from tests.runtime.speaking import talk, until


async def all_stopped(world, stops_before=99):
    """Wait until all workers have reported all iterations that they do.

    They stop before another one then.
    """
    for talker in world.talkers.values():
        await talker.stopped.wait()
        talker._stops_before = stops_before


def test_workers_train_to_the_end_and_leave(tmp_path):
    world = World(tmp_path)
    world.play()
    assert world.log.losses == [3.0] * 4 and not world.events.state.recovery.recoveries


def test_who_has_not_said_who_it_is_is_cut_off_at_the_end(tmp_path):
    """As a worker that was just started again."""
    world, found = World(tmp_path), []

    async def script(world):
        found.append(socket.create_connection((world.address.host, world.address.port), timeout=5))
        await asyncio.to_thread(found[0].recv, 1000)  # the greeting

    gc.disable()
    try:
        world.play(script)
        with found[0] as connection, contextlib.suppress(ConnectionError):
            while connection.recv(1000):  # the greeting, where the script was not in time for it
                pass
    finally:
        gc.enable()


def test_once_an_order_has_committed_those_before_it_are_forgotten(tmp_path):
    async def script(world):
        await all_stopped(world)
        world.processes.end(WORKERS[0])

    world = World(tmp_path, lambda down: schedule_for(JOB, list(map(str, down))))
    world.play(script, stops_before=2)
    asyncio.run(until(lambda: world.forgotten == [2]))


def test_while_workers_wait_for_an_order_nobody_looks_for_garbage(tmp_path):
    looks = {}

    def schedule(down):
        looks["planning"] = gc.isenabled()
        return schedule_for(JOB, list(map(str, down)))

    async def script(world):
        await all_stopped(world, stops_before=2)  # the same iteration in the next order
        looks["training"] = gc.isenabled()
        world.processes.end(WORKERS[0])
        await until(lambda: world.events.state.order == 2)
        looks["trains again"] = gc.isenabled()
        for talker in list(world.talkers.values())[1:]:
            talker.say(IterationReport(talker.worker, 2, 2, 1.0, 0.1))

    World(tmp_path, schedule).play(script, stops_before=2)
    assert looks == {"training": True, "planning": False, "trains again": True} and gc.isenabled()


def test_first_what_a_worker_said_then_that_it_is_gone(tmp_path):
    """Both are there at the same time."""

    async def script(world):
        talker = world.talkers[WORKERS[0]]
        await all_stopped(world)
        talker.say(WorkerFailed(WORKERS[0], "why"))
        world.processes.end(WORKERS[0], 1)

    with pytest.raises(
        RunError, match=r"^worker 0\.0 failed: why \(see .*worker-0\.0\.log\); 2 iterations are"
    ):
        World(tmp_path).play(script, stops_before=2)


def test_a_process_that_ends_while_its_connection_stays_is_waited_for_no_longer_than_a_moment(
    tmp_path,
):
    async def script(world):
        await all_stopped(world)
        world.processes.end(WORKERS[0])

    with pytest.raises(RunError, match=r"^worker 0\.0 was killed by SIGKILL; 2 iterations are"):
        World(tmp_path, setup=setup_with(heartbeat_timeout_seconds=20.0)).play(
            script, stops_before=2
        )


def test_a_silent_worker_is_given_up_and_killed(tmp_path):
    async def script(world):
        await all_stopped(world)
        world.talkers[WORKERS[1]].beating = False

    world = World(tmp_path)
    with pytest.raises(RunError, match=r"^worker 1\.0 stopped answering; 2 iterations are"):
        world.play(script, stops_before=2)


def test_workers_are_gone_with_the_agent_of_their_node(tmp_path):
    async def script(world):
        await all_stopped(world)
        world.agent.writer.close()

    setup = setup_with(nodes=2, heartbeat_timeout_seconds=20.0)
    with pytest.raises(RunError, match=r"^worker 1\.0 is gone with node 1; 2 iterations are"):
        World(tmp_path, setup=setup).play(script, stops_before=2, agent=True)


def test_an_agent_that_joins_anew_ends_what_is_left_of_its_nodes_workers(tmp_path):
    """An agent that joins anew ends what is left of its node's workers.

    Their machine was lost without a word, its launcher, too, when there was another node 0. Else
    their new processes would be refused until the system gives up the old connections.
    """

    async def script(world):
        await all_stopped(world, stops_before=2)  # the same iteration in the next order
        world.agent = await talk(world.address, JoinNode(1))
        await world.agent.reader.read(2**16)
        world.new = await talk(world.address, JoinWorker(WORKERS[1]))
        (answer,) = world.new.frames.parse_messages(await world.new.reader.read(2**16))
        assert isinstance(to_worker.decode(answer), WorkerSetup)
        await until(lambda: world.events.state.order == 2)
        for worker in WORKERS[::2]:
            world.talkers[worker].say(IterationReport(worker, 2, 2, 1.0, 0.1))

    setup = setup_with(nodes=2, heartbeat_timeout_seconds=20.0)
    world = World(tmp_path, lambda down: schedule_for(JOB, list(map(str, down))), setup=setup)
    world.play(script, stops_before=2)
    (recovery,) = world.events.state.recovery.recoveries
    assert recovery.dead == (WORKERS[1],) and recovery.reasons == (
        "worker 1.0 is gone with node 1",
    )
    assert world.log.losses == [3.0] * 2 + [2.0] * 2


def test_what_ranks_have_said_that_were_not_all_ready_is_over_with_their_node(tmp_path):
    # Else the first rank of the next process would make the worker ready, with what the last one
    # has said.

    async def script(world):
        workers = world.events._workers
        # The first ranks of all are ready, and no other.
        await until(lambda: len(workers.incomplete_workers) == 3)
        world.agent.writer.close()
        await until(lambda: len(workers.incomplete_workers) == 2)
        world.kept = [
            await talk(world.address, JoinNode(1)),
            await talk(
                world.address,
                JoinWorker(WORKERS[1], rank=1),
                Ready(WORKERS[1], (("127.0.0.1", 2),)),
            ),
        ]
        await until(lambda: len(workers.incomplete_workers) == 3)
        world.events._enqueue(world.events._require_all_connected)

    world = World(
        tmp_path,
        setup=setup_with(nodes=2),
        config=tiny(tensor_parallel=2),
        join_timeout_seconds=1000,
    )
    with pytest.raises(
        RunError,
        match=r"^waited 1000 s unsuccessfully for worker 0\.0 of node 0, worker 2\.0 of node "
        r"0 and worker 1\.0 of node 1; ",
    ):
        world.play(script, agent=True)


def test_a_second_agent_of_a_node_is_refused_and_ends_nobody(tmp_path):
    async def script(world):
        await all_stopped(world)
        second = await talk(world.address, JoinNode(1), WorkerEnded(WORKERS[1], 1))
        (answer,) = second.frames.parse_messages(await second.reader.read(2**16))
        assert to_node_agent.decode(answer) == NodeTaken()
        for talker in world.talkers.values():
            talker.say(IterationReport(talker.worker, 1, 2, 1.0, 0.1))

    world = World(tmp_path, setup=setup_with(nodes=2))
    world.play(script, stops_before=2, agent=True)
    assert world.log.losses == [3.0] * 4


def test_workers_that_stay_away_are_waited_for_only_so_long(tmp_path):
    async def script(world):
        """Two connect, and say nothing more, not even that they live."""
        for worker in WORKERS[1:]:
            world.talkers[worker].beating, world.talkers[worker].answers = False, False
        await until(lambda: WORKERS[0] in world.events.state.live)
        await asyncio.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS)  # nobody is given up before it is ready
        world.events._enqueue(world.events._require_all_connected)

    with pytest.raises(
        RunError,
        match=r"^waited 1000 s unsuccessfully for worker 1\.0 of node 0 and worker 2\.0 of "
        "node 0; no iteration is committed$",
    ):
        World(tmp_path, join_timeout_seconds=1000).play(script)


@pytest.mark.parametrize("claimed", [WORKERS[1], Worker(7, 0)])
def test_a_second_process_that_claims_to_be_a_worker_is_refused_and_so_is_a_worker_beyond_the_grid(
    claimed, tmp_path
):
    async def script(world):
        await all_stopped(world)
        stranger = await talk(
            world.address, JoinWorker(claimed), IterationReport(claimed, 1, 2, 9.0, 0.1)
        )
        with contextlib.suppress(ConnectionResetError):
            assert await stranger.reader.read() == b""
        for talker in world.talkers.values():
            talker.say(IterationReport(talker.worker, 1, 2, 1.0, 0.1))

    world = World(tmp_path)
    world.play(script, stops_before=2)
    assert world.log.losses == [3.0] * 4


@pytest.mark.usefixtures("plans_here")
def test_planning_blocks_neither_heartbeats_nor_news(tmp_path):
    # It takes twice the heartbeat timeout or more: nobody is given up, and a death meanwhile is
    # heard of.
    planned, asked = [], []

    def scheduler(down):
        began = time.monotonic()
        asked.append(down)
        time.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS)
        while len(world.processes.buried) < 2 and time.monotonic() < began + SOON / 2:
            time.sleep(0.01)  # the first one, on a busy machine
        planned.append((down, began, time.monotonic()))
        return schedule_for(JOB, list(map(str, down)))

    async def die(world, worker):
        world.processes.end(worker)
        world.talkers[worker].writer.close()

    async def script(world):
        await all_stopped(world)
        await die(world, WORKERS[0])
        await until(lambda: asked)
        await die(world, WORKERS[1])

    world = World(tmp_path, scheduler)
    world.play(script, stops_before=2)
    asyncio.run(until(lambda: len(planned) == 2))  # nobody waits for the first one
    (recovery,) = world.events.state.recovery.recoveries
    assert recovery.dead == (WORKERS[0], WORKERS[1]) and world.processes.killed == []
    planned.sort(key=lambda item: item[1])
    assert [down for down, _, _ in planned] == [(WORKERS[0],), (WORKERS[0], WORKERS[1])]
    assert planned[0][1] < world.processes.buried[1][1] < planned[0][2]
    assert world.log.losses == [3.0] * 2 + [1.0] * 2


def test_a_worker_that_comes_back_and_fails_again_is_told(tmp_path):
    """Once each time, whether it says why, is silent, or just ends."""

    async def again(world, fail):
        talker = Talker(WORKERS[0], world.address)
        talker.answers = False
        live = asyncio.create_task(talker.live())
        await until(lambda: talker.writer is not None and WORKERS[0] in world.events._workers)
        count = len(world.told)
        fail(talker)
        await until(lambda: len(world.told) > count)
        live.cancel()

    async def script(world):
        await all_stopped(world, stops_before=2)  # the same iteration in the next order
        world.processes.end(WORKERS[0])
        world.talkers[WORKERS[0]].writer.close()
        await until(lambda: world.events.state.recovery.recoveries)

        def say_why(talker):
            talker.say(WorkerFailed(WORKERS[0], "why"))
            world.processes.end(WORKERS[0], 1)

        await again(world, say_why)
        await again(world, lambda _: world.processes.end(WORKERS[0], 3))
        for talker in list(world.talkers.values())[1:]:
            talker.say(IterationReport(talker.worker, 2, 2, 1.0, 0.1))

    world = World(tmp_path, lambda down: schedule_for(JOB, list(map(str, down))))
    world.play(script, stops_before=2)
    news = [str(line) for line in world.told]
    assert len(news) == 3 and news[0].startswith(
        "worker 0.0 was killed by SIGKILL: iteration 2 runs on 2 workers"
    )
    assert news[1].startswith("worker 0.0 failed: why (see") and news[1].endswith(
        "), before it took part"
    )
    assert news[2].startswith("worker 0.0 ended with exit status 3") and news[2].endswith(
        "), before it took part"
    )


def test_a_death_is_not_dated_back_to_a_failure_on_purpose_before_the_last_order(tmp_path):
    # Its worker has outlived that, or is back since: the pause was said to be all that had passed
    # since the order.
    found = []

    async def script(world):
        happens = world.events._apply_event
        world.events._apply_event = lambda event: (found.append(event), happens(event))
        first, second, _ = world.talkers.values()
        await all_stopped(world, stops_before=2)  # the same iteration in the next order
        second.say(Injected(second.worker, 0, time.monotonic()))
        await until(lambda: world.events._injected)
        world.processes.end(first.worker)
        await until(lambda: world.events.state.recovery.recoveries)
        found.append(time.monotonic())
        world.processes.end(second.worker)

    scheduler, cut = (
        lambda down: schedule_for(JOB, list(map(str, down))),
        Injection(WORKERS[1], 2, action="cut"),
    )
    World(tmp_path, scheduler, injections=(cut,)).play(script, stops_before=2)
    (killed,) = [event for event in found if isinstance(event, float)]
    *_, lost = [event for event in found if isinstance(event, WorkerLost)]
    assert lost.worker == WORKERS[1] and lost.since >= killed


class Looks:
    """A clock that goes on by as much as usual with each look at it.

    Whatever else this machine does plays no role.
    """

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        self.now += HEARTBEAT_TIMEOUT_SECONDS / CHECKS_PER_TIMEOUT
        return self.now


def test_a_worker_that_hangs_while_it_sends_heartbeats_is_told_and_given_up(tmp_path, monkeypatch):
    """Its main thread is well, and says what the other does."""
    monkeypatch.setattr(stall_watch, "time", Looks())

    async def script(world):
        talker = world.talkers[WORKERS[1]]
        await all_stopped(world)
        talker.status = WorkerStatus(WORKERS[1], "iteration 2, F", 1.0, waits=False)

    world = World(
        tmp_path, lambda down: schedule_for(JOB, list(map(str, down))), stall_timeout_seconds=0.6
    )
    world.play(script, stops_before=2)
    stall, recovery = map(str, world.told)
    assert stall.startswith(
        "nothing has been committed for 1 s; worker 1.0: iteration 2, F (1 s); worker 0.0: waits"
    )
    assert recovery.startswith(
        "worker 1.0 hung for 1 s in iteration 2, F: iteration 2 runs on 2 workers"
    )
    assert WORKERS[1] in world.processes.killed and world.log.losses == [3.0] * 2 + [2.0] * 2


def test_node_0_says_at_once_for_which_node_it_waits(tmp_path):
    """And where it listens."""

    async def script(world):
        for worker in WORKERS[1:]:
            world.talkers[worker].answers = False

    world = World(tmp_path, setup=setup_with(nodes=2), join_timeout_seconds=0.3)
    with pytest.raises(
        RunError,
        match=r"^waited 0\.3 s unsuccessfully for node 1, which has not connected, and for ",
    ):
        world.play(script)
    assert world.told == [
        f"node 0, at 127.0.0.1:{world.address.port}, waits for node 1, which has not connected"
    ]


def test_one_line_tells_that_nodes_do_not_share_their_folder(tmp_path):
    """Else no checkpoint is ever complete, and nobody knows."""

    async def script(world):
        for worker in (WORKERS[0], WORKERS[2]):
            world.talkers[worker].folder = read_lock_holder(tmp_path)

    with hold_folder_lock(tmp_path, 0):
        world = World(tmp_path, setup=setup_with(nodes=2))
        world.play(script)
    (line,) = [line for line in world.told if "folder" in line]
    assert line.startswith(
        "node 1 writes to another folder than node 0: checkpoints and parameters of which both "
    )
    assert world.events.news.notes == [line]


def test_what_all_workers_meet_is_said_once(tmp_path):
    """As a disk on which no checkpoint has room."""

    async def script(world):
        await all_stopped(world)
        for talker in [*world.talkers.values()] * 2:
            talker.say(Note(talker.worker, "no room"))
        first = next(iter(world.talkers.values()))
        first.say(Note(first.worker, "something else"))
        await until(lambda: "something else" in world.told)
        first.say(Paused(first.worker, 1, holding((0, 4)), None, "the end of the test"))

    world = World(tmp_path, lambda _: schedule_for(JOB))
    world.play(script, stops_before=2)
    assert world.told.count("no room") == 1 == world.events.news.notes.count("no room")


def test_what_a_worker_says_is_shown_in_one_line_whatever_it_holds(tmp_path, monkeypatch):
    """Its notes, what it does, and why it has stopped."""
    monkeypatch.setattr(stall_watch, "time", Looks())
    wild = "a\x1b[2J\nb"

    async def script(world):
        await all_stopped(world)
        first, second, _ = world.talkers.values()
        first.say(Note(first.worker, wild))
        first.status = WorkerStatus(first.worker, wild, 1.0, waits=True)
        await until(lambda: any("nothing has been committed" in line for line in world.told))
        second.say(Paused(second.worker, 1, holding((0, 4)), None, wild))

    world = World(tmp_path, lambda _: schedule_for(JOB), stall_timeout_seconds=0.6)
    world.play(script, stops_before=2)
    news = [str(line) for line in world.told if "a [2J b" in str(line)]
    assert len(news) == 3 and all(line.isprintable() for line in map(str, world.told))


def test_what_decides_nothing_is_followed_by_no_look_at_all_workers(tmp_path, monkeypatch):
    """Reports that decide nothing are followed by no look at all workers.

    Heartbeats pass beside the queue, and of an iteration's reports only the last can change
    anything.
    """
    looked = []
    monkeypatch.setattr(next_order, "prepare_changes", lambda step, phase: looked.append(step))
    setup = setup_with(iterations=90, heartbeat_timeout_seconds=1000.0)
    monkeypatch.setattr(talking, "SETUP", setup)
    world = World(tmp_path, setup=setup)
    world.play()
    assert world.log.next_iteration == 90 and len(looked) < 90 + 60, "one of three reports commits"
