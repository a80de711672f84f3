"""Where a disk is full, lines wait, and the run goes on."""

import errno
from io import FileIO

from slipstream.runtime.coordinator.records import run_log
from slipstream.runtime.coordinator.records.run_log import RunLog, read_losses
from slipstream.runtime.coordinator.records.writer_thread import Writer
from slipstream.runtime.events import EVENTS, LOSSES, Noted, decode_event


class Full(FileIO):
    """Takes half of a line, then none, while `full`."""

    full = False

    def write(self, data):
        if Full.full and len(data) > 1:
            super().write(data[:3])
            if Full.full == "twice":
                return 3
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room_and_said_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_log, "FileIO", Full)
    problems, write = [], Writer()
    write.report_problem = problems.append
    with RunLog(tmp_path, write=write) as log:
        for iteration in range(6):
            Full.full = "twice" if 2 <= iteration < 5 else False
            log.write_iteration(iteration, float(iteration))
            log.write(Noted(text=str(iteration)))
    assert read_losses(tmp_path, 0) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    lines = (tmp_path / EVENTS).read_bytes().splitlines()
    assert [decode_event(line).text for line in lines] == list("012345")
    assert len(problems) == 4 and all("cannot be written" in line for line in problems[:2])
    assert all(line.endswith("is written again") for line in problems[2:])


def test_what_a_disk_that_stays_full_lacks_is_said_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "FileIO", Full)
    problems, write = [], Writer()
    write.report_problem = problems.append
    with RunLog(tmp_path, write=write) as log:
        log.write_iteration(0, 0.0)
        Full.full = True
        for iteration in (1, 2, 3):
            log.write_iteration(iteration, 0.0)
    Full.full = False
    assert (
        problems[-1]
        == f"{tmp_path / LOSSES} lacks the last 3 of its lines, which could not be written"
    )
    assert read_losses(tmp_path, 0) == [0.0]
