"""Workers keep parts of layers' optimizer states.

Whatever fails, the numbers are those of one process that has all.
"""

import json
import os
import signal

import pytest

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.events import EVENTS, Failed, FetchBegun, HandedOver, WentBack
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import (
    BACK,
    KILLS,
    KILLS_ITERATIONS,
    TIMEOUT_SECONDS,
    Planning,
    at,
    dead,
    planned,
    returned,
    train,
)
from tests.runtime.pacing import slowly_until
from tests.runtime.running import (
    assert_same_evaluations,
    assert_same_masters,
    assert_same_numbers,
    judge,
    parallel,
    schedule_for,
    tiny,
)
from tests.runtime.state.test_steps import FIRST, SAME

WIDE = grid(3, 2, 2, more="optimizer = 1")
FOUR = grid(4, 1, 2, more="optimizer = 1")
V = grid(2, 2, 2, more="[placement]\norder = 'v'\nchunks = 2")


def sharded(iterations=6, **training):
    return tiny(iterations=iterations, shard_optimizer=True, **training)


def events_of(out, kind):
    events = [json.loads(line) for line in (out / EVENTS).read_text().splitlines()]
    return [event for event in events if event["event"] == kind.__struct_config__.tag]


@pytest.mark.parametrize("clip_norm", [None, 1.8])
def test_killed_anywhere_and_back(clip_norm, fork_server, tmp_path):
    """A worker is killed anywhere, and comes back.

    Where one dies before its step, another has stepped, and waits for the parameters: it undoes the
    step.
    """
    config = sharded(KILLS_ITERATIONS, clip_norm=clip_norm)
    result = train(KILLS, fork_server, tmp_path, job=WIDE, config=config, returns=BACK)
    assert set(dead(result)) == {"0.0", "2.1", "1.0", "1.1"} and sorted(returned(result)) == [
        "0.0",
        "2.1",
    ]
    assert all(recovery.went_back_to is None for recovery in result.recoveries)
    assert all(recovery.meanwhile for recovery in result.recoveries if recovery.returned), (
        "all train while parts are fetched"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        {"1.0": "asked"},
        {"2.0": "asked"},
        {"2.0": "loaded"},
        {"0.0": "met", "2.0": "met"},
        {"0.0": "moved", "1.0": "moved"},
    ],
    ids=[
        "who-gives-and-is-a-buddy",
        "who-gives",
        "who-gets",
        "before-they-change",
        "buddies-after-they-have-changed",
    ],
)
def test_who_dies_while_parts_change_hands(kills, fork_server, tmp_path):
    # Once 0.0 is dead, and for 0.0, which comes back, each of the others keeps other parts than
    # before. While they are fetched, its buddy 1.0 alone has its part.
    injections = [
        at(worker, iteration, place)
        for worker, place in kills.items()
        for iteration in range(3, 60)
    ]
    result = train(
        [at("0.0", 2), *injections],
        fork_server,
        tmp_path,
        job=FOUR,
        config=sharded(60),
        returns=(Return(Worker(0, 0), 3),),
    )
    assert dead(result)[0] == "0.0" and {*dead(result)} >= {*kills}
    assert "0.0" in kills or returned(result) == ["0.0"]
    assert "1.0" in kills or all(recovery.went_back_to is None for recovery in result.recoveries)


def test_a_layer_of_which_nothing_is_trained_comes_to_who_comes_back(fork_server, tmp_path):
    # No part of it is kept by anybody, and it is another one than a new layer.
    config = parallel("tests.runtime.exact_parallel:Frozen", 1, iterations=46, shard_optimizer=True)
    result = train(
        [at("0.0", 2)],
        fork_server,
        tmp_path,
        job=grid(3, 1, 2, more="optimizer = 1"),
        config=config,
        returns=(Return(Worker(0, 0), 3),),
    )
    assert dead(result) == returned(result) == ["0.0"]


def test_one_dies_when_the_last_step_was_not_the_one_that_was_guessed(fork_server, tmp_path):
    # It is committed, and the others have not gathered what was stepped anew: they write it as they
    # get it at the end.
    config = sharded(1, clip_norm=FIRST, **SAME)
    train([at("1.0", 0, "reported")], fork_server, tmp_path, job=WIDE, config=config)
    assert [event["worker"] for event in events_of(tmp_path, Failed)] == [[1, 0]]


def test_two_that_are_not_buddies_lose_nothing(fork_server, tmp_path):
    """Of four, each is the next one's buddy.

    The others step their parts at once, and cut them anew while they train; then one of these is
    lost, too.
    """
    events, killed = [], []

    def anew() -> bool:
        return any(isinstance(event, HandedOver) for event in events)

    def kill(iteration, loss):
        slowly(iteration, loss)
        if anew() and not killed:
            killed.append(fork_server.pids["3.0"])
            os.kill(*killed, signal.SIGKILL)

    slowly = slowly_until(anew)
    result = train(
        [at("0.0", 2, "O"), at("2.0", 2, "O")],
        fork_server,
        tmp_path,
        job=FOUR,
        config=sharded(40),
        progress=kill,
        observe=events.append,
    )
    assert sorted(dead(result)) == ["0.0", "2.0", "3.0"] and sorted(dead(result)[:2]) == [
        "0.0",
        "2.0",
    ]
    assert all(recovery.went_back_to is None for recovery in result.recoveries)
    assert [bool(recovery.meanwhile) for recovery in result.recoveries if recovery.rebalanced] == [
        True
    ]
    assert {event.purpose for event in events if isinstance(event, FetchBegun)} == {"settle"}


