"""Workers that are killed, and return, in a loop in torch's pipeline stages: real processes."""

from contextlib import ExitStack

import pytest

from benchmarks.plugged import GRID, MICROBATCHES, TOLERANCE, Chaos
from benchmarks.plugged_worker import train_alone

KILLS = 4


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True], ids=["gloo", "double of NCCL"])
def test_losses_and_parameters_are_those_of_one_process_through_kills_and_returns(double):
    with ExitStack() as stack:
        chaos = Chaos(stack, seed=1, double=double)
        chaos.run(KILLS)
    alone = train_alone(GRID[1], MICROBATCHES, 1 + max(chaos.losses))
    assert chaos.kills == KILLS and chaos.pauses
    assert sorted(chaos.losses) == [*range(len(alone.losses))]
    for iteration, losses in chaos.losses.items():
        assert all(abs(loss - alone.losses[iteration]) < TOLERANCE for loss in losses)
    for parameters in chaos.final:
        for stage, values in parameters.items():
            assert values == pytest.approx(alone.parameters[int(stage)], abs=TOLERANCE)
