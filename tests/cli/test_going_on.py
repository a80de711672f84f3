"""`slipstream train` that ends early says how to go on.

The command that it prints does.
"""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.runtime import launch
from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.run_folder import TakeoverRecord, write_takeover_record
from tests.patience import HEARTBEATS
from tests.runtime.counted_data import FOLDER
from tests.runtime.forked import own_fork_server
from tests.runtime.launchers import SECRET, Launcher, command
from tests.runtime.pacing import after_each_iteration, hold_at
from tests.runtime.running import free_port, judge_of_text, losses_in, tiny_text

JOB = tiny_text(pipelines=2, iterations=40)
COMMON = ("--method", "greedy", "--json")


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setattr(launch, "ForkServer", own_fork_server)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def train(*arguments: object):
    return CliRunner().invoke(app, ["train", *map(str, arguments), *HEARTBEATS])


def end_after_five(iteration: int, _: float) -> None:
    if iteration == 4:
        os.kill(os.getpid(), signal.SIGTERM)


def losses_in_lines(out: Path) -> list[bytes]:
    path = out / "losses.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def test_the_command_that_is_printed_goes_on_and_a_run_that_is_done_has_nothing_left(
    job, tmp_path, monkeypatch
):
    out = tmp_path / "with a space"
    with monkeypatch.context() as patched:
        after_each_iteration(patched, end_after_five)
        # What schedulers repeat: begins here, goes on later.
        first = train(job, *COMMON, "--out", out, "--resume", out)
    assert (
        first.exit_code == 143
        and "no checkpoint to resume from; starts with iteration 0" in first.stderr
    )
    advice = re.search(
        r"interrupted by SIGTERM; .*; resume from its checkpoint of iteration (\d+): "
        r"(slipstream train .*)",
        first.stderr,
    )
    assert advice is not None, first.stderr
    done = len(losses_in(out))
    assert int(advice[1]) == done < 40
    program, *arguments = shlex.split(advice[2])
    assert program == "slipstream" and "--json" in arguments

    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0, second.output
    answer = json.loads(second.stdout)
    assert answer["first_iteration"] == done
    assert losses_in(out) == pytest.approx(judge_of_text(JOB).losses, rel=0, abs=1e-9)

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    third = CliRunner().invoke(app, arguments)
    assert (
        third.exit_code == 0
        and "has seen 40 iterations of 40: nothing is left to do; --iterations" in third.stderr
    )
    again = json.loads(third.stdout)
    assert again.keys() == answer.keys() and again["parameter_digest"] == answer["parameter_digest"]
    assert again["losses"] == [] and again["first_iteration"] == 40
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    other = train(
        job,
        "--nodes",
        2,
        "--node",
        1,
        "--rendezvous",
        f"127.0.0.1:{free_port()}",
        "--json",
        "--out",
        out,
        "--resume",
        out,
        "--join-timeout",
        1,
    )
    assert other.exit_code == 0 and json.loads(other.stdout) == {"node": 1}, (
        "it does not wait for a node 0"
    )

    next((out / "parameters").iterdir()).unlink()
    fourth = CliRunner().invoke(app, arguments)
    assert (
        fourth.exit_code == 0
        and "nothing is left to do but to write the parameters" in fourth.stderr
    )
    assert json.loads(fourth.stdout)["parameter_digest"] == answer["parameter_digest"]


def held_command(path: str, *words: str) -> int:
    """`slipstream`, which waits after five iterations until a file is there."""
    hold_at(4, Path(path))
    return command(*words)


def test_a_folder_with_results_is_refused_in_one_line_and_forced(job, tmp_path):
    out = tmp_path / "out"
    assert train(job, *COMMON, "--iterations", 3, "--out", out).exit_code == 0
    newest = open_latest(out / "checkpoints")
    assert newest is not None and newest.iteration == 3, (
        "checkpoints are on by default, one at the end"
    )
    for every in (0, 2):
        refused = train(
            job, *COMMON, "--iterations", 2, "--seed", 1, "--out", out, "--checkpoint-every", every
        )
        assert refused.exit_code == 2 and refused.stderr.count("\n") <= 20
        assert re.search(
            r"holds the results of another run \(.*\): its checkpoint is of another job \(its "
            r"training.seed is 0, here it is 1\); give another --out, or delete them with --force$",
            refused.stderr,
            re.M,
        )
    same = train(job, *COMMON, "--iterations", 4, "--out", out)
    assert (
        same.exit_code == 2
        and f": go on from its checkpoint with --resume {out}, give another" in same.stderr
    )
    assert "list scheduler" not in same.stderr, "what is refused is not planned first"
    forced = train(
        job,
        *COMMON,
        "--iterations",
        2,
        "--seed",
        1,
        "--out",
        out,
        "--checkpoint-every",
        0,
        "--force",
    )
    assert forced.exit_code == 0, forced.output
    assert not list((out / "checkpoints").glob("*")) and len(losses_in(out)) == 2

    saved = train(job, *COMMON, "--iterations", 2, "--out", out, "--resume", out)
    assert saved.exit_code == 2 and "no checkpoint here" in saved.stderr
    for path in (out / "parameters").iterdir():
        path.unlink()
    # As after a first minute.
    again = train(job, *COMMON, "--iterations", 1, "--out", out, "--resume", out)
    assert again.exit_code == 0, again.output
    assert (
        "was ended before its first checkpoint: repeats its 2 iterations from iteration 0"
        in again.stderr
    )
    assert len(losses_in(out)) == 1


