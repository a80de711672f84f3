"""Workers die, hang, fail, lose connections and come back.

The numbers are those of one process all the same.
"""

import os
import signal
import threading
import time

import pytest

from slipstream.planner.failures import FailurePlanner
from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.coordinator.planning.schedule_finder import NoScheduleError
from slipstream.runtime.errors import RunError
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.node_agent import join_run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.relabel import relabel_schedule
from tests.runtime.failing import (
    JOB,
    LONG,
    SILENT_SECONDS,
    TIMEOUT_SECONDS,
    WIDE,
    against,
    at,
    dead,
    planned,
    returned,
    train,
)
from tests.runtime.forked import own_fork_server
from tests.runtime.pacing import UntilBack
from tests.runtime.running import assert_same_numbers, free_port, judge, schedule_for, tiny
from tests.runtime.speaking import SECRET, own_job


@pytest.mark.parametrize(
    "kills",
    [
        [("0.0", 1, 0), ("2.1", 2, "A"), ("1.0", 4, "stepped"), ("0.1", 5, "reported")],
        [("1.1", 0, 3), ("0.0", 2, "O"), ("0.1", 3, "reported"), ("2.0", 4, 5)],
        [("2.0", 0, "stepped"), ("0.1", 1, 5), ("0.0", 3, "A"), ("1.1", 5, "stepped")],
        [("1.1", 0, "O"), ("2.0", 2, "reported"), ("1.0", 4, 3), ("2.1", 5, "O")],
    ],
)
def test_killed_anywhere_in_an_iteration(kills, fork_server, tmp_path):
    result = train([at(*kill) for kill in kills], fork_server, tmp_path, job=WIDE)
    # One that has reported the last iteration may not be missed. Two may be lost in one recovery:
    # who has no business with the first, runs into its own end before it hears of it.
    assert set(dead(result)) <= {worker for worker, *_ in kills} and len(dead(result)) >= 3
    assert result.recoveries[-1].live == 6 - len(dead(result))
    for recovery in result.recoveries:
        assert recovery.reasons == tuple(
            f"worker {worker} was killed by SIGKILL" for worker in recovery.dead
        )
        assert recovery.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("stop", "worker 1.0 stopped answering"),
        ("raise", "worker 1.0 failed: InjectedError: injected in iteration 2"),
        ("exit", "worker 1.0 ended with exit status 3"),
        ("cut", None),
    ],
)
def test_other_ways_to_fail(action, reason, fork_server, tmp_path):
    result = train([at("1.0", 2, 3, action)], fork_server, tmp_path)
    (recovery,) = result.recoveries
    if reason is None:  # nobody has died: all go on together
        assert recovery.dead == recovery.reasons == () and recovery.live == 4
    else:
        assert (
            recovery.dead == (Worker(1, 0),)
            and recovery.reasons[0].startswith(reason)
            and recovery.live == 3
        )


def test_several_at_once(fork_server, tmp_path):
    result = train(
        [at("0.0", 2, 1), at("1.1", 2, 1), at("2.1", 2, 4)], fork_server, tmp_path, job=WIDE
    )
    assert sorted(dead(result)) == ["0.0", "1.1", "2.1"]


@pytest.mark.parametrize("place", ["ordered", "met", "moved"])
def test_another_dies_during_the_recovery(place, fork_server, tmp_path):
    """The run continues at iteration 1 or 2: the second death is ready for both."""
    result = train(
        [at("0.0", 2, 4), at("1.1", 1, place), at("1.1", 2, place)], fork_server, tmp_path, job=WIDE
    )
    assert dead(result) == ["0.0", "1.1"]


@pytest.mark.parametrize("clip_norm", [1e-3, 1.8])
def test_failures_before_a_step_is_validated(clip_norm, fork_server, tmp_path):
    """Steps are made on a guess, undone and made again, as one dies in between."""
    config = tiny(iterations=8, clip_norm=clip_norm)
    kills = [at("2.0", 1, "stepped"), at("0.1", 3, 0), at("1.0", 4, "A"), at("1.1", 6, "reported")]
    result = train(kills, fork_server, tmp_path, job=WIDE, config=config)
    assert dead(result) == ["2.0", "0.1", "1.0", "1.1"]


