"""Who would train something else than the run takes no part in it, and nothing is lost by that."""

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.runtime.checkpoints.checkpoint import Checkpoint, Manifest, open_latest
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.coordinator.run_fit import check_fit, compare_with_checkpoint
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import JOB, WIDE, against, at, dead, planned, returned
from tests.runtime.forked import own_fork_server
from tests.runtime.launchers import Launcher
from tests.runtime.pacing import slowly_until
from tests.runtime.running import assert_same_numbers, free_port, judge, losses_in, schedule_for, tiny
from tests.runtime.test_node_0_restart import LEAD, assert_right, led_until_killed

BACK = Worker(0, 0)
ROOT = Path(__file__).parents[2]
HALF = 4
"""Iterations of each of two runs, one after the other."""


@pytest.mark.timeout(900)
def test_a_node_0_with_another_job_file_leaves_the_workers_to_the_right_one(tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    led_until_killed(out, log, free_port(), 1, "committed@4", "")
    committed = len(losses_in(out))
    assert Launcher(LEAD, out, 0, 1, "", "0.5", log=log).wait(240) == 1
    assert "training.clip_norm is 0.5 here and not given in the run" in log.read_text(), log.read_text()
    assert len(losses_in(out)) == committed
    assert Launcher(LEAD, out, 0, 1, "", "", log=log).wait(240) == 0, log.read_text()
    assert "node 0 continues with the 4 workers" in log.read_text(), log.read_text()
    assert_right(out)


@pytest.mark.slow
def test_a_worker_that_returns_with_other_code_is_refused(tmp_path, monkeypatch):
    """The model's file is edited during the run."""
    source = tmp_path / "edited_model.py"
    source.write_text((ROOT / "tests/runtime/ruled_model.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = tiny(iterations=30)
    config = replace(config, model=replace(config.model, name="edited_model:Model"))
    reference = judge(config, WIDE.microbatches, 30)
    told: list[str] = []

    def is_refused() -> bool:
        return any("worker 0.0 is refused" in line and "the source of module edited_model is not the same" in line
                   for line in told)

    slow_down = slowly_until(is_refused)

    def edit(iteration: int, loss: float) -> None:
        if iteration == 1:  # before the death
            source.write_text(source.read_text().replace("RATE = 0.02", "RATE = 0.3"))
        if iteration > 5:
            slow_down(iteration, loss)

    with own_fork_server() as fork_server:
        result = run(schedule_for(WIDE), config, out=tmp_path / "out", fork_server=fork_server, progress=edit,
                     options=RunOptions(notify=lambda news: told.append(str(news))),
                     resilience=against([at("0.0", 4)], scheduler=planned(WIDE), returns=(Return(BACK, 5),)))
    assert_same_numbers(result, reference)
    assert dead(result) == ["0.0"] and returned(result) == [] and is_refused()


def numbered(per_pipeline: int, **training: object) -> RunConfig:
    return tiny(data="tests.runtime.careless:Numbered", options={"per_pipeline": per_pipeline}, **training)


def half(config: RunConfig, out: Path, fork_server) -> Checkpoint:
    """The checkpoint that a run on two pipelines has left."""
    run(schedule_for(JOB), config, out=out, iterations=HALF, fork_server=fork_server,
        resilience=Resilience(checkpoint_every=HALF))
    checkpoint = open_latest(out / CHECKPOINTS)
    assert checkpoint is not None and checkpoint.manifest.run is not None
    return checkpoint


def test_data_that_name_samples_by_the_grid_are_not_resumed_on_another_one(fork_server, tmp_path):
    """As many micro-batches are read, but others."""
    config = tiny(data="tests.runtime.careless:Seeded")
    checkpoint = half(config, tmp_path / "first", fork_server)
    with pytest.raises(ConfigError, match=r"its samples of iteration 0 are not those of the run that wrote the "
                                          r"checkpoint, since grid\.microbatches is \[4\] here and \[2,2\] in its run"):
        run(schedule_for(grid(1, 2, 4)), config, out=tmp_path / "second", iterations=2 * HALF,
            fork_server=fork_server, resilience=Resilience(resume=checkpoint))


def test_data_that_number_their_samples_are_resumed_on_another_grid(fork_server, tmp_path):
    """The numbers are those of one process; what differs is told in one line."""
    config = replace(numbered(2), model=replace(tiny().model, dropout=0.0))
    checkpoint = half(config, tmp_path / "first", fork_server)
    wider = replace(config, training=replace(config.training, options={"per_pipeline": 4}))
    told: list[str] = []
    result = run(schedule_for(grid(1, 2, 4)), wider, out=tmp_path / "second", iterations=2 * HALF,
                 fork_server=fork_server, options=RunOptions(notify=lambda news: told.append(str(news))),
                 resilience=Resilience(resume=checkpoint))
    reference = judge(wider, (4,), 2 * HALF)
    assert result.losses == pytest.approx(reference.losses[HALF:], rel=0, abs=1e-9)
    (line,) = [line for line in told if "resumes with differences" in line]
    assert "training.options.per_pipeline is 4 here and 2 in its run" in line
    assert "grid.microbatches is [4] here and [2,2] in its run" in line and "samples" not in line


def test_checkpoints_of_earlier_versions_say_nothing_of_their_run():
    fit = check_fit(schedule_for(JOB), tiny(), RunOptions())
    earlier = Manifest(iteration=1, identity={}, layers=())
    assert compare_with_checkpoint(Checkpoint(Path("old"), earlier), fit, tiny()) is None
    same = replace(earlier, run=fit.facts.identity)
    assert compare_with_checkpoint(Checkpoint(Path("same"), same), fit, tiny()) is None
