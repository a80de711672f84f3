"""Plans whose reductions overlap compute, in processes of their own.

Float64 training equals one process to 1e-9.
"""

import pytest

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Slowdown
from slipstream.schedules.schedule import OpKind, Worker
from tests.jobs import grid
from tests.runtime.failing import at, dead, returned, train
from tests.runtime.running import schedule_for
from tests.runtime.test_routes import eight_layers

TIMES = "forward = 4\nbackward_input = 4\nbackward_weight = 4\nall_reduce = 4"
NETWORK = "[network]\noverlap = true"
JOB = grid(3, 2, 4, times=TIMES, more=f"optimizer = 1\n[placement]\nlayers = [4, 4]\n{NETWORK}")


def begins_early(schedule):
    """Whether somebody begins a reduction before its last W."""
    kinds = []
    for program in schedule.programs:
        kinds.append([op.kind for op in program])
    return any(OpKind.W in ops[ops.index(OpKind.A) :] for ops in kinds)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"shard_optimizer": True, "clip_norm": 0.5},
        {"clip_norm": 1.8},
        {"tensor_parallel": 2},
        {"recompute": "full"},
    ],
    ids=["plain", "sharded and clipped", "clipped by a wrong guess", "ranks", "recomputed"],
)
def test_killed_with_the_same_numbers(training, fork_server, tmp_path):
    """Numbers stay the same where workers are killed.

    One dies when it has begun a reduction, which others then wait for in vain beside what they
    compute; one when it has stepped; and one in the middle of what comes after its first reduction.
    """
    assert begins_early(schedule_for(JOB)) and begins_early(schedule_for(JOB, ["1.0"]))
    result = train(
        [at("1.0", 1, "A"), at("0.1", 3, "stepped"), at("2.1", 4, after_reducing(["0.1", "1.0"]))],
        fork_server,
        tmp_path,
        job=JOB,
        config=eight_layers(6, **training),
    )
    assert {*dead(result)} == {"1.0", "0.1", "2.1"}


def after_reducing(failed):
    """The place of worker 2.1's first op after it has begun a reduction."""
    kinds = [op.kind for op in schedule_for(JOB, failed).ops(Worker(2, 1))]
    return kinds.index(OpKind.W, kinds.index(OpKind.A))


@pytest.mark.parametrize("shard", [False, True])
def test_layers_that_share_parameters(shard, fork_server, tmp_path):
    """Layers share parameters: the embedding is the head.

    Its gradients are those of two reductions, by workers of two stages.
    """
    config = parse_run_config(
        {
            "name": "tests.runtime.exact_parallel:Tied",
            "blocks": 6,
            "width": 8,
            "heads": 2,
            "context": 8,
        },
        {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": 6},
        shard_optimizer=shard,
        clip_norm=0.5,
    )
    result = train(
        [at("1.0", 1, "A"), at("0.1", 3, "stepped"), at("2.1", 4, after_reducing(["0.1", "1.0"]))],
        fork_server,
        tmp_path,
        job=JOB,
        config=config,
    )
    assert {*dead(result)} == {"1.0", "0.1", "2.1"}


def test_a_slow_worker_is_relieved(fork_server, tmp_path):
    # Its peers run micro-batches of it, and one of them dies when it has begun a reduction.
    job = grid(
        3,
        2,
        4,
        times=TIMES,
        more=f"optimizer = 1\nslow = {{'1.1' = 2.0}}\n[placement]\nlayers = [4, 4]\n{NETWORK}",
    )
    schedule = schedule_for(job)
    assert schedule.shed > 0 and begins_early(schedule)
    result = train(
        [at("2.1", 2, "A")],
        fork_server,
        tmp_path,
        job=job,
        config=eight_layers(6),
        slowdowns=(Slowdown(Worker(1, 1), 0, 2.0),),
    )
    assert dead(result) == ["2.1"]


@pytest.mark.parametrize("shard", [False, True])
def test_cut_connections_and_who_comes_back(shard, fork_server, tmp_path):
    """Steps are undone where connections are cut and workers come back.

    Gradients of a range that was reduced already are not counted twice.
    """
    result = train(
        [at("1.1", 1, "O", "cut"), at("0.0", 3, "A")],
        fork_server,
        tmp_path,
        job=JOB,
        config=eight_layers(50, shard_optimizer=shard),
        returns=(Return(Worker(0, 0), 8),),
    )
    assert dead(result) == ["0.0"] and returned(result) == ["0.0"]
