import pytest

from slipstream.schedules.measured_trace import (
    MeasuredIteration,
    MeasuredOp,
    MeasuredTrace,
    MeasuredTraceError,
    decode_measured_trace,
    encode_measured_trace,
    placed_ops,
    read_measured_trace,
    write_measured_trace,
)
from slipstream.schedules.schedule import OpKind, Worker

OPS = (
    MeasuredOp(Worker(0, 1), OpKind.O, None, None, None, 0.5, 0.75),
    MeasuredOp(Worker(0, 1), OpKind.F, 1, 0, 3, 0.125, 0.25),
    MeasuredOp(Worker(0, 0), OpKind.F, 0, 0, 3, 0.0, 0.125),
)
TRACE = MeasuredTrace(job="j", iterations=(MeasuredIteration(0, OPS), MeasuredIteration(1, ())))


def test_round_trip(tmp_path):
    write_measured_trace(TRACE, tmp_path / "trace.json")
    assert read_measured_trace(tmp_path / "trace.json") == TRACE
    assert encode_measured_trace(TRACE).startswith(
        b'{"format":"slipstream.trace","version":1,"job":"j",'
        b'"iterations":[[0,[[[0,1],"O",null,null,null,0.5,0.75],'
    )


def test_placed_in_order_of_start():
    placed = placed_ops(TRACE.iterations[0])
    assert list(placed) == [Worker(0, 0), Worker(0, 1)]
    assert [(op.kind, op.start_ticks, op.end_ticks) for op in placed[Worker(0, 1)]] == [
        (OpKind.F, 125_000_000, 250_000_000),
        (OpKind.O, 500_000_000, 750_000_000),
    ]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"version":1', b'"version":2', "trace format version 2; this Slipstream reads 1"),
        (b"slipstream.trace", b"slipstream.schedule", "not a Slipstream trace"),
        (b'"job":"j"', b'"job":"j","job":"k"', "key 'job' is given twice"),
        (b"0.5,0.75", b"0.75,0.5", "iteration 0: O on 0.1 runs from 0.75 s to 0.5 s"),
        (b"0.5,0.75", b"-0.5,0.75", "expected 0 <= start <= end"),
        (b"0.5,0.75", b"0.5,1e99", "expected 0 <= start <= end"),
        (b"0.5,0.75", b"0.5,NaN", "no readable trace"),
        (b"[0,1]", b"[-1,1]", "Expected `int` >= 0"),
        (b'"O"', b'"Z"', "no readable trace"),
    ],
)
def test_refused(old, new, reason):
    data = encode_measured_trace(TRACE)
    assert old in data
    with pytest.raises(MeasuredTraceError) as caught:
        decode_measured_trace(data.replace(old, new, 1), "trace.json")
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_truncated_anywhere():
    data = encode_measured_trace(TRACE)
    for length in range(len(data) - 1):
        with pytest.raises(MeasuredTraceError):
            decode_measured_trace(data[:length])


def test_missing(tmp_path):
    with pytest.raises(MeasuredTraceError, match="cannot be read"):
        read_measured_trace(tmp_path / "none.json")
