"""The transition function, with workers that only count.

These die and come back at random, and so does it.

Messages are delivered in any order that connections allow. Layers that move take time, and orders
begin in part. Whatever happens, a worker is never told to go on from where it cannot be, and each
iteration is in the file of losses once, in order, when the run ends.
"""

import json
import random

import pytest

from slipstream.runtime.coordinator.decisions import commit_log
from slipstream.runtime.coordinator.decisions.run_state import EndedPhase
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import LOSSES
from tests.runtime.coordinator.counting_workers import ITERATIONS
from tests.runtime.coordinator.counting_world import CutWorld, OtherWorld, RankedWorld, World


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(commit_log, "MIN_INTERVAL_SECONDS", 0.0)


class Played:
    """What has happened in some runs, all of which have ended as they may."""

    def __init__(self, kind, seeds, folder, deadly=0.016) -> None:
        self.restarts = self.back = self.deaths = self.ended = self.told = self.saved = (
            self.unknown
        ) = 0
        self.partial = self.moved = self.others = 0
        self.fewest, self.worlds = set(), []
        for seed in seeds:
            self._play(
                seed,
                kind(random.Random(seed), folder / str(seed), deadly=0.004 if seed % 5 else deadly),
            )

    def _play(self, seed, world) -> None:
        self.worlds.append(world)
        try:
            for _ in range(100_000 * len(world.workers)):
                world.act()
                if isinstance(world.state.phase, EndedPhase):
                    break
            else:
                pytest.fail(f"seed {seed}: the run hangs")
        except RunError as error:
            self.ended += 1
            assert not world.there and any(reason in str(error) for reason in world.ends), (
                seed,
                error,
            )
            return
        self.fewest.add(world.fewest)
        if world.state.log.next_iteration < ITERATIONS:
            self.ended += 1
            assert world.told_to_leave, (seed, "it has ended early")
            return
        world.write(len(world.unwritten))
        lines = [json.loads(line) for line in (world.out / LOSSES).read_text().splitlines()]
        assert [line["iteration"] for line in lines] == list(range(ITERATIONS)), seed
        assert all(
            line["loss"] == line["iteration"]
            or (line["loss"] is None and line["iteration"] in world.unknown)
            for line in lines
        ), seed
        self.told += world.told_to_leave
        self.restarts, self.back = self.restarts + world.restarts, self.back + world.went_back
        self.deaths += world.deaths
        self.unknown += len(world.unknown)
        self.saved += world.saved
        self.partial, self.moved = self.partial + world.partial, self.moved + world.moved
        self.others += getattr(world, "refused_others", 0)


def test_whoever_dies_the_numbers_are_whole(tmp_path):
    played = Played(World, range(50), tmp_path)
    assert (
        played.restarts > 30
        and played.back > 1
        and played.deaths > 60
        and played.told > 20
        and played.ended < 25
    ), vars(played)
    assert min(played.fewest) == 1 and played.saved > 100
    assert played.partial > 30 and played.moved > 30


def test_whoever_returns_with_another_job_file_the_numbers_are_whole(tmp_path):
    """Such a worker is refused, also by another coordinator than the one it came to."""
    played = Played(OtherWorld, range(20), tmp_path)
    assert played.others > 3 and played.restarts > 10 and played.deaths > 20, vars(played)


def test_whichever_rank_of_a_worker_stops_first_the_numbers_are_whole(tmp_path):
    played = Played(RankedWorld, range(30), tmp_path, 0.01)  # an order takes them longer to begin
    assert played.restarts > 15 and played.deaths > 30 and played.told > 5 and played.ended < 15, (
        vars(played)
    )


def test_links_that_never_work_cost_no_healthy_worker_and_no_standstill(tmp_path):
    # Whoever cannot be reached goes, or one of the two whose link it is, and the others go on.
    played = Played(CutWorld, range(40), tmp_path)
    assert not played.ended, vars(played)
    blamed = [world for world in played.worlds if world.given_up]
    assert len(blamed) > 20, "else the links were cut too late"
    for world in blamed:
        assert world.given_up <= {world.lone} | world.unreached
        assert any("order" in note or "could not get its layers" in note for note in world.notes)
        if len(world.unreached) > 1:
            assert world.given_up == {world.lone}, (world.lone, world.unreached, world.given_up)
