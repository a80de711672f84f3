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
def test_two_stages(case, nursery, tmp_path):
    train_and_compare(grid(3, 2, 2, more="optimizer = 1"), case, nursery, tmp_path)


@pytest.mark.parametrize("case", DEEP, ids=name)
def test_three_stages(case, nursery, tmp_path):
    train_and_compare(grid(3, 3, 2, more="optimizer = 1"), case, nursery, tmp_path)


@pytest.mark.parametrize(("job", "failed"), [
    (grid(2, 2, 3, more="[placement]\norder = 'interleaved'\nchunks = 2"), []),
    (grid(2, 2, 3, more="[placement]\norder = 'interleaved'\nchunks = 2"), ["1.0"]),
    (grid(2, 2, 3, more="[placement]\norder = 'v'\nchunks = 2"), ["0.1"]),
    (grid(2, 2, 3, more="[placement]\nchunks = 2"), ["0.0"]),
    (grid(2, 2, 2, more="[placement]\nlayers = [1, 5]"), []),
    (grid(3, 2, [1, 3, 2]), ["1.1"]),
    (grid(3, 2, 4, more="optimizer = 2\n[memory]\ncapacity = 2\nactivation = 1\nweight_stash = 0.5"), ["2.0"]),
    (grid(1, 1, 3), []),
    (grid(1, 4, 3), []),
], ids=["interleaved", "interleaved-1.0", "v-0.1", "linear chunks-0.0", "own layers", "uneven counts", "little memory",
        "one worker", "one pipeline"])
@pytest.mark.parametrize("backward", ["split", "fused"])
def test_other_shapes(job, failed, backward, nursery, tmp_path):
    train_and_compare(job, (failed, (backward, "staggered")), nursery, tmp_path)


def train_and_compare(job, case, nursery, out):
    failed, (backward, optimizer) = case
    schedule = schedule_for(job, failed, backward=backward, optimizer=optimizer)
    result = run(schedule, tiny(), out=out, nursery=nursery)
    assert_same_numbers(result, judge(tiny(), job.microbatches, ITERATIONS))
