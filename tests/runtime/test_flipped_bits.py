"""A bit of what a worker holds flips.

Real processes find it, and their numbers are those of one process.
"""

import pytest
import torch

from slipstream.runtime.checkpoints.checkpoint import load_layers, open_checkpoint, open_latest
from slipstream.runtime.errors import RunError
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import TIMEOUT_SECONDS, dead, planned
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

WIDE = grid(3, 2, 2, more="optimizer = 1")
TWO = grid(2, 2, 2, more="optimizer = 1")
WRONG = Worker(1, 0)
SAVED = 0, 4
"""Iterations of checkpoints before it is found.

The second may still be on its way to the disk.
"""


def flipped(what, job, config, fork_server, out):
    """One flips in iteration 5; copies are compared before every third step."""
    said = []
    result = run(
        schedule_for(job),
        config,
        out=out,
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=planned(job),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
            checkpoint_every=4,
            verify_every=3,
            faults_per_hour=6,
            injections=(Injection(WRONG, 5, 1, f"flip {what}"),),
        ),
        options=RunOptions(notify=lambda news: said.append(str(news))),
    )
    assert_same_numbers(result, judge(config, job.microbatches, config.training.iterations))
    (recovery,) = [recovery for recovery in result.recoveries if recovery.broken is not None]
    assert "differed before iteration 6: " in recovery.broken
    assert any(line.startswith("copies of layer") for line in said)
    return result, recovery


def test_of_three_holders_the_wrong_one_is_given_up(fork_server, tmp_path):
    result, recovery = flipped("parameters", WIDE, tiny(iterations=9), fork_server, tmp_path)
    assert dead(result) == [str(WRONG)] and recovery.went_back_to in SAVED and recovery.in_doubt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "sharded"), [("state", False), ("state", True), ("copy", True), ("parameters", True)]
)
def test_of_two_nobody_is_and_all_go_back(what, sharded, fork_server, tmp_path):
    config = tiny(iterations=9, shard_optimizer=sharded)
    result, recovery = flipped(what, TWO, config, fork_server, tmp_path)
    assert (
        not dead(result)
        and recovery.went_back_to in SAVED
        and "there is no majority among" in recovery.broken
    )


@pytest.mark.parametrize("what", ["parameters", "state"])
def test_what_flips_after_the_last_step_is_not_published(what, fork_server, tmp_path):
    # Neither the final parameters nor the last checkpoint are: the run ends with an error, and the
    # one before stays.
    with pytest.raises(
        RunError, match=r"final parameter \d|copies of layers? .* differed before iteration 9"
    ):
        run(
            schedule_for(TWO),
            tiny(iterations=9),
            out=tmp_path,
            fork_server=fork_server,
            resilience=Resilience(
                scheduler=planned(TWO),
                checkpoint_every=4,
                injections=(Injection(WRONG, 8, "stepped", f"flip {what}"),),
            ),
        )
    assert not list(tmp_path.glob("parameters/*.safetensors"))
    newest = open_latest(tmp_path / CHECKPOINTS)
    assert newest is not None and newest.iteration == 8


def test_a_checkpoint_of_a_wrong_copy_never_appears_and_is_written_again(fork_server, tmp_path):
    # The bit flips in iteration 5, and the state before the step of 6 is saved: found as 6 is to be
    # committed.
    config = tiny(iterations=9)
    result = run(
        schedule_for(WIDE),
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=planned(WIDE),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
            checkpoint_every=3,
            verify_every=3,
            faults_per_hour=6,
            injections=(Injection(WRONG, 5, 1, "flip parameters"),),
        ),
    )
    (recovery,) = [recovery for recovery in result.recoveries if recovery.broken is not None]
    assert "differed before iteration 6: " in recovery.broken and recovery.went_back_to in (0, 3)
    assert_same_numbers(result, judge(config, WIDE.microbatches, 9))
    saved = open_checkpoint(tmp_path / CHECKPOINTS / "iteration-6")
    expected = judge(config, WIDE.microbatches, 6).parameters
    for layer, state in load_layers(saved, range(len(saved.manifest.layers))).items():
        for name, tensor in state.items():
            if name.startswith("model."):
                theirs = expected[f"{layer}.{name.removeprefix('model.')}"]
                torch.testing.assert_close(tensor, theirs, rtol=0, atol=1e-9)
