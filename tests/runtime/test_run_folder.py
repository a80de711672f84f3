"""One run writes to a folder at a time, and none over another's results.

What was killed leaves nothing behind.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.runtime.checkpoints.checkpoint import (
    KEPT_CHECKPOINTS,
    load_layers,
    open_checkpoint,
    open_latest,
    start_saving,
)
from slipstream.runtime.checkpoints.parameters import draft_layer, publish_layer
from slipstream.runtime.coordinator.decisions import commit_log
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.run_folder import (
    FolderError,
    claim_folder,
    clean_up_folder,
    hold_folder_lock,
)
from slipstream.schedules.files import write_atomically
from slipstream.schedules.schedule import Worker
from tests import patience
from tests.jobs import grid
from tests.runtime.checkpoints.test_checkpoint import IDENTITY, assert_same, share, states, write
from tests.runtime.failing import at, train
from tests.runtime.pacing import Pauses
from tests.runtime.running import (
    assert_same_numbers,
    command_environment,
    judge,
    schedule_for,
    tiny,
)

JOB = grid(2, 2, 2)


def committed(out: Path) -> list[int]:
    return [
        json.loads(line)["iteration"] for line in (out / "losses.jsonl").read_text().splitlines()
    ]


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_in_the_folder_is_refused_and_does_no_harm(fork_server, tmp_path):
    """Also one that would start anew."""
    refused = []

    def second(iteration, _):
        if iteration == 2:
            for force in (False, True):
                with pytest.raises(
                    FolderError, match=rf"process {os.getpid()} on .* is writing there; wait"
                ) as error:
                    run(
                        schedule_for(JOB),
                        tiny(seed=1),
                        out=tmp_path,
                        options=RunOptions(force=force),
                    )
                refused.append(str(error.value))

    result = run(schedule_for(JOB), tiny(), out=tmp_path, fork_server=fork_server, progress=second)
    assert len(refused) == 2
    assert_same_numbers(result, judge(tiny(), JOB.microbatches))
    assert committed(tmp_path) == list(range(20))
    assert not list(tmp_path.glob(".*")), "the lock is gone with the run"


HOLD = (
    "import sys, time; from pathlib import Path; from slipstream.runtime.run_folder import "
    "hold_folder_lock\n"
    "with hold_folder_lock(Path(sys.argv[1]), 0): print('held', flush=True); time.sleep(60)"
)


def test_a_crash_lets_go_of_the_folder(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=command_environment(),
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with (
        pytest.raises(FolderError, match=f"process {holder.pid} on "),
        hold_folder_lock(tmp_path, 0),
    ):
        pass
    with hold_folder_lock(tmp_path, 1):
        pass  # another node of the same run
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    holder.stdout.close()
    with hold_folder_lock(tmp_path, 0):
        pass
    assert not list(tmp_path.iterdir())


def test_of_many_that_want_the_folder_one_at_a_time_has_it(tmp_path):
    """The file is removed and made again all the while."""
    inside, peak, got = 0, 0, 0

    def want() -> None:
        nonlocal inside, peak, got
        for _ in range(300):
            try:
                with hold_folder_lock(tmp_path, 0):
                    inside += 1
                    peak, got = max(peak, inside), got + 1
                    inside -= 1
            except FolderError:
                pass

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert peak == 1 and got > 100


@pytest.mark.parametrize("every", [0, 3])
def test_the_results_of_another_run_are_kept_unless_told_otherwise(every, fork_server, tmp_path):
    schedule, resilience = schedule_for(JOB), Resilience(checkpoint_every=every)
    run(
        schedule,
        tiny(iterations=3),
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=3),
    )
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with pytest.raises(
        FolderError,
        match=r"holds the results of another run \(3 iterations, a checkpoint of "
        r"iteration 3, parameters\): its checkpoint is of another job \(its "
        r"training.seed is 0, here it is 1\); give another --out",
    ):
        run(
            schedule,
            tiny(iterations=2, seed=1),
            out=tmp_path,
            fork_server=fork_server,
            resilience=resilience,
        )
    assert before == {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    config = tiny(iterations=2, seed=1)
    result = run(
        schedule,
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=resilience,
        options=RunOptions(force=True),
    )
    assert_same_numbers(result, judge(config, JOB.microbatches, 2))
    newest = open_latest(tmp_path / "checkpoints")
    assert newest is None if every == 0 else newest is not None and newest.iteration == 2
    assert committed(tmp_path) == [0, 1]


def test_no_checkpoint_is_written_unless_one_is_asked_for(fork_server, tmp_path):
    run(
        schedule_for(JOB),
        tiny(iterations=2),
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=0),
    )
    assert not (tmp_path / "checkpoints").exists()


def test_going_on_keeps_the_losses_and_drops_what_is_newer_only_when_told_to(fork_server, tmp_path):
    schedule = schedule_for(JOB)
    run(
        schedule,
        tiny(iterations=6),
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=3),
    )
    earlier = min((tmp_path / "checkpoints").iterdir())
    assert earlier.name == "iteration-3"
    back = Resilience(checkpoint_every=3, resume=open_checkpoint(earlier))
    with pytest.raises(
        FolderError, match="holds a checkpoint of iteration 6 already; go on from that one"
    ):
        run(schedule, tiny(iterations=5), out=tmp_path, fork_server=fork_server, resilience=back)
    run(
        schedule,
        tiny(iterations=5),
        out=tmp_path,
        fork_server=fork_server,
        resilience=back,
        options=RunOptions(force=True),
    )
    assert committed(tmp_path) == [0, 1, 2, 3, 4]
    newest = open_latest(tmp_path / "checkpoints")
    assert newest is not None and newest.iteration == 5


def test_losses_are_not_lost_when_the_one_who_goes_on_is_killed_at_once(tmp_path):
    """Half a line that a kill has left is dropped, and no line before it."""
    (tmp_path / "losses.jsonl").write_text(
        '{"iteration": 0, "loss": 5.0}\n{"iteration": 1, "loss": 4.0}\n{"itera'
    )
    script = (
        "import os, sys; from pathlib import Path\n"
        "from slipstream.runtime.coordinator.records.run_log import RunLog\n"
        f"RunLog(Path({str(tmp_path)!r}), 2); os.kill(os.getpid(), 9)"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        env=command_environment(),
        check=False,
        timeout=patience.SECONDS,
    )
    assert committed(tmp_path) == [0, 1]


class Killing:
    """In a process of its own: SIGKILL before a writer's file operation with some number."""

    WATCHED = (
        "open",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.mkdir",
        "shutil.rmtree",
        "os.chmod",
        "os.scandir",
        "os.listdir",
    )

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._left = str(folder), number

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in self.WATCHED and str(arguments[0]).startswith(self._folder):
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


