"""A worker that is stuck in its process group for good goes on all the same."""

import os
import sys
import threading

import pytest
from msgspec.structs import replace
from torch import nn

from runtime.launch import Resilience, run
from runtime.model.gpt import GPT
from runtime.processes.fork_server import ForkServer
from runtime.protocol.failure_injection import Injection
from runtime.replay.stuck_calls import AbandonedError, OpenCalls
from schedules.schedule import Worker
from tests.runtime.failing import TIMEOUT_SECONDS, WIDE, planned
from tests.runtime.running import assert_same_numbers, judge, tiny

CALLS = 2
FILE = "SLIPSTREAM_TEST_STUCK"


class Stuck(GPT):
    """A GPT one of whose workers, the first to get there, never comes back from its second all-reduce."""

    def build(self, layer: int) -> nn.Module:
        from torch.distributed import ProcessGroupGloo

        path, original, left = os.environ.get(FILE), ProcessGroupGloo.allreduce, [CALLS]

        def allreduce(group, tensors):
            left[0] -= 1
            if left[0] == 0:
                try:
                    os.close(os.open(str(path), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return original(group, tensors)
                threading.Event().wait()
            return original(group, tensors)

        forked = sys.argv[0].endswith("fork_server_process.py")
        if path is not None and forked and "allreduce" not in vars(ProcessGroupGloo):
            ProcessGroupGloo.allreduce = allreduce
        return GPT.build(self, layer)


def test_a_worker_stuck_for_good_in_its_process_group_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv(FILE, str(tmp_path / "stuck"))
    config = tiny(iterations=6)
    stuck = replace(config, model=replace(config.model, name="tests.runtime.replay.test_stuck_calls:Stuck"))
    injections = (Injection(Worker(1, 1), 1, "A"),)
    with ForkServer() as fork_server:
        result = run(planned(WIDE)(()), stuck, out=tmp_path, fork_server=fork_server, resilience=Resilience(
            scheduler=planned(WIDE), heartbeat_timeout_seconds=TIMEOUT_SECONDS, injections=injections))
    assert (tmp_path / "stuck").exists()
    (recovery,) = result.recoveries
    assert recovery.dead == (Worker(1, 1),) and recovery.live == 5
    assert_same_numbers(result, judge(config, WIDE.microbatches, 6))


def test_who_comes_out_of_a_call_after_being_left_behind_is_stopped():
    calls, inside, out, ended = OpenCalls(), threading.Event(), threading.Event(), []

    def call():
        calls.begin("summing")
        inside.set()
        out.wait(20)
        try:
            calls.end()
        except AbandonedError:
            ended.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(20)
    assert not calls.abandon(thread.ident, 100) and not calls.abandon(0, 0)
    assert calls.abandon(thread.ident, 0)
    out.set()
    thread.join(20)
    assert ended == [True]
    calls.begin("summing")
    calls.end()


def test_a_call_that_fails_says_so():
    calls = OpenCalls()
    calls.begin("summing")
    calls.end()
    with pytest.raises(AbandonedError):
        calls.begin("summing")
        assert calls.abandon(threading.get_ident(), 0)
        calls.end()
