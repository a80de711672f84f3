"""`python -m benchmarks.device` on a CPU, in its shortest form: the same commands that are run on GPUs.

In this process, or forked, so that not each of them imports torch anew.
"""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks import device
from slipstream.cli.app import app
from slipstream.runtime.processes import fork_server
from tests.runtime.forked import own_fork_server
from tests.runtime.launchers import Launcher, command

pytestmark = pytest.mark.slow

SHORT = ("--dtypes", "bf16", "--blocks", "2", "--width", "64", "--context", "32", "--batch", "2", "--iterations", "3",
         "--rounds", "1")
SETTLED_SECONDS = 1.0
OPS = 12
"""F, I and W of four micro-batches: what a worker does in an iteration at least."""


def answer(*words):
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


def test_one_table_of_all_that_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["device", "--device", "cpu", "--json", *SHORT])
    monkeypatch.setattr(device, "command", answer)
    monkeypatch.setattr(device, "subprocess", SimpleNamespace(Popen=start))
    monkeypatch.setattr(device, "LIMIT_SECONDS", 280.0)
    monkeypatch.setattr(fork_server, "ForkServer", own_fork_server)
    device.main()
    table = json.loads(capsys.readouterr().out)
    assert re.match(r"\d{4}-\d\d-\d\d: .* CPU cores .*, 4 workers, gloo, torch ", table["title"])
    rows = table["bf16"]
    settles = not rows["settled, three workers"].startswith("does not pay")  # ops this short are noise: the run decides
    for phase in ("all four workers", "at once, three workers", *["settled, three workers"] * settles):
        planned, measured = (float(re.search(rf"{word} (\S+) ms", rows[phase])[1]) for word in ("planned", "measured"))
        assert measured > 0 and 0 < planned < OPS * 1000 / 4, "by a second for each op, as the file says, it is OPS s"
    assert "predicted" in rows["settled, three workers"]
    assert float(rows["layers moved"].removesuffix(" MB")) > 0 or not settles
    assert {"F of a stage", "pause after a SIGKILL", "memory, activation", "memory, stash"} <= set(rows)
