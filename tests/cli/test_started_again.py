"""The process that leads a run, and its parent, which starts it again."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from slipstream.cli.shared.run_process import exit_on_signals, fork_supervised
from tests import patience
from tests.runtime.launchers import Launcher


def ended_by(folder: str, name: str) -> None:
    """Lead a run that a signal ends, or take part without a folder.

    Nobody has taken the signal over.
    """
    signal.signal(signal.Signals[name], signal.SIG_DFL)
    if folder:
        fork_supervised(Path(folder), print)
    else:
        exit_on_signals()
    os.kill(os.getpid(), signal.Signals[name])
    time.sleep(patience.SECONDS)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="no process ends with its parent elsewhere"
)
@pytest.mark.parametrize(
    ("name", "status"),
    [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", -1), ("SIGTERM of another node", 143)],
)
def test_a_run_that_is_told_to_end_has_a_status_at_its_very_beginning_and_end_too(
    name, status, tmp_path
):
    """Supervisors, and tests, tell it from one that has crashed."""
    log, (signal_name, *node) = tmp_path / "log", name.split(maxsplit=1)
    launcher = Launcher(f"{__name__}:ended_by", "" if node else tmp_path, signal_name, log=log)
    assert launcher.wait(patience.SECONDS) == status, log.read_text()
