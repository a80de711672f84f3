"""Pipelines in both directions over the same workers.

Each worker holds two stages, and copies of a stage stay alike.
"""

import pytest

from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.launch import run
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import LONG, at, dead, returned, train
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

JOB = grid(2, 4, 2, more="optimizer = 1\n[placement]\norder = 'bidirectional'")


def test_clipping_counts_each_layer_once(fork_server, tmp_path):
    config = tiny(iterations=5, clip_norm=0.5)
    result = run(schedule_for(JOB), config, out=tmp_path, fork_server=fork_server)
    assert_same_numbers(result, judge(config, JOB.microbatches, 5))


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["0.1", "1.3"])
def test_a_worker_dies_and_comes_back(worker, fork_server, tmp_path):
    result = train(
        [at(worker, 2, "O")],
        fork_server,
        tmp_path,
        job=JOB,
        config=LONG,
        returns=(Return(Worker.parse(worker), 3),),
    )
    assert dead(result) == returned(result) == [worker]


def test_both_workers_of_a_column_die_whose_layers_another_column_has_copies_of(
    fork_server, tmp_path
):
    """Roles move: those who live get the layers from the copies."""
    result = train(
        [at("0.1", 2, "O"), at("1.1", 4, 1)],
        fork_server,
        tmp_path,
        job=JOB,
        config=tiny(iterations=8),
        scheduler=FailurePlanner(JOB, schedule_for(JOB), None).after,
    )
    assert dead(result) == ["0.1", "1.1"] and len(result.recoveries) == 2
