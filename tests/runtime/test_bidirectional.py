"""Pipelines in both directions over the same workers: each holds two stages, and copies of a stage stay alike."""

import pytest

from cli.shared.failure_schedules import scheduler
from runtime.launch import Resilience, run
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Injection
from schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import planned
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

LONG = 120
"""Iterations in which a worker can surely come back."""
JOB = grid(2, 4, 2, more="optimizer = 1\n[placement]\norder = 'bidirectional'")


def test_clipping_counts_each_layer_once(fork_server, tmp_path):
    config = tiny(iterations=5, clip_norm=0.5)
    result = run(schedule_for(JOB), config, out=tmp_path, fork_server=fork_server)
    assert_same_numbers(result, judge(config, JOB.microbatches, 5))


@pytest.mark.parametrize("worker", ["0.1", "1.3"])
def test_a_worker_dies_and_comes_back(worker, fork_server, tmp_path):
    config, dead = tiny(iterations=LONG), Worker.parse(worker)
    resilience = Resilience(scheduler=planned(JOB), heartbeat_timeout_seconds=2,
                            injections=(Injection(dead, 2, "O", "kill"),), returns=(Return(dead, 3),))
    result = run(schedule_for(JOB), config, out=tmp_path, fork_server=fork_server, resilience=resilience)
    assert_same_numbers(result, judge(config, JOB.microbatches, LONG))
    assert [one.dead for one in result.recoveries if one.dead] == [(dead,)]
    assert [one.returned for one in result.recoveries if one.returned] == [(dead,)]


def test_both_workers_of_a_column_die_whose_layers_another_column_has_copies_of(fork_server, tmp_path):
    """Roles move: those who live get the layers from the copies."""
    config = tiny(iterations=8)
    resilience = Resilience(scheduler=scheduler(JOB, schedule_for(JOB), None), heartbeat_timeout_seconds=2,
                            injections=(Injection(Worker(0, 1), 2, "O"), Injection(Worker(1, 1), 4, 1)))
    result = run(schedule_for(JOB), config, out=tmp_path, fork_server=fork_server, resilience=resilience)
    assert_same_numbers(result, judge(config, JOB.microbatches, 8))
    assert [one.dead for one in result.recoveries] == [(Worker(0, 1),), (Worker(1, 1),)]
