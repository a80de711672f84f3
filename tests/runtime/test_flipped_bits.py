"""A bit of what a worker holds flips: real processes find it, and their numbers are those of one process."""

import pytest

from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import TIMEOUT_SECONDS, dead, planned
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

WIDE = grid(3, 2, 2, more="optimizer = 1")
TWO = grid(2, 2, 2, more="optimizer = 1")
WRONG = Worker(1, 0)
SAVED = 0, 4
"""Checkpoints before it is found: the second may still be on its way to the disk."""


def flipped(what, job, config, fork_server, out):
    """One flips in iteration 5; copies are compared before every third step."""
    said = []
    result = run(schedule_for(job), config, out=out, fork_server=fork_server, resilience=Resilience(
        scheduler=planned(job), heartbeat_timeout_seconds=TIMEOUT_SECONDS, checkpoint_every=4, verify_every=3,
        faults_per_hour=6, injections=(Injection(WRONG, 5, 1, f"flip {what}"),)), options=RunOptions(
            notify=lambda one: said.append(str(one))))
    assert_same_numbers(result, judge(config, job.microbatches, config.training.iterations))
    (recovery,) = [one for one in result.recoveries if one.broken is not None]
    assert "differed before iteration 6: " in recovery.broken
    assert any(line.startswith("copies of layer") for line in said)
    return result, recovery



def test_of_three_holders_the_wrong_one_is_given_up(fork_server, tmp_path):
    result, recovery = flipped("parameters", WIDE, tiny(iterations=9), fork_server, tmp_path)
    assert dead(result) == [str(WRONG)] and recovery.went_back_to in SAVED and recovery.in_doubt


@pytest.mark.slow
@pytest.mark.parametrize(("what", "sharded"), [("state", False), ("state", True), ("copy", True), ("parameters", True)])
def test_of_two_nobody_is_and_all_go_back(what, sharded, fork_server, tmp_path):
    config = tiny(iterations=9, shard_optimizer=sharded)
    result, recovery = flipped(what, TWO, config, fork_server, tmp_path)
    assert not dead(result) and recovery.went_back_to in SAVED and "there is no majority among" in recovery.broken
