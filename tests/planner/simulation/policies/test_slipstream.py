"""Slipstream and ReCycle against small cases worked out by hand.

ReCycle has the same rules, apart from layers that move.
"""

import msgspec
import pytest

from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy_runs import simulate_policy
from tests.planner.simulation.small import (
    COSTS,
    gain,
    lose,
    run,
    scenario,
    spans,
    throughputs,
    trace,
)


def test_slipstream_loses_half_an_iteration_and_a_switch():
    result = run("in-place", lose(100.0, 0), gain(300.0, 0))
    after = 18 / 28  # two workers of stage 0 run nine micro-batches each: 27 + 1
    # The newcomer loads its stage for three seconds while the others train on.
    assert spans(result) == [
        ("RUN", 100.0),
        ("SWITCH", 2.0),
        ("LOST", 9 / after),
        ("RUN", 200 - 2 - 9 / after),
        ("RUN", 3.0),
        ("SWITCH", 2.0),
        ("RUN", 695.0),
    ]
    useful = 100 * 18 / 19 + (203 - 2 - 14) * after + 695 * 18 / 19
    assert result.throughput == pytest.approx(useful / 1000) and result.switch_count == 2


def test_recycle_waits_for_those_who_load():
    result = run("recycle", lose(100.0, 0), gain(300.0, 0))
    assert spans(result)[-3:] == [("SWITCH", 2.0), ("LOAD", 3.0), ("RUN", 695.0)]


def test_what_is_not_redone_when_a_newcomer_is_ready_is_redone_faster():
    result = run("in-place", lose(100.0, 0), gain(104.0, 0))
    before, after = 18 / 28, 18 / 19
    redone = 5 * before  # from 102 to 107
    assert spans(result) == [
        ("RUN", 100.0),
        ("SWITCH", 2.0),
        ("LOST", 2.0),
        ("LOST", 3.0),
        ("SWITCH", 2.0),
        ("LOST", (9 - redone) / after),
        ("RUN", 1000 - 109 - (9 - redone) / after),
    ]


def test_slipstream_moves_a_worker_where_that_pays_and_slipstream_fixed_does_not():
    both = [lose(100.0, 0), lose(200.0, 2)]  # two of stage 0
    moves = run("in-place", *both)
    assert ("LOAD", 3.0) in spans(moves), (
        "all wait: another switch would take longer than what three seconds train"
    )
    slow = msgspec.structs.replace(COSTS, load_seconds=100.0)
    trains = spans(run("in-place", *both, scenario={"costs": slow}))
    assert [name for name, _ in trains].count("SWITCH") == 3 and "LOAD" not in dict(trains)
    stays = run("slipstream-fixed", *both)
    assert [name for name, _ in spans(stays)].count("SWITCH") == 2
    assert stays.useful_rates[-1] == pytest.approx(18 / (18 * 3 + 1))
    assert moves.useful_rates[-1] == pytest.approx(18 / 28)  # one of each stage down


def test_a_stage_without_workers_goes_back_to_the_checkpoint():
    result = run("in-place", lose(100.0, 0, 2, 4))
    rate = result.useful_rates[-1]
    # Checkpoints every sqrt(2 x 10 x 1000) = 141 s, in the background: nothing is kept of the first
    # 100 s.
    assert spans(result)[:3] == [("RUN", 100.0), ("RESTART", 50.0), ("LOST", 100 * 18 / 19 / rate)]
    waits = run("in-place", lose(100.0, 0, 1, 2, 3, 4), gain(400.0, 0, 1))
    assert ("WAIT", 300.0) in spans(waits) and ("RESTART", 50.0) in spans(waits)


def test_a_failure_during_a_restart_starts_it_anew():
    result = run("in-place", lose(100.0, 0, 2, 4), lose(120.0, 1))
    assert spans(result)[1:3] == [("RESTART", 20.0), ("RESTART", 50.0)]


