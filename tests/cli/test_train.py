import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.shared.launch_options import read_rehearsals
from slipstream.planner.job.file import parse_job, read_job
from slipstream.planner.job.presets import preset_text
from slipstream.runtime import launch
from slipstream.runtime.coordinator.records.run_log import read_losses
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE
from slipstream.schedules import codec
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.table import Table
from tests.jobs import grid
from tests.patience import HEARTBEATS
from tests.runtime.forked import own_fork_server
from tests.runtime.launchers import Launcher
from tests.runtime.pacing import Pauses, after_each_iteration
from tests.runtime.running import (
    below,
    children,
    free_port,
    judge_of_text,
    schedule_for,
    wait_until_gone,
)
from tests.runtime.test_going_back import saved

JOB = """
pipelines = 2
stages = 2
microbatches = 2
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 1
[model]
blocks = 2
width = 16
heads = 2
context = 16
[training]
iterations = 4
batch = 1
device = "cpu"
"""
KEYS = {
    "iterations",
    "first_iteration",
    "losses",
    "parameter_digest",
    "recoveries",
    "measured_period",
    "planned_period",
    "slow_workers",
}


@pytest.fixture(autouse=True)
def _quick_fork_servers(monkeypatch):
    """Fork servers of commands that are run in this process.

    `start` has those that are run by users.
    """
    monkeypatch.setattr(launch, "ForkServer", own_fork_server)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def train(*arguments: object):
    return CliRunner().invoke(
        app, ["train", *map(str, arguments), *HEARTBEATS], catch_exceptions=False
    )


def start(*arguments: object, errors: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        "from slipstream.cli.start import main; main()",
        "train",
        *map(str, arguments),
        *HEARTBEATS,
    ]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), SECRET_VARIABLE: "0123456789abcdef"},
        start_new_session=True,
    )


def test_plans_and_trains_and_says_how_it_went(job, tmp_path):
    done = train(
        job,
        "--failed",
        "1.0",
        "--dtype",
        "float64",
        "--method",
        "greedy",
        "--json",
        "--out",
        tmp_path / "out",
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer.keys() == KEYS
    assert answer["iterations"] == len(answer["losses"]) == 4 and answer["recoveries"] == []
    assert answer["losses"][-1] < answer["losses"][0]
    assert "iteration      3  loss" in done.stderr
    assert codec.read(tmp_path / "out" / "schedule.json").failed == (Worker(1, 0),)
    layer_files = {f"layer-000{layer}.safetensors" for layer in range(4)}
    assert {path.name for path in (tmp_path / "out" / "parameters").iterdir()} == layer_files

    again = train(
        job,
        "--schedule",
        tmp_path / "out" / "schedule.json",
        "--dtype",
        "float64",
        "--iterations",
        2,
        "--out",
        tmp_path / "again",
        "--tensorboard",
        tmp_path / "board",
    )
    assert again.exit_code == 0, again.output
    assert re.search(r"iteration      1  loss .* tokens/s", again.stderr), again.stderr
    assert len(list((tmp_path / "board").glob("events.out.tfevents.*"))) == 1
    assert "2 iterations, loss" in again.stdout and "measured" in again.stdout
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "again" / "losses.jsonl").read_text().splitlines()
    ]
    assert losses == pytest.approx(answer["losses"][:2], abs=1e-12)