def test_one_comes_back_and_others_die_meanwhile(fork_server, tmp_path):
    kills = [at("0.0", 2, 3), at("1.1", 3, "A"), at("2.0", 35, 1)]
    back = [Return(Worker.parse(worker), 4) for worker in ("0.0", "1.1")]
    result = train(kills, fork_server, tmp_path, job=WIDE, config=LONG, returns=tuple(back))
    assert dead(result) == ["0.0", "1.1", "2.0"] and sorted(returned(result)) == ["0.0", "1.1"]
    first = next(recovery for recovery in result.recoveries if recovery.returned)
    assert first.iteration > 4  # the others have gone on without


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ordered", "met", "moved", 0])
def test_one_that_comes_back_dies_again(place, fork_server, tmp_path):
    """At whichever iteration it is taken in."""
    again = [at("0.0", iteration, place) for iteration in range(3, LONG.training.iterations)]
    result = train(
        [at("0.0", 2, 3), *again],
        fork_server,
        tmp_path,
        config=LONG,
        returns=(Return(Worker(0, 0), 3),),
    )
    assert dead(result) == ["0.0", "0.0"]


@pytest.mark.usefixtures("plans_here")
def test_roles_move_after_failures_and_back(fork_server, tmp_path):
    # Two of three workers of a stage die, and one of the other stage takes over there, with its
    # layers.
    options = PlanOptions(method="greedy", time_limit=1)
    used = []

    def normal(down):
        schedule = relabel_schedule(normal_form(WIDE, len(down), options).schedule, down)
        assert schedule is not None
        used.append(schedule)
        return schedule

    result = train(
        [at("0.0", 2, 3), at("1.0", 4, "stepped")],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        scheduler=normal,
        returns=(Return(Worker(0, 0), 6), Return(Worker(1, 0), 6)),
    )
    assert dead(result) == ["0.0", "1.0"] and sorted(returned(result)) == ["0.0", "1.0"]
    # Who plays another role when they come back has fetched its layers, too, while it trained in
    # the old one.
    assert all(recovery.meanwhile for recovery in result.recoveries if recovery.returned)
    moved = [seat for schedule in used for seat in schedule.moves]
    assert any(seat.role.column != seat.worker.column for seat in moved)


