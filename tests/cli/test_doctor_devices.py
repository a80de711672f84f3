"""`slipstream doctor --devices` on a CPU, in its shortest form: the same that is run on GPUs.

In this process, or forked, so that not each of its commands imports torch anew.
"""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import devices
from slipstream.cli.app import app
from slipstream.runtime.processes import fork_server
from slipstream.runtime.tools import conformance, profile
from tests.runtime.forked import own_fork_server
from tests.runtime.launchers import Launcher, command

SETTLED_SECONDS = 1.0
OPS = 12
"""F, I and W of four micro-batches: what a worker does in an iteration at least."""


def answer(*words):
    if words[0] == "train":
        assert Launcher(f"{__name__}:settling_soon", *words, log=os.devnull).wait(280) == 0
        return ""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def start(words, *, stdout, stderr):
    assert words[:3] == [sys.executable, "-m", "slipstream"] and stdout is stderr
    return Launcher(f"{__name__}:settling_soon", *words[3:], log=stdout.name)


def settling_soon(*words):
    """`slipstream`, which plans a settled schedule in no more time than it must."""
    from slipstream.planner.failures import FailurePlanner

    FailurePlanner.__init__.__kwdefaults__["settled_seconds"] = SETTLED_SECONDS
    return command(*words)


def doctor(*words):
    return CliRunner().invoke(app, ["doctor", "--devices", *words])


@pytest.mark.slow
def test_one_page_of_all_that_is_measured(monkeypatch):
    monkeypatch.setattr(devices, "SIZE", devices.Size(2, 64, 32, 2, iterations=3, rounds=1, dtypes=("bf16",)))
    monkeypatch.setattr(devices, "command", answer)
    monkeypatch.setattr(devices, "subprocess", SimpleNamespace(Popen=start))
    monkeypatch.setattr(devices, "LIMIT_SECONDS", 280.0)
    for module in (fork_server, profile):
        monkeypatch.setattr(module, "ForkServer", own_fork_server)
    done = doctor("--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    table = json.loads(done.stdout)
    assert re.match(r"\d{4}-\d\d-\d\d: .* CPU cores .*, 4 workers, gloo, torch ", table["title"])
    rows = table["bf16"]
    assert rows["checks of transports"] == f"gloo on CPUs: {len(conformance.CHECKS)} of {len(conformance.CHECKS)}"
    assert float(rows["losses against one process, float64, a worker lost"].split()[0]) <= devices.TOLERANCE
    settles = not rows["settled, three workers"].startswith("does not pay")  # ops this short are noise: the run decides
    for phase in ("all four workers", "at once, three workers", *["settled, three workers"] * settles):
        planned, measured = (float(re.search(rf"{word} (\S+) ms", rows[phase])[1]) for word in ("planned", "measured"))
        assert measured > 0 and 0 < planned < OPS * 1000 / 4, "by a second for each op, as the file says, it is OPS s"
    assert "predicted" in rows["settled, three workers"]
    assert float(rows["layers moved"].removesuffix(" MB")) > 0 or not settles
    assert {"F of a stage", "pause after a SIGKILL", "memory, activation", "memory, stash"} <= set(rows)


@pytest.fixture
def page(monkeypatch):
    """What is asked for is recorded, and nothing measured."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(devices, "page", lambda device, told: asked.append(device) or ("today", {
        "bf16": {"transfer": "1 ms"}, "float32": {"transfer": "2 ms"}}))
    return asked


def test_a_machine_without_a_gpu_measures_its_cpu_and_says_so_in_one_line(page):
    done = doctor()
    assert done.exit_code == 0 and page == ["cpu"]
    assert done.stderr.strip() == "no GPU that torch can use: the CPU is measured"
    assert done.stdout == "today\n\n|  | bf16 | float32 |\n| --- | --- | --- |\n| transfer | 1 ms | 2 ms |\n"


def test_a_gpu_that_is_not_there_is_refused(page):
    done = doctor("--device", "cuda")
    assert done.exit_code == 2 and not page and "no GPU that torch can use" in done.stderr


def test_a_transport_that_breaks_a_promise_is_told(monkeypatch):
    def broken(_):
        raise conformance.NotConformingError("sums are wrong")

    monkeypatch.setattr(conformance, "CHECKS", {"sums": broken})
    done = doctor("--device", "cpu")
    assert done.exit_code == 1 and done.stderr.strip().endswith("sums: sums are wrong")


def test_losses_that_deviate_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "command", lambda *_: "")
    losses = [SimpleNamespace(loss=float(at)) for at in range(devices.EXACT_ITERATIONS)]
    resumed = SimpleNamespace(event=devices.Resumed(pause=0.1, live=3))
    monkeypatch.setattr(devices, "read_run", lambda _: SimpleNamespace(committed=losses, events=[resumed]))
    monkeypatch.setattr(devices, "reference_run", lambda *_: SimpleNamespace(
        losses=[one.loss + 1e-6 for one in losses]))
    with pytest.raises(devices.DevicesError, match=r"deviate from those of one process by 1\.0e-06"):
        devices.exactness("cpu", tmp_path)
    monkeypatch.setattr(devices, "reference_run", lambda *_: SimpleNamespace(losses=[one.loss for one in losses]))
    assert devices.exactness("cpu", tmp_path).value.startswith("0.0e+00")


def test_a_command_that_does_not_end_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(devices, "LIMIT_SECONDS", 0.01)
    with pytest.raises(devices.DevicesError, match=r"^`slipstream --version` did not end within 0 s"):
        devices.command("--version")