def test_who_comes_during_a_restart_joins_after_it():
    result = run("in-place", lose(100.0, 0, 2, 4), gain(120.0, 0), gain(130.0, 2))
    assert [span for span in spans(result) if span[0] == "RESTART"] == [
        ("RESTART", 20.0),
        ("RESTART", 10.0),
        ("RESTART", 20.0),
    ], "50 seconds in all"
    assert result.useful_rates[-1] == pytest.approx(18 / 28), "five workers"


def test_a_machine_that_is_still_loading_does_not_save_its_stage():
    """A stage whose only machine is still loading it is lost with the source.

    Nobody has its parameters then.
    """
    result = run("in-place", lose(100.0, 0, 2), lose(101.0, 4), seconds=1000.0)
    assert "RESTART" in [name for name, _ in spans(result)]


@pytest.mark.parametrize("failures", range(5))
def test_slipstream_is_never_slower_than_recycle(failures):
    ours, recycle = (
        POLICIES[name](scenario()).steady_rate(failures) for name in ("slipstream", "recycle")
    )
    assert ours >= recycle * (1 - 1e-9)


def test_recycle_absorbs_one_failure_as_published():
    """The published worked example takes 30 slots with and without the failure.

    It has 3 x 4 workers, 6 micro-batches, optimizer 3 slots.
    """
    policy = POLICIES["recycle"](scenario(stages=4, optimizer=3))
    assert policy.fault_free_rate == pytest.approx(18 / 30) == policy.steady_rate(1)
    assert POLICIES["slipstream"](scenario(stages=4, optimizer=3)).fault_free_rate == pytest.approx(
        18 / 22
    )


def test_layers_move_while_the_job_trains_and_then_it_is_settled():
    policy = POLICIES["slipstream"](scenario())
    settled, stages = policy.throughputs.rebalanced_answer(1)
    assert 18 / 28 < settled <= 18 / (18 * 6 / 5 + 1) and stages > 0
    result = simulate_policy(policy, trace(lose(100.0, 0), gain(600.0, 0)))
    move = 3.0 * stages  # three seconds a stage
    assert spans(result)[:4] == [("RUN", 100.0), ("SWITCH", 2.0), ("LOST", move), ("SWITCH", 2.0)]
    remaining = (9 - move * 18 / 28) / settled
    assert spans(result)[4:6] == [("LOST", remaining), ("RUN", 500 - 4 - move - remaining)]
    # The newcomer loads its stage while all train on as settled, and then all are there.
    assert spans(result)[6:] == [("RUN", 3.0), ("SWITCH", 2.0), ("RUN", 395.0)]
    assert result.useful_rates[5:].tolist() == pytest.approx([settled, settled, 0.0, 18 / 19])
    assert policy.steady_rate(1) == settled


def test_layers_stay_where_the_next_failure_comes_too_soon():
    often = run("slipstream", lose(100.0, 0), scenario={"between": 4.0})
    assert often.useful_rates[-1] == pytest.approx(18 / 28)
    assert spans(often) == spans(run("in-place", lose(100.0, 0), scenario={"between": 4.0}))


def test_the_next_failure_is_answered_as_if_layers_had_not_moved():
    result = run("slipstream", lose(100.0, 0), lose(500.0, 3))
    at_once = result.useful_rates[result.seconds[:-1] > 500.0].tolist()
    assert next(rate for rate in at_once if rate) >= 18 / 28 * (1 - 1e-9)
    assert "RESTART" not in [name for name, _ in spans(result)]


def test_who_comes_during_a_restart_does_not_undo_its_layers():
    """A restart loads the layers as moved, whatever was moving before it."""
    costs = msgspec.structs.replace(COSTS, load_seconds=100.0)
    changes = lose(100.0, 0), lose(150.0, 2, 4), gain(160.0, 0)
    result = run("slipstream", *changes, scenario={"costs": costs})
    assert spans(result)[4:6] == [("RESTART", 10.0), ("RESTART", 40.0)]
    # While the newcomer loads its stage, the three others train as settled.
    assert result.phases[6].redone == pytest.approx(throughputs().rebalanced_answer(3)[0])