def test_a_whole_machine_loses_nothing(fork_server, tmp_path):
    """Neighbours share one: buddies are on the other."""
    machines = [[Worker(0, 0), Worker(1, 0)], [Worker(2, 0), Worker(3, 0)]]
    result = run(
        schedule_for(FOUR),
        sharded(),
        out=tmp_path,
        fork_server=fork_server,
        options=RunOptions(topology=machines),
        resilience=Resilience(
            scheduler=planned(FOUR),
            injections=(at("0.0", 2, "A"), at("1.0", 2, "O")),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
        ),
    )
    assert sorted(dead(result)) == ["0.0", "1.0"] and all(
        recovery.went_back_to is None for recovery in result.recoveries
    )
    assert_same_numbers(result, judge(sharded(), FOUR.microbatches, 6))


def test_two_that_are_buddies_take_the_run_back_to_its_newest_checkpoint(fork_server, tmp_path):
    def kill(iteration, _):  # both, before either is missed
        if iteration == 4 and not killed:
            killed.extend(fork_server.pids[name] for name in ("1.0", "2.0"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    killed = []
    result = train(
        [],
        fork_server,
        tmp_path,
        job=FOUR,
        config=sharded(9),
        progress=kill,
        checkpoint_every=3,
        rebalancer=Planning(FOUR),
    )
    assert sorted(dead(result)) == ["1.0", "2.0"] and [
        recovery.went_back_to for recovery in result.recoveries
    ][-1] in (0, 3)
    (reason,) = [event["reason"] for event in events_of(tmp_path, WentBack)]
    assert reason.startswith(
        "optimizer state of layer 0 is lost with two workers that both kept it: worker "
    )


def test_v_placement_ranks_evaluation_and_another_optimizer(fork_server, tmp_path):
    """Within each plane of ranks it is the same."""
    model = {"blocks": 2, "width": 16, "heads": 4, "context": 16, "dropout": 0.1}
    training = {
        "batch": 1,
        "dtype": "float64",
        "device": "cpu",
        "iterations": 5,
        "optimizer": "sgd",
        "momentum": 0.9,
        "clip_norm": 0.5,
        "evaluate_every": 1,
        "validation_text": __file__,
    }
    config = parse_run_config(model, {**training, "tensor_parallel": 2, "shard_optimizer": True})
    result = run(
        schedule_for(V),
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=planned(V),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
            injections=(at("0.1", 2, "O"),),
        ),
    )
    assert dead(result) == ["0.1"]
    reference = judge(parse_run_config(model, training), V.microbatches, 5)
    assert_same_numbers(result, reference)
    assert_same_evaluations(tmp_path, reference)


def test_a_checkpoint_is_whole_and_goes_anywhere(fork_server, tmp_path):
    first, then = tmp_path / "sharded", tmp_path / "then"
    run(
        schedule_for(WIDE),
        sharded(4),
        out=first,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=2),
    )
    run(
        schedule_for(grid(2, 4, 3)),
        tiny(iterations=6),
        out=then,
        fork_server=fork_server,
        resilience=Resilience(resume=open_latest(first / CHECKPOINTS)),
    )
    result = run(
        schedule_for(WIDE),
        sharded(8),
        out=tmp_path / "again",
        fork_server=fork_server,
        resilience=Resilience(resume=open_latest(then / CHECKPOINTS)),
    )
    assert_same_numbers(result, judge(tiny(iterations=8), (2, 2, 2), 8))


@pytest.mark.parametrize(
    ("training", "share"),
    [
        ({"shard_optimizer": True, "clip_norm": 1.8}, 1e-4),
        ({"reduce_dtype": "bf16", "optimizer": "sgd", "learning_rate": 0.1}, 0.02),
    ],
)
def test_bf16_parameters_with_float32_masters(training, share, fork_server, tmp_path):
    """Replicas with bf16 parameters and float32 masters end with the same bits.

    The run requires it; masters are where those of one process are.

    Gradients are bf16 numbers, whose sums in float32 are all but exact in any order. Each sum in
    bf16 is off by up to 2^-9: masters by that share of the way that they have gone, about.
    """
    config = tiny(iterations=6, dtype="bf16", master_weights=True, **training)
    result = run(
        schedule_for(WIDE),
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=planned(WIDE),
            checkpoint_every=3,
            injections=(at("0.0", 2, "O"),),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
        ),
    )
    assert dead(result) == ["0.0"]
    assert_same_masters(result, config, WIDE.microbatches, 6, share=share)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"dtype": "float16"},
            "training.dtype is 'float16'; expected one of .*: float16 needs loss scaling, which "
            "is not supported; bf16 needs none",
        ),
        (
            {"master_weights": True, "dtype": "float32"},
            "training.master_weights is true, and training.dtype 'float32'; expected 'bf16'",
        ),
        (
            {"reduce_dtype": "bf16"},
            "training.reduce_dtype is 'bf16', and there are no master_weights; expected them, or",
        ),
    ],
)
def test_what_cannot_be_is_refused(training, message):
    with pytest.raises(ConfigError, match=message):
        parse_run_config({}, training)
