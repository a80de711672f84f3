"""What ops take by what their samples cost."""

import pytest
import torch

from slipstream.runtime.replay import recorder as recorder_module
from slipstream.runtime.replay.recorder import Recorder
from slipstream.schedules.schedule import Op, OpKind, Worker


def test_ops_are_told_by_what_their_samples_cost(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(recorder_module, "perf_counter", lambda: now[0])
    recorder, cost = Recorder(torch.device("cpu")), {0: 1.0, 1: 3.0, 2: 2.0}
    recorder.costs = lambda op, iteration: cost[op.microbatch] + 0 * iteration
    recorder.start_iteration(4, traced=False)
    for number, factor in cost.items():
        with recorder.record_op(Op(OpKind.F, 0, 0, number, Worker(0, 0), 0, 1)):
            now[0] += 0.1 * factor
    (found,) = recorder.op_times()
    assert found.seconds == pytest.approx(0.1) and found.misfit == pytest.approx(0.0)
    recorder.costs = None
    (plain,) = recorder.op_times()
    assert plain.misfit is None and plain.seconds > 1.5 * found.seconds
