"""All who hold some layer die.

Those that live go back to the newest checkpoint they can read, and go on in place.
"""

import time

import pytest

from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.checkpoints.checkpoint import (
    find_complete,
    load_layers,
    open_checkpoint,
    open_latest,
)
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import CheckpointWritten
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import (
    JOB,
    TIMEOUT_SECONDS,
    WIDE,
    Planning,
    at,
    dead,
    planned,
    returned,
    train,
)
from tests.runtime.running import (
    assert_same_numbers,
    judge,
    losses_in,
    metrics_in,
    schedule_for,
    tiny,
)

TEN = tiny(iterations=10)


def on_the_spot(job):
    """Plan as `slipstream train` does.

    Live workers take over the roles of a stage that nobody holds.
    """
    return FailurePlanner(job, planned(job)(()), None).after


def saved(out, *iterations, kills=()):
    """Have the run wait until a checkpoint of each iteration is complete.

    It is of the state before the iteration.

    It becomes one when its writers hear that the iteration is committed. They have heard that
    before they begin the second next one, at whose commit the run waits. A worker may begin the
    third next one before that, and one that dies there may not have written yet: `kills` have to be
    later, or before anything is saved.
    """
    assert not any(number <= kill.iteration < number + 4 for number in iterations for kill in kills)

    def wait(iteration, _):
        deadline, before = time.monotonic() + 120, iteration - 2
        while before in iterations and before not in find_complete(out / "checkpoints"):
            assert time.monotonic() < deadline, "the checkpoint is not written"
            time.sleep(0.01)

    return wait


def lose(kills, fork_server, out, *, job=JOB, config=TEN, **more):
    return train(
        kills, fork_server, out, job=job, config=config, scheduler=on_the_spot(job), **more
    )


def test_without_a_checkpoint_they_begin_anew(fork_server, tmp_path):
    pids = {}
    result = lose(
        [at("0.1", 3), at("1.1", 5)],
        fork_server,
        tmp_path,
        checkpoint_every=0,
        progress=lambda *_: pids.update(fork_server.pids),
    )
    assert dead(result) == ["0.1", "1.1"]
    *_, back = result.recoveries
    assert back.went_back_to == 0 and back.repeated in (4, 5) and back.live == 2
    assert (
        f"went back to iteration 0, and {back.repeated} iterations are run again, with the "
        "same numbers" in str(back)
    )
    assert losses_in(tmp_path) == list(result.losses) and len(result.trace.iterations) == 3
    assert [metrics.recoveries for metrics in metrics_in(tmp_path)] == [2] * 10, (
        "all were run again"
    )
    assert len(set(pids.values())) == 4, "a process was started again"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_they_go_back_to_the_newest_checkpoint(optimizer, fork_server, tmp_path):
    # The last one who wrote it may die with the stage, or the next one is being written.
    seen, kills = [], [at("0.1", 8, 3), at("1.1", 10, 3)]
    wait = saved(tmp_path, 4, kills=kills)
    result = lose(
        kills,
        fork_server,
        tmp_path,
        checkpoint_every=4,
        config=tiny(
            iterations=14, optimizer=optimizer, momentum=0.5 if optimizer == "sgd" else 0.0
        ),
        progress=lambda iteration, loss: (seen.append(iteration), wait(iteration, loss)),
    )
    *_, back = result.recoveries
    assert back.went_back_to in (4, 8) and back.went_back_to + back.repeated in (9, 10)
    assert seen[-14 + back.went_back_to :] == list(range(back.went_back_to, 14))
    assert open_latest(tmp_path / "checkpoints").iteration == 14


