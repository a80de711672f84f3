"""A worker that is stuck in its process group for good goes on."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import nn

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.models.gpt import GPT
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.runtime.ranks.worker_group import worker_group
from slipstream.runtime.replay.stuck_calls import AbandonedError, OpenCalls
from slipstream.runtime.worker.injected_faults import Injector
from slipstream.schedules.schedule import OpKind, Worker
from tests.jobs import grid
from tests.runtime.failing import TIMEOUT_SECONDS, WIDE, planned
from tests.runtime.forked import own_fork_server
from tests.runtime.running import assert_same_numbers, judge, tiny
from tests.runtime.test_overlapped import NETWORK, TIMES

CALLS = "SLIPSTREAM_TEST_CALLS"
FILE = "SLIPSTREAM_TEST_STUCK"


class Stuck(GPT):
    """A GPT, one of whose workers never comes back from an all-reduce.

    It is the first to get to that number.

    A worker that is to die does so once that has happened: in the order after, nothing would
    release the one.
    """

    def build(self, layer: int) -> nn.Module:
        from torch.distributed import ProcessGroupGloo

        path, original, builds_left = (
            os.environ.get(FILE),
            ProcessGroupGloo.allreduce,
            [int(os.environ.get(CALLS, 0))],
        )

        def allreduce(group, tensors):
            builds_left[0] -= 1
            if builds_left[0] == 0:
                try:
                    os.close(os.open(str(path), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return original(group, tensors)
                threading.Event().wait()
            return original(group, tensors)

        fail = Injector.fail_if_due

        def fail_later(injector, iteration, place):
            while (iteration, place) in injector._mine and not Path(path).exists():
                time.sleep(0.01)
            fail(injector, iteration, place)

        forked = sys.argv[0].endswith("fork_server_process.py")
        if path is not None and forked and "allreduce" not in vars(ProcessGroupGloo):
            ProcessGroupGloo.allreduce = allreduce
            Injector.fail_if_due = fail_later
        return GPT.build(self, layer)


@pytest.mark.parametrize(
    "job",
    [
        WIDE,
        grid(3, 2, 2, times=TIMES, more=f"optimizer = 1\n[placement]\nlayers = [2, 2]\n{NETWORK}"),
    ],
    ids=["at its place", "beside compute"],
)
def test_a_worker_stuck_for_good_in_its_process_group_goes_on(job, monkeypatch, tmp_path):
    monkeypatch.setenv(FILE, str(tmp_path / "stuck"))
    reductions = sum(op.kind is OpKind.A for op in planned(job)(()).ops(Worker(0, 0)))
    monkeypatch.setenv(CALLS, str(reductions + 1))  # the first of the second iteration
    config = tiny(iterations=6)
    stuck = replace(
        config, model=replace(config.model, name="tests.runtime.replay.test_stuck_calls:Stuck")
    )
    injections = (Injection(Worker(1, 1), 1, "A"),)
    with own_fork_server(__name__) as fork_server:
        result = run(
            planned(job)(()),
            stuck,
            out=tmp_path,
            fork_server=fork_server,
            resilience=Resilience(
                scheduler=planned(job),
                heartbeat_timeout_seconds=TIMEOUT_SECONDS,
                injections=injections,
            ),
        )
    assert (tmp_path / "stuck").exists()
    (recovery,) = result.recoveries
    assert recovery.dead == (Worker(1, 1),) and recovery.live == 5
    assert_same_numbers(result, judge(config, job.microbatches, 6))


class StuckRank(GPT):
    """A GPT in workers of two ranks, one of which never comes back.

    It is stuck in a call in its first F; then another dies.
    """

    def build(self, layer: int) -> nn.Module:
        from torch.distributed import ProcessGroupGloo

        path, original = str(os.environ.get(FILE)), ProcessGroupGloo._reduce_scatter_base

        def first(name):
            try:
                os.close(os.open(path + name, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            return True

        def stays(group, *arguments):
            if first("-stuck"):
                threading.Event().wait()
            return original(group, *arguments)

        def dies(group, *arguments):
            if Path(path + "-stuck").exists() and first("-dead"):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(group, *arguments)

        forked = sys.argv[0].endswith("fork_server_process.py")
        if forked and "_reduce_scatter_base" not in vars(ProcessGroupGloo):
            ProcessGroupGloo._reduce_scatter_base = stays if layer == 0 else dies
        return GPT.build(self, layer)


def stuck_rank(config, seed, dtype, device):
    return StuckRank(config, seed, dtype, device, worker_group())


def test_a_rank_that_is_stuck_within_a_forward_goes_on(monkeypatch, tmp_path):
    """It must not keep what the next order's thread needs, such as torch's random generators."""
    monkeypatch.setenv(FILE, str(tmp_path / "one"))
    config = parse_run_config(
        {"blocks": 2, "width": 8, "heads": 2, "context": 8},
        {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": 3, "tensor_parallel": 2},
    )
    stuck = replace(
        config, model=replace(config.model, name="tests.runtime.replay.test_stuck_calls:stuck_rank")
    )
    job = grid(2, 2, 2, more="optimizer = 1")
    with own_fork_server(__name__) as fork_server:
        result = run(
            planned(job)(()),
            stuck,
            out=tmp_path,
            fork_server=fork_server,
            resilience=Resilience(
                scheduler=planned(job), heartbeat_timeout_seconds=TIMEOUT_SECONDS
            ),
        )
    (recovery,) = result.recoveries
    assert recovery.dead in {(Worker(0, 1),), (Worker(1, 1),)} and recovery.live == 3
    alone = replace(config, training=replace(config.training, tensor_parallel=1))
    assert_same_numbers(result, judge(alone, job.microbatches, 3))


def test_who_comes_out_of_a_call_after_being_left_behind_is_stopped():
    calls, inside, out, ended = OpenCalls(), threading.Event(), threading.Event(), []

    def call():
        calls.enter_call("summing")
        inside.set()
        out.wait(20)
        try:
            calls.leave_call()
        except AbandonedError:
            ended.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(20)
    assert not calls.abandon_threads([thread.ident], 100) and not calls.abandon_threads([0], 0)
    assert calls.abandon_threads([thread.ident], 0)
    out.set()
    thread.join(20)
    assert ended == [True]
    calls.enter_call("summing")
    calls.leave_call()


def test_a_call_that_fails_says_so():
    calls = OpenCalls()
    calls.enter_call("summing")
    calls.leave_call()
    with pytest.raises(AbandonedError):
        calls.enter_call("summing")
        assert calls.abandon_threads([threading.get_ident()], 0)
        calls.leave_call()


def test_who_comes_out_while_it_is_being_left_behind_is_either_left_behind_or_not():
    """A worker that comes out while being left behind is in one state.

    Were it taken for one that has come out, and stopped all the same, everybody would wait for it.
    """
    calls, inside, out, ended = OpenCalls(), threading.Event(), threading.Event(), []

    class Watched(set):
        def add(self, thread):
            set.add(self, thread)
            out.set()
            ended_before.wait(0.2)

    def call():
        calls.enter_call("summing")
        inside.set()
        out.wait(20)
        try:
            calls.leave_call()
            ended.append(False)
        except AbandonedError:
            ended.append(True)
        ended_before.set()

    ended_before = threading.Event()
    calls._abandoned = Watched()
    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(20)
    left_behind = calls.abandon_threads([thread.ident], 0)
    thread.join(20)
    assert ended == [left_behind]


def test_a_wait_for_the_device_names_its_peers_and_is_never_left_behind():
    # Over NCCL the device waits for other workers, and its thread for the device; a call within it
    # is told apart.
    calls, me = OpenCalls(), threading.get_ident()
    calls.enter_call("waiting for the device", [Worker(0, 1)], on_device=True)
    call = calls.call_of_thread(me)
    assert call.awaited == (Worker(0, 1),) and not calls.abandon_threads([me], 0)
    calls.enter_call("receiving", [Worker(1, 1)])
    assert calls.call_of_thread(me).awaited == (Worker(1, 1),)
    calls.leave_call()
    assert calls.call_of_thread(me) == call
    calls.leave_call()
    assert calls.call_of_thread(me) is None