def killed(folder: Path, number: int, work) -> bool:
    """Whether a process was killed before so many of its file operations.

    It does some work.
    """
    pid = os.fork()
    if pid == 0:
        sys.addaudithook(Killing(folder, number))
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def writing(folder: Path, out: Path) -> None:
    """Write all that workers and node 0 write.

    It is a checkpoint that makes an older one go, a layer, and a file of node 0.
    """
    start_saving(folder, 30, share(states(3), 1, 2, 3), IDENTITY).wait()
    draft_layer(out, 0, 1, states()[0])
    publish_layer(out, 0, 1)
    write_atomically(out / "schedule.json", b"{}")
    RunLog(out, 1)


def prepared(out: Path) -> None:
    """Two checkpoints, and half of a third one, with a layer that was saved twice."""
    folder = out / "checkpoints"
    for iteration in (10, 20):
        write(folder, iteration, states(iteration))
    for seed in (2, 3):
        start_saving(folder, 30, share(states(seed), 0), IDENTITY).wait()


def whole(out: Path) -> set[str]:
    """The files of what is there and complete."""
    folder = out / "checkpoints"
    found = {
        "events.jsonl",
        "losses.jsonl",
        "schedule.json",
        "parameters/layer-0000.safetensors",
    } & names(out)
    for path in folder.glob("iteration-*"):
        manifest = json.loads((path / "manifest.json").read_text())
        names_of_files = ["manifest.json"]
        for layer in manifest["layers"]:
            names_of_files += [layer["file"], f"layer-{layer['layer']:04d}.json"]
        found |= {f"checkpoints/{path.name}/{name}" for name in names_of_files}
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks a process with torch in it")
def test_writers_killed_at_any_step_leave_nothing_behind(tmp_path_factory):
    # The next start removes what they left, and so does the end of a run; no checkpoint that was
    # complete is harmed.
    number, found, before = 0, set(), tmp_path_factory.mktemp("before")
    prepared(before)
    while True:
        out = tmp_path_factory.mktemp("killed")
        shutil.copytree(before, out, dirs_exist_ok=True)
        folder = out / "checkpoints"
        more = killed(out, number, lambda folder=folder, out=out: writing(folder, out))
        newest = open_latest(folder, IDENTITY)
        assert newest is not None and newest.iteration in (20, 30)
        found |= {path for path in names(out) if "/." in path or path.startswith(".")}
        if number % 2:
            claim_folder(out, newest, tiny(), force=False)
            (out / "trace.json").touch()  # made anew
        else:
            clean_up_folder(out)
        expected = whole(out)
        if number % 2:
            expected = {name for name in expected if not name.startswith("parameters/")}
        assert names(out) - {"trace.json"} == expected, number
        assert_same(load_all(folder), states(20) if newest.iteration == 20 else states(3))
        if not more:
            break
        number += 1
    assert number > 40 and newest.iteration == 30, number
    # Without the removal these would have stayed.
    kinds = {re.sub(r"\d", "N", path.split("/")[-1])[:9] for path in found}
    assert {".layer-NN", ".manifest", ".schedule"} <= kinds, kinds


