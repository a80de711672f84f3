"""Progress of long work in a log: `slipstream.cli.shared.console`."""

from slipstream.cli.shared.console import QUIET_SECONDS, LogProgress


def test_a_line_for_each_tenth_and_at_times_what_is_done(capsys):
    now = 0.0
    log = LogProgress("planning", "entries", lambda: now)
    log.show_work("the first")
    log.show_work("at the same time")
    now += QUIET_SECONDS
    log.show_work("later")
    for done in range(101):
        log.show_count(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["planning: the first", "planning: later"]
    assert lines[2:] == [f"planning: {10 * tenth} of 100 entries" for tenth in range(11)]