@pytest.mark.parametrize("clip_norm", [1e-3, 1.8])
def test_with_clipping_and_several_that_die_at_once(clip_norm, fork_server, tmp_path):
    kills = [at("0.1", 7, "stepped"), at("1.1", 7, "O"), at("2.1", 7, "A")]
    result = lose(
        kills,
        fork_server,
        tmp_path,
        job=WIDE,
        config=tiny(iterations=10, clip_norm=clip_norm),
        checkpoint_every=3,
        progress=saved(tmp_path, 3, kills=kills),
    )
    assert sorted(dead(result)) == ["0.1", "1.1", "2.1"]
    assert [
        recovery.went_back_to for recovery in result.recoveries if recovery.went_back_to is not None
    ] in (
        [3],
        [6],
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ordered", "met", "moved", 1])
def test_another_dies_while_they_go_back(place, fork_server, tmp_path):
    kills = [at("0.1", 8, 1), at("1.1", 8, 2), at("2.1", 8, 3)]
    result = lose(
        [*kills, at("0.0", 4, place)],
        fork_server,
        tmp_path,
        job=WIDE,
        checkpoint_every=4,
        progress=saved(tmp_path, 4, kills=kills),
    )
    assert sorted(dead(result)) == ["0.0", "0.1", "1.1", "2.1"] and result.recoveries[-1].live == 2


def test_one_that_is_back_takes_part_at_once(fork_server, tmp_path):
    """Everybody reads the checkpoint."""
    kills = [at("0.1", 3), at("1.1", 60)]
    result = lose(
        kills,
        fork_server,
        tmp_path,
        config=tiny(iterations=110),
        checkpoint_every=50,
        progress=saved(tmp_path, 50, kills=kills),
        returns=(Return(Worker(1, 1), 61),),
    )
    assert dead(result) == ["0.1", "1.1"] and returned(result) == ["1.1"]
    assert [recovery.went_back_to for recovery in result.recoveries if recovery.dead] == [None, 50]


def test_a_run_that_began_from_a_checkpoint_goes_back_to_it(fork_server, tmp_path):
    """It lies in the folder of another run."""
    train([], fork_server, tmp_path / "first", config=tiny(iterations=4), checkpoint_every=4)
    config = tiny(iterations=9)
    resilience = Resilience(
        scheduler=on_the_spot(JOB),
        heartbeat_timeout_seconds=TIMEOUT_SECONDS,
        checkpoint_every=0,
        resume=open_latest(tmp_path / "first" / "checkpoints"),
        injections=(at("0.1", 6), at("1.1", 7)),
    )
    result = run(
        schedule_for(JOB),
        config,
        out=tmp_path / "out",
        fork_server=fork_server,
        resilience=resilience,
    )
    assert result.recoveries[-1].went_back_to == 4 == result.first_iteration
    reference = judge(config, JOB.microbatches, 9)
    assert (
        max(
            abs(ours - theirs)
            for ours, theirs in zip(result.losses, reference.losses[4:], strict=True)
        )
        <= 1e-9
    )


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(fork_server, tmp_path):
    seen, news, events, kills = [], [], [], [at("0.1", 9), at("1.1", 14, 4)]
    wait = saved(tmp_path, 5, 10, kills=kills)

    def damage(iteration, loss):  # before anybody can have begun the iteration after the next
        wait(iteration, loss)
        if iteration == 12:
            seen.append(iteration)
            if len(seen) == 1:
                for path in (tmp_path / "checkpoints" / "iteration-10").glob("*.safetensors"):
                    path.write_bytes(b"\0" + path.read_bytes()[1:])
            else:
                assert load_layers(
                    open_checkpoint(find_complete(tmp_path / "checkpoints")[10]), range(4)
                ), "it is written anew"

    resilience = Resilience(
        scheduler=on_the_spot(JOB),
        heartbeat_timeout_seconds=TIMEOUT_SECONDS,
        checkpoint_every=5,
        injections=tuple(kills),
    )
    result = run(
        schedule_for(JOB),
        tiny(iterations=16),
        out=tmp_path,
        fork_server=fork_server,
        resilience=resilience,
        progress=damage,
        options=RunOptions(notify=news.append, observe=events.append),
    )
    assert_same_numbers(result, judge(tiny(iterations=16), JOB.microbatches, 16))
    assert result.recoveries[-1].went_back_to == 5
    assert any("iteration-10" in str(line) for line in news) and len(seen) == 2
    assert [event.checkpoint for event in events if isinstance(event, CheckpointWritten)].count(
        10
    ) == 2


@pytest.mark.slow
@pytest.mark.parametrize("settling", [None, Rebalancing()], ids=["fixed", "move"])
def test_fewer_workers_than_stages_go_on_down_to_one_and_up_again(settling, fork_server, tmp_path):
    """One holds all layers then; those that come back take theirs from it."""
    job, pids = grid(2, 3, 2, more="optimizer = 1"), set()
    kills = [
        *(at(name, 6, place) for name, place in (("0.0", 1), ("1.0", 2), ("0.1", 1), ("1.1", 2))),
        at("0.2", 8),
    ]
    wait = saved(tmp_path, 2, kills=kills)
    back = [
        Return(Worker.parse(name), 9 + number)
        for number, name in enumerate(["0.0", "1.0", "0.1", "1.1", "0.2"])
    ]

    def progress(iteration, loss):
        wait(iteration, loss)
        pids.update(fork_server.pids.items())

    result = lose(
        kills,
        fork_server,
        tmp_path,
        job=job,
        config=tiny(iterations=80),
        checkpoint_every=2,
        rebalancer=Planning(job),
        settling=settling,
        returns=back,
        progress=progress,
    )
    assert sorted(dead(result)) == ["0.0", "0.1", "0.2", "1.0", "1.1"]
    live = [recovery.live for recovery in result.recoveries]
    assert 1 in live and live[-1] == 6, live
    assert {
        recovery.went_back_to for recovery in result.recoveries if recovery.went_back_to is not None
    } <= {
        2,
        4,
        6,
    }
    assert [name for name, _ in pids].count("1.2") == 1 and len(pids) == 11, (
        "the one that was left has its process"
    )


def test_where_one_worker_has_too_little_memory_the_run_ends_and_says_so(fork_server, tmp_path):
    job = grid(
        2,
        2,
        2,
        more="optimizer = 1\n[memory]\nactivation = 1\nweight_stash = 1\ncapacity = 4\n"
        "weights = 10",
    )
    with pytest.raises(
        RunError,
        match=r"stage 1 has no live worker left: .*0\.1 .* no schedule keeps all workers "
        "within their memory",
    ):
        lose(
            [at("0.1", 3), at("1.1", 4), at("0.0", 5)],
            fork_server,
            tmp_path,
            job=job,
            rebalancer=Planning(job),
        )
