"""A computing thread that hangs by itself, while heartbeats go on: it is told and given up, and training goes on."""

import os
import re
import sys
import threading
import time
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor, nn

from runtime.coordinator import stall_watch
from runtime.launch import Resilience, run
from runtime.model.gpt import GPT
from tests.runtime.failing import TIMEOUT_SECONDS, WIDE, planned
from tests.runtime.forked import own_fork_server
from tests.runtime.running import assert_same_numbers, judge, tiny

FILE = "SLIPSTREAM_TEST_HANGS"
CALLS = 6


class Hanging(GPT):
    """A GPT in which the first worker that gets to some call of a layer never comes back from it."""

    def build(self, layer: int) -> nn.Module:
        made, path, left = GPT.build(self, layer), os.environ.get(FILE), [CALLS]
        forward = made.forward

        def hang(*values: Tensor) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                try:
                    os.close(os.open(str(path), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return forward(*values)
                threading.Event().wait()
            return forward(*values)

        if path is not None and sys.argv[0].endswith("fork_server_process.py") and layer == 0:
            made.forward = hang
        return made


class From:
    """A clock that stands still until a file is there, however long a busy machine takes until then."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, None

    def monotonic(self) -> float:
        if self._began is None and self._path.exists():
            self._began = time.monotonic()
        return 1000.0 if self._began is None else 1000.0 + time.monotonic() - self._began


def test_a_worker_that_hangs_in_its_own_code_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv(FILE, str(tmp_path / "hangs"))
    monkeypatch.setattr(stall_watch, "time", From(tmp_path / "hangs"))
    config = tiny(iterations=6)
    hanging = replace(config, model=replace(config.model, name="tests.runtime.test_hangs:Hanging"))
    with own_fork_server(__name__) as fork_server:
        result = run(planned(WIDE)(()), hanging, out=tmp_path, fork_server=fork_server, resilience=Resilience(
            scheduler=planned(WIDE), heartbeat_timeout_seconds=TIMEOUT_SECONDS, stall_timeout_seconds=3.0))
    assert (tmp_path / "hangs").exists()
    (recovery,) = result.recoveries
    (worker,) = recovery.dead
    assert worker.column == 0 and recovery.live == 5
    assert re.match(rf"worker {worker} hung for \d+ s in iteration \d, F\(micro", recovery.reasons[0])
    stall = next(note for note in result.notes if note.startswith("nothing has been committed for "))
    assert f"worker {worker}: iteration" in stall and "failed" not in stall
    assert "receiving from worker" in stall or "summing the gradients" in stall
    assert_same_numbers(result, judge(config, WIDE.microbatches, 6))
