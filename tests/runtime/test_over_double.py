"""Runs over a double of NCCL, with its manners.

Nothing of the garbage that an abort leaves is ever committed.
"""

import random
from dataclasses import replace

import pytest

from benchmarks.chaos import TOLERANCE, train_through
from benchmarks.chaos_checks import Tally
from benchmarks.chaos_scenario import settings
from slipstream.runtime.coordinator import run_fit
from slipstream.runtime.events import Event, Failed
from slipstream.runtime.launch import run
from tests.runtime.failing import (
    BACK,
    KILLS,
    KILLS_ITERATIONS,
    WIDE,
    Planning,
    at,
    dead,
    returned,
    train,
)
from tests.runtime.forked import own_fork_server
from tests.runtime.replay.double import HASTY, SLOW
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny
from tests.runtime.test_overlapped import JOB as OVERLAPPED
from tests.runtime.test_routes import eight_layers

pytestmark = pytest.mark.usefixtures("unhurried")
GATHER_SECONDS = 20.0
"""Seconds of a slow gathering of parameters.

That is far longer than it takes until all have heard of a death, and less than it takes to give up
who computes for so long.
"""


@pytest.fixture(autouse=True)
def _over_nccl(monkeypatch):
    monkeypatch.setattr(run_fit, "choose_transport", lambda *_, **__: "nccl")


@pytest.fixture(scope="module")
def workers_of_double():
    with own_fork_server("tests.runtime.over_double") as fork_server:
        yield fork_server


@pytest.mark.parametrize("training", [{}, {"clip_norm": 1.8}, {"shard_optimizer": True}])
def test_numbers_are_those_of_one_process(training, workers_of_double, tmp_path):
    config = tiny(iterations=5, **training)
    result = run(schedule_for(WIDE), config, out=tmp_path, fork_server=workers_of_double)
    assert_same_numbers(result, judge(config, WIDE.microbatches, 5))


@pytest.mark.parametrize("training", [{}, {"shard_optimizer": True, "clip_norm": 1.8}])
def test_killed_anywhere_and_back(training, workers_of_double, tmp_path):
    config = tiny(iterations=KILLS_ITERATIONS, **training)
    result = train(KILLS, workers_of_double, tmp_path, job=WIDE, config=config, returns=BACK)
    assert {*dead(result)} == {"0.0", "2.1", "1.0", "1.1"} and sorted(returned(result)) == [
        "0.0",
        "2.1",
    ]


@pytest.mark.parametrize("training", [{}, {"shard_optimizer": True, "clip_norm": 1.8}])
def test_killed_while_gradients_are_reduced_beside_compute(training, workers_of_double, tmp_path):
    # With clipping, the first one dies in an iteration that is void, in which the others gather
    # parameters again: what comes of that is not what the committed iteration before has left.
    result = train(
        [at("1.0", 1, "A"), at("0.1", 3, "O")],
        workers_of_double,
        tmp_path,
        job=OVERLAPPED,
        config=eight_layers(6, **training),
    )
    assert dead(result) == ["1.0", "0.1"]


def test_one_dies_where_layers_move(workers_of_double, tmp_path):
    result = train(
        [at("1.1", 2, 3), at("0.1", 20, 3)],
        workers_of_double,
        tmp_path,
        job=WIDE,
        config=tiny(iterations=30),
        rebalancer=Planning(WIDE),
    )
    assert dead(result) == ["1.1", "0.1"]


@pytest.mark.parametrize("hasty", [False, True], ids=["as it is", "without commit points"])
def test_parameters_that_an_abort_has_filled_with_garbage_do_not_count(
    hasty, monkeypatch, tmp_path
):
    # The last stage has reported an iteration when one of its workers dies; the first one is still
    # gathering what it has stepped, which the end of the order breaks off. Without commit points,
    # all report an iteration, which is then committed with what the abort has left: so a loss is
    # not finite, and the run goes back.
    slow, lost = tmp_path / "slow", list[Failed]()
    monkeypatch.setenv(SLOW, f"allgather 0.0 {GATHER_SECONDS} {slow}")
    if hasty:
        monkeypatch.setenv(HASTY, "1")

    def slow_down(iteration: int, _: float) -> None:
        if iteration == 1 and not lost:
            slow.touch()

    def observe(event: Event) -> None:
        if isinstance(event, Failed):
            lost.append(event)
            slow.unlink(missing_ok=True)

    with own_fork_server("tests.runtime.over_double") as fork_server:
        result = train(
            [at("2.1", 2, "reported")],
            fork_server,
            tmp_path / "out",
            job=WIDE,
            progress=slow_down,
            config=tiny(iterations=6, shard_optimizer=True),
            observe=observe,
        )
    if hasty:
        assert any("the loss of iteration 3 is not finite" in note for note in result.notes)
    else:
        assert dead(result) == ["2.1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (1, "plain"),
        (2, "sharded-clipped"),
        (3, "settling"),
        (4, "sharded-settling-clipped"),
        (5, "ranks-clipped"),
    ],
)
def test_chaos(seed, name, workers_of_double, tmp_path):
    tally, setting = Tally(), replace(settings("3x2", 24)[name], gap=(3, 8), away=(1, 4))
    train_through(
        setting, random.Random(seed), workers_of_double, tmp_path, tally, storm_seconds=2.0
    )
    assert tally.kills >= 2, tally.report()
    assert tally.deviation <= TOLERANCE
