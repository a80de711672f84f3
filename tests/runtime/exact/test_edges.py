"""Bad links, receivers and losses in virtual time, by seeds.

Links never work, receivers take nothing, and losses are not finite.
"""

import random

import pytest

from slipstream.runtime.moving import layer_sender
from tests.runtime.coordinator.counting_world import WORKERS
from tests.runtime.exact.test_exact import CONFIGS, _alone
from tests.runtime.exact.world import ITERATIONS, ExactWorld

__all__ = ["_alone"]
EDGES = "apart", "slow", "exponent"
ROOM_SECONDS = 0.2
"""Takes the place of the product's seconds of virtual time.

A receiver that takes nothing is dropped after as long.
"""
SEEDS = range(1000, 1010)
"""Of the slow test; `python -m benchmarks.virtual_time` plays as many as are asked."""


class EdgeWorld(ExactWorld):
    """Nobody dies by chance, but `bad` in some iteration.

    When it is back, it does not work as it should.
    """

    def __init__(self, seed, folder, name, *, nccl, apart=False, slow=False, flips=None) -> None:
        rng = random.Random(seed)
        self.apart, self.slow, self.bad = apart, slow, rng.choice(WORKERS)
        self.unreached = frozenset(
            rng.sample(
                [worker for worker in WORKERS if worker != self.bad],
                rng.randint(1, len(WORKERS) - 1),
            )
        )
        self.dies_in = rng.randrange(1, ITERATIONS - 3) if apart or slow else ITERATIONS
        super().__init__(
            rng,
            folder / f"{seed}-{name}-{nccl}",
            CONFIGS[name],
            nccl=nccl,
            every=rng.choice([0, 2]),
            deadly=0.0,
            restarts=0.0,
            flips=flips,
            # the next gathering of sharded parameters takes the bit with it, and
            # leaves its loss
            verify_every=1 if name != "whole" else rng.choice([0, 1]),
        )
        self.wires.is_cut = self.are_members_apart

    def is_apart(self, worker, other) -> bool:
        pair = {worker, other}
        return self.apart and self.deaths > 0 and self.bad in pair and bool(pair & self.unreached)

    def are_members_apart(self, prefix) -> bool:
        members = [worker for worker in WORKERS if f"{worker}:" in prefix]
        return any(
            self.is_apart(worker, other)
            for worker in members
            for other in members
            if worker != other
        )

    def takes_nothing(self, worker) -> bool:
        return self.slow and self.deaths > 0 and worker == self.bad

    def act(self) -> None:
        if (
            self.state.log.next_iteration >= self.dies_in
            and self.bad in self.workers
            and not self.deaths
        ):
            self.kill(self.bad)
        super().act()


def build_world(seed, folder, name, edge, *, nccl) -> EdgeWorld:
    """A run with one of `EDGES`."""
    return EdgeWorld(
        seed,
        folder,
        name,
        nccl=nccl,
        apart=edge == "apart",
        slow=edge == "slow",
        flips="exponent" if edge == "exponent" else None,
    )


def play(world: EdgeWorld) -> EdgeWorld:
    """One run, to its end, in which nobody goes who can be reached. Raises Deviation."""
    world.play()
    world.check_end()
    if world.apart or world.slow:  # of a single link, either end may be at fault
        assert world.given_up <= {world.bad} | (
            world.unreached if len(world.unreached) == 1 else set()
        ), world.history
    return world


@pytest.mark.parametrize("nccl", [False, True])
def test_whoever_cannot_be_reached_holds_up_nobody(nccl, tmp_path):
    for seed in range(4):
        world = play(EdgeWorld(seed, tmp_path, "whole", nccl=nccl, apart=True))
        assert not world.given_up or world.notes


@pytest.mark.parametrize("nccl", [False, True])
def test_whoever_takes_no_layers_holds_up_nobody(nccl, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_sender, "ROOM_SECONDS", ROOM_SECONDS)
    for seed in range(4):
        play(EdgeWorld(seed, tmp_path, "whole", nccl=nccl, slow=True))


@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_bit_of_an_exponent_ends_no_run(name, nccl, tmp_path):
    # Where the loss is not finite, copies are compared, and the run goes back at most once.
    for seed in range(3):
        play(EdgeWorld(seed, tmp_path, name, nccl=nccl, flips="exponent"))


@pytest.mark.slow
@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_edges_cost_no_number_and_no_healthy_worker(edge, name, nccl, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_sender, "ROOM_SECONDS", ROOM_SECONDS)
    for seed in SEEDS:
        play(build_world(seed, tmp_path, name, edge, nccl=nccl))
