"""Node 0 and all workers of a run are lost: with which checkpoint its command continues."""

from pathlib import Path

import pytest

from slipstream.runtime.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    DamagedError,
    open_checkpoint,
)
from slipstream.runtime.coordinator.run_options import RunRequest
from slipstream.runtime.launch import Resilience, RunOptions, _resume_whole
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.run_folder import TakeoverRecord
from tests.runtime.checkpoints.test_checkpoint import states, write
from tests.runtime.failing import JOB
from tests.runtime.running import schedule_for, tiny


def saved(run: Path, iteration: int) -> Checkpoint:
    write(run / "checkpoints", iteration, states(iteration))
    return open_checkpoint(run / "checkpoints" / f"iteration-{iteration}")


def damage(checkpoint: Checkpoint) -> None:
    next(checkpoint.path.glob("layer-0001-*.safetensors")).write_bytes(b"")


class Lost:
    """A run in `out` that began from iteration 3 of another run."""

    def __init__(self, folder: Path) -> None:
        self.before, self.out = folder / "before", folder / "out"
        self.older, self.began = (saved(self.before, iteration) for iteration in (2, 3))
        self.news: list[object] = []

    def resume_whole(self, resume: Checkpoint | None, **options: object) -> RunRequest:
        request = RunRequest(
            schedule=schedule_for(JOB),
            config=tiny(),
            out=self.out,
            options=RunOptions(notify=self.news.append, **options),
            resilience=Resilience(resume=resume),
        )
        record = TakeoverRecord(
            epoch=1,
            coordinator=Rendezvous("127.0.0.1", 1),
            first_iteration=3,
            resume=str(self.began.path.resolve()),
            fork_server=None,
        )
        return _resume_whole(request, record)

    def find_path(self, resume: Checkpoint | None, **options: object) -> Path | None:
        found = self.resume_whole(resume, **options).resilience.resume
        return None if found is None else found.path


@pytest.fixture
def lost(tmp_path):
    return Lost(tmp_path)


def test_the_same_command_continues_from_what_the_run_began_from(lost):
    again = lost.resume_whole(lost.began)
    assert again.resilience.resume.path == lost.began.path and again.resilience.resume.is_verified
    assert again.options.again, "the run's own results are no other run's"


def test_a_command_that_resumes_in_place_does_so_too_and_does_not_start_from_iteration_0(lost):
    assert lost.find_path(None, again=True) == lost.began.path
    assert lost.find_path(None) is None, "it does not resume"
    damaged = saved(lost.out, 5)
    damage(damaged)
    assert lost.find_path(damaged, again=True) == lost.began.path
    assert not damaged.path.exists() and "damaged-iteration-5" in str(lost.news[-1])


def test_the_newest_checkpoint_of_the_run_comes_first(lost):
    own = [saved(lost.out, iteration) for iteration in (4, 6)]
    assert lost.find_path(lost.began) == lost.find_path(own[1]) == own[1].path
    damage(own[1])
    assert lost.find_path(lost.began) == own[0].path


def test_another_checkpoint_that_is_asked_for_is_taken(lost):
    saved(lost.out, 4)
    other = lost.resume_whole(lost.older)
    assert other.resilience.resume.path == lost.older.path and not other.options.again


def test_without_any_that_is_whole_it_is_refused(lost):
    damage(lost.began)
    with pytest.raises(DamagedError, match=r"iteration-3"):
        lost.find_path(None, again=True)
    # The same where the run began from a checkpoint of its own folder.
    lost.began, newest = saved(lost.out, 4), saved(lost.out, 6)
    damage(lost.began)
    damage(newest)
    with pytest.raises(DamagedError, match=r"iteration-6"):
        lost.find_path(newest, again=True)


def test_other_nodes_are_to_be_told_of_another_folder(lost):
    """They look only where their own --resume says."""
    assert lost.find_path(lost.began, nodes=2) == lost.began.path
    with pytest.raises(CheckpointError, match=rf"every node with --resume {lost.began.path}$"):
        lost.find_path(None, again=True, nodes=2)
    own = saved(lost.out, 4)
    with pytest.raises(CheckpointError, match=rf"every node with --resume {own.path}$"):
        lost.find_path(lost.began, nodes=2)
