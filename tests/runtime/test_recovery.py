"""Workers die at a given place; the numbers are those of one process all the same."""

import pytest

from runtime.conductor import RunError
from runtime.injection import Injection
from runtime.launch import Resilience, run
from schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

JOB = grid(2, 2, 2, more="optimizer = 1")
CONFIG = tiny(iterations=6)
TIMEOUT_SECONDS = 1.0


def planned(job):
    return lambda down: schedule_for(job, [str(worker) for worker in down])


def train(injections, nursery, out, *, job=JOB, config=CONFIG, **resilience):
    """Train with failures and compare with the fault-free run in one process."""
    given = Resilience(**{"scheduler": planned(job), "heartbeat_timeout_seconds": TIMEOUT_SECONDS,
                          "injections": tuple(injections), **resilience})
    result = run(schedule_for(job), config, out=out, nursery=nursery, resilience=given)
    assert_same_numbers(result, judge(config, job.microbatches, config.training.iterations))
    return result


def at(worker: str, iteration: int, place="A", action="kill") -> Injection:
    return Injection(Worker.parse(worker), iteration, place, action)


@pytest.mark.parametrize("place", [0, 3, 5, "A", "O", "stepped", "reported"])
@pytest.mark.parametrize("worker", ["0.0", "1.1"])
def test_killed_anywhere_in_an_iteration(worker, place, nursery, tmp_path):
    result = train([at(worker, 2, place)], nursery, tmp_path)
    (recovery,) = result.recoveries
    assert recovery.dead == (Worker.parse(worker),) and recovery.iteration in (2, 3)
    assert recovery.reasons == (f"worker {worker} was killed by SIGKILL",)
    assert recovery.seconds > 0


def test_a_stage_without_workers_ends_the_run_after_the_last_committed_iteration(nursery, tmp_path):
    with pytest.raises(RunError, match=r"^stage 1 has no live worker left: worker 0\.1 was killed by SIGKILL, worker "
                                       r"1\.1 was killed by SIGKILL; 3 iterations are committed"):
        train([at("0.1", 1), at("1.1", 3)], nursery, tmp_path)
    assert len((tmp_path / "losses.jsonl").read_text().splitlines()) == 3
