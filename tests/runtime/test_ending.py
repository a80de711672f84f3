"""Runs that are told to end do so at the next iteration.

They leave a checkpoint; a worker that is told to leaves them.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.launch import Resilience, RunOptions, RunResult, run
from slipstream.runtime.node_agent import join_run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.stop_signals import REPEAT_SECONDS, SIGNALS, RunStopped
from slipstream.runtime.protocol.rendezvous import Rendezvous
from tests.runtime.failing import GRACE_SECONDS, JOB, TIMEOUT_SECONDS, dead, planned
from tests.runtime.running import assert_same_numbers, free_port, judge, log_of, schedule_for, tiny
from tests.runtime.speaking import SECRET, own_job
from tests.runtime.test_going_back import on_the_spot, saved

ENDLESS = 100_000
CONFIG = tiny(iterations=30)
ONE_NODE = RunOptions()


def committed(out: Path) -> int:
    return len((out / "losses.jsonl").read_text().splitlines())


def newest(out: Path) -> int | None:
    found = open_latest(out / "checkpoints")
    return None if found is None else found.iteration


def stopped(
    out: Path,
    fork_server: ForkServer,
    progress,
    *,
    every: int | None = None,
    grace: float = GRACE_SECONDS,
    notify=lambda _: None,
    **resilience,
) -> RunStopped:
    with pytest.raises(RunStopped) as caught:
        run(
            schedule_for(JOB),
            tiny(iterations=ENDLESS),
            out=out,
            fork_server=fork_server,
            progress=progress,
            options=RunOptions(grace_seconds=grace, notify=notify),
            resilience=Resilience(
                scheduler=planned(JOB),
                checkpoint_every=every,
                heartbeat_timeout_seconds=TIMEOUT_SECONDS,
                **resilience,
            ),
        )
    assert fork_server.pids == {}
    return caught.value


def assert_goes_on(out: Path, fork_server: ForkServer, lost: int = 0) -> None:
    """From the checkpoint, to the numbers of a run that nothing has happened to."""
    checkpoint = open_latest(out / "checkpoints")
    assert checkpoint is not None and checkpoint.iteration + lost == committed(out) < 30
    run(
        schedule_for(JOB),
        CONFIG,
        out=out,
        fork_server=fork_server,
        resilience=Resilience(resume=checkpoint),
    )
    losses = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    reference = judge(CONFIG, JOB.microbatches, 30)
    assert losses == pytest.approx(list(reference.losses), rel=0, abs=1e-9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_the_run_with_a_checkpoint_from_which_it_goes_on(
    number, fork_server, tmp_path
):
    def tell(iteration, _):
        if iteration == 5:
            os.kill(os.getpid(), number)

    before = [*map(signal.getsignal, SIGNALS)]
    error = stopped(tmp_path, fork_server, tell)
    assert error.number == number and str(error) == f"interrupted by {number.name}"
    assert [*map(signal.getsignal, SIGNALS)] == before
    assert 6 <= committed(tmp_path) <= 10 and not (tmp_path / "parameters").exists()
    assert_goes_on(tmp_path, fork_server)
    assert "Traceback" not in log_of(tmp_path)


def test_without_checkpoints_it_just_ends_at_the_next_iteration(fork_server, tmp_path):
    def tell(iteration, _):
        if iteration == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped(tmp_path, fork_server, tell, every=0)
    assert 6 <= committed(tmp_path) <= 10 and not (tmp_path / "checkpoints").exists()


def test_a_signal_that_is_repeated_at_once_is_the_same_one(fork_server, tmp_path):
    """From the scheduler and from torchrun; also where workers get it twice."""

    def tell(iteration, _):
        if iteration == 5:
            for pid in 2 * [os.getpid(), *fork_server.pids.values()]:
                os.kill(pid, signal.SIGTERM)

    stopped(tmp_path, fork_server, tell)
    assert_goes_on(tmp_path, fork_server)


def test_a_warning_that_slurm_sends_to_all_processes_ends_the_run_once(fork_server, tmp_path):
    """pytorch 154849: what `sbatch --signal=USR1@90` sends kills a process that does not know of
    it.
    """

    def tell(iteration, _):
        if iteration == 3:  # to workers alone: they survive it
            for pid in fork_server.pids.values():
                os.kill(pid, signal.SIGUSR1)
        if iteration == 9:
            for pid in [*fork_server.pids.values(), os.getpid()]:
                os.kill(pid, signal.SIGUSR1)

    assert stopped(tmp_path, fork_server, tell).number == signal.SIGUSR1
    assert 10 <= committed(tmp_path) <= 14
    assert_goes_on(tmp_path, fork_server)


def test_a_second_signal_ends_it_at_once(fork_server, tmp_path):
    def tell(iteration, _):
        if iteration == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(REPEAT_SECONDS[signal.SIGINT] + 0.1)
            os.kill(os.getpid(), signal.SIGINT)

    assert stopped(tmp_path, fork_server, tell).number == signal.SIGINT
    assert committed(tmp_path) == 6 and newest(tmp_path) is None


def test_a_signal_before_the_first_iteration(fork_server, tmp_path):
    def tell_when_started() -> None:
        while not fork_server.pids:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(0, tell_when_started)
    timer.start()
    stopped(tmp_path, fork_server, None)
    timer.join()


def test_a_signal_while_one_is_dead_and_none_can_go_on_in_time(fork_server, tmp_path):
    """A worker is stopped; nobody gives it up before the time is over."""

    def tell(iteration, _):
        if iteration == 5:
            os.kill(fork_server.pids["1.0"], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)
            began.append(time.monotonic())

    began: list[float] = []
    with pytest.raises(RunStopped, match=r"^interrupted by SIGTERM, and not ended within 1 s$"):
        run(
            schedule_for(JOB),
            tiny(iterations=ENDLESS),
            out=tmp_path,
            fork_server=fork_server,
            progress=tell,
            options=RunOptions(grace_seconds=1.0),
            resilience=Resilience(
                scheduler=planned(JOB), checkpoint_every=None, heartbeat_timeout_seconds=60
            ),
        )
    assert time.monotonic() - began[0] < 30 and fork_server.pids == {}


def test_a_death_while_the_run_ends_loses_no_checkpoint(fork_server, tmp_path):
    def tell(iteration, _):
        if iteration == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(fork_server.pids["1.0"], signal.SIGKILL)

    stopped(tmp_path, fork_server, tell)
    assert_goes_on(tmp_path, fork_server)


def test_a_layer_that_is_lost_while_the_run_ends_leaves_the_newest_checkpoint_to_go_on_from(
    fork_server, tmp_path
):
    """No time is spent on going back: that would write what is written already."""

    def tell(iteration, loss):
        saved(tmp_path, 4)(iteration, loss)
        if iteration == 6:
            for name in ("0.0", "1.0"):
                os.kill(fork_server.pids[name], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGTERM)

    said: list[str] = []
    stopped(tmp_path, fork_server, tell, every=4, notify=lambda news: said.append(str(news)))
    assert committed(tmp_path) == 7 and newest(tmp_path) == 4
    (line,) = [line for line in said if "has no live worker left" in line]
    assert line.startswith("stage 0 has no live worker left: worker ") and line.endswith(
        "without another checkpoint"
    )
    assert_goes_on(tmp_path, fork_server, lost=3)


def trained(
    out: Path,
    fork_server: ForkServer,
    progress,
    options: RunOptions = ONE_NODE,
    every: int | None = 0,
) -> RunResult:
    result = run(
        schedule_for(JOB),
        CONFIG,
        out=out,
        fork_server=fork_server,
        progress=progress,
        options=options,
        resilience=Resilience(
            scheduler=on_the_spot(JOB),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
            checkpoint_every=every,
        ),
    )
    assert_same_numbers(result, judge(CONFIG, JOB.microbatches, 30))
    return result


def test_a_worker_that_is_told_to_end_leaves_and_the_others_go_on(fork_server, tmp_path):
    def tell(iteration, _):
        if iteration == 5:
            os.kill(fork_server.pids["1.0"], signal.SIGTERM)

    result = trained(tmp_path, fork_server, tell)
    assert dead(result) == ["1.0"]
    assert result.recoveries[0].reasons == ("worker 1.0 has left, as it was asked to",)
    assert "Traceback" not in log_of(tmp_path)


def test_all_workers_told_to_end_end_the_run_with_a_checkpoint(fork_server, tmp_path):
    """As schedulers tell all processes of a job; none is left to go on."""

    def tell(iteration, _):
        if iteration == 5:
            for pid in fork_server.pids.values():
                os.kill(pid, signal.SIGTERM)

    stopped(tmp_path, fork_server, tell)
    assert_goes_on(tmp_path, fork_server)


def test_a_worker_that_alone_holds_layers_saves_them_first_and_the_others_go_on_from_there(
    fork_server, tmp_path
):
    def tell(iteration, _):
        if iteration == 5:
            os.kill(fork_server.pids["1.0"], signal.SIGKILL)
        elif iteration == 8:
            os.kill(fork_server.pids["0.0"], signal.SIGTERM)

    result = trained(tmp_path, fork_server, tell, every=None)
    assert dead(result) == ["1.0", "0.0"]
    last = result.recoveries[-1]
    assert last.live == 2 and last.went_back_to in range(9, 14) and last.repeated == 0


def test_a_node_whose_workers_leave(fork_server, other_fork_server, tmp_path):
    """Each worker of a node gets a signal, and the node leaves.

    The signal itself reaches the launcher of a node in `tests/cli/test_ending.py`.
    """
    rendezvous, errors = Rendezvous("127.0.0.1", free_port()), []

    def follow() -> None:
        try:
            join_run(
                rendezvous,
                own_job(JOB, CONFIG, tmp_path / "other"),
                node=1,
                nodes=2,
                fork_server=other_fork_server,
            )
        except Exception as error:
            errors.append(error)

    def tell(iteration, _):
        if iteration == 5:
            for pid in other_fork_server.pids.values():
                os.kill(pid, signal.SIGTERM)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    options = RunOptions(nodes=2, rendezvous=rendezvous, secret=SECRET)
    result = trained(tmp_path / "lead", fork_server, tell, options)
    thread.join(60)
    assert sorted(dead(result)) == ["1.0", "1.1"] and len(result.recoveries) <= 2 and not errors
