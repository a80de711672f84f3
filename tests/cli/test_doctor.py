"""`slipstream doctor`: what it finds here, and what it says where something is broken."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from slipstream.cli import doctor
from slipstream.cli.app import app
from slipstream.runtime.tools.self_test import SelfTest, SelfTestError
from slipstream.schedules.check import Violation
from tests.patience import SECONDS
from tests.runtime.running import wait_until_gone


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def findings(result):
    return {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_all_is_well_here(monkeypatch):
    """The whole self-test: a plan, a lookup, and two processes that talk over gloo."""
    monkeypatch.setattr(doctor, "SELF_TEST_SECONDS", SECONDS)
    result = run("--json")
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["ok"]
    found = findings(result)
    assert {
        found[name]["status"]
        for name in ("torch", "ortools", "gloo", "plan and check", "two processes")
    } == {"ok"}
    assert (
        "period 30 s" in found["plan and check"]["detail"]
        and "1 MiB over gloo" in found["two processes"]["detail"]
    )


def test_report_for_a_reader():
    result = run("--quick")
    assert result.exit_code == 0 and "self-test" not in result.stdout
    assert "✓ torch " in result.stdout and result.stdout.rstrip().endswith("all is well")


def test_a_missing_package(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    result = run("--quick")
    assert (
        result.exit_code == 1
        and "✗ no-such-package" in result.stdout
        and "pip install" in result.stdout
    )


def test_a_broken_planner_is_told(monkeypatch):
    broken = Violation("memory", "worker 0.0 holds too much")
    monkeypatch.setattr("slipstream.schedules.check.check", lambda schedule: [broken])
    found = next(iter(doctor._test_planning()))
    assert found.status == "failed" and "worker 0.0 holds too much" in found.detail


def test_processes_that_never_meet_are_ended():
    with SelfTest() as self_test:
        with pytest.raises(SelfTestError, match=r"within 0 s"):
            self_test.wait(0.1)
        pids = list(self_test.fork_server.pids.values())
    wait_until_gone(pids)


def test_a_process_that_dies_is_named():
    with SelfTest() as self_test:
        for name in ("0", "1"):  # else the other may have told of the broken connection first
            self_test.fork_server.kill_process(name)
        with pytest.raises(SelfTestError, match="ended with status -9"):
            self_test.wait(SECONDS)


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from slipstream.cli.app import app; "
        "done = CliRunner().invoke(app, ['doctor', '--help']); sys.exit(done.exit_code or "
        "'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=False).returncode == 0
    )
