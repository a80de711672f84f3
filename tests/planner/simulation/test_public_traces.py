"""Traces that others have published, in small files of their forms."""

import json

import pytest

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.trace_file import TraceFileError, read_availability_trace

ACME = (
    "job_id,user,node_num,gpu_num,cpu_num,type,state,"
    "submit_time,start_time,end_time,duration,queue,gpu_time\n"
    """1,u1,4,32,8,Pretrain,FAILED,@00:00:00+08:00,@00:00:00+08:00,@01:00:00+08:00,3600,0,0
2,u1,4,32,8,Pretrain,NODE_FAIL,@01:00:00+08:00,@01:10:00+08:00,@03:00:00+08:00,6600,0,0
3,u2,2,16,8,Pretrain,COMPLETED,@00:30:00+08:00,@00:30:00+08:00,@04:00:00+08:00,12600,0,0
4,u3,8,64,8,Debug,FAILED,@00:30:00+08:00,@00:30:00+08:00,@00:40:00+08:00,600,0,0
5,u3,1,8,8,Other,CANCELLED,,,,,,
"""
).replace("@", "2023-03-01 ")


def fault(node, days, kind):
    return {
        "node_id": node,
        "event_time": days,
        "event_type": f"fault_{kind}",
        "fault_type": {"Level": "Hardware Failure", "Class": "GPU", "Desc": "GPU Lost"},
    }


def read(tmp_path, text, name="trace.csv", **how):
    (tmp_path / name).write_text(text)
    return read_availability_trace(tmp_path / name, **how)


def test_spot_instances(tmp_path):
    text = json.dumps({"metadata": {"gap_seconds": 300}, "data": [4, 4, 2, 2, 3]})
    trace = read(tmp_path, text, "us-west-2c_v100_1.json")
    assert (
        list(trace.iterate_live_counts()) == [(0.0, 4), (600.0, 2), (1200.0, 3)]
        and trace.length_seconds == 1500.0
    )
    assert trace.name == "us-west-2c_v100_1" and "drawn at random" in trace.notes[0]
    assert trace == read(tmp_path, text, "us-west-2c_v100_1.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a spot trace"),
        ('{"metadata": {}, "data": []}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "more than 0"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, -1]}', r"data\[1\] is -1"),
        ('{"metadata": {"gap_seconds": 300}, "data": [0, 0]}', "no instance"),
        ("job_id,user\n1,2\n", "line 1: no column node_num"),
        ("[]", "no faults"),
        ('[{"node_id": "a"}]', "InfiniteHBD-Trace"),
        (
            json.dumps([fault("a", 1.0, "start")] + 2 * [fault("a", 2.0, "end")]),
            "of a ends on day 2, but has not begun",
        ),
        (ACME.replace("2023-03-01 01:10:00+08:00", "soon"), "line 3: expected numbers and times"),
        (ACME.splitlines()[0] + "\n", "no job on several servers"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line(tmp_path, text, message):
    with pytest.raises(TraceFileError, match=message) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


FAULTS = [
    fault("b", 1.0, "start"),
    fault("a", 2.0, "start"),
    fault("b", 3.0, "start"),
    fault("b", 4.0, "end"),
    fault("b", 5.0, "end"),
    fault("a", 6.0, "end"),
    fault("b", 6.0, "start"),
    fault("c", 7.0, "start"),
    fault("c", 7.0, "end"),
    fault("b", 10.0, "end"),
]


def test_overlapping_faults_of_a_server_are_one_time_out_of_service(tmp_path):
    trace = read(tmp_path, json.dumps(FAULTS), "faults.json")
    assert (trace.places, trace.length_seconds) == (
        400,
        10 * 86_400.0,
    ) and "3 of which had faults" in trace.notes[0]
    assert trace.changes == (
        Change(86_400.0, removed=(1,)),
        Change(2 * 86_400.0, removed=(0,)),
        Change(5 * 86_400.0, added=(1,)),
        Change(6 * 86_400.0, removed=(1,), added=(0,)),
        Change(10 * 86_400.0, added=(1,)),
    )
    assert trace.mean_live_machines == pytest.approx(400 - (4 + 4 + 4) / 10)


def test_failing_jobs_of_acme_take_a_server_until_the_next_begins(tmp_path):
    trace = read(tmp_path, ACME)
    assert (trace.places, trace.length_seconds) == (6, 4 * 3600.0), "jobs of the type Pretrain only"
    (first, back, second, again) = trace.changes
    assert (first.seconds, back.seconds, second.seconds, again.seconds) == (
        3600.0,
        4200.0,
        10_800.0,
        11_160.0,
    )
    assert first.removed == back.added and second.removed == again.added
    assert "3 jobs, 2 of which failed" in trace.notes[0]


def ops(slow_from):
    for step in range(3):
        for pipeline in range(4):
            for stage in range(2):
                factor = 2.5 if (pipeline, stage) == (1, 0) and step >= slow_from else 1.0
                for microbatch in range(3):
                    yield (
                        pipeline,
                        stage,
                        step,
                        "forward-compute",
                        3.0 * microbatch,
                        1.0 * (stage + 1) * factor,
                    )
                    yield (
                        pipeline,
                        stage,
                        step,
                        "backward-compute",
                        3.0 * microbatch + 1,
                        2.0 * factor,
                    )
                yield pipeline, stage, step, "forward-send", 0.0, 50.0 if pipeline == 2 else 0.0


def test_slow_workers_of_straggler_analysis(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
    columns = dict(zip(names, zip(*ops(slow_from=1), strict=True), strict=True))
    parquet.write_table(
        arrow.table({name: list(values) for name, values in columns.items()}),
        tmp_path / "job.parquet",
    )
    trace = read_availability_trace(tmp_path / "job.parquet")
    assert (trace.places, trace.live) == (8, tuple(range(8))) and trace.length_seconds == 150.0
    assert trace.changes == (Change(50.0, slowed=((2, 2.5),)),), "sends are not computation"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(TraceFileError, match="not a trace of StragglerAnalysis"):
        read_availability_trace(tmp_path / "bad.parquet")
    parquet.write_table(arrow.table({"step": [1]}), tmp_path / "other.parquet")
    with pytest.raises(TraceFileError, match=r"StragglerAnalysis|no column"):
        read_availability_trace(tmp_path / "other.parquet")
