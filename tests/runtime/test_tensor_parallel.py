"""Workers that are groups of processes, whatever fails.

The numbers are those of one process with the whole model.
"""

import pytest

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.errors import RunError
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import dead, returned, train
from tests.runtime.running import assert_same_numbers, judge, schedule_for
from tests.runtime.state.test_steps import RARELY, SAME

TWO = grid(2, 2, 2, more="optimizer = 1")
WIDE = grid(3, 2, 2, more="optimizer = 1")
V = grid(2, 2, 2, more="[placement]\norder = 'v'\nchunks = 2")
TINY = {"blocks": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1}
GPT = {"blocks": 2, "width": 16, "heads": 4, "context": 16, "dropout": 0.1}
BY_TORCH = {
    "name": "tests.runtime.parallelized:Parallelized",
    "blocks": 2,
    "width": 8,
    "context": 8,
}


def config(ranks, model=GPT, **training):
    return parse_run_config(
        model,
        {
            "batch": 1,
            "dtype": "float64",
            "device": "cpu",
            "iterations": 4,
            "tensor_parallel": ranks,
            **training,
        },
    )


@pytest.mark.parametrize(
    ("model", "job", "ranks", "failed", "training"),
    [
        (GPT, TWO, 2, [], {"evaluate_every": 2, "validation_text": __file__}),
        (GPT, TWO, 4, [], {"clip_norm": 0.5, "recompute": ["attention", "mlp"]}),
        (GPT, V, 2, ["0.1"], {"clip_norm": 0.5, "recompute": "full"}),
        (GPT, grid(1, 1, 2), 4, [], {"optimizer": "sgd", "momentum": 0.9}),
        (BY_TORCH, TWO, 2, ["1.1"], {"clip_norm": 0.5}),
    ],
    ids=[
        "two ranks, evaluated",
        "four, clipped, parts recomputed",
        "v, one down, clipped, recomputed",
        "one worker",
        "cut by torch",
    ],
)
def test_numbers_are_those_of_one_process(
    model, job, ranks, failed, training, fork_server, tmp_path
):
    result = run(
        schedule_for(job, failed),
        config(ranks, model, **training),
        out=tmp_path,
        fork_server=fork_server,
    )
    assert_same_numbers(result, judge(config(1, model, **training), job.microbatches, 4))


def test_ranks_agree_on_whether_a_guessed_step_was_wrong(fork_server, tmp_path):
    """Guesses that are right, one that is wrong, and guesses again, as in `test_steps`."""
    training, job = {"clip_norm": RARELY, "iterations": 20, **SAME}, grid(3, 1, 2)
    result = run(
        schedule_for(job), config(2, TINY, **training), out=tmp_path, fork_server=fork_server
    )
    assert_same_numbers(result, judge(config(1, TINY, **training), job.microbatches, 20))


def at(worker, rank, iteration, place, action="kill"):
    return Injection(Worker.parse(worker), iteration, place, action, rank)


def test_each_rank_dies_at_each_place_and_takes_its_worker_with_it(fork_server, tmp_path):
    kills = [
        at("0.0", 1, 1, 0),
        at("2.1", 0, 2, "A"),
        at("1.0", 1, 4, "stepped"),
        at("0.1", 0, 5, "reported"),
    ]
    result = train(
        kills, fork_server, tmp_path, job=WIDE, config=config(2, iterations=7, clip_norm=1.8)
    )
    assert dead(result) == ["0.0", "2.1", "1.0", "0.1"] and result.recoveries[-1].live == 2
    for recovery in result.recoveries:
        assert recovery.reasons == tuple(
            f"worker {worker} was killed by SIGKILL" for worker in recovery.dead
        )


@pytest.mark.slow
def test_it_comes_back_as_one_and_the_next_rank_dies_while_it_is_taken_in(fork_server, tmp_path):
    again = [at("0.0", 0, iteration, "met") for iteration in range(3, 60)]
    result = train(
        [at("0.0", 1, 2, 3), *again],
        fork_server,
        tmp_path,
        job=TWO,
        config=config(2, iterations=60, clip_norm=0.5),
        returns=(Return(Worker(0, 0), 3), Return(Worker(0, 0), 4)),
    )
    assert dead(result)[:2] == ["0.0", "0.0"] and set(returned(result)) <= {"0.0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "action", "reason"),
    [
        (GPT, "stop", "worker 1.0 stopped answering"),
        (GPT, "raise", "worker 1.0 failed: InjectedError"),
        (BY_TORCH, "cut", None),
    ],
)
def test_a_rank_fails_in_another_way(model, action, reason, fork_server, tmp_path):
    result = train(
        [at("1.0", 1, 2, 3, action)], fork_server, tmp_path, job=TWO, config=config(2, model)
    )
    (recovery,) = result.recoveries
    if reason is None:
        assert recovery.dead == () and recovery.live == 4
    else:
        assert (
            recovery.dead == (Worker(1, 0),)
            and recovery.reasons[0].startswith(reason)
            and recovery.live == 3
        )


def test_a_checkpoint_of_two_ranks_is_gone_on_from_by_any_number(fork_server, tmp_path):
    first, then = tmp_path / "first", config(1, iterations=6)
    run(
        schedule_for(TWO),
        config(2),
        out=first,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=2),
    )
    for ranks, stages in ((1, 4), (4, 1)):
        result = run(
            schedule_for(grid(2, stages, 2)),
            config(ranks, iterations=6),
            out=tmp_path / str(ranks),
            fork_server=fork_server,
            resilience=Resilience(resume=open_latest(first / CHECKPOINTS)),
        )
        assert result.losses == pytest.approx(judge(then, (2, 2), 6).losses[4:], abs=1e-9)


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        (
            {**GPT, "heads": 2},
            4,
            "model.heads is 2; expected a multiple of training.tensor_parallel, 4",
        ),
        (
            {**BY_TORCH, "name": "tests.runtime.parallelized:Whole"},
            2,
            "training.tensor_parallel is 2, and no layer of the model has `shards`: all ranks "
            "would do the same; expected 1",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(model, ranks, message, tmp_path):
    with pytest.raises((ConfigError, RunError), match=message.replace("(", r"\(")):
        run(schedule_for(TWO), config(ranks, model), out=tmp_path)
    assert not list(tmp_path.iterdir())