def load_all(folder: Path):
    newest = open_latest(folder, IDENTITY)
    assert newest is not None
    return load_layers(newest, range(4))


@pytest.mark.slow
def test_checkpoints_are_saved_as_often_as_they_cost_little(fork_server, tmp_path, monkeypatch):
    """By the run's own measure; a worker dies and comes back meanwhile."""
    monkeypatch.setattr(commit_log, "MIN_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(commit_log, "MAX_TIME_SHARE", 0.1)
    began = time.monotonic()
    seen = set()

    pauses = Pauses()

    def progress(iteration: int, _: float) -> None:
        seen.update(path.name for path in (tmp_path / "checkpoints").glob("iteration-*"))
        pauses.wait(iteration > 90 and len(seen) < 2)

    result = train(
        [at("0.0", 60)],
        fork_server,
        tmp_path,
        config=tiny(iterations=120),
        progress=progress,
        checkpoint_every=None,
        returns=(Return(Worker(0, 0), 70),),
    )
    *before, last = result.checkpoints
    assert (
        before
        and all(checkpoint.seconds > 0 for checkpoint in result.checkpoints)
        and last.iteration < 120
    )
    costs = [checkpoint.seconds for checkpoint in before]
    # Some are measured late: by a worker that is slower than those whose cost the pause was taken
    # from.
    elapsed = time.monotonic() - began
    assert (
        sum(sorted(costs)[: 3 * len(costs) // 4]) <= 0.1 * elapsed and len(costs) <= elapsed / 0.05
    )
    assert len(seen) >= 2
    newest = open_latest(tmp_path / "checkpoints")
    assert newest is not None and newest.iteration == 120


def test_what_is_never_complete_does_not_fill_the_disk(tmp_path):
    """As where the nodes see different folders."""
    for iteration in range(5):
        start_saving(tmp_path, iteration, share(states(), 0, 1), IDENTITY).wait()
    assert len(list(tmp_path.iterdir())) <= KEPT_CHECKPOINTS + 1
