"""A computing thread hangs by itself, while heartbeats go on.

It is told and given up, and training goes on.
"""

import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import Tensor, nn

from slipstream.runtime.coordinator.connections import stall_watch
from slipstream.runtime.events import Event, Failed
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.models.gpt import GPT
from tests.jobs import grid
from tests.runtime.exact_parallel import Exact
from tests.runtime.failing import TIMEOUT_SECONDS, WIDE, planned
from tests.runtime.forked import own_fork_server
from tests.runtime.pacing import slowly_until
from tests.runtime.running import assert_same_numbers, joined, judge, parallel, tiny

pytestmark = pytest.mark.slow

FILE = "SLIPSTREAM_TEST_HANGS"
CALLS = 6


def hanging(layer: int, module: nn.Module) -> nn.Module:
    """A layer, which, if it is the first, does not come back from some call.

    That is in the first process that gets there.
    """
    path, calls_left, forward = os.environ.get(FILE), [CALLS], module.forward

    def hang(*values: Tensor) -> Tensor:
        calls_left[0] -= 1
        if calls_left[0] == 0:
            try:
                os.close(os.open(str(path), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return forward(*values)
            threading.Event().wait()
        return forward(*values)

    if path is not None and sys.argv[0].endswith("fork_server_process.py") and layer == 0:
        module.forward = hang
    return module


class Hanging(GPT):
    """A GPT one of whose workers never comes back from a layer's call.

    It is the first that gets to that call.
    """

    def build(self, layer: int) -> nn.Module:
        return hanging(layer, GPT.build(self, layer))


class HangingRank(Exact):
    """One of several ranks does not come back."""

    def build(self, layer: int) -> nn.Module:
        return hanging(layer, Exact.build(self, layer))


class From:
    """A clock that stands still until a file is there.

    It does so however long a busy machine takes until then; and again once it has been stopped.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._began, self._stopped = path, None, None

    def monotonic(self) -> float:
        if self._began is None and self._path.exists():
            self._began = time.monotonic()
        return (
            1000.0
            if self._began is None
            else 1000.0 + (self._stopped or time.monotonic()) - self._began
        )

    def stop(self) -> None:
        self._stopped = time.monotonic()


def test_a_worker_that_hangs_in_its_own_code_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv(FILE, str(tmp_path / "hangs"))
    monkeypatch.setattr(stall_watch, "time", From(tmp_path / "hangs"))
    config = tiny(iterations=6)
    hanging = replace(config, model=replace(config.model, name="tests.runtime.test_hangs:Hanging"))
    with own_fork_server(__name__) as fork_server:
        result = run(
            planned(WIDE)(()),
            hanging,
            out=tmp_path,
            fork_server=fork_server,
            resilience=Resilience(
                scheduler=planned(WIDE),
                heartbeat_timeout_seconds=TIMEOUT_SECONDS,
                stall_timeout_seconds=3.0,
            ),
        )
    assert (tmp_path / "hangs").exists()
    (recovery,) = result.recoveries
    (worker,) = recovery.dead
    assert worker.column == 0 and recovery.live == 5
    assert re.match(rf"worker {worker} hung for \d+ s in iteration \d, \d+F\d", recovery.reasons[0])
    stall = next(
        note for note in result.notes if note.startswith("nothing has been committed for ")
    )
    assert f"worker {worker}: iteration" in stall and "failed" not in stall
    assert "receiving from worker" in stall or "summing the gradients" in stall
    assert_same_numbers(result, judge(config, WIDE.microbatches, 6))


def test_a_rank_that_hangs_in_its_own_code_takes_its_worker_with_it(monkeypatch, tmp_path):
    # The others of its worker wait for it: it is given up as a whole, and comes back so.
    monkeypatch.setenv(FILE, str(tmp_path / "hangs"))
    clock, job = From(tmp_path / "hangs"), grid(2, 1, 2)
    monkeypatch.setattr(stall_watch, "time", clock)

    def observe(event: Event) -> None:
        if isinstance(event, Failed):
            clock.stop()

    config = parallel("tests.runtime.test_hangs:HangingRank", 2, iterations=30)
    with own_fork_server(__name__) as fork_server:
        result = run(
            planned(job)(()),
            config,
            out=tmp_path,
            fork_server=fork_server,
            options=RunOptions(observe=observe),
            progress=slowly_until(lambda: joined(tmp_path)),
            resilience=Resilience(
                scheduler=planned(job),
                heartbeat_timeout_seconds=TIMEOUT_SECONDS,
                stall_timeout_seconds=3.0,
                faults_per_hour=2,
            ),
        )
    (recovery,) = [recovery for recovery in result.recoveries if recovery.dead]
    (worker,) = recovery.dead
    assert re.match(rf"worker {worker} hung for \d+ s in iteration \d, \d+F\d", recovery.reasons[0])
    assert joined(tmp_path) == [str(worker)]
    assert_same_numbers(
        result,
        judge(
            parallel("tests.runtime.exact_parallel:Exact", 1, iterations=30), job.microbatches, 30
        ),
    )