def test_a_node_that_dies_is_one_recovery_by_the_schedule_of_a_table_by_node(job, tmp_path):
    """All workers of a node are killed.

    They are two of stage 0, on one machine by [topology], in place.
    """
    text = JOB.replace("pipelines = 2", "pipelines = 3").replace(
        "iterations = 4", "iterations = 30\ndtype = 'float64'"
    )
    job.write_text(text + '[topology]\nnode = [["0.1", "1.1"], ["0.0", "1.0"], ["2.0", "2.1"]]\n')
    result = CliRunner().invoke(
        app,
        [
            "table",
            str(job),
            "--max-failures",
            "0",
            "--by-node",
            "--method",
            "greedy",
            "--time-limit",
            "0.1",
            "--jobs",
            "1",
            "--out",
            str(tmp_path / "table"),
        ],
    )
    assert result.exit_code == 0, result.output
    done = train(
        job, "--table", tmp_path / "table", "--kill", "node1@2", "--json", "--out", tmp_path / "out"
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    (recovery,) = answer["recoveries"]
    assert (sorted(recovery["dead"]), recovery["nodes"], recovery["live"]) == (
        ["0.0", "1.0"],
        [1],
        4,
    )
    # An iteration is short: the next may have begun before its processes are killed.
    assert re.search(r"so that machine 1 is lost: iteration \d+ runs on 4 workers", done.stderr), (
        done.stderr
    )
    assert answer["losses"] == pytest.approx(judge_of_text(text).losses, abs=1e-9)
    events = [
        json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    ]
    orders = [event["schedule"] for event in events if event["event"] == "order_given"]
    found = Table.load(tmp_path / "table").lookup([Worker(0, 0), Worker(1, 0)])
    assert not found.layers_to_load and len(orders) == 2
    assert codec.read(tmp_path / "out" / "schedules" / f"{orders[1]}.json") == found.schedule
    assert [event["node"] for event in events if event["event"] == "node_lost"] == [1]


def test_kills_returns_checkpoints_and_resuming_on_another_grid(job, tmp_path, monkeypatch):
    common = ("--dtype", "float64", "--method", "greedy", "--json")
    whole = judge_of_text(JOB.replace("iterations = 4", "iterations = 60\ndtype = 'float64'"))
    pauses, events = Pauses(), tmp_path / "out" / "events.jsonl"
    after_each_iteration(
        monkeypatch,
        lambda iteration, _: pauses.wait(iteration > 2 and '"joined"' not in events.read_text()),
    )
    done = train(
        job,
        *common,
        "--iterations",
        60,
        "--kill",
        "1.0@2",
        "--return",
        "1.0@3",
        "--kill",
        "0.1@55",
        "--checkpoint-every",
        8,
        "--out",
        tmp_path / "out",
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert [recovery["dead"] for recovery in answer["recoveries"] if recovery["dead"]] == [
        ["1.0"],
        ["0.1"],
    ]
    assert [recovery["returned"] for recovery in answer["recoveries"] if recovery["returned"]] == [
        ["1.0"]
    ]
    assert answer["losses"] == pytest.approx(whole.losses, abs=1e-9)
    # Iteration 1 where a peer had not yet reported it when 1.0, which ran ahead, died.
    assert re.search(
        "worker 1.0 was killed by SIGKILL: iteration [12] runs on 3 workers", done.stderr
    ), done.stderr
    # Of iteration 48 only if it was on the disk before 0.1 died.
    kept = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert "iteration-60" in kept and len(kept) <= 3

    job.write_text(
        JOB.replace("pipelines = 2", "pipelines = 1")
        .replace("stages = 2", "stages = 3")
        .replace("microbatches = 2", "microbatches = 4")
    )
    again = train(
        job, *common, "--iterations", 63, "--resume", tmp_path / "out", "--out", tmp_path / "out"
    )
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["first_iteration"] == 60
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "losses.jsonl").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == list(range(63))


def test_what_the_planner_has_computed_again_changes_no_number(job, tmp_path):
    """The first stage's activations are computed again, and a worker dies.

    There is room for less than 2 of 4 micro-batches.
    """
    text = JOB.replace("microbatches = 2", "microbatches = 4").replace(
        "iterations = 4", "iterations = 6"
    )
    job.write_text(
        text.replace(
            "[model]",
            "[placement]\nlayers = [2, 2]\n[memory]\ncapacity = 1.4\nactivation = 1\n"
            "weight_stash = 0.1\nrecomputed = 0.05\n[model]",
        )
        + "recompute = 'auto'\n"
    )
    done = train(
        job,
        "--dtype",
        "float64",
        "--method",
        "greedy",
        "--kill",
        "1.0@2",
        "--json",
        "--out",
        tmp_path / "out",
    )
    assert done.exit_code == 0, done.output
    assert "stage 0 computes its activations again: by quick plans" in done.stderr
    schedule = codec.read(tmp_path / "out" / "schedule.json")
    first, second = (schedule.times.backward_input[stage] for stage in (0, 1))
    assert first == second + schedule.times.forward[0] and check(schedule) == []
    whole = judge_of_text(text.replace("[training]", "[training]\ndtype = 'float64'"))
    assert json.loads(done.stdout)["losses"] == pytest.approx(whole.losses, abs=1e-9)


def test_a_lost_stage_takes_the_run_back_to_its_checkpoint(job, tmp_path, monkeypatch):
    after_each_iteration(monkeypatch, saved(tmp_path / "out", 6))
    common = ("--dtype", "float64", "--method", "greedy", "--iterations", 40, "--json")
    whole = judge_of_text(JOB.replace("iterations = 4", "iterations = 40\ndtype = 'float64'"))
    kill = ("--kill", "0.1@12", "--kill", "1.1@16")
    lost = train(job, *common, *kill, "--checkpoint-every", 3, "--out", tmp_path / "out")
    assert lost.exit_code == 0, lost.output
    assert re.search(r"so the run went back to iteration (3|6|9|12|15)\b", lost.stderr), lost.stderr
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "out" / "losses.jsonl").read_text().splitlines()
    ]
    assert losses == pytest.approx(whole.losses, abs=1e-9)


