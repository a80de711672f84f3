import io
import json
from collections import defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.drawing.op_labels import worker_label
from slipstream.cli.drawing.svg_timeline import draw_schedule
from slipstream.cli.drawing.text_timeline import MAX_ROWS, draw_timeline
from slipstream.cli.exporters.perfetto import perfetto_trace
from slipstream.cli.shared.summaries import gap_text
from slipstream.cli.timeline_page import ShownSchedule, timeline_page
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_with
from slipstream.schedules.codec import write
from slipstream.schedules.layers import compact_layers_text
from slipstream.schedules.measured_trace import MeasuredTrace, write_measured_trace
from slipstream.schedules.schedule import Memory, OpKind, Worker
from tests.general import general_schedules, layers_moved
from tests.generate import BROKEN, HEALTHY, by_hand, measured_of, planned, schedules
from tests.jobs import grid

SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments):
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def drawn(schedule, width=80, **console):
    console = Console(width=width, record=True, **console)
    with console.capture() as capture:
        console.print(draw_timeline(schedule, width))
    return capture.get().splitlines()


# --- The terminal ---------------------------------------------------------------------------------


def test_timeline_without_colour():
    lines = [line.rstrip() for line in drawn(by_hand(BROKEN), width=80)]
    assert lines[:6] == [
        "     |0 s      |1        |2        |3        |4        |5        |6        |7",
        "0.0  F0   F1   ··········I0   ···············I1   W0   W1   A    O",
        "0.1       F0   f1.0 I0   i1.0 F1   f1.1 I1   i1.1 W0   W1   w1.0 w1.1 A    O",
        "",
        "1.0  F0   F1   ···············I0   W0   ··········I1   W1   A    O",
        "1.1  ╳ down ────────────────────────────────────────────────────────────────────",
    ]
    assert lines[6:] == [
        " F  forward   I  backward (input)   W  backward (weights)   A  all-reduce",
        " O  optimizer  · idle  f1.3 re-routed: micro-batch 3 of pipeline 1",
    ]


def test_timeline_in_colour():
    console = Console(width=80, force_terminal=True, color_system="truecolor", no_color=False)
    with console.capture() as capture:
        console.print(draw_timeline(by_hand(BROKEN), 80))
    assert "\x1b[30;48;2;86;180;233mF0   F1   \x1b[0m" in capture.get()
    assert "\x1b[1;4;30;48;2;86;180;233mf1.0 \x1b[0m" in capture.get()


def test_equal_pipelines_are_drawn_once():
    lines = drawn(planned(grid(64, 4, 4)))
    assert [line for line in lines if "pipelines" in line] == ["x 64: pipelines 0-63 alike"]
    assert len(lines) <= 9
    lines = drawn(planned(grid(12, 3, "[4, 4, 4, 2, 4, 4, 4, 4, 4, 4, 4, 4]")))
    assert [line for line in lines if line.startswith(("x ", "pipeline"))] == [
        "x 11: pipelines 0-2, 4-11 alike",
        "pipeline 3",
    ]
    lines = drawn(planned(grid(2, 2, 4)))
    assert [line for line in lines if "pipeline" in line] == ["x 2: pipelines 0-1 alike"]


def test_broken_pipelines_are_always_drawn():
    """Each of the 23 others helps pipeline 20, so that no two run the same."""
    lines = [line.rstrip() for line in drawn(planned(grid(24, 4, 24), [Worker(20, 2)]))]
    assert any(line.startswith("20.2  ╳ down") for line in lines)
    assert len(lines) < 2 * MAX_ROWS
    assert "and 12 more pipelines" in lines


@settings(max_examples=30)
@given(schedules())
def test_any_schedule_fits_the_width(schedule):
    for width in (40, 133):
        assert all(len(line) <= width for line in drawn(schedule, width))


def test_no_gap_is_shown_as_none():
    assert [gap_text(gap) for gap in (0, 1e-9, 0.0123)] == ["0.00%", "0.01%", "1.23%"]


