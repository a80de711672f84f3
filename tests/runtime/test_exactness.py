"""Whoever fails and in whatever mode: float64 training equals a plain single-process loop to 1e-9."""

from itertools import combinations

import pytest

from runtime.launch import run
from tests.jobs import grid
from tests.runtime.running import ITERATIONS, assert_same_numbers, judge, schedule_for, tiny

MODES = [(backward, optimizer) for backward in ("split", "fused") for optimizer in ("staggered", "synchronous")]


def failure_sets(stages: int) -> list[list[str]]:
    """None; each single worker of 3 pipelines; two of one pipeline; two of one stage."""
    return [[], *([f"{pipeline}.{stage}"] for pipeline in range(3) for stage in range(stages)),
            *([f"1.{left}", f"1.{right}"] for left, right in combinations(range(stages), 2)),
            *([f"{stage % 3}.{stage}", f"{(stage + 1) % 3}.{stage}"] for stage in range(stages))]


WIDE = [(failed, mode) for failed in failure_sets(2) for mode in MODES]
DEEP = [(failed, MODES[index % 4]) for index, failed in enumerate(failure_sets(3))] \
    + [(["1.1"], mode) for mode in MODES]


def name(case):
    return "-".join((*case[0], *case[1]))


@pytest.mark.parametrize("case", WIDE, ids=name)
def test_two_stages(case, fork_server, tmp_path):
    train_and_compare(grid(3, 2, 2, more="optimizer = 1"), case, fork_server, tmp_path)


@pytest.mark.parametrize("case", DEEP, ids=name)
def test_three_stages(case, fork_server, tmp_path):
    train_and_compare(grid(3, 3, 2, more="optimizer = 1"), case, fork_server, tmp_path)


BOTH_WAYS = grid(2, 4, 3, more="[placement]\norder = 'bidirectional'")
INTERLEAVED = grid(2, 2, 3, more="[placement]\norder = 'interleaved'\nchunks = 2")


@pytest.mark.parametrize(("job", "failed", "backward"), [
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
    (grid(3, 2, 4, more="optimizer = 2\n[memory]\ncapacity = 2\nactivation = 1\nweight_stash = 0.5"), ["2.0"], "split"),
    (grid(1, 1, 3), [], "split"),
    (grid(1, 4, 3), [], "split"),
], ids=["interleaved", "interleaved-1.0-split", "interleaved-1.0-fused", "v-0.1", "chunks-0.0", "both ways",
        "both ways-1.0-0.2", "both ways-0.3", "own layers",
        "uneven counts-split", "uneven counts-fused", "little memory", "one worker", "one pipeline"])
def test_other_shapes(job, failed, backward, fork_server, tmp_path):
    train_and_compare(job, (failed, (backward, "staggered")), fork_server, tmp_path)


def train_and_compare(job, case, fork_server, out):
    failed, (backward, optimizer) = case
    schedule = schedule_for(job, failed, backward=backward, optimizer=optimizer)
    result = run(schedule, tiny(), out=out, fork_server=fork_server)
    assert_same_numbers(result, judge(tiny(), job.microbatches, ITERATIONS))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bf16", 0.05)])
def test_lower_precision_follows_as_closely_as_it_can(dtype, tolerance, fork_server, tmp_path):
    config, job = tiny(dtype=dtype), grid(3, 2, 2)
    result = run(schedule_for(job, ["1.1"]), config, out=tmp_path, iterations=5, fork_server=fork_server)
    assert result.losses == pytest.approx(judge(config, job.microbatches, 5).losses, abs=tolerance)
    assert result.losses[-1] < result.losses[0]