def test_a_run_without_workers_ends_and_says_how_to_go_on(job, tmp_path, monkeypatch):
    after_each_iteration(monkeypatch, saved(tmp_path / "o", 6))
    kill = [
        part for worker in ("0.0@12", "0.1@12", "1.0@16", "1.1@16") for part in ("--kill", worker)
    ]
    lost = train(
        job,
        "--method",
        "greedy",
        "--iterations",
        40,
        *kill,
        "--checkpoint-every",
        3,
        "--out",
        tmp_path / "o",
    )
    assert lost.exit_code == 1 and re.search(
        "no (live )?worker is left|no live worker left", lost.stderr
    ), lost.output
    # A worker may have run ahead of its peers' reports when it dies.
    assert re.search("1[56] iterations are committed", lost.stderr), lost.stderr
    # Those of the last iterations before a death may not be on the disk yet.
    way_on = re.escape(f"slipstream train {job} --resume {tmp_path / 'o'}")
    assert re.search(f"resume from its checkpoint of iteration [369125]+: {way_on}", lost.stderr)


def test_schedules_come_from_a_table(job, tmp_path):
    table = tmp_path / "table"
    result = CliRunner().invoke(
        app,
        [
            "table",
            str(job),
            "--max-failures",
            "1",
            "--method",
            "greedy",
            "--time-limit",
            "1",
            "--out",
            str(table),
        ],
    )
    assert result.exit_code == 0, result.output
    done = train(job, "--table", table, "--kill", "0.0@1", "--json", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["recoveries"]) == 1
    refused = train(job, "--table", table, "--backward", "split")
    assert refused.exit_code == 2 and "--table says how to run" in refused.stderr
    job.write_text(JOB.replace("pipelines = 2", "pipelines = 3"))
    refused = train(job, "--table", table)
    assert refused.exit_code == 2 and "its pipelines are 2, the job's 3" in refused.stderr


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="Linux can make a pipe short")
def test_a_terminal_that_takes_nothing_holds_nothing_up(job, tmp_path):
    running, losses = (
        start(job, "--iterations", 150, "--method", "greedy", "--out", tmp_path / "out"),
        tmp_path / "out",
    )
    fcntl.fcntl(running.stderr, fcntl.F_SETPIPE_SZ, 4096)
    try:
        wait_for(lambda: read_losses(losses, 0) is not None and len(read_losses(losses, 0)) == 150)
        output, log_text = running.communicate(timeout=240)
    finally:
        running.kill()
    assert running.returncode == 0 and "150 iterations" in output
    assert len(log_text) > 2 * 4096 and "iteration    149" in log_text, "it is all told later"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="no process ends with its parent elsewhere"
)
def test_what_leads_is_started_again_where_the_system_has_killed_it_and_goes_on_with_its_workers(
    job, tmp_path
):
    out, log, found = (
        tmp_path / "out",
        tmp_path / "log",
        "node 0 continues with the 4 workers that it has found",
    )
    workers: list[int] = []
    with log.open("w") as errors:
        running = start(
            job,
            "--iterations",
            200,
            "--dtype",
            "float64",
            "--method",
            "greedy",
            "--json",
            "--out",
            out,
            errors=errors,
        )
    try:
        for count in (1, 2):
            trained = len(read_losses(out, 0) or ()) + 2
            wait_for(lambda trained=trained: len(read_losses(out, 0) or ()) >= trained)
            (leads,) = children(running.pid)
            workers = workers or below(leads)
            os.kill(leads, signal.SIGKILL)
            wait_for(lambda count=count: log.read_text().count(found) == count)
        output, _ = running.communicate(timeout=240)
    finally:
        running.kill()
    log_text = log.read_text()
    assert running.returncode == 0 and "Traceback" not in log_text, log_text
    assert (
        log_text.count("node 0 was killed by SIGKILL, and is restarted; its workers are alive") == 2
    )
    wanted = judge_of_text(
        JOB.replace("iterations = 4", "iterations = 200\ndtype = 'float64'")
    ).losses
    assert read_losses(out, 0) == pytest.approx(wanted, abs=1e-9)
    assert json.loads(output)["parameter_digest"]
    wait_until_gone(workers)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(job, tmp_path):
    running = start(job, "--iterations", 100_000, "--method", "greedy", "--out", tmp_path / "out")
    losses = tmp_path / "out" / "losses.jsonl"
    wait_for(lambda: losses.exists() and losses.read_text().count("\n") >= 2)
    processes = below(running.pid)
    assert len(processes) == 6  # what leads, the fork server and 4 workers
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=240)
    assert running.returncode == 130 and time.monotonic() - began < 240
    assert "Traceback" not in errors and "interrupted" in errors
    wait_until_gone(processes)


