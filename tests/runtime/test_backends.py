"""The same runs over every transport that this machine has.

They are gloo on CPUs, gloo beside GPUs, and NCCL.
"""

import pytest
import torch

from slipstream.planner.job.file import parse_job
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.schedules.schedule import Schedule, Worker
from tests.runtime.running import assert_same_numbers, judge, schedule_for

JOB = parse_job(
    "pipelines = 2\nstages = 2\nmicrobatches = 2\n[time]\nforward = 1\nbackward_input = [0, 1]\n"
    "backward_weight = 1\noptimizer = 1\n"
)
WORKERS = 4
ITERATIONS = 6


@pytest.fixture(params=["gloo on CPUs", "gloo beside GPUs", "nccl"])
def config(request) -> RunConfig:
    """Without dropout: a GPU draws other random numbers than the judge's CPU."""
    cards = torch.cuda.device_count()
    if request.param == "gloo beside GPUs" and not cards:
        pytest.skip("needs a GPU")
    if request.param == "nccl" and cards < WORKERS:
        pytest.skip(f"needs {WORKERS} GPUs, as NCCL refuses two workers on one; here are {cards}")
    backend = "nccl" if request.param == "nccl" else "gloo"
    device = "cpu" if "CPU" in request.param else "cuda"
    return parse_run_config(
        {"blocks": 2, "width": 16, "heads": 2, "context": 16},
        {
            "batch": 1,
            "dtype": "float64",
            "device": device,
            "backend": backend,
            "clip_norm": 1.0,
            "iterations": ITERATIONS,
        },
    )


def expected(config: RunConfig):
    return judge(
        parse_run_config(
            {"blocks": 2, "width": 16, "heads": 2, "context": 16},
            {
                "batch": 1,
                "dtype": "float64",
                "device": "cpu",
                "clip_norm": 1.0,
                "iterations": ITERATIONS,
            },
        ),
        JOB.microbatches,
        ITERATIONS,
    )


@pytest.mark.parametrize(("backward", "failed"), [("split", []), ("fused", []), ("split", ["1.1"])])
def test_numbers_are_those_of_one_process(config, backward, failed, fork_server, tmp_path):
    result = run(
        schedule_for(JOB, failed, backward=backward), config, out=tmp_path, fork_server=fork_server
    )
    assert_same_numbers(result, expected(config))


def test_a_killed_worker_is_survived(config, fork_server, tmp_path):
    def scheduler(down: tuple[Worker, ...]) -> Schedule:
        return schedule_for(JOB, [str(worker) for worker in down])

    result = run(
        schedule_for(JOB),
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=scheduler,
            heartbeat_timeout_seconds=20,
            injections=(Injection(Worker(0, 1), 2, 3),),
        ),
    )
    assert [recovery.dead for recovery in result.recoveries] == [(Worker(0, 1),)]
    assert_same_numbers(result, expected(config))
