"""Data that are read in order go on from their saved state.

They do so after a resume, and in a worker that comes back.
"""

import os
from pathlib import Path

import pytest

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.schedules.schedule import Worker
from tests.runtime.failing import JOB, at, dead, returned, train
from tests.runtime.running import judge, schedule_for, tiny
from tests.runtime.stream_data import reads_in
from tests.runtime.test_going_back import saved

HALF = 4
"""Iterations of each of two runs, one after the other."""


def reading(reads: Path, iterations: int):
    return tiny(
        data="tests.runtime.stream_data:Stream",
        options={"reads": str(reads)},
        iterations=iterations,
    )


def first_reads(reads: Path) -> list[int]:
    """The first iteration that each worker has read."""
    return sorted(
        iterations[0] for pid, iterations in reads_in(reads).items() if pid != os.getpid()
    )


def test_a_run_that_resumes_reads_on(fork_server, tmp_path):
    reads = tmp_path / "reads"
    config = reading(reads, 2 * HALF)
    reference = judge(config, JOB.microbatches, 2 * HALF)
    run(
        schedule_for(JOB),
        config,
        out=tmp_path / "run",
        iterations=HALF,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=HALF),
    )
    assert first_reads(reads) == [0] * 4
    reads.unlink()
    result = run(
        schedule_for(JOB),
        config,
        out=tmp_path / "run",
        fork_server=fork_server,
        resilience=Resilience(resume=open_latest(tmp_path / "run" / CHECKPOINTS)),
    )
    assert first_reads(reads) == [HALF] * 4
    assert result.losses == pytest.approx(reference.losses[HALF:], rel=0, abs=1e-9)


def test_a_worker_that_comes_back_reads_on_from_the_last_checkpoint(fork_server, tmp_path):
    """Late in a long run, the beginning is hours of reading away."""
    reads, out = tmp_path / "reads", tmp_path / "run"
    kills = [at("0.0", 8)]
    result = train(
        kills,
        fork_server,
        out,
        config=reading(reads, 50),
        checkpoint_every=4,
        returns=(Return(Worker(0, 0), 9),),
        progress=saved(out, 4, kills=kills),
    )
    assert dead(result) == returned(result) == ["0.0"]
    *others, last = first_reads(reads)
    assert others == [0] * 4 and last >= 4
