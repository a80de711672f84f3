"""Workers that are threads train as one process does, to 1e-9.

Whoever has failed, and in whatever mode.

`tests.runtime.test_exactness` has processes.
"""

from itertools import combinations

import pytest

from tests.jobs import grid
from tests.runtime.replay.test_routes import compare
from tests.runtime.running import schedule_for

MODES = [
    (backward, optimizer)
    for backward in ("split", "fused")
    for optimizer in ("staggered", "synchronous")
]


def failure_sets(stages: int) -> list[list[str]]:
    """None; each single worker of 3 pipelines; two of one pipeline; two of one stage."""
    return [
        [],
        *([f"{pipeline}.{stage}"] for pipeline in range(3) for stage in range(stages)),
        *([f"1.{left}", f"1.{right}"] for left, right in combinations(range(stages), 2)),
        *([f"{stage % 3}.{stage}", f"{(stage + 1) % 3}.{stage}"] for stage in range(stages)),
    ]


TWO = [(2, failed, mode) for failed in failure_sets(2) for mode in MODES]
ALONE = [(3, ["1.1"], mode) for mode in MODES]
THREE = [(3, failed, MODES[index % 4]) for index, failed in enumerate(failure_sets(3))] + ALONE


@pytest.mark.parametrize(
    "case", [*TWO, *THREE], ids=lambda case: "-".join((f"{case[0]} stages", *case[1], *case[2]))
)
def test_every_failure_in_every_mode(case):
    stages, failed, (backward, optimizer) = case
    schedule = schedule_for(
        grid(3, stages, 2, more="optimizer = 1"), failed, backward=backward, optimizer=optimizer
    )
    compare(schedule, clip_norm=None, skip=False)
