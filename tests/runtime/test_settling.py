"""After a failure layers move while training continues.

Whatever fails meanwhile, numbers stay those of one process.
"""

import pytest

from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.events import FetchAbandoned, HandedOver, OrderGiven, SettlingChosen
from slipstream.runtime.launch import RunOptions, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import Worker
from tests.runtime.failing import Planning, against, at, dead, planned, returned
from tests.runtime.pacing import UntilBack, slowly_until
from tests.runtime.running import assert_same_evaluations, assert_same_numbers, judge
from tests.runtime.test_routes import LINEAR, eight_layers

CONFIG = eight_layers(iterations=60, clip_norm=1.6, evaluate_every=10, validation_text=__file__)


def train(
    injections,
    fork_server,
    out,
    *,
    returns=(),
    mtbf=None,
    rate=None,
    config=CONFIG,
    tolerance=1e-9,
):
    events = []
    scheduler, planning = planned(LINEAR), Planning(LINEAR)
    settings = against(
        injections,
        scheduler=scheduler,
        returns=tuple(returns),
        fetch_bytes_per_second=rate,
        rebalancer=planning,
        settling=Rebalancing(mtbf_seconds=mtbf),
    )
    back = UntilBack(returns)
    settled = slowly_until(
        lambda: (
            phases(events)[-1] != "at once"
            or any(isinstance(event, SettlingChosen) and not event.settles for event in events)
        )
    )
    result = run(
        scheduler(()),
        config,
        out=out,
        fork_server=fork_server,
        resilience=settings,
        options=RunOptions(observe=events.append, notify=back.notify),
        progress=lambda iteration, loss: (settled(iteration, loss), back.progress(iteration, loss)),
    )
    reference = judge(config, LINEAR.microbatches, config.training.iterations)
    assert_same_numbers(result, reference, tolerance)
    assert_same_evaluations(out, reference, tolerance)
    return result, events, planning


def phases(events):
    return [event.phase for event in events if isinstance(event, OrderGiven)]


def test_at_once_then_settled(fork_server, tmp_path):
    result, events, _ = train([at("1.2", 2, "O")], fork_server, tmp_path)
    assert dead(result) == ["1.2"] and phases(events) == ["whole", "at once", "settled"]
    settled = result.recoveries[-1]
    assert (
        settled.rebalanced
        and settled.meanwhile
        and str(settled).startswith("layers have moved: iteration ")
    )
    (chosen,) = [event for event in events if isinstance(event, SettlingChosen)]
    assert (
        chosen.settles and chosen.moves_bytes > 0 and chosen.settled_period < chosen.present_period
    )


def test_it_does_not_settle_where_the_next_failure_comes_sooner(fork_server, tmp_path):
    result, events, _ = train([at("1.2", 2)], fork_server, tmp_path, mtbf=0.01)
    assert phases(events) == ["whole", "at once"] and len(result.recoveries) == 1
    assert [event.settles for event in events if isinstance(event, SettlingChosen)] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["1.1", "0.1"])
@pytest.mark.usefixtures("plans_here")
def test_another_dies_while_layers_move(worker, fork_server, tmp_path):
    # It has been asked for layers, or is fetching some; nobody waits for what has become of no use.
    kills = [
        at("1.2", 2),
        *(
            at(worker, iteration, place)
            for iteration in range(3, CONFIG.training.iterations)
            for place in ("asked", "loaded")
        ),
    ]
    result, events, planning = train(kills, fork_server, tmp_path, rate=2e4)
    assert dead(result) in (["1.2"], ["1.2", worker]) and phases(events)[-1] == "settled"
    if len(dead(result)) == 2:
        assert (
            any(isinstance(event, FetchAbandoned) for event in events)
            and len(set(planning.asked)) == 2
        )


@pytest.mark.slow
def test_one_dies_after_layers_have_moved_and_both_come_back(fork_server, tmp_path):
    # The first answer leaves layers where they are then; those that come back take theirs from
    # whoever has them.
    kills, back = (
        [at("1.2", 2), at("1.0", 58)],
        [Return(Worker(1, 0), 62), Return(Worker(1, 2), 63)],
    )
    config = eight_layers(
        iterations=100, clip_norm=1.6, evaluate_every=10, validation_text=__file__
    )
    result, events, _ = train(kills, fork_server, tmp_path, returns=back, config=config)
    assert dead(result) == ["1.2", "1.0"] and sorted(returned(result)) == ["1.0", "1.2"]
    assert phases(events)[:3] == ["whole", "at once", "settled"] and phases(events)[-1] == "whole"
    # Layers have moved, and then each has come back, or both at one boundary.
    joins = sum(bool(recovery.returned) for recovery in result.recoveries)
    assert sum(isinstance(event, HandedOver) for event in events) >= 1 + joins


@pytest.mark.slow
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_shards_of_workers_of_two_processes_move_too(shard_optimizer, fork_server, tmp_path):
    config = eight_layers(
        iterations=60,
        clip_norm=1.6,
        evaluate_every=10,
        validation_text=__file__,
        tensor_parallel=2,
        shard_optimizer=shard_optimizer,
    )
    result, events, _ = train([at("1.2", 2, "O")], fork_server, tmp_path, config=config)
    assert dead(result) == ["1.2"] and phases(events) == ["whole", "at once", "settled"]
    assert result.recoveries[-1].meanwhile, "all train while layers and parts are fetched"