def test_reductions_beside_other_ops_are_not_in_the_legend_as_drawn():
    job = grid(
        2,
        2,
        3,
        times="forward = 2\nbackward_input = 2\nbackward_weight = 2\nall_reduce = 1\n",
        more="[network]\noverlap = true\n",
    )
    text = "\n".join(drawn(plan_with(PlanOptions(steps=1000), job, ()).schedule, 80))
    assert "all-reduces run beside other ops, not drawn" in text and "A  all-reduce" not in text


def test_summary(tmp_path):
    memory = Memory(unit=0.5, capacity=(9, 9), activation=(2, 2), weight_stash=(1, 1))
    write(by_hand(BROKEN, memory=memory), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json", "--width", 100)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == (
        "by hand: period 7 s · bound 500 ms, gap 1300.00% · bubbles 28.6% · 1 down, "
        "2 re-routed · peak memory 2 to 3, in the job file's unit"
    )
    answer = json.loads(run(tmp_path / "plan.json", "--json").stdout)
    assert answer.pop("bubble_share") == pytest.approx(12 / 42)
    assert answer == {
        "job": "by hand",
        "period": 7.0,
        "lower_bound": 0.5,
        "gap": 13.0,
        "status": "feasible",
        "method": "hand",
        "backward": "split",
        "optimizer": "staggered",
        "workers": 3,
        "failed": ["1.1"],
        "rerouted": 2,
        "shed": 0,
        "holds": {},
        "moves": [],
        "bound_scope": "whole stages",
        "peak_memory": 3.0,
        "measured": [],
    }


