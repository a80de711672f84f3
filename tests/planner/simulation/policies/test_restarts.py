"""Policies that drop or restart: torchft, FT-HSDP, restarts from a checkpoint."""

import numpy as np
import pytest

from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Cause
from tests.planner.simulation.small import WHOLE, gain, lose, run, scenario, spans


def test_torchft_drops_the_group_that_lost_a_worker():
    result = run("torchft", lose(100.0, 0))
    assert result.useful_rates[-1] == pytest.approx(WHOLE * 2 / 3)
    assert spans(result)[:3] == [("RUN", 100.0), ("SWITCH", 2.0), ("LOST", 9 / (WHOLE * 2 / 3))]
    for failures in range(4):
        assert POLICIES["torchft"](scenario()).steady_rate(failures) == pytest.approx(
            WHOLE * ((6 - failures) // 2) / 3
        )


def test_torchft_restarts_a_whole_group_while_others_train():
    result = run("torchft", lose(100.0, 0), gain(300.0, 0))
    assert spans(result)[3:] == [
        ("RUN", 200 - 2 - 9 / (WHOLE * 2 / 3)),
        ("RUN", 50.0),
        ("SWITCH", 2.0),
        ("LOAD", 3.0),
        ("RUN", 645.0),
    ]
    assert result.useful_rates[-1] == pytest.approx(WHOLE)


def test_restart_loses_the_work_since_the_last_checkpoint():
    result = run("checkpoint-restart", lose(400.0, 0), scenario={"between": 500.0})
    # Every sqrt(2 x 10 x 500) = 100 s of training and 10 s of writing: at 400 s the last was 70 s
    # ago.
    after = 18 / 31
    assert spans(result)[:3] == [("RUN", 400.0), ("RESTART", 50.0), ("LOST", 70 * WHOLE / after)]
    assert result.useful_rates[0] == pytest.approx(WHOLE * 100 / 110)
    lost = result.seconds_lost(WHOLE)
    assert sum(lost.values()) == pytest.approx(1000 * (1 - result.throughput / WHOLE))
    assert lost[Cause.RESTART] == 50.0 and lost[Cause.CHECKPOINT] > 0


def test_restart_takes_newcomers_in_after_a_checkpoint():
    result = run("checkpoint-restart", lose(100.0, 0), gain(400.0, 0), scenario={"between": 500.0})
    assert [name for name, _ in spans(result)].count("RESTART") == 2
    assert result.useful_rates[-1] == pytest.approx(WHOLE * 100 / 110)


def test_a_failure_stalls_ft_hsdp_once():
    """A failure stalls all for three minutes.

    The replica restarts in ten while the others train, and joins by a usual switch.
    """
    result = run("ft-hsdp", lose(100.0, 0), gain(150.0, 0), seconds=2000.0)
    stopped = sum(
        lasting
        for phase, lasting in zip(result.phases, np.diff(result.seconds), strict=True)
        if phase.cause in (Cause.SWITCH, Cause.LOAD)
    )
    assert stopped == pytest.approx(180 + 2 + 3)
    assert result.phases[-1].cause is Cause.RUN and result.seconds[-2] == pytest.approx(
        150 + 600 + 2 + 3
    )
