"""Workers that go on as half their processes, with what optimizers and layers may be: the numbers are those of one
process."""

import pytest

from slipstream.runtime.launch import Resilience, run
from tests.jobs import grid
from tests.runtime.failing import planned
from tests.runtime.running import (
    assert_same_masters,
    assert_same_numbers,
    degradable,
    joined,
    judge,
    schedule_for,
)
from tests.runtime.test_tensor_parallel import NEVER_SILENT, at, dead, until_joined

MASTERS = {"dtype": "bf16", "master_weights": True}
ITERATIONS = 45


def config(model, ranks, **training):
    return degradable(f"tests.runtime.exact_parallel:{model}", ranks, iterations=ITERATIONS, **training)


def degraded(job, training, model, fork_server, out):
    """A run in which the workers of a stage lose a rank one after the other: what the second keeps, or holds, then
    comes from the first, and there is a checkpoint of both."""
    kills = [at("1.0", 1, 2, "O"), at("0.0", 0, 28, "stepped")]
    progress = until_joined(out, {2: 1, 28: 2})
    result = run(schedule_for(job), config(model, 2, **training), out=out, fork_server=fork_server,
                 progress=progress, resilience=Resilience(
                     scheduler=planned(job), injections=tuple(kills), heartbeat_timeout_seconds=NEVER_SILENT,
                     checkpoint_every=ITERATIONS))
    assert dead(result) == ["1.0", "0.0"] and all(one.went_back_to is None for one in result.recoveries)
    assert joined(out) == [("1.0", 2), ("0.0", 2)]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_layers_that_share_parameters(sharded, fork_server, tmp_path):
    """The embedding is the head, of workers of another stage."""
    job, training = grid(2, 2, 2, more="optimizer = 1"), {"clip_norm": 0.5, "shard_optimizer": sharded}
    result = degraded(job, training, "Tied", fork_server, tmp_path)
    assert_same_numbers(result, judge(config("Tied", 1, **training), job.microbatches, ITERATIONS))


@pytest.mark.slow
def test_plans_with_reductions_beside_compute(fork_server, tmp_path):
    job = grid(2, 2, 2, times="forward = 2\nbackward_input = 2\nbackward_weight = 2\nall_reduce = 2",
               more="optimizer = 1\n[placement]\nlayers = [2, 2]\n[network]\noverlap = true")
    assert schedule_for(job).overlaps
    result = degraded(job, {"clip_norm": 0.5}, "Tied", fork_server, tmp_path)
    assert_same_numbers(result, judge(config("Tied", 1, clip_norm=0.5), job.microbatches, ITERATIONS))


@pytest.mark.parametrize(("job", "model", "training"), [
    (grid(2, 2, 2, more="optimizer = 1"), "Exact", {"clip_norm": 0.5}),
    (grid(3, 1, 2), "Tied", {"shard_optimizer": True})], ids=["whole", "sharded, tied"])
def test_master_weights(job, model, training, fork_server, tmp_path):
    """See `tests.runtime.test_sharded_optimizer`. Where they are sharded, embedding and head are one in each worker."""
    result = degraded(job, {**MASTERS, **training}, model, fork_server, tmp_path)
    assert_same_masters(result, config(model, 1, **MASTERS, **training), job.microbatches, ITERATIONS, share=1e-4)
