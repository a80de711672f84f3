"""When ops ran.

The host waits for a GPU no more often than it must.
"""

import itertools

import pytest
import torch

from slipstream.runtime.replay.recorder import Recorder
from slipstream.schedules.schedule import Op, OpKind, Worker

WORKER = Worker(0, 0)
OPS = [
    Op(OpKind.F, 0, 0, 0, WORKER, 0, 1),
    Op(OpKind.W, 0, 0, 0, WORKER, 1, 2),
    Op(OpKind.O, None, None, None, WORKER, 2, 3),
]


class FakeGpu:
    """A device whose clock advances by 1 ms with each event.

    It counts how often the host waits for it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self.events = 0
        ticks = itertools.count()
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                gpu.events += 1

            def record(self) -> None:
                self.milliseconds = next(ticks)

            def synchronize(self) -> None:
                gpu.waits += 1

            def elapsed_time(self, other: "Event") -> float:
                return other.milliseconds - self.milliseconds

        def synchronize() -> None:
            gpu.waits += 1

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def run(recorder: Recorder, *, traced: bool) -> None:
    recorder.start_iteration(0, traced=traced)
    for op in OPS:
        with recorder.record_op(op):
            pass


def test_an_iteration_that_is_not_traced_waits_for_its_step_and_for_nothing_else(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    recorder = Recorder(torch.device("cuda", 0), 0.0)
    for _ in range(5):
        run(recorder, traced=False)
        assert recorder.window_seconds() == pytest.approx(0.005) and recorder.traced_ops() == ()
        assert [
            (time.kind, time.slice, time.number, time.seconds) for time in recorder.op_times()
        ] == [
            (OpKind.F, 0, 1, pytest.approx(0.001)),
            (OpKind.W, 0, 1, pytest.approx(0.001)),
        ]
    assert gpu.waits == 5, "the end of its O: before that the iteration may not be reported"
    assert gpu.events == 5 * 2 * len(OPS)


def test_a_traced_iteration_tells_when_each_op_ran(monkeypatch):
    FakeGpu(monkeypatch)
    recorder = Recorder(torch.device("cuda", 0), 100.0)
    run(recorder, traced=True)
    assert recorder.window_seconds() == pytest.approx(0.005)
    ops = recorder.traced_ops()
    assert [op.kind for op in ops] == [OpKind.F, OpKind.W, OpKind.O] and ops[0].start_seconds > 100
    assert [op.end_seconds - op.start_seconds for op in ops] == pytest.approx([0.001] * 3)
    run(recorder, traced=False)
    assert recorder.traced_ops() == ()


@pytest.mark.parametrize("traced", [False, True])
def test_on_a_cpu_the_window_is_the_same_traced_or_not(traced):
    recorder = Recorder(torch.device("cpu"), 5.0)
    run(recorder, traced=True)
    run(recorder, traced=traced)
    assert 0 <= recorder.window_seconds() < 1
    assert len(recorder.traced_ops()) == (3 if traced else 0)
