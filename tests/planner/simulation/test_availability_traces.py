"""Trace files of both forms, clean and dirty, and drawn traces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planner.simulation.availability_trace import (
    AvailabilityTrace,
    Change,
    fit_to_job,
    group_gpus,
    with_node_failures,
)
from slipstream.planner.simulation.failure_models import FAILURE_MODELS
from slipstream.planner.simulation.synthetic_trace import draw_trace
from slipstream.planner.simulation.trace_file import (
    TraceFileError,
    build_from_counts,
    parse_availability_trace,
    read_availability_trace,
)
from tests.planner.simulation.small import failing

SAMPLES = """
2021-12-11, 10:00:00, 4
2021-12-11, 10:01:00, 4   # nothing happens

2021-12-11, 10:02:00, 2
2021-12-11, 10:03:00, 3
"""
EVENTS = """
0,add,a
0,add,b
0,add,c
60000,remove,b
60000,remove,a
90000,add,d
120000,remove,c
"""


def test_availability():
    trace = parse_availability_trace(SAMPLES)
    assert (trace.places, trace.live, trace.length_seconds) == (4, (0, 1, 2, 3), 180.0)
    assert list(trace.iterate_live_counts()) == [(0.0, 4), (120.0, 2), (180.0, 3)]
    assert trace.machine_losses == 2 and trace.mean_live_machines == pytest.approx(
        (4 * 120 + 2 * 60) / 180
    )
    assert [
        parse_availability_trace(SAMPLES, seed=1).changes,
        parse_availability_trace(SAMPLES, seed=1).changes,
    ] == [parse_availability_trace(SAMPLES, seed=1).changes] * 2
    assert any("drawn at random" in note for note in trace.notes)


def test_events():
    trace = parse_availability_trace(EVENTS)
    assert trace == AvailabilityTrace(
        name="trace",
        places=3,
        live=(0, 1, 2),
        length_seconds=120.0,
        changes=(
            Change(60.0, removed=(0, 1)),
            Change(90.0, added=(0,)),
            Change(120.0, removed=(2,)),
        ),
    )
    assert trace.seconds_between_failures == 60.0


def test_times_that_run_backwards_are_sorted():
    lines = EVENTS.strip().splitlines()
    trace = parse_availability_trace(
        "\n".join([*lines[:3], lines[5], lines[4], lines[3], lines[6]])
    )
    assert trace.changes == parse_availability_trace(EVENTS).changes
    assert trace.notes == ("time ran backwards 1 times: lines were sorted by time",)


SLOW = (
    EVENTS
    + """30000,slow,a,1.5