def damage(checkpoint: Path, layer: int) -> str:
    """Flip a bit in the middle of a layer's file; its name."""
    [path] = checkpoint.glob(f"layer-{layer:04}-*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name


def test_a_damaged_checkpoint_is_named_and_kept_aside_and_the_one_before_is_taken(job, tmp_path):
    """Megatron-LM 5281: endless restarts from a checkpoint that cannot be read."""
    out, saved = tmp_path / "out", tmp_path / "out" / "checkpoints"
    assert (
        train(job, *COMMON, "--iterations", 6, "--checkpoint-every", 2, "--out", out).exit_code == 0
    )
    name = damage(saved / "iteration-6", 1)
    again = train(job, *COMMON, "--iterations", 6, "--out", out, "--resume", out)
    assert again.exit_code == 0, again.output
    assert re.search(
        rf"{name}: its SHA-256 is not that of the bytes written: it is damaged; it is kept as "
        rf".*damaged-iteration-6, and training continues from .*iteration-4$",
        again.stderr,
        re.M,
    )
    assert json.loads(again.stdout)["first_iteration"] == 4
    assert losses_in(out) == pytest.approx(judge_of_text(JOB).losses[:6], rel=0, abs=1e-9)
    assert sorted(path.name for path in saved.iterdir()) == [
        "damaged-iteration-6",
        "iteration-4",
        "iteration-6",
    ]

    other = train(
        job, *COMMON, "--out", tmp_path / "other", "--resume", saved / "damaged-iteration-6"
    )
    assert other.exit_code == 2 and f"{name}: its SHA-256 is not that" in other.stderr
    damage(saved / "iteration-6", 3)
    (saved / "iteration-4" / "manifest.json").write_bytes(b"\0" * 100)
    for _ in range(2):  # schedulers repeat commands
        refused = train(job, *COMMON, "--iterations", 8, "--out", out, "--resume", out)
        assert refused.exit_code == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert re.search(
            r"layer-0003-.*damaged; no checkpoint in .*checkpoints is whole", refused.stderr
        )


@pytest.mark.parametrize("is_of_layer", [True, False])
def test_also_where_the_machine_was_lost_with_node_0_and_all_workers(is_of_layer, job, tmp_path):
    """Node 0's record is still there: workers may wait for another node 0."""
    out = tmp_path / "out"
    whole = train(job, *COMMON, "--iterations", 6, "--checkpoint-every", 2, "--out", out)
    assert whole.exit_code == 0, whole.output
    newest = out / "checkpoints" / "iteration-6"
    if is_of_layer:
        damage(newest, 1)
    else:
        (newest / "manifest.json").write_bytes(b"\0" * 100)
    address = Rendezvous("127.0.0.1", free_port())
    record = TakeoverRecord(
        epoch=1, coordinator=address, first_iteration=0, resume=None, fork_server=None
    )
    write_takeover_record(out, record)
    again = train(job, *COMMON, "--iterations", 6, "--out", out, "--resume", out)
    assert again.exit_code == 0, again.output
    assert "damaged-iteration-6, and training continues from" in again.stderr
    assert json.loads(again.stdout)["first_iteration"] == 4
    assert losses_in(out) == pytest.approx(judge_of_text(JOB).losses[:6], rel=0, abs=1e-9)


@pytest.mark.parametrize(
    "again", ["the same command", "in the folder of --out", "the command that is printed"]
)
def test_a_resumed_run_that_ends_before_its_first_checkpoint_begins_once_more_as_before(
    again, job, tmp_path, monkeypatch
):
    """With what it was resumed from, in another folder.

    Where all of its processes were lost, node 0's record is still there, and nothing was printed.
    """
    before, out = tmp_path / "before", tmp_path / "out"
    assert train(job, *COMMON, "--iterations", 3, "--out", before).exit_code == 0
    source = before / "checkpoints" / "iteration-3"
    options = (*COMMON, "--iterations", 7, "--checkpoint-every", 0, "--out", out)
    with monkeypatch.context() as patched:
        after_each_iteration(patched, end_after_five)
        resumed = train(job, *options, "--resume", before)
    assert resumed.exit_code == 143 and losses_in(out), resumed.output
    if again == "the command that is printed":
        advice = re.search(r"resume again from that of iteration 3: (.*)", resumed.stderr)
        assert advice is not None, resumed.stderr
        last = CliRunner().invoke(app, shlex.split(advice[1])[1:])
    else:
        record = TakeoverRecord(
            epoch=1,
            coordinator=Rendezvous("127.0.0.1", free_port()),
            first_iteration=3,
            resume=str(source.resolve()),
            fork_server=None,
        )
        write_takeover_record(out, record)
        resume = before if again == "the same command" else out
        last = train(job, *options, "--resume", resume)
        assert f"training continues from {source}" in last.stderr
    assert last.exit_code == 0, last.output
    assert json.loads(last.stdout)["first_iteration"] == 3
    assert losses_in(out) == pytest.approx(judge_of_text(JOB).losses[3:7], rel=0, abs=1e-9)


def numbers_read(folder: Path) -> dict[int, list[int]]:
    """The samples of each iteration."""
    found: dict[int, list[int]] = {}
    for path in folder.iterdir():
        iteration, _, _, *numbers = map(int, path.name.split("-"))
        found.setdefault(iteration, []).extend(numbers)
        path.unlink()
    return {iteration: sorted(found[iteration]) for iteration in sorted(found)}


@pytest.mark.parametrize("data", ["Counted", "Uncounted"])
def test_samples_are_counted_where_a_run_goes_on_with_other_pipelines(data, tmp_path, monkeypatch):
    """Megatron-Bridge 5637: after a resume on another number of pipelines, samples were repeated or
    skipped.
    """
    read = tmp_path / "read"
    read.mkdir()
    monkeypatch.setenv(FOLDER, str(read))

    def resumed(pipelines: int, batch: int, iterations: int):
        path = tmp_path / "job.toml"
        path.write_text(
            tiny_text(pipelines, iterations)
            .replace("batch = 1", f"batch = {batch}")
            .replace("context = 16", "context = 4")
            + f"""
            data = "tests.runtime.counted_data:{data}"
            [training.options]
            microbatches = {[2] * pipelines}
            """
        )
        for leftover in read.iterdir():  # which the first looks leave
            leftover.unlink()
        return train(path, *COMMON, "--out", tmp_path / "out", "--resume", tmp_path / "out")

    assert resumed(3, 1, 3).exit_code == 0
    assert numbers_read(read) == {0: [*range(6)], 1: [*range(6, 12)], 2: [*range(12, 18)]}
    second = resumed(2, 1, 5)
    if data == "Uncounted":
        assert second.exit_code == 2 and second.stderr.count("\n") == 1
        assert (
            "iterations have read 18 samples" in second.stderr
            and "no method begin_at(iteration" in second.stderr
        )
        return
    assert second.exit_code == 0, second.output
    assert {key: value for key, value in numbers_read(read).items() if key >= 3} == {
        3: [18, 19, 20, 21],
        4: [22, 23, 24, 25],
    }
    third = resumed(2, 2, 6)  # a larger batch
    assert third.exit_code == 0, third.output
    assert {key: value for key, value in numbers_read(read).items() if key >= 5} == {
        5: [*range(26, 34)]
    }


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_node_that_is_told_to_end_leaves_and_the_others_go_on(job, tmp_path):
    """SIGTERM at the launcher of node 1; node 0 trains to the end."""
    meeting, nodes = f"127.0.0.1:{free_port()}", []
    try:
        for node in (0, 1):
            nodes.append(
                Launcher(
                    f"{__name__}:held_command",
                    tmp_path / "told",
                    "train",
                    job,
                    "--nodes",
                    2,
                    "--node",
                    node,
                    "--rendezvous",
                    meeting,
                    "--method",
                    "greedy",
                    "--iterations",
                    1500,
                    *HEARTBEATS,
                    "--out",
                    tmp_path / "out",
                    log=tmp_path / f"{node}.log",
                )
            )
        deadline = time.monotonic() + 200
        while len(losses_in_lines(tmp_path / "out")) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        nodes[1].send_signal(signal.SIGTERM)
        (tmp_path / "told").touch()
        assert nodes[1].wait(120) == 143
        assert nodes[0].wait(600) == 0, (tmp_path / "0.log").read_text()
    finally:
        for launcher in nodes:
            launcher.kill()
            launcher.wait(60)
    lead, other = ((tmp_path / f"{node}.log").read_text() for node in (0, 1))
    assert (
        "interrupted by SIGTERM; the workers of node 1 have left" in other
        and "Traceback" not in lead + other
    )
    assert "worker 1.0 has left, as it was asked to" in lead and "runs on 2 workers" in lead
