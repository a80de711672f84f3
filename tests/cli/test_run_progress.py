"""The progress line of `slipstream train`."""

import io

import pytest
from rich.console import Console

from slipstream.cli.shared import run_process as run_progress
from slipstream.cli.shared.run_process import RunProgress
from slipstream.runtime.events import (
    FetchAbandoned,
    FetchBegun,
    FetchProgressed,
    HandedOver,
    OrderGiven,
    Started,
)


@pytest.fixture
def progress(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(run_progress.time, "monotonic", lambda: clock[0])
    shown = RunProgress(tokens=1000)
    shown.clock, shown.iteration = clock, 0
    shown.observe(Started(job="job", workers=16, iterations=9, samples=64, fault_free_period=1.0))
    assert str(shown) == ""
    shown.observe(order("whole", 16, 1.0))
    return shown


def order(phase, live, period):
    return OrderGiven(order=1, schedule="0" * 16, live=live, planned_period=period, phase=phase)


def commit(progress, *seconds):
    for second in seconds:
        progress.clock[0] += second
        progress.record_commit(progress.iteration)
        progress.iteration += 1


def test_throughput_is_of_the_last_iterations_of_the_present_order(progress):
    commit(progress, 1)
    assert str(progress) == "whole, 16 of 16 workers, planned 100 % of fault-free"
    commit(progress, 2, 2)
    assert (
        str(progress)
        == "whole, 16 of 16 workers, 32,000 tokens/s, 12.0 s left, planned 100 % of fault-free"
    )
    commit(progress, *[4] * run_progress.RECENT_ITERATIONS)
    assert progress.throughput == 16_000
    progress.observe(order("at once", 15, 1.25))
    commit(progress, 9)
    assert str(progress) == "at once, 15 of 16 workers, planned 80 % of fault-free"
    commit(progress, 5)
    assert progress.throughput == 12_800


@pytest.mark.parametrize("width", [60, 100])
def test_a_narrow_terminal_shows_the_count_of_iterations(width, monkeypatch):
    screen = Console(file=io.StringIO(), width=width, force_terminal=True)
    monkeypatch.setattr(run_progress, "err", screen)
    with run_progress.show_progress(1000, 8) as display:
        display.show_event(order("at once", 15, 1.25))
        display.show_commit(41, 3.5)
        display.show_commit(42, 3.25)
    assert "43/1000" in screen.file.getvalue()


def test_samples_that_are_no_tokens_are_counted_themselves():
    progress = RunProgress(tokens=None)
    progress.observe(
        Started(job="job", workers=16, iterations=9, samples=64, fault_free_period=None)
    )
    progress.observe(order("whole", 16, 1.0))
    progress._committed.extend((0.0, 2.0))
    assert str(progress) == "whole, 16 of 16 workers, 32 samples/s, 18.0 s left"


def test_the_end_is_told_as_a_clock_would(progress):
    progress.observe(
        Started(
            job="job", workers=16, iterations=1003, samples=1, fault_free_period=None, iteration=1
        )
    )
    progress.iteration = 1
    commit(progress, 1, 9.5)
    assert str(progress) == "whole, 16 of 16 workers, 105 tokens/s, 2:38:20 left"
    progress.iteration = 1001
    commit(progress, 9.5)
    assert progress.seconds_left == 9.5
    commit(progress, 9.5)
    assert "left" not in str(progress)


def test_the_phase_while_layers_move(progress):
    progress.observe(order("at once", 15, 1.25))
    progress.observe(FetchBegun(fetch=1, purpose="join", layers=2, workers=()))
    progress.observe(FetchProgressed(fetch=1, share=0.5))
    assert progress.phase == "at once"
    progress.observe(FetchBegun(fetch=2, purpose="settle", layers=2, workers=()))
    assert progress.phase == "settling 0 %"
    progress.observe(FetchProgressed(fetch=2, share=0.42))
    progress.observe(FetchProgressed(fetch=1, share=0.9))
    assert str(progress).startswith("settling 42 %, 15 of 16 workers")
    progress.observe(FetchAbandoned(fetch=2, reason="its source died"))
    assert progress.phase == "at once"
    progress.observe(FetchBegun(fetch=3, purpose="settle", layers=2, workers=()))
    progress.observe(HandedOver(fetch=3, order=2))
    progress.observe(order("settled", 15, 1.1))
    assert str(progress) == "settled, 15 of 16 workers, planned 91 % of fault-free"


def test_without_a_fault_free_plan_there_is_no_share(progress):
    progress.observe(
        Started(job="job", workers=16, iterations=9, samples=64, fault_free_period=None)
    )
    assert str(progress) == "whole, 16 of 16 workers"
