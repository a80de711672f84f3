"""What a run says last is true, also where a full disk took nothing."""

import signal

import pytest
import typer

from slipstream.cli.shared.run_process import exit_on_errors
from slipstream.runtime.processes.stop_signals import RunStopped


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (b"", "the losses of no iterations"),
        (b"{}\n", "the losses of 1 iteration;"),
        (b"{}\n{}\n{", "the losses of 2 iterations;"),
        (None, "the losses of no iterations"),
    ],
)
def test_the_last_line_counts_the_losses_that_are_on_disk(losses, says, tmp_path, capsys):
    if losses is not None:
        (tmp_path / "losses.jsonl").write_bytes(losses)
    with (
        pytest.raises(typer.Exit) as ended,
        exit_on_errors(lambda: "; there is no checkpoint", tmp_path),
    ):
        raise RunStopped(signal.SIGTERM, "interrupted by SIGTERM")
    assert ended.value.exit_code == 143
    line = " ".join(capsys.readouterr().err.split())
    assert says in line and line.endswith("; there is no checkpoint") and "on disk" not in line
