"""Workers that are groups of processes: the numbers are those of one process that has the whole model."""

import pytest

from runtime.config import parse_run_config
from runtime.launch import Resilience, run
from runtime.model.checkpoint import latest
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Injection
from runtime.run_folder import CHECKPOINTS
from schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import assert_same_numbers, judge, schedule_for

TWO = grid(2, 2, 2, more="optimizer = 1")
V = grid(2, 2, 2, more="[placement]\norder = 'v'\nchunks = 2")


def config(ranks, **training):
    model = {"blocks": 2, "width": 16, "heads": 4, "context": 16, "dropout": 0.1}
    return parse_run_config(model, {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": 4,
                                    "tensor_parallel": ranks, **training})


@pytest.mark.parametrize(("job", "ranks", "failed", "training"), [
    (TWO, 2, [], {}),
    (TWO, 4, [], {"clip_norm": 0.5}),
    (V, 2, ["0.1"], {"clip_norm": 0.5, "recompute": "full"}),
], ids=["two ranks", "four, clipped", "v, one down, clipped, recomputed"])
def test_numbers_are_those_of_one_process(job, ranks, failed, training, fork_server, tmp_path):
    result = run(schedule_for(job, failed), config(ranks, **training), out=tmp_path, fork_server=fork_server)
    assert_same_numbers(result, judge(config(1, **training), job.microbatches, 4))


def scheduler(job):
    return lambda down: schedule_for(job, [str(worker) for worker in down])


def test_a_rank_that_dies_takes_its_worker_with_it_and_both_come_back(fork_server, tmp_path):
    training = {"iterations": 8, "clip_norm": 0.5}
    result = run(schedule_for(TWO), config(2, **training), out=tmp_path, fork_server=fork_server,
                 resilience=Resilience(
                     scheduler=scheduler(TWO), injections=(Injection(Worker(1, 0), 2, 1, rank=1),),
                     returns=(Return(Worker(1, 0), 3),), checkpoint_every=3))
    assert_same_numbers(result, judge(config(1, **training), TWO.microbatches, 8))
    assert len(result.recoveries) == 2


def test_a_checkpoint_of_two_ranks_is_gone_on_from_by_any_number(fork_server, tmp_path):
    first, then = tmp_path / "first", config(1, iterations=6)
    run(schedule_for(TWO), config(2), out=first, fork_server=fork_server, resilience=Resilience(checkpoint_every=2))
    for ranks, stages in ((1, 4), (4, 1)):
        result = run(schedule_for(grid(2, stages, 2)), config(ranks, iterations=6), out=tmp_path / str(ranks),
                     fork_server=fork_server, resilience=Resilience(resume=latest(first / CHECKPOINTS)))
        assert result.losses == pytest.approx(judge(then, (2, 2), 6).losses[4:], abs=1e-9)
