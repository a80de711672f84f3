"""The steps of `benchmarks.devices`.

Those that hang end, what is found is kept, and checks run in processes.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.chaos_checks import lives
from benchmarks.conformance import CHECKS, GLOO
from benchmarks.devices import __main__ as devices
from benchmarks.devices.__main__ import Choices, Limits, run_steps
from benchmarks.devices.page import page
from benchmarks.devices.process_tree import dump_stacks, end_tree
from benchmarks.devices.report import Report, Row, read_rows
from benchmarks.devices.teams import DOUBLE, check_in_processes
from slipstream.runtime.processes.fork_server import ForkServer
from tests.patience import SECONDS

ROOT = str(devices.ROOT)


@pytest.fixture(scope="module")
def fork_server():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, before)))
    with ForkServer() as server:
        yield server
    os.environ.pop("PYTHONPATH")
    os.environ.update({} if before is None else {"PYTHONPATH": before})


@pytest.mark.slow
@pytest.mark.parametrize("transport", [GLOO, DOUBLE])
def test_what_every_transport_promises_holds_between_processes(
    fork_server, tmp_path, transport, monkeypatch
):
    monkeypatch.setattr("benchmarks.devices.teams.CHECK_SECONDS", SECONDS)
    found = check_in_processes(transport, fork_server, tmp_path / "log", 4 * SECONDS)
    assert (found.passed, found.failures, found.left) == (len(CHECKS), {}, 0), (
        tmp_path / "log"
    ).read_text()


def test_a_check_that_fails_in_processes_is_told_and_the_next_one_runs(
    fork_server, tmp_path, monkeypatch
):
    monkeypatch.setattr("benchmarks.devices.teams.CHECK_SECONDS", SECONDS)
    found = check_in_processes(
        GLOO,
        fork_server,
        tmp_path / "log",
        4 * SECONDS,
        ["sums", "commit point"],
        modules=("tests.benchmarks.broken_sums",),
    )
    assert found.passed == 1 and found.left == 0
    assert found.failures == {"sums": "sums are wrong"}
    assert str(found) == f"1 of {len(CHECKS)}; sums: sums are wrong"


def test_a_hanging_process_leaves_its_stacks_and_nothing_below_it_lives(tmp_path):
    text = (
        "import faulthandler, signal, subprocess, sys, time\n"
        "def hangs():\n"
        "    print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
        "    time.sleep(600)\n"
        "faulthandler.register(signal.SIGUSR2)\nhangs()\n"
    )
    with (tmp_path / "log").open("a") as log:
        hanging = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=log, text=True
        )
    below = int(hanging.stdout.readline())
    dump_stacks([hanging.pid], tmp_path / "log")
    deadline = time.monotonic() + SECONDS
    while (
        "in hangs" not in (said := (tmp_path / "log").read_text()) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert f"process {hanging.pid}" in said and "in hangs" in said
    end_tree(hanging.pid)
    assert hanging.wait(SECONDS) == -signal.SIGKILL
    deadline = time.monotonic() + SECONDS
    while lives(below):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_step_that_takes_too_long_is_a_row_and_the_next_one_begins(tmp_path, monkeypatch):
    steps = {"hangs": Limits(1, 1), "works": Limits(SECONDS, SECONDS)}
    monkeypatch.setattr(devices, "STEPS", steps)
    monkeypatch.setattr(devices, "MODULE", "tests.benchmarks.steps")
    monkeypatch.setenv("PYTHONPATH", ROOT)
    well = run_steps(
        ["hangs", "works"],
        tmp_path,
        "cpu",
        Choices("cpu", None, blocking=True),
        time.monotonic() + 2 * SECONDS,
        (),
    )
    rows = list(read_rows(tmp_path))
    assert not well and [(row.step, row.what) for row in rows] == [
        ("hangs", "did not end"),
        ("works", "told"),
    ]
    assert rows[1].value == "gloo"


def test_the_page_has_the_last_value_of_each_row():
    rows = [Row("first", "a", "1", {}), Row("second", "b|c", "2", {}), Row("first", "a", "3", {})]
    text = page(rows, "command")
    assert "| a | 3 |" in text and "| a | 1 |" not in text and "| b\\|c | 2 |" in text
    assert text.index("**first**") < text.index("**second**")


def test_what_has_worked_is_used_from_then_on():
    choices = Choices("cuda", None, blocking=True)
    assert choices.transport == "nccl" and choices.environment == {}
    choices.learn(
        [
            Row("two processes", "", "", {"variant": "nccl, blocking", "works": False}),
            Row("two processes", "", "", {"variant": "nccl, not blocking", "works": True}),
        ]
    )
    assert choices.transport == "nccl" and choices.environment == {"SLIPSTREAM_NCCL_BLOCKING": "0"}
    choices.learn(
        [
            Row("a death survived", "", "", {"transport": "nccl", "works": False}),
            Row("a death survived", "", "", {"transport": "gloo", "works": True}),
        ]
    )
    assert choices.transport == "gloo"
    assert Choices("cpu", None, blocking=True).transport == "gloo"


def test_a_report_is_on_disk_at_once(tmp_path, capsys):
    Report(tmp_path, "step").row("what", "value", works=True)
    assert list(read_rows(tmp_path)) == [Row("step", "what", "value", {"works": True})]
    assert "step | what: value" in capsys.readouterr().out
