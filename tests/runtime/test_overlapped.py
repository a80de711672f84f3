"""Plans whose reductions overlap compute, in processes of their own: float64 training equals one process to 1e-9."""

import pytest

from slipstream.schedules.schedule import OpKind
from tests.jobs import grid
from tests.runtime.failing import at, train
from tests.runtime.running import schedule_for
from tests.runtime.test_routes import eight_layers

JOB = grid(3, 2, 4, times="forward = 4\nbackward_input = 4\nbackward_weight = 4\nall_reduce = 4",
           more="optimizer = 1\n[placement]\nlayers = [4, 4]\n[network]\noverlap = true")


def begins_early(schedule):
    """Whether somebody begins a reduction before its last W."""
    kinds = [[op.kind for op in program] for program in schedule.programs]
    return any(OpKind.W in ops[ops.index(OpKind.A):] for ops in kinds)


@pytest.mark.parametrize("training", [
    {}, {"shard_optimizer": True, "clip_norm": 0.5}, {"tensor_parallel": 2}, {"recompute": "full"}])
def test_killed_with_the_same_numbers(training, fork_server, tmp_path):
    assert begins_early(schedule_for(JOB)) and begins_early(schedule_for(JOB, ["1.0"]))
    result = train([at("1.0", 1, "A"), at("0.1", 3, "stepped")], fork_server, tmp_path, job=JOB,
                   config=eight_layers(6, **training))
    assert result.recoveries