def test_all_workers_of_a_stage_die_after_one_of_another_stage_has_taken_over_there(
    fork_server, tmp_path
):
    # It holds the stage's layers: the others take them from it, by a schedule that is planned on
    # the spot.
    options = PlanOptions(method="greedy", time_limit=1)
    on_the_spot = FailurePlanner(WIDE, planned(WIDE)(()), None).after

    def table(down):
        found = (
            relabel_schedule(normal_form(WIDE, len(down), options).schedule, down)
            if len(down) <= 2
            else None
        )
        return found or on_the_spot(down)

    result = train(
        [at("0.0", 2, 3), at("1.0", 4, "stepped"), at("2.0", 7, 1)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=tiny(iterations=10),
        scheduler=table,
    )
    assert dead(result) == ["0.0", "1.0", "2.0"] and result.recoveries[-1].live == 3


@pytest.mark.usefixtures("plans_here")
def test_whoever_dies_or_hangs_while_a_schedule_is_planned_is_noticed_at_once(tmp_path):
    # Planning blocks nothing: neither news of processes nor heartbeats, for the lack of which
    # nobody is given up.
    #
    # It takes until both have been noticed: longer than anybody may be silent.
    noticed, stopped = [], threading.Event()

    def gone(name, number):
        os.kill(server.pids[name], number)
        if number == signal.SIGSTOP:
            stopped.set()
        deadline = time.monotonic() + 60
        while name in server.pids and time.monotonic() < deadline:
            time.sleep(0.01)
        if name not in server.pids:
            noticed.append(name)

    def slow(down):
        if len(down) == 1:
            gone("1.1", signal.SIGKILL)
            gone("2.0", signal.SIGSTOP)
        elif len(down) == 2:
            assert stopped.wait(60), "else an iteration is trained before 2.0 stops"
        return planned(WIDE)(down)

    with own_fork_server() as server:
        result = train(
            [at("0.0", 2)],
            server,
            tmp_path,
            job=WIDE,
            heartbeat_timeout_seconds=SILENT_SECONDS,
            scheduler=lambda down: slow(down) if down else planned(WIDE)(()),
        )
    assert noticed == ["1.1", "2.0"], "while it was planned"
    assert dead(result) == ["0.0", "1.1", "2.0"] and len(result.recoveries) == 1


def test_a_whole_node_dies(fork_server, tmp_path):
    rendezvous, errors = Rendezvous("127.0.0.1", free_port()), []

    def follow(other):
        try:
            join_run(
                rendezvous,
                own_job(JOB, LONG, tmp_path / "other"),
                node=1,
                nodes=2,
                fork_server=other,
            )
        except RunError as error:
            errors.append(str(error))

    with own_fork_server() as other:
        thread = threading.Thread(target=follow, args=(other,), daemon=True)
        thread.start()
        result = train_on_two_nodes(rendezvous, other, fork_server, tmp_path)
        thread.join(60)
    assert errors == ["the process that starts the workers has died"]
    assert sorted(dead(result)) == ["1.0", "1.1"]
    assert_same_numbers(result, judge(LONG, JOB.microbatches, LONG.training.iterations))


def train_on_two_nodes(rendezvous: Rendezvous, other: ForkServer, fork_server: ForkServer, out):
    """The second one, with all its processes, is gone soon after iteration 2."""

    def kill(iteration, _):
        if iteration == 2:
            os.kill(other._process.pid, signal.SIGKILL)

    return run(
        schedule_for(JOB),
        LONG,
        out=out,
        fork_server=fork_server,
        progress=kill,
        options=RunOptions(nodes=2, rendezvous=rendezvous, secret=SECRET),
        resilience=Resilience(scheduler=planned(JOB), heartbeat_timeout_seconds=TIMEOUT_SECONDS),
    )


def test_a_stage_without_workers_and_schedule_ends_the_run_after_the_last_committed_iteration(
    fork_server, tmp_path
):
    def fixed(down):
        if {Worker(0, 1), Worker(1, 1)} <= set(down):
            raise NoScheduleError("the table has none")
        return planned(JOB)(down)

    with pytest.raises(
        RunError,
        match=r"^stage 1 has no live worker left: worker 0\.1 was killed by SIGKILL, worker "
        r"1\.1 was killed by SIGKILL, and the table has none; [23] iterations are com",
    ) as lost:
        train([at("0.1", 1), at("1.1", 3)], fork_server, tmp_path, scheduler=fixed)
    # Three, or two where stage 0 had not yet reported the last one when 1.1 began the next.
    committed = len((tmp_path / "losses.jsonl").read_text().splitlines())
    assert f"; {committed} iterations are committed" in str(lost.value)


def test_no_schedule_ends_the_run_with_its_reason(fork_server, tmp_path):
    def refuse(_):
        raise NoScheduleError("the table has none")

    # None where stage 0 had not yet reported the first one when 0.1 began the next.
    with pytest.raises(
        RunError, match=r"^worker 0\.1 was killed by SIGKILL, and the table has none; (no|one) it"
    ):
        train([at("0.1", 1)], fork_server, tmp_path, scheduler=refuse)


def test_a_schedule_of_another_job_ends_the_run(fork_server, tmp_path):
    with pytest.raises(
        RunError, match=r"^the schedule for the failure of 0\.1 is for another job; (no|one) iter"
    ):
        train([at("0.1", 1)], fork_server, tmp_path, scheduler=planned(WIDE))


def test_one_comes_back_after_the_checkpoint_of_the_start_is_gone(fork_server, tmp_path):
    """It is swept away by newer ones; whoever comes back takes all from the others."""
    folder = tmp_path / "checkpoints"
    train([], fork_server, tmp_path, checkpoint_every=3)
    first = open_latest(folder)
    settings = against(
        [at("0.0", 20)],
        scheduler=planned(JOB),
        checkpoint_every=2,
        resume=first,
        returns=(Return(Worker(0, 0), 21),),
    )
    pace = UntilBack(settings.returns)
    result = run(
        schedule_for(JOB),
        LONG,
        out=tmp_path,
        fork_server=fork_server,
        resilience=settings,
        progress=pace.progress,
        options=RunOptions(notify=pace.notify),
    )
    assert not first.path.exists()
    assert dead(result) == returned(result) == ["0.0"]