@pytest.mark.slow
def test_ctrl_c_while_it_plans_ends_the_search_and_training_starts(job, tmp_path):
    """As the lines say; the next one would end the run."""
    job.write_text(
        JOB.replace("stages = 2", "stages = 4")
        .replace("microbatches = 2", "microbatches = 7")
        .replace("forward = 1", "forward = [1.03, 1.19, 0.97, 1.11]\ntransfer = 0.31")
        .replace("backward_input = 1", "backward_input = [0.7, 1.3, 1.21, 1.07]")
        .replace("backward_weight = 1", "backward_weight = [1.13, 0.83, 1.31, 0.59]")
        .replace("iterations = 4", "iterations = 1")
        # No bound is reached.
        + "[memory]\ncapacity = 3\nactivation = 1\nweight_stash = 0.5\n"
    )
    running = start(
        job, "--failed", "1.2", "--time-limit", 500, "--json", "--out", tmp_path / "out"
    )
    try:
        while "list scheduler" not in (line := running.stderr.readline()):
            assert line, "it ended before it had a schedule"
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=240)
    finally:
        running.kill()
    assert running.returncode == 0 and "Traceback" not in errors, errors
    assert "Ctrl-C has ended the search: training starts by the best schedule so far." in errors
    assert json.loads(output)["iterations"] == 1


