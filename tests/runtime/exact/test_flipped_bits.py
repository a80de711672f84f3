"""A bit flips in what one worker holds: it is found, and each loss and each parameter is that of one process."""

import random

import pytest

from tests.runtime.exact.test_exact import CONFIGS, RARE, _alone
from tests.runtime.exact.world import ExactWorld

__all__ = ["_alone"]
FLIPS = [("whole", "parameters"), ("whole", "state"), ("sharded", "parameters"), ("sharded", "state"),
         ("sharded", "copy"), ("clipped", "parameters"), ("clipped", "state"), ("clipped", "copy")]


def play(seed: int, name: str, what: str, folder, *, nccl: bool) -> ExactWorld:
    """One run, to its end. Raises Deviation."""
    rng = random.Random(seed)
    world = ExactWorld(rng, folder / f"{seed}-{name}-{what}-{nccl}", CONFIGS[name], nccl=nccl,
                       every=rng.choice([0, 3, 4]), deadly=0.0, restarts=RARE if seed % 2 else 0.0,
                       verify_every=rng.choice([1, 2, 3]), flips=what)
    world.play()
    world.check_end()
    assert world.flipped is not None
    if world.found is None:  # a step that was undone, as it was guessed or node 0 died, has taken the bit with it
        assert name == "clipped" or world.restarts, world.history
    else:
        assert world.found.iteration <= world.flipped + world.verify_every + 1, world.history
    return world


@pytest.mark.parametrize(("name", "what"), FLIPS[:5])
def test_a_flipped_bit_is_found_and_changes_no_number(name, what, tmp_path):
    assert all(play(0, name, what, tmp_path, nccl=nccl).found for nccl in (False, True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), FLIPS)
def test_flipped_bits_are_found_and_change_no_number(name, what, tmp_path):
    runs = [play(seed, name, what, tmp_path, nccl=nccl) for seed in range(100, 130) for nccl in (False, True)]
    assert any(world.went_back for world in runs)
    assert name != "whole" or all(world.deaths or world.restarts for world in runs if world.found), \
        "of three, the wrong one is given up"
