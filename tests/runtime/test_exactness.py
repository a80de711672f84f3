"""Float64 training in processes equals a plain single-process loop to 1e-9.

Whoever has failed, in any shape.

`tests.runtime.replay.test_modes` has every failure in every mode, in threads.
"""

import pytest

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.launch import run
from tests.jobs import grid
from tests.runtime.replay.test_modes import MODES
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

TWO, THREE = (grid(3, stages, 2, more="optimizer = 1") for stages in (2, 3))
CONFIG = tiny(iterations=8)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("job", "failed"), [(TWO, ["1.1"]), (THREE, ["1.0", "1.2"])], ids=["two stages", "three"]
)
def test_modes(job, failed, mode, fork_server, tmp_path):
    train_and_compare(job, (failed, mode), fork_server, tmp_path)


@pytest.mark.parametrize(
    ("job", "failed"),
    [(TWO, []), (TWO, ["0.0", "0.1"]), (TWO, ["2.0"]), (THREE, ["2.2"]), (THREE, ["0.1", "1.1"])],
    ids=["none", "a pipeline", "a first stage", "a last stage", "two of a stage"],
)
def test_failures(job, failed, fork_server, tmp_path):
    train_and_compare(job, (failed, MODES[0]), fork_server, tmp_path)


BOTH_WAYS = grid(2, 4, 3, more="[placement]\norder = 'bidirectional'")
INTERLEAVED = grid(2, 2, 3, more="[placement]\norder = 'interleaved'\nchunks = 2")


@pytest.mark.parametrize(
    ("job", "failed", "backward"),
    [
        (INTERLEAVED, [], "split"),
        (INTERLEAVED, ["1.0"], "split"),
        (INTERLEAVED, ["1.0"], "fused"),
        (grid(2, 2, 3, more="[placement]\norder = 'v'\nchunks = 2"), ["0.1"], "split"),
        (grid(2, 2, 3, more="[placement]\nchunks = 2"), ["0.0"], "fused"),
        (BOTH_WAYS, [], "split"),
        (BOTH_WAYS, ["1.0", "0.2"], "split"),
        (BOTH_WAYS, ["0.3"], "fused"),
        (grid(2, 2, 2, more="[placement]\nlayers = [1, 3]"), [], "split"),
        (grid(3, 2, [1, 3, 2]), ["1.1"], "split"),
        (grid(3, 2, [1, 3, 2]), ["1.1"], "fused"),
        (
            grid(
                3,
                2,
                4,
                more="optimizer = 2\n[memory]\ncapacity = 2\nactivation = 1\nweight_stash = 0.5",
            ),
            ["2.0"],
            "split",
        ),
        (grid(1, 1, 3), [], "split"),
        (grid(1, 4, 3), [], "split"),
    ],
    ids=[
        "interleaved",
        "interleaved-1.0-split",
        "interleaved-1.0-fused",
        "v-0.1",
        "chunks-0.0",
        "both ways",
        "both ways-1.0-0.2",
        "both ways-0.3",
        "own layers",
        "uneven counts-split",
        "uneven counts-fused",
        "little memory",
        "one worker",
        "one pipeline",
    ],
)
def test_other_shapes(job, failed, backward, fork_server, tmp_path):
    train_and_compare(job, (failed, (backward, "staggered")), fork_server, tmp_path)


def train_and_compare(job, case, fork_server, out):
    failed, (backward, optimizer) = case
    schedule = schedule_for(job, failed, backward=backward, optimizer=optimizer)
    result = run(schedule, CONFIG, out=out, fork_server=fork_server)
    assert_same_numbers(result, judge(CONFIG, job.microbatches, CONFIG.training.iterations))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bf16", 0.05)])
def test_lower_precision_follows_as_closely_as_it_can(dtype, tolerance, fork_server, tmp_path):
    config, job = tiny(dtype=dtype), grid(3, 2, 2)
    result = run(
        schedule_for(job, ["1.1"]), config, out=tmp_path, iterations=5, fork_server=fork_server
    )
    assert result.losses == pytest.approx(judge(config, job.microbatches, 5).losses, abs=tolerance)
    assert result.losses[-1] < result.losses[0]


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one of a machine compiles for minutes
def test_compiled_layers_in_workers_give_the_numbers_of_one_process(fork_server, tmp_path):
    """Each process compiles what it runs, with a worker down from the start."""
    job = grid(2, 2, 2)
    configs = [
        parse_run_config(
            {"blocks": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1},
            {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": 3, "compile": compiled},
        )
        for compiled in (True, False)
    ]
    result = run(schedule_for(job, ["0.1"]), configs[0], out=tmp_path, fork_server=fork_server)
    assert_same_numbers(result, judge(configs[1], job.microbatches, 3))