def test_a_broken_rule_is_named(tmp_path):
    write(by_hand(HEALTHY, period_ticks=5), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json")
    assert done.exit_code == 0
    assert "breaks rules (period" in done.stderr


def test_program_of_a_worker(tmp_path):
    write(by_hand(HEALTHY), tmp_path / "s.json")
    printed = run(tmp_path / "s.json", "--program", "0.1").output.splitlines()
    assert printed[:2] == ["1RECV_F0.0 from 0.0 #0", "1F0.0"] and printed[-1] == "O"
    assert (
        json.loads(run(tmp_path / "s.json", "--program", "0.1", "--json").output)["program"]
        == printed
    )


def test_a_program_goes_with_no_drawing(tmp_path):
    write(by_hand(HEALTHY), tmp_path / "s.json")
    asked = run(tmp_path / "s.json", "--program", "0.1", "--html", tmp_path / "page.html")
    assert (
        asked.exit_code == 2
        and "leave out --html" in asked.stderr
        and not (tmp_path / "page.html").exists()
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [("7.0", "has no program for this worker; expected one of 0.0,"), ("x", "'x' is not a worker")],
)
def test_a_program_that_is_not_there(tmp_path, name, said):
    write(by_hand(HEALTHY), tmp_path / "s.json")
    asked = run(tmp_path / "s.json", "--program", name)
    assert asked.exit_code == 2 and said in " ".join(asked.output.split())


def test_measured_in_the_terminal(tmp_path):
    schedule = by_hand(BROKEN)
    write(schedule, tmp_path / "plan.json")
    write_measured_trace(
        MeasuredTrace(job="by hand", iterations=(measured_of(schedule),)), tmp_path / "trace.json"
    )
    done = run(tmp_path / "plan.json", "--measured", tmp_path / "trace.json")
    assert "measured, iteration 0: longest busy window 10.5 s" in done.stdout.splitlines()
    assert done.stdout.count("╳ down") == 2
    answer = json.loads(
        run(tmp_path / "plan.json", "--measured", tmp_path / "trace.json", "--json").stdout
    )
    assert answer["measured"] == [{"iteration": 0, "period": 10.5}]


def test_a_trace_of_another_job(tmp_path):
    write(by_hand(BROKEN), tmp_path / "plan.json")
    other = MeasuredTrace(job="by hand", iterations=(measured_of(by_hand(HEALTHY)),))
    write_measured_trace(other, tmp_path / "trace.json")
    done = run(tmp_path / "plan.json", "--measured", tmp_path / "trace.json")
    assert done.exit_code == 2
    assert "worker 1.1 is not one of the live workers" in done.stderr
    done = run(tmp_path / "plan.json", "--measured", tmp_path / "plan.json")
    assert done.exit_code == 2
    assert "not a Slipstream trace" in done.stderr


def test_perfetto_cannot_be_written(tmp_path):
    write(by_hand(BROKEN), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json", "--perfetto", tmp_path)
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


# --- Perfetto -------------------------------------------------------------------------------------


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def slices_of(events):
    """(process, thread) -> its slices in order, as (begin, end, event) in nanoseconds."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = nanoseconds(event["ts"])
            threads[event["pid"], event["tid"]].append(
                (begin, begin + nanoseconds(event["dur"]), event)
            )
    for slices in threads.values():
        slices.sort(key=lambda item: item[:2])
    return threads


def assert_well_formed(events):
    """Assert what Perfetto asks.

    Threads are named, slices do not overlap, and both ends of a flow lie inside a slice.
    """
    threads = slices_of(events)
    named = {(event["pid"], event["tid"]) for event in events if event.get("name") == "thread_name"}
    processes = {event["pid"] for event in events if event.get("name") == "process_name"}
    assert set(threads) <= named
    assert {pid for pid, _ in threads} <= processes
    for slices in threads.values():
        for (_, end, _), (begin, _, _) in pairwise(slices):
            assert end <= begin
    ends = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
    for flow in ends.values():
        assert set(flow) == {"s", "f"} and flow["f"]["bp"] == "e"
        source, target = (enclosing(threads, flow[side]) for side in "sf")
        assert source["args"]["microbatch"] == target["args"]["microbatch"]
        assert source["args"]["pipeline"] == target["args"]["pipeline"]
        (first, end), (begin, last) = sorted(layers_in(part) for part in (source, target))
        assert first < end == begin < last  # neighbours on the route
    return len(ends)


def layers_in(event):
    first, _, last = event["args"]["layers"].partition("-")
    return int(first), int(last or first) + 1


def enclosing(threads, event):
    at = nanoseconds(event["ts"])
    (found,) = [
        slice_ for begin, end, slice_ in threads[event["pid"], event["tid"]] if begin <= at < end
    ]
    return found


def test_perfetto_structure():
    schedule = by_hand(BROKEN)
    events = json.loads(perfetto_trace(schedule, [measured_of(schedule)]))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "planned pipeline 0",
        "planned pipeline 1",
        "measured pipeline 0",
        "measured pipeline 1",
    ]
    # 4 micro-batches, forth and back, planned and measured.
    assert assert_well_formed(events) == 2 * 8
    (first, *_) = [
        event for event in events if event["name"] == "F 1.1" and event["args"]["stage"] == 1
    ]
    assert first | {"args": None} == {
        "ph": "X",
        "name": "F 1.1",
        "cat": "forward",
        "pid": 1,
        "tid": 2,
        "ts": 3_000_000,
        "dur": 500_000,
        "args": None,
    }
    assert first["args"] == {
        "stage": 1,
        "layers": "1",
        "pipeline": 1,
        "microbatch": 1,
        "rerouted": True,
        "shed": False,
    }
    measured = [event for event in events if event["ph"] == "X" and event["pid"] > 2]
    assert len(measured) == sum(1 for _ in schedule.all_ops())
    assert max(event["ts"] + event["dur"] for event in measured) == 1.5 * 7.5e6


def test_several_measured_iterations():
    schedule = by_hand(BROKEN)
    events = json.loads(
        perfetto_trace(schedule, [measured_of(schedule, 3), measured_of(schedule, 4)])
    )["traceEvents"]
    titles = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"measured iteration 3 pipeline 0", "measured iteration 4 pipeline 1"} <= titles
    assert_well_formed(events)


@settings(max_examples=30)
@given(schedules())
def test_perfetto_of_any_schedule(schedule):
    # Ticks that are no whole nanoseconds.
    fine = replace(schedule, tick_seconds=schedule.tick_seconds / 3e7)
    events = json.loads(perfetto_trace(fine, [measured_of(fine, factor=1.1)]))["traceEvents"]
    assert_well_formed(events)
    count = sum(1 for _ in schedule.all_ops())
    assert sum(event["ph"] == "X" for event in events) == 2 * count


def test_perfetto_file(tmp_path):
    write(by_hand(HEALTHY), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json", "--perfetto", tmp_path / "trace.json", "--json")
    assert done.exit_code == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {
        "forward",
        "backward_input",
        "backward_weight",
        "all_reduce",
        "optimizer",
    }
    assert OpKind.F in {event["name"][0] for event in events if event["ph"] == "X"}


# --- SVG ------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(schedules())
def test_picture_of_any_schedule(schedule):
    """An op is one titled rectangle, and no label is wider than it.

    Schedules are fused, bidirectional, or of several stages a worker.
    """
    root = ElementTree.fromstring(draw_schedule(schedule))
    titled = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    lasting = [op for op in schedule.all_ops() if op.end_ticks > op.start_ticks]
    assert sorted(box.find(f"{SVG}title").text for box in titled) == sorted(
        map(schedule.op_text, lasting)
    )
    framed = [box for box in titled if box.get("stroke") == "#111"]
    assert len(framed) == sum(
        op.pipeline not in (None, schedule.seat_of[op.worker].role.pipeline) for op in lasting
    )
    assert sum(text.text == "down" for text in root.iter(f"{SVG}text")) == len(schedule.failed)
    width = float(root.get("viewBox").split()[2])
    assert all(0 <= float(box.get("x")) <= width - float(box.get("width")) + 0.1 for box in titled)


def test_picture_has_a_time_axis_and_room_for_labels_of_what_is_re_routed():
    """An op has no room for five characters unless the picture is made wider."""
    schedule = planned(grid(2, 4, 12), [Worker(0, 1)])
    root = ElementTree.fromstring(draw_schedule(schedule))
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"0 s", "20"} <= texts and {f"f0.{number}" for number in range(12)} <= texts
    assert float(root.get("viewBox").split()[2]) > 1200
    healthy = ElementTree.fromstring(draw_schedule(planned(grid(2, 4, 12))))
    assert float(healthy.get("viewBox").split()[2]) == 1100


def test_picture_tells_stages_of_one_worker_apart():
    schedule = planned(grid(1, 2, 2, more="[placement]\norder = 'v'\nchunks = 2"))
    texts = {
        text.text for text in ElementTree.fromstring(draw_schedule(schedule)).iter(f"{SVG}text")
    }
    assert {"F0", "F1", "F0′", "F1′", "lighter, 1′: a worker's second stage"} <= texts


# --- Slices, layers held, shed micro-batches ------------------------------------------------------


def test_layers_moved_in_the_terminal(tmp_path):
    write(layers_moved(), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json", "--width", 150)
    assert done.exit_code == 0 and not done.stderr
    title, *lines = done.stdout.splitlines()
    assert "1 down, 2 re-routed · 1 shed" in title
    (row,) = [line for line in lines if line.startswith("1.0 [0-2]")]
    # Shed, of some layers, and nothing re-routed.
    assert "F0.1" in row and "F0:0-2" in row and "f" not in row
    (row,) = [line for line in lines if line.lstrip().startswith("0.1")]
    assert "f1.1" in row and "F1.1" not in row
    legend = done.stdout
    for text in (
        "f1.3 re-routed",
        "F1.3 shed: its own worker is alive",
        "F3:4-6 layers 4 to 6",
        "[4-6] holds layers",
    ):
        assert text in legend
    answer = json.loads(run(tmp_path / "plan.json", "--json").stdout)
    assert (answer["rerouted"], answer["shed"], answer["holds"]) == (2, 1, {"1.0": [[0, 3]]})


def test_layers_moved_as_a_picture():
    picture = draw_schedule(layers_moved()).decode()
    # F, I and W of one micro-batch, and the legend.
    assert picture.count('stroke-dasharray="3 2"') == 3 + 1
    for text in (
        "1.0 [0-2]",
        "<title>F(micro-batch 1.0, layers 0 to 2) on 1.0</title>",
        ">F0:0-2<",
        ">f1.1<",
        ">F0.1<",
        "re-routed (pipeline.micro-batch)",
        ">shed<",
        "F3:4-6: layers 4 to 6",
    ):
        assert text in picture
    assert "shed" not in draw_schedule(by_hand(BROKEN)).decode()


@settings(max_examples=30)
@given(general_schedules())
def test_no_name_of_a_worker_is_cut(schedule):
    """By the margin: where layers have moved, names are long.

    Layers that are left out are told by dots.
    """
    root = ElementTree.fromstring(draw_schedule(schedule))
    left = float(root.get("viewBox").split()[0])
    names = {
        text.text: float(text.get("x"))
        for text in root.iter(f"{SVG}text")
        if text.get("text-anchor") == "end"
    }
    assert len(names) == schedule.grid.pipelines * schedule.grid.columns
    # 6: of a letter of this size.
    assert all(left <= end - 6 * len(name) for name, end in names.items())
    for seat in schedule.seats:
        if schedule.has_moved_layers(seat):
            holding = compact_layers_text(schedule.held_layers_of_seat(seat))
            assert worker_label(seat.worker, schedule).endswith(
                f"[{holding}]" if len(holding) <= 12 else f"[{holding[:11]}…]"
            )


def test_layers_moved_in_perfetto():
    events = json.loads(perfetto_trace(layers_moved()))["traceEvents"]
    assert_well_formed(events)
    assert {"name": "worker 1.0, holds layers 0-2"} in [
        event["args"] for event in events if event["ph"] == "M"
    ]
    (part,) = [event for event in events if event["name"] == "F 1.0 layers 0-2"]
    assert part["args"] == {
        "layers": "0-2",
        "pipeline": 1,
        "microbatch": 0,
        "rerouted": False,
        "shed": False,
    }
    shed = {event["name"] for event in events if event["ph"] == "X" and event["args"]["shed"]}
    assert shed == {"F 0.1", "I 0.1", "W 0.1"}
    flows = [event for event in events if event["ph"] == "s"]
    assert len(flows) == 2 * 4  # each micro-batch changes its worker once, there and back


@settings(max_examples=40)
@given(general_schedules())
def test_layers_anywhere_are_drawn(schedule):
    # They are in the terminal, as a picture, for Perfetto and on a page: nothing is too odd to
    # draw.
    Console(file=io.StringIO(), width=100).print(draw_timeline(schedule, 100))
    ElementTree.fromstring(draw_schedule(schedule))
    assert_well_formed(json.loads(perfetto_trace(schedule))["traceEvents"])
    assert timeline_page([ShownSchedule("any", schedule)])


def test_a_trace_of_slices_that_the_schedule_does_not_have(tmp_path):
    schedule = layers_moved()
    write(by_hand(BROKEN), tmp_path / "plan.json")
    write_measured_trace(
        MeasuredTrace(job="j", iterations=(measured_of(schedule),)), tmp_path / "trace.json"
    )
    done = run(tmp_path / "plan.json", "--measured", tmp_path / "trace.json")
    assert done.exit_code == 2
    assert (
        "F on 0.1 is of slice 3; " in done.stderr
        and "plan.json has 2; give the schedule that" in done.stderr
    )


def test_a_folder_is_refused_with_the_option_for_runs(tmp_path):
    refused = run(tmp_path)
    assert (
        refused.exit_code == 2
        and f"a run is shown with `slipstream show --run {tmp_path}`"
        in refused.stderr.replace("\n", "")
    )