def test_one_command_a_node(job, tmp_path):
    common = (
        "train",
        job,
        "--nodes",
        2,
        "--rendezvous",
        f"127.0.0.1:{free_port()}",
        "--method",
        "greedy",
        "--json",
        *HEARTBEATS,
        "--out",
    )
    said = [tmp_path / f"said-by-{node}" for node in (0, 1)]
    nodes = [
        Launcher(
            "tests.runtime.launchers:command",
            *common,
            tmp_path / str(node),
            "--node",
            node,
            log=said[node],
        )
        for node in (1, 0)
    ]
    ended = [node.wait(240) for node in nodes]
    lead, other = (log.read_text() for log in said)
    assert ended == [0, 0], lead + other
    assert answer_in(lead).keys() == KEYS and answer_in(other) == {"node": 1}
    for node, workers in enumerate((["0.0", "0.1"], ["1.0", "1.1"])):
        logs = sorted(path.stem for path in (tmp_path / str(node) / "logs").iterdir())
        assert logs == [f"worker-{worker}" for worker in workers]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--failed", "7.7"], "--failed: the job has no worker 7.7"),
        (["--failed", "x"], "'x' is not a worker"),
        (["--dtype", "float12"], "training.dtype is 'float12'; expected one of 'float32'"),
        (["--backward", "odd"], "--backward odd: expected split or fused"),
        (["--nodes", "2"], "--nodes needs --rendezvous"),
        (
            ["--nodes", "2", "--node", "2", "--rendezvous", "127.0.0.1:1"],
            "--node 2: expected 0 to 1",
        ),
        (["--node", "1"], "--node 1 needs --nodes, how many there are"),
        (
            ["--nodes", "2", "--node", "1", "--rendezvous", "127.0.0.1:1"],
            "a run on 2 nodes needs a secret that all of them have: set SLIPSTREAM_SECRET_FILE",
        ),
        (["--rendezvous", "nowhere"], "'nowhere' is not an address: write HOST:PORT"),
        (["--schedule", "/no/such.json"], "/no/such.json: cannot be read"),
        (["--schedule", "x.json", "--failed", "1.0"], "leave out --failed"),
        (["--kill", "1.0"], "--kill 1.0: expected D.S@ITERATION, for example 1.2@10"),
        (["--kill", "x@3"], "'x' is not a worker"),
        (
            ["--failed-node", "0"],
            "--failed-node: the job file does not say which workers share a node; add [topology]",
        ),
        (
            ["--kill", "node1@3"],
            "--kill node: the job file does not say which workers share a node; add [topology]",
        ),
        (
            ["--slow", "1.0@3"],
            "--slow 1.0@3: expected D.S=FACTOR@ITERATION with a factor of 1 (usual) to 1000",
        ),
        (
            ["--slow", "1.0=0.5@3"],
            "--slow 1.0=0.5@3: expected D.S=FACTOR@ITERATION with a factor of 1",
        ),
        (
            ["--slow", "1.0=nan@3"],
            "--slow 1.0=nan@3: expected D.S=FACTOR@ITERATION with a factor of 1",
        ),
        (["--slow", "1.0=2"], "--slow 1.0=2: expected D.S=FACTOR@ITERATION, for example 1.2=2@10"),
        (["--slow", "7.0=2@3"], "--slow 7.0=2@3: the job has no worker 7.0"),
        (["--return", "7.0@3"], "--return 7.0@3: the job has no worker 7.0"),
        (["--table", "/no/such"], "/no/such: no such folder or table"),
        (["--params", "/no/such.toml"], "/no/such.toml"),
        (["--resume", "/no/such"], "--resume /no/such: no checkpoint here"),
    ],
)
def test_bad_options_are_refused_in_one_line(job, arguments, says):
    refused = train(job, *arguments)
    assert refused.exit_code == 2 and refused.stdout == ""
    assert says in refused.stderr.replace("\n", " ") and refused.stderr.count("\n") == 1


def test_bad_tables_are_refused_with_the_file(job):
    job.write_text(JOB.replace("width = 16", "widht = 16"))
    refused = train(job)
    assert (
        refused.exit_code == 2
        and f"{job}: unknown key model.widht; did you mean model.width?" in refused.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kill", "1.0@3"], "--kill 1.0@3 cannot happen: the last iteration is 2"),
        (
            ["--kill", "1.0@1", "--return", "1.0@3"],
            "--return 1.0@3 cannot happen: the last iteration is 2",
        ),
        (
            ["--slow", "1.0=2@1", "--slow", "1.0=1@40"],
            "--slow 1.0@40 cannot happen: the last iteration is 2",
        ),
        (
            ["--return", "1.0@2"],
            "--return 1.0@2: worker 1.0 is not down by then; expected --kill 1.0@ITERATION before",
        ),
        (
            ["--kill", "1.0@2", "--return", "1.0@1"],
            "--return 1.0@1: worker 1.0 is not down by then",
        ),
        (
            ["--kill", "1.0@1", "--kill", "1.0@2"],
            "--kill 1.0@2: worker 1.0 is down by then; expected --return 1.0@",
        ),
        (["--failed", "1.0", "--kill", "1.0@2"], "--kill 1.0@2: worker 1.0 is down by then"),
        (["--slow", "1.0=2@1", "--slow", "1.0=3@1"], "--slow 1.0=3@1 contradicts --slow 1.0=2@1"),
    ],
)
def test_rehearsals_that_cannot_happen_or_contradict_each_other_are_refused(job, arguments, says):
    refused = train(job, "--iterations", 3, *arguments)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and says in refused.stderr, (
        refused.output
    )


@pytest.mark.parametrize(
    ("kill", "returned", "absent"),
    [
        (["1.0@1"], ["1.0@1"], ()),
        ((), ["1.0@1"], (Worker(1, 0),)),
        (["1.0@1", "1.0@2"], ["1.0@1", "1.0@2"], ()),
        (["node0@0"], ["0.0@1", "1.0@2"], ()),
    ],
)
def test_rehearsals_that_can_happen(job, kill, returned, absent):
    job.write_text(JOB + '[topology]\nnode = [["0.0", "1.0"], ["0.1", "1.1"]]\n')
    rehearsals = read_rehearsals(
        read_job(job), [*kill], returned, ["1.0=2@1", "1.0=1@2", "1.0=1@2"]
    )
    assert [*rehearsals.find_conflicts(3, absent)] == []


