"""The file of events: whole lines, whoever was killed before, and each schedule once."""

import hashlib
import json

from slipstream.runtime.coordinator.decisions.effects import compute_schedule_digest
from slipstream.runtime.coordinator.records import run_log
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.events import Failed, Noted, RunFinished, decode_event
from slipstream.schedules.schedule import Worker


def lines(folder):
    return (folder / "events.jsonl").read_bytes().splitlines()


def test_each_event_has_its_time_and_its_iteration(tmp_path):
    seen = []
    with RunLog(tmp_path, 3, observer=seen.append) as log:
        log.write(Failed(worker=Worker(1, 2), reason="a reason\nof two lines"))
        log.write_iteration(3, 2.0)
        log.write(RunFinished())
    assert [decode_event(line) for line in lines(tmp_path)] == seen
    first, last = map(json.loads, lines(tmp_path))
    assert first["event"] == "failed" and first["worker"] == [1, 2] and first["iteration"] == 3
    assert last.pop("time") > 1.6e9 and last.pop("seconds") >= 0
    assert last == {"event": "finished", "iteration": 4, "error": None}


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(Noted(text="one"))
        assert len(lines(tmp_path)) == 1  # whoever is killed now leaves it


def test_the_next_start_appends_and_removes_half_a_line(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(Noted(text="x" * 100_000))
        log.write(Noted(text="two"))
    whole = (tmp_path / "events.jsonl").read_bytes()
    for half in (b'{"event":"noted","ti', b'{"event":"noted","text":"' + b"y" * 200_000, b""):
        (tmp_path / "events.jsonl").write_bytes(whole + half)
        with RunLog(tmp_path) as log:
            log.write(Noted(text="three"))
        assert (tmp_path / "events.jsonl").read_bytes().startswith(whole)
        assert [decode_event(line).text[:5] for line in lines(tmp_path)] == [
            "xxxxx",
            "two",
            "three",
        ]
    (tmp_path / "events.jsonl").write_bytes(b"only half a line")
    with RunLog(tmp_path):
        pass
    assert lines(tmp_path) == []


def test_times_do_not_go_back_with_the_clock(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        log.write(Noted(text="before"))
        monkeypatch.setattr(run_log.time, "time", lambda: 0.0)
        log.write(Noted(text="after"))
    before, after = (decode_event(line).time for line in lines(tmp_path))
    assert 1.6e9 < before <= after < before + 60


def test_a_schedule_is_kept_once_by_its_digest(tmp_path):
    with RunLog(tmp_path) as log:
        for text in (b"{}", b"[]", b"{}"):
            log.store_schedule(text)
    digests = [compute_schedule_digest(text) for text in (b"{}", b"[]", b"{}")]
    assert digests[0] == digests[2] != digests[1]
    names = sorted(f"{digest}.json" for digest in set(digests))
    assert sorted(path.name for path in (tmp_path / "schedules").iterdir()) == names
    for digest, text in zip(digests, (b"{}", b"[]"), strict=False):
        assert (tmp_path / "schedules" / f"{digest}.json").read_bytes() == text
        assert hashlib.sha256(text).hexdigest().startswith(digest)
