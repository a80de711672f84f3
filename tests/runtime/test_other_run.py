"""Who would train something else than the run takes no part in it.

Nothing is lost by that.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.runtime import launch
from slipstream.runtime.checkpoints.checkpoint import Checkpoint, Manifest, open_latest
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.coordinator.run_fit import check_fit, compare_with_checkpoint
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import JOB, WIDE, against, at, dead, planned, returned
from tests.runtime.forked import fork_server_of_launcher, own_fork_server
from tests.runtime.launchers import Launcher
from tests.runtime.pacing import hold_at, slowly_until
from tests.runtime.running import (
    assert_same_numbers,
    free_port,
    judge,
    losses_in,
    schedule_for,
    tiny,
)
from tests.runtime.test_node_0_restart import LEAD, SEEN, assert_right, killed, led_until_killed

BACK = Worker(0, 0)
ROOT = Path(__file__).parents[2]
HALF = 4
"""Iterations of each of two runs, one after the other."""
NARROW = grid(1, 2, 2)


def lead_narrow(out: str, port: str, dies: str) -> None:
    """Resume in a folder on a grid that reads fewer samples; be killed once it has saved."""
    folder = Path(out) / CHECKPOINTS
    if dies:
        hold_at(2 * HALF, Path(out).with_name(SEEN))

    def progress(iteration: int, _: float) -> None:
        if dies and iteration == 2 * HALF + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    launch.LISTEN_SECONDS = 60.0
    with fork_server_of_launcher() as fork_server:
        run(
            schedule_for(NARROW),
            tiny(iterations=4 * HALF),
            out=Path(out),
            progress=progress,
            fork_server=fork_server,
            options=RunOptions(
                rendezvous=Rendezvous("127.0.0.1", int(port)) if int(port) else None,
                notify=lambda news: print(news, file=sys.stderr, flush=True),
            ),
            resilience=against(
                [],
                resume=open_latest(folder),
                checkpoint_every=HALF + 1,
                coordinator_timeout_seconds=240.0,
            ),
        )


@pytest.mark.timeout(900)
def test_node_0_of_a_run_resumed_on_another_grid_continues_after_a_checkpoint(
    fork_server, tmp_path
):
    """Its workers count samples from the checkpoint that the run began from, not the newest."""
    out, log = tmp_path / "out", tmp_path / "log"
    half(tiny(), out, fork_server)
    first = Launcher(f"{__name__}:lead_narrow", out, free_port(), "dies", log=log)
    deadline = time.monotonic() + 240
    while (newest := open_latest(out / CHECKPOINTS)) is None or newest.iteration <= HALF:
        assert first.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    killed(first, log)
    second = Launcher(f"{__name__}:lead_narrow", out, 0, "", log=log)
    assert second.wait(240) == 0, log.read_text()
    assert "node 0 continues with the 2 workers" in log.read_text(), log.read_text()
    assert len(losses_in(out)) == 4 * HALF


@pytest.mark.timeout(900)
def test_a_node_0_with_another_job_file_leaves_the_workers_to_the_right_one(tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    led_until_killed(out, log, free_port(), 1, "committed@4", "")
    committed = len(losses_in(out))
    assert Launcher(LEAD, out, 0, 1, "", "0.5", log=log).wait(240) == 1
    assert "training.clip_norm is 0.5 here and not given in the run" in log.read_text(), (
        log.read_text()
    )
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
    news_lines: list[str] = []

    def is_refused() -> bool:
        return any(
            "worker 0.0 is refused" in line
            and "the source of module edited_model is not the same" in line
            for line in news_lines
        )

    slow_down = slowly_until(is_refused)

    def edit(iteration: int, loss: float) -> None:
        if iteration == 1:  # before the death
            source.write_text(source.read_text().replace("RATE = 0.02", "RATE = 0.3"))
        if iteration > 5:
            slow_down(iteration, loss)

    with own_fork_server() as fork_server:
        result = run(
            schedule_for(WIDE),
            config,
            out=tmp_path / "out",
            fork_server=fork_server,
            progress=edit,
            options=RunOptions(notify=lambda news: news_lines.append(str(news))),
            resilience=against([at("0.0", 4)], scheduler=planned(WIDE), returns=(Return(BACK, 5),)),
        )
    assert_same_numbers(result, reference)
    assert dead(result) == ["0.0"] and returned(result) == [] and is_refused()


def numbered(per_pipeline: int, **training: object) -> RunConfig:
    return tiny(
        data="tests.runtime.careless:Numbered", options={"per_pipeline": per_pipeline}, **training
    )


def half(config: RunConfig, out: Path, fork_server) -> Checkpoint:
    """The checkpoint that a run on two pipelines has left."""
    run(
        schedule_for(JOB),
        config,
        out=out,
        iterations=HALF,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=HALF),
    )
    checkpoint = open_latest(out / CHECKPOINTS)
    assert checkpoint is not None and checkpoint.manifest.run is not None
    return checkpoint


def test_data_that_name_samples_by_the_grid_are_not_resumed_on_another_one(fork_server, tmp_path):
    """As many micro-batches are read, but others."""
    config = tiny(data="tests.runtime.careless:Seeded")
    checkpoint = half(config, tmp_path / "first", fork_server)
    with pytest.raises(
        ConfigError,
        match=r"its samples of iteration 0 are not those of the run that wrote the "
        r"checkpoint, since grid\.microbatches is \[4\] here and \[2,2\] in its run",
    ):
        run(
            schedule_for(grid(1, 2, 4)),
            config,
            out=tmp_path / "second",
            iterations=2 * HALF,
            fork_server=fork_server,
            resilience=Resilience(resume=checkpoint),
        )


def test_data_that_number_their_samples_are_resumed_on_another_grid(fork_server, tmp_path):
    """The numbers are those of one process; what differs is told in one line."""
    config = replace(numbered(2), model=replace(tiny().model, dropout=0.0))
    checkpoint = half(config, tmp_path / "first", fork_server)
    wider = replace(config, training=replace(config.training, options={"per_pipeline": 4}))
    news_lines: list[str] = []
    result = run(
        schedule_for(grid(1, 2, 4)),
        wider,
        out=tmp_path / "second",
        iterations=2 * HALF,
        fork_server=fork_server,
        options=RunOptions(notify=lambda news: news_lines.append(str(news))),
        resilience=Resilience(resume=checkpoint),
    )
    reference = judge(wider, (4,), 2 * HALF)
    assert result.losses == pytest.approx(reference.losses[HALF:], rel=0, abs=1e-9)
    (line,) = [line for line in news_lines if "resumes with differences" in line]
    assert "training.options.per_pipeline is 4 here and 2 in its run" in line
    assert "grid.microbatches is [4] here and [2,2] in its run" in line and "samples" not in line


def test_checkpoints_of_earlier_versions_say_nothing_of_their_run():
    fit = check_fit(schedule_for(JOB), tiny(), RunOptions())
    earlier = Manifest(iteration=1, identity={}, layers=())
    assert compare_with_checkpoint(Checkpoint(Path("old"), earlier), fit, tiny()) is None
    same = replace(earlier, run=fit.facts.identity)
    assert compare_with_checkpoint(Checkpoint(Path("same"), same), fit, tiny()) is None
