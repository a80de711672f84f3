"""A bit that flips in one worker's state is found.

Each loss and each parameter is that of one process.
"""

import random

import pytest

from slipstream.runtime.coordinator.decisions.run_state import TrainingPhase
from tests.runtime.exact.test_exact import CONFIGS, RARE, _alone
from tests.runtime.exact.world import ExactWorld

__all__ = ["_alone"]
FLIPS = [
    ("whole", "parameters"),
    ("whole", "state"),
    ("sharded", "parameters"),
    ("sharded", "state"),
    ("sharded", "copy"),
    ("clipped", "parameters"),
    ("clipped", "state"),
    ("clipped", "copy"),
]
SEEDS = range(100, 110)
"""Of the slow test; `python -m benchmarks.virtual_time` plays as many as are asked.

Of 103, parameters were wrong.
"""


class HalfToldWorld(ExactWorld):
    """Node 0 dies when the difference has been found, and again later.

    The second time is while the run goes back.

    Some of the peers of the worker whose bit has flipped have heard that it does, and have dropped
    the right copies.
    """

    hearers = (0,)
    """These peers, by their number."""
    half_told = False

    def happens(self, event) -> None:
        found_before = self.found
        super().happens(event)
        if self.found != found_before:
            self.die_after([*self.workers])
        elif (
            isinstance(self.state.phase, TrainingPhase)
            and self.state.phase.restores
            and not self.half_told
        ):
            self.half_told = True
            peers = [
                worker
                for worker in sorted(self.workers)
                if worker.column == self.wrong.column and worker != self.wrong
            ]
            self.die_after([peers[number] for number in self.hearers])

    def die_after(self, hearers) -> None:
        """Node 0 dies once these workers have heard all that it has sent to them."""
        for worker in hearers:
            while self.workers[worker].inbox:
                self.workers[worker].hear()
        self.restart()


def play(seed: int, name: str, what: str, folder, *, nccl: bool, kind=ExactWorld) -> ExactWorld:
    """One run, to its end. Raises Deviation."""
    rng = random.Random(seed)
    world = kind(
        rng,
        folder / f"{seed}-{name}-{what}-{nccl}-{kind.__name__}",
        CONFIGS[name],
        nccl=nccl,
        every=rng.choice([0, 3, 4]),
        deadly=0.0,
        restarts=RARE if seed % 2 else 0.0,
        verify_every=rng.choice([1, 2, 3]),
        flips=what,
    )
    world.play()
    world.check_end()
    assert world.flipped is not None
    # A step that was undone, as it was guessed or node 0 died, has taken the bit with it.
    if world.found is None:
        assert name == "clipped" or world.restarts, world.history
    else:
        assert world.found.iteration <= world.flipped + world.verify_every + 1, world.history
    return world


@pytest.mark.parametrize(("name", "what"), FLIPS[:5])
def test_a_flipped_bit_is_found_and_changes_no_number(name, what, tmp_path):
    assert all(play(0, name, what, tmp_path, nccl=nccl).found for nccl in (False, True))


@pytest.mark.parametrize(("name", "what"), [("whole", "parameters"), *FLIPS[2:5]])
def test_who_has_not_heard_that_the_run_goes_back_does_not_bring_the_wrong_bit_back(
    name, what, tmp_path
):
    for hearers in ((0,), (1,), (0, 1)):
        kind = type(f"Told{len(hearers)}{hearers[0]}", (HalfToldWorld,), {"hearers": hearers})
        assert play(0, name, what, tmp_path, nccl=False, kind=kind).half_told


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), FLIPS)
def test_flipped_bits_are_found_and_change_no_number(name, what, tmp_path):
    runs = [play(seed, name, what, tmp_path, nccl=nccl) for seed in SEEDS for nccl in (False, True)]
    assert any(world.went_back for world in runs)
    assert name != "whole" or all(
        world.deaths or world.restarts for world in runs if world.found
    ), "of three, the wrong one is given up"
