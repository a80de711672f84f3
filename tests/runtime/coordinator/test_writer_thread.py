"""A file system that does not answer holds up nobody."""

import os
import threading
import time
from io import FileIO

from slipstream.runtime.coordinator.records import run_log, writer_thread
from slipstream.runtime.coordinator.records.run_log import IterationLines
from slipstream.runtime.coordinator.records.writer_thread import WriterThread
from slipstream.runtime.events import EVENTS, Iteration, Noted, decode_event, decode_iteration
from slipstream.runtime.launch import Resilience, RunOptions, run
from tests.runtime.failing import JOB
from tests.runtime.running import assert_same_numbers, judge, losses_in, schedule_for, tiny

SOON = 30.0


def until(happened):
    deadline = time.monotonic() + SOON
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_trains_while_its_file_system_hangs_and_writes_all_of_it_later(
    fork_server, tmp_path, monkeypatch
):
    answers, hung, news_lines = threading.Event(), [], []
    monkeypatch.setattr(writer_thread, "SLOW_WRITE_SECONDS", 0.2)

    class Hanging(FileIO):
        """From the third iteration on."""

        def write(self, data):
            if b'"iteration":2' in data and not answers.is_set():
                hung.append(data)
                answers.wait(SOON)
            return super().write(data)

    def progress(iteration, loss):
        if iteration == 6:
            until(lambda: hung)
            assert len(losses_in(tmp_path)) == 2, "the files hang, and the run does not"
        if (
            iteration > 6
            and not answers.is_set()
            and any("have not been written" in text for text in news_lines)
        ):
            answers.set()
        if iteration > 6 and not any("are written again" in text for text in news_lines):
            # What is slow is looked for with the heartbeats: ten times within the timeout.
            time.sleep(0.5)

    monkeypatch.setattr(run_log, "FileIO", Hanging)
    config = tiny(iterations=30)
    result = run(
        schedule_for(JOB),
        config,
        out=tmp_path,
        fork_server=fork_server,
        progress=progress,
        resilience=Resilience(heartbeat_timeout_seconds=10.0),
        options=RunOptions(notify=lambda news: news_lines.append(str(news))),
    )
    assert_same_numbers(result, judge(config, JOB.microbatches, 30))
    assert losses_in(tmp_path) == list(result.losses)
    kept = [
        event.text
        for line in (tmp_path / EVENTS).read_bytes().splitlines()
        if isinstance(event := decode_event(line), Noted)
    ]
    # More than once where another write took long.
    assert len(kept) >= 2
    assert all("have not been written" in text for text in kept[::2])
    assert all("are written again" in text for text in kept[1::2])
    assert tuple(kept) == result.notes


def test_what_is_written_again_is_told_before_the_next_write_that_is_slow(monkeypatch):
    monkeypatch.setattr(writer_thread, "SLOW_WRITE_SECONDS", 0.05)
    answers = [threading.Event(), threading.Event()]
    news = []
    with WriterThread(news.append) as write:
        for answer in answers:
            write(lambda answer=answer: answer.wait(SOON))
        until(lambda: news.extend(write.take_reports()) or news)
        answers[0].set()
        # The first write has been told, and the second one is slow, too.
        until(
            lambda: (
                write._said and write._began is not None and time.monotonic() - write._began > 0.05
            )
        )
        news += write.take_reports()
        answers[1].set()
    assert ["again" in text for text in news] == [False, True, False, True]


def test_what_is_never_taken_is_given_up_at_the_end_and_nobody_waits_for_it(tmp_path, monkeypatch):
    """A pipe that nobody reads."""
    monkeypatch.setattr(writer_thread, "CLOSE_SECONDS", 0.2)
    reading, writing = os.pipe()
    reports, has_begun = [], threading.Event()
    with WriterThread(reports.append) as write:
        write(lambda: (has_begun.set(), os.write(writing, b"x" * 10_000_000)))
        assert has_begun.wait(SOON)
        write(lambda: None)
    assert ["2 writes" in news and "does not answer" in news for news in reports] == [True]
    os.close(reading)


def test_all_that_waits_is_written_at_the_end_in_order_whatever_fails(tmp_path):
    done, news = [], []
    with WriterThread(news.append) as write:
        for number in range(1000):
            write(lambda number=number: done.append(number) if number != 500 else done.missing())
    assert done == [number for number in range(1000) if number != 500]
    assert ["'missing'" in text for text in news] == [True]


def test_lines_are_cut_without_room_also_those_that_wait(tmp_path):
    lines = IterationLines(tmp_path / "lines", 0, print)
    for iteration in (1, 2, 3, None, 4):
        if iteration is None:
            lines.drop_iterations_from(2)
        else:
            lines.append(Iteration(iteration=iteration, loss=1.0))
    lines.close()
    assert [
        decode_iteration(line).iteration for line in (tmp_path / "lines").read_bytes().splitlines()
    ] == [1, 4]