30000,gpus,c,3
70000,slow,a,2
95000,slow,d,1.25
100000,slow, d , 1
100000,gpus,c,8
"""
)


def test_machines_that_are_slow_or_short_of_gpus():
    trace = parse_availability_trace(SLOW, gpus_per_worker=8)
    assert trace.gpus_per_worker == 8 and (trace.machine_slowdowns, trace.partial_losses) == (2, 1)
    assert trace.changes == (
        Change(30.0, slowed=((0, 1.5),), gpus=((2, 3),)),
        Change(60.0, removed=(0, 1)),
        Change(90.0, added=(0,)),
        Change(95.0, slowed=((0, 1.25),)),
        Change(100.0, slowed=((0, 1.0),), gpus=((2, 8),)),
        Change(120.0, removed=(2,)),
    )
    assert trace.notes[-1].startswith("1 events ignored"), "a is not there any more at 70 s"


def test_what_a_policy_sees_of_machines_that_lost_gpus():
    trace = parse_availability_trace(SLOW, gpus_per_worker=8)
    goes_on = list(trace.iterate_policy_changes(lambda alive: alive))
    assert goes_on[:2] == [
        Change(30.0, removed=(2,), slowed=((0, 1.5),)),
        Change(30.0, added=(2,), slowed=((2, 8 / 3),)),
    ], "those that are left begin anew"
    assert goes_on[5].slowed == ((0, 1.0), (2, 1.0))
    down = list(trace.iterate_policy_changes(lambda alive: alive if alive == 8 else 0))
    assert down[0] == Change(30.0, removed=(2,), slowed=((0, 1.5),))
    assert down[4] == Change(100.0, added=(2,), slowed=((0, 1.0),)) and down[5].removed == (2,)
    assert all(not change.gpus for change in (*goes_on, *down))


def test_a_machine_that_is_removed_while_down_leaves_once():
    text = (
        "0,add,a\n0,add,b\n1000,gpus,a,1\n2000,slow,a,3\n3000,remove,a\n4000,add,a\n5000,remove,b\n"
    )
    seen = list(
        parse_availability_trace(text, gpus_per_worker=2).iterate_policy_changes(
            lambda alive: 0 if alive == 1 else alive
        )
    )
    assert seen == [Change(1.0, removed=(0,)), Change(4.0, added=(0,)), Change(5.0, removed=(1,))]


def test_slow_machines_are_slow_in_a_job_of_another_size():
    large = fit_to_job(parse_availability_trace(SLOW, gpus_per_worker=8), 6)
    assert large.changes[0].slowed == ((0, 1.5), (1, 1.5)) and large.changes[0].gpus == (
        (4, 3),
        (5, 3),
    )


def test_gpus_make_workers():
    gpus = AvailabilityTrace(
        name="gpus",
        places=4,
        live=(0, 1, 2, 3),
        length_seconds=10.0,
        changes=(
            Change(1.0, removed=(1,)),
            Change(2.0, removed=(0,)),
            Change(3.0, added=(0,), removed=(3,)),
            Change(4.0, added=(1, 3)),
        ),
    )
    workers = group_gpus(gpus, 2)
    assert (workers.places, workers.live, workers.gpus_per_worker) == (2, (0, 1), 2)
    assert workers.changes == (
        Change(1.0, gpus=((0, 1),)),
        Change(2.0, removed=(0,)),
        Change(3.0, added=(0,), gpus=((0, 1), (1, 1))),
        Change(4.0, gpus=((0, 2), (1, 2))),
    )
    assert workers.partial_losses == 2  # that one comes back short of a GPU is no loss
    with pytest.raises(
        ValueError, match="4 GPUs cannot be divided into workers of 3; expected a multiple"
    ):
        group_gpus(gpus, 3)


def test_unknown_removals_and_second_additions_are_ignored_and_told():
    trace = parse_availability_trace(EVENTS + "130000,remove,z\n140000,add,d\n150000,remove,d\n")
    assert trace.changes[-1] == Change(150.0, removed=(0,)) and trace.notes[0].startswith(
        "2 events ignored"
    )


def test_a_machine_that_follows_another_within_an_instant_is_a_newcomer():
    trace = parse_availability_trace("0,add,a\n1000,remove,a\n1000,add,b\n2000,remove,b\n")
    assert [(change.removed, change.added) for change in trace.changes] == [
        ((0,), ()),
        ((), (0,)),
        ((0,), ()),
    ]
    assert trace.changes[1].seconds > trace.changes[0].seconds


def test_of_several_counts_at_one_instant_the_last_holds_and_holes_are_told():
    text = "".join(f"2021-12-11, 10:{minute:02}:00, 4\n" for minute in range(10))
    trace = parse_availability_trace(text + "2021-12-11, 10:09:00, 3\n2021-12-11, 20:00:00, 4\n")
    assert list(trace.iterate_live_counts()) == [(0.0, 4), (540.0, 3), (36000.0, 4)]
    assert "1 gaps without samples, 9.8 h in all: the last count is taken to hold" in trace.notes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no lines"),
        ("time,what\n", "line 1: 'time,what'; expected `YYYY"),
        (SAMPLES + "2021-12-11, 10:05:00, -3\n", "line 7: '2021-12-11, 10:05:00, -3'"),
        (
            SAMPLES + "0,add,a\n",
            "line 7: '0,add,a'; expected `YYYY-MM-DD, HH:MM:SS, COUNT` as above it",
        ),
        (
            SAMPLES + "2021-13-11, 10:05:00, 3\n",
            "line 7: '2021-13-11, 10:05:00, 3'; there is no such date",
        ),
        (EVENTS + "9000,lose,a\n", "line 9: '9000,lose,a'"),
        (
            EVENTS + "9000,slow,a\n",
            "line 9: '9000,slow,a'; expected `MILLISECONDS,add|remove,NAME`, `MILLISECONDS,slow",
        ),
        (
            EVENTS + "9000,slow,a,0.5\n",
            "line 9: '9000,slow,a,0.5'; expected a factor from 1 (its usual speed) to 1000",
        ),
        (EVENTS + "9000,slow,a,1001\n", "expected a factor"),
        (EVENTS + "9000,slow,a,nan\n", "line 9: '9000,slow,a,nan'"),
        (EVENTS + "9000,slow,a,-1\n", "line 9: '9000,slow,a,-1'"),
        (EVENTS + "9000,slow,a,1e3\n", "line 9: '9000,slow,a,1e3'"),
        (
            EVENTS + "9000,gpus,a,2\n",
            "line 9: '9000,gpus,a,2'; expected 1 to 1 GPUs, as many as a worker has",
        ),
        (EVENTS + "9000,gpus,a,0\n", "where none is left, remove it"),
        (EVENTS + "9000,gpus,,1\n", "line 9: '9000,gpus,,1'"),
        (EVENTS + "9000,slow,a" + " ," * 200_000 + "x\n", "line 9: '9000,slow,a , , ,"),
        ("0,add,a\n0,add,b\n", "line 2: all lines have the same time"),
        ("2021-12-11, 10:00:00, 0\n2021-12-11, 10:01:00, 0\n", "no machine is ever alive"),
        (
            "0,add,a\n999999999999999999,remove,a\n",
            "line 2: the trace would span more than a century",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text, says):
    with pytest.raises(TraceFileError) as refused:
        parse_availability_trace(text)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_files(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_bytes(b"\xef\xbb\xbf" + EVENTS.replace("\n", "\r\n").encode())
    trace = read_availability_trace(path)
    assert trace.name == "spot" and trace.changes == parse_availability_trace(EVENTS).changes
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceFileError, match=r"spot\.csv: not UTF-8"):
        read_availability_trace(path)
    with pytest.raises(TraceFileError, match="cannot be read"):
        read_availability_trace(tmp_path / "none")


def test_a_small_job_runs_on_places_drawn_from_the_fleet():
    trace = build_from_counts([(0.0, 100), (10.0, 50), (20.0, 100)], 30.0, "half")
    small = fit_to_job(trace, 20, seed=3)
    assert (
        small.places == 20
        and small.live == tuple(range(20))
        and small == fit_to_job(trace, 20, seed=3)
    )
    assert 2 < small.machine_losses < 18 and fit_to_job(trace, 100) is trace


def test_in_a_large_job_a_place_stands_for_several_workers():
    large = fit_to_job(parse_availability_trace(EVENTS), 7)
    assert large.live == tuple(range(7))
    assert [change.removed for change in large.changes] == [(0, 1, 2, 3), (), (4, 5, 6)]


def test_a_place_is_a_node_where_the_job_has_nodes():
    nodes = ((0, 3), (1,), (2, 4))
    fitted = fit_to_job(parse_availability_trace(EVENTS), 5, nodes=nodes)
    assert (fitted.places, fitted.live) == (5, (0, 1, 2, 3, 4))
    assert fitted.changes == (
        Change(60.0, removed=(0, 1, 3)),
        Change(90.0, added=(0, 3)),
        Change(120.0, removed=(2, 4)),
    )
    small = fit_to_job(parse_availability_trace(EVENTS), 4, nodes=((0, 1), (2, 3)))
    assert all(set(change.removed) | set(change.added) <= {0, 1, 2, 3} for change in small.changes)
    assert small.notes == ("the job's 2 nodes are drawn at random from the trace's 3 places",)
    large = fit_to_job(
        parse_availability_trace(EVENTS), 12, nodes=tuple((n, n + 6) for n in range(6))
    )
    assert large.changes[0].removed == (0, 1, 2, 3, 6, 7, 8, 9)


def test_a_node_is_there_while_all_of_it_is():
    gpus = AvailabilityTrace(
        name="gpus",
        places=6,
        live=(0, 1, 2, 3, 4),
        length_seconds=10.0,
        changes=(
            Change(1.0, removed=(1,)),
            Change(2.0, removed=(4,)),
            Change(3.0, added=(1, 5), removed=(2,)),
            Change(4.0, added=(4,)),
            Change(5.0, added=(2,)),
            Change(6.0, removed=(0, 1)),
        ),
    )
    together = with_node_failures(gpus, ((0, 4), (1, 2), (3,), (5,)))
    assert together.live == (0, 1, 2, 3, 4)
    assert together.changes == (
        Change(1.0, removed=(1, 2)),
        Change(2.0, removed=(0, 4)),
        Change(3.0, added=(5,)),
        Change(4.0, added=(0, 4)),
        Change(5.0, added=(1, 2)),
        Change(6.0, removed=(0, 1, 2, 4)),
    )


@given(seed=st.integers(0, 2**16), size=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_nodes_of_drawn_failures_are_whole_or_down(seed, size):
    drawn = draw_trace(failing(30, (3, 200)), 12, 2, seed)
    nodes = tuple(tuple(range(first, first + size)) for first in range(0, 12, size))
    together = with_node_failures(drawn, nodes)
    live, single, changes = (
        set(together.live),
        set(drawn.live),
        {change.seconds: change for change in together.changes},
    )
    for change in drawn.changes:
        single = single - set(change.removed) | set(change.added)
        if change.seconds in changes:
            of_nodes = changes[change.seconds]
            assert set(of_nodes.removed) <= live and not set(of_nodes.added) & live
            live = live - set(of_nodes.removed) | set(of_nodes.added)
        assert live == {place for node in nodes if set(node) <= single for place in node}
    assert size > 1 or together.changes == drawn.changes


def test_failures_come_at_the_rate_asked_for():
    failures = failing(100, repair_hours=1e-3, transient_share=0)
    assert draw_trace(failures, 200, 50).machine_losses == pytest.approx(
        200 * 50 * 24 / 100, rel=0.15
    )
    assert (
        draw_trace(failures, 10, 5, 1)
        == draw_trace(failures, 10, 5, 1)
        != draw_trace(failures, 10, 5, 2)
    )


def test_repairs_take_as_long_as_asked_for():
    lasting = draw_trace(failing(100, repair_hours=50, transient_share=0), 300, 40)
    brief = draw_trace(failing(100, repair_hours=50, transient_share=1, restart_hours=1), 300, 40)
    assert lasting.mean_live_machines / 300 == pytest.approx(100 / 150, abs=0.05)
    assert brief.mean_live_machines / 300 == pytest.approx(100 / 101, abs=0.01)


def test_nodes_and_racks_fail_together():
    failures = failing(1e7, (4, 300), (8, 1e9))
    trace = draw_trace(failures, 40, 20)
    assert trace.machine_losses and all(
        change.removed[0] % 4 == 0 and len(change.removed) == 4
        for change in trace.changes
        if change.removed
    )
    racks = draw_trace(failing(1e7, (8, 300)), 40, 20)
    assert all(len(change.removed) == 8 for change in racks.changes if change.removed)


def test_no_machine_dies_twice_or_returns_alive():
    trace = draw_trace(failing(5, (3, 20), repair_hours=5), 12, 10)
    live = set(trace.live)
    for change in trace.changes:
        assert live.issuperset(change.removed) and live.isdisjoint(change.added)
        live = live - set(change.removed) | set(change.added)


def test_llama_3_fails_every_three_hours():
    trace = draw_trace(FAILURE_MODELS["llama-3"], 16_384, 30)
    assert trace.seconds_between_failures / 3600 == pytest.approx(3.1, rel=0.15)


def test_more_failures_than_can_be_drawn_are_refused():
    with pytest.raises(ValueError, match="shorten it to at most 5 million"):
        draw_trace(failing(1e-9), 4, 1)