def test_a_job_that_names_no_model_is_refused_before_it_is_planned(tmp_path):
    """As `slipstream new` writes them."""
    job = tmp_path / "job.toml"
    job.write_text(preset_text("llama-3-8b"))
    refused = train(job)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert (
        "has no [model], and its stages have 32 layers: say which model is trained"
        in refused.stderr
    )


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        (("[model]", "[model]\nname = 'nowhere:Model'"), [], "No module named 'nowhere'"),
        (
            ("[model]", "[placement]\nlayers = [1, 2]\n[model]"),
            [],
            "stages hold 3 layers; the model has 4",
        ),
        (("stages = 2", "stages = 7"), [], "4 layers cannot be cut into 7 stages"),
        (
            ("[training]", "[training]\ntext = '/no/such/text'"),
            [],
            "training.text is '/no/such/text'",
        ),
        (
            ("", ""),
            ["--out", "job.toml"],
            "job.toml/schedule.json: cannot be written: Not a directory",
        ),
        (
            ("", ""),
            ["--tensorboard", "job.toml/board"],
            "job.toml/board/events: cannot be written: Not a directory",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_is_planned(
    change, arguments, says, job, monkeypatch
):
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr(
        "slipstream.cli.train.make_plan", lambda *_, **__: pytest.fail("it is planned")
    )
    job.write_text(JOB.replace(*change) if change[0] else JOB)
    refused = train("job.toml", *arguments)
    assert refused.exit_code == 2 and says in refused.stderr and refused.stderr.count("\n") == 1, (
        refused.stderr
    )


def test_a_schedule_that_is_too_large_for_a_file_is_refused_before_the_folder_is_made(
    job, tmp_path, monkeypatch
):
    monkeypatch.setattr("slipstream.schedules.codec.MAX_OPS", 10)
    refused = train(job, "--out", tmp_path / "run")
    assert refused.exit_code == 2 and refused.stderr.splitlines()[-1].endswith(
        "ops; expected at most 10"
    )
    assert not (tmp_path / "run" / "schedule.json").exists()


def test_a_schedule_of_another_job_is_refused(job, tmp_path):
    file = tmp_path / "schedule.json"
    codec.write(schedule_for(grid(3, 2, 2)), file)
    refused = train(job, "--schedule", file)
    assert refused.exit_code == 2 and "its pipelines are 3, the job's 2" in refused.stderr


def test_a_v_is_not_taken_for_two_directions(job, tmp_path):
    """Both have the same workers in the same places."""
    codec.write(
        schedule_for(parse_job(JOB + "[placement]\norder = 'v'\nchunks = 2\n")),
        tmp_path / "schedule.json",
    )
    job.write_text(JOB + "[placement]\norder = 'bidirectional'\n")
    refused = train(job, "--schedule", tmp_path / "schedule.json")
    assert (
        refused.exit_code == 2
        and "its directions of micro-batches are 1, the job's 2" in refused.stderr
    )


def test_a_corrupt_schedule_is_refused(job, tmp_path):
    file = tmp_path / "schedule.json"
    data = codec.encode(schedule_for(grid(2, 2, 2)))
    file.write_bytes(data[: len(data) // 2])
    refused = train(job, "--schedule", file)
    assert (
        refused.exit_code == 2
        and "no readable schedule" in refused.stderr
        and refused.stderr.count("\n") == 1
    )
    file.write_bytes(data.replace(b'["F",0,0,', b'["F",0,1,', 1))
    refused = train(job, "--schedule", file)
    assert refused.exit_code == 1 and "breaks a rule" in refused.stderr


def test_a_stage_without_workers_cannot_be_planned(job):
    answer = train(job, "--failed", "0.1", "--failed", "1.1")
    assert answer.exit_code == 1 and "stage 1" in answer.stderr


def answer_in(said: str) -> dict[str, object]:
    """The one object in what a command has printed."""
    (line,) = (line for line in said.splitlines() if line.startswith("{"))
    return json.loads(line)


def wait_for(condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
