"""Workers come in while the others train, whatever happens meanwhile.

The numbers are those of one process.
"""

import os
import signal
import sys

import pytest
from msgspec.structs import replace

from slipstream.runtime.events import FetchBegun
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import Worker
from tests.runtime.failing import JOB, LONG, WIDE, at, dead, returned, train
from tests.runtime.forked import own_fork_server
from tests.runtime.running import metrics_in, tiny
from tests.runtime.state.test_steps import OFTEN, RARELY, SAME, SPIKY

BACK = Worker(0, 0)
SLOWLY = 60e3
"""Bytes a second for layers that move.

The state of a stage takes about two seconds, and an iteration milliseconds.
"""
EVER = range(3, LONG.training.iterations)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "backward", "optimizer"),
    [
        ({}, "fused", "staggered"),
        ({}, "split", "synchronous"),
        ({"clip_norm": OFTEN}, "split", "staggered"),
        ({"clip_norm": RARELY}, "fused", "staggered"),
        (
            {"clip_norm": OFTEN, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1},
            "fused",
            "synchronous",
        ),
        ({"optimizer": "sgd", "learning_rate": 0.1}, "split", "staggered"),
    ],
)
def test_the_numbers_are_the_same_in_every_mode(
    training, backward, optimizer, fork_server, tmp_path
):
    config = tiny(iterations=LONG.training.iterations, **SAME, **training)
    result = train(
        [at("0.0", 2)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=config,
        modes=(backward, optimizer),
        returns=(Return(BACK, 3),),
    )
    assert dead(result) == returned(result) == ["0.0"]
    assert result.recoveries[-1].meanwhile


def test_steps_that_are_not_made_are_not_made_by_who_follows_either(tmp_path, monkeypatch):
    (tmp_path / "spiky_model.py").write_text(SPIKY)
    monkeypatch.chdir(tmp_path)
    # The directory stays on the path, and the module loaded.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "spiky_model", raising=False)
    plain = tiny(iterations=LONG.training.iterations, skip_nonfinite=True, clip_norm=OFTEN)
    config = replace(plain, model=replace(plain.model, name="spiky_model:SpikyGPT"))
    with own_fork_server() as fork_server:
        result = train(
            [at("0.0", 2)],
            fork_server,
            tmp_path,
            job=WIDE,
            config=config,
            returns=(Return(BACK, 3),),
            fetch_bytes_per_second=8 * SLOWLY,
        )
    assert returned(result) == ["0.0"]


def test_what_is_logged_is_the_same_in_every_iteration_while_workers_come_and_go(
    fork_server, tmp_path
):
    """torchtitan 4663, torchft 292: loss, learning rate and data changed with the replicas."""
    config = tiny(
        iterations=LONG.training.iterations,
        clip_norm=OFTEN,
        warmup_iterations=10,
        learning_rate_schedule="cosine",
    )
    train([], fork_server, tmp_path / "calm", job=WIDE, config=config)
    result = train(
        [at("0.0", 2), at("2.1", 9)],
        fork_server,
        tmp_path / "stormy",
        job=WIDE,
        config=config,
        returns=(Return(BACK, 3),),
    )
    assert dead(result) == ["0.0", "2.1"] and returned(result) == ["0.0"]
    calm, stormy = metrics_in(tmp_path / "calm"), metrics_in(tmp_path / "stormy")
    rates = [metrics.learning_rate for metrics in stormy]
    assert [metrics.learning_rate for metrics in calm] == rates
    for name in ("loss", "gradient_norm"):
        values = [getattr(metrics, name) for metrics in stormy]
        assert [getattr(metrics, name) for metrics in calm] == pytest.approx(
            values, rel=0, abs=1e-9
        )


def test_all_train_while_layers_are_fetched_slowly(fork_server, tmp_path):
    result = train(
        [at("0.0", 2)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        returns=(Return(BACK, 3),),
        fetch_bytes_per_second=SLOWLY / 3,
    )
    (_, recovery) = result.recoveries
    assert recovery.returned == (BACK,) and recovery.meanwhile >= 3


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "cut", "stop"])
def test_a_source_fails(action, fork_server, tmp_path):
    """A source fails, most likely while it gives layers.

    Then the other one of the stage gives them all.
    """
    result = train(
        [at("0.0", 2), at("1.0", 12, "O", action)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        returns=(Return(BACK, 3),),
        fetch_bytes_per_second=SLOWLY,
    )
    assert dead(result) == (["0.0"] if action == "cut" else ["0.0", "1.0"])
    assert returned(result) == ["0.0"]


def test_a_source_dies_when_it_is_asked(fork_server, tmp_path):
    result = train(
        [at("0.0", 2), *(at("1.0", iteration, "asked") for iteration in EVER)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        returns=(Return(BACK, 3),),
    )
    assert dead(result) == ["0.0", "1.0"] and returned(result) == ["0.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "action"),
    [("loaded", "kill"), ("loaded", "stop"), ("loaded", "raise"), ("followed", "kill")],
)
def test_who_comes_in_fails_before_it_is_in(place, action, fork_server, tmp_path):
    """It is no member yet: nobody else stops.

    One that only fails to fetch tries again, and then all wait for it.
    """
    again = [
        at("0.0", iteration, place, action) for iteration in range(1, LONG.training.iterations)
    ]
    result = train(
        [at("0.0", 2), *again],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        returns=(Return(BACK, 3),),
    )
    if action == "raise":
        assert dead(result) == ["0.0"]
    elif action == "kill":
        assert dead(result) == ["0.0"] and returned(result) == []
    else:  # a process that is stopped may still say what it was about to say, and be taken in
        assert set(dead(result)) == {"0.0"}


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["0.1", "2.0"])
def test_another_dies_while_layers_are_fetched(worker, fork_server, tmp_path):
    """After two iterations meanwhile."""
    events = []

    def observe(event):
        if isinstance(event, FetchBegun):
            events.append(event)

    def progress(iteration, _):
        if events and iteration == events[0].iteration + 1:
            os.kill(fork_server.pids[worker], signal.SIGKILL)

    result = train(
        [at("0.0", 2)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        returns=(Return(BACK, 3),),
        fetch_bytes_per_second=SLOWLY,
        progress=progress,
        observe=observe,
    )
    assert dead(result) == ["0.0", worker] and returned(result) == ["0.0"]


@pytest.mark.slow
def test_two_come_in_with_layers_of_different_stages(fork_server, tmp_path):
    back = (Return(BACK, 4), Return(Worker(1, 1), 4))
    result = train(
        [at("0.0", 2), at("1.1", 2)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        returns=back,
        fetch_bytes_per_second=2 * SLOWLY,
    )
    assert sorted(returned(result)) == ["0.0", "1.1"] and result.recoveries[-1].live == 6


@pytest.mark.parametrize("last", [5, 9, 14])
def test_near_the_end_one_comes_in_or_does_not(last, fork_server, tmp_path):
    result = train(
        [at("0.0", 2)],
        fork_server,
        tmp_path,
        job=JOB,
        config=tiny(iterations=last),
        returns=(Return(BACK, 3),),
    )
    assert dead(result) == ["0.0"]


def test_before_the_first_step_there_is_nothing_to_fetch(fork_server, tmp_path):
    """Two die in iteration 0; whoever is ready when it is run again, is in."""
    result = train(
        [at("0.0", 0, 1), at("1.1", 0, "O")],
        fork_server,
        tmp_path,
        job=WIDE,
        config=LONG,
        returns=(Return(BACK, 0), Return(Worker(1, 1), 0)),
    )
    assert sorted(dead(result)) == sorted(returned(result)) == ["0.0", "1.1"]
