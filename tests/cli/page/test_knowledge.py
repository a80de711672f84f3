"""The timeline page knows of schedules what the Python packages know.

It runs in a real browser.
"""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.normalise import normalised
from slipstream.planner.options import PlanOptions
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.precedence import op_key, producer_keys
from slipstream.schedules.schedule import COMPUTE_KINDS, Worker
from tests.cli.page.pages import write_page
from tests.general import general_schedules
from tests.generate import schedules
from tests.jobs import grid

DUMP = """timeline.panels.map((panel) => panel.seats.map((seat, number) =>
    [...seat.track.kinds.keys()].map((index) => {
    const ref = { panel, seat: number, index }, op = panel.op(ref);
    return [KINDS[op.kind], op.slice, op.microbatch < 0 ? -1 : op.pipeline, op.microbatch,
        op.worker, op.start, op.end,
        panel.waits(ref).map((wait) => panel.title(wait.ref))]; })))"""


@settings(max_examples=3)
@given(
    st.lists(schedules(), min_size=8, max_size=8),
    st.lists(general_schedules(), min_size=8, max_size=8),
)
def test_ops_waits_and_memory_of_any_schedules(chromium, tmp_path_factory, whole, general):
    """Split and fused, bidirectional, chunks, slow workers, layers anywhere: as `schedules` has
    them.
    """
    many = [*whole, *general]
    with chromium.open(write_page(tmp_path_factory.mktemp("page"), *many)) as page:
        dumps = page.js(DUMP)
        units = page.js("timeline.panels.map((panel) => panel.second)")
        origins = page.js(
            "timeline.panels.map((panel) => [panel.numbers.rerouted, panel.numbers.shed, "
            "...[0, 1].map("
            "(shed) => panel.seats.reduce((sum, { track }) => sum + "
            "[...track.kinds.keys()].filter((i) =>"
            " track.kinds[i] === F && track.pipelines[i] >= 0 && track.shed[i] === "
            "shed).length, 0))])"
        )
        peaks = page.js(
            "timeline.panels.map((panel) => panel.memory && panel.seats.map(s => "
            "panel.memoryOf(s).peak))"
        )
        chains = page.js(
            "timeline.panels.map((panel) => panel.critical.map(({ ref, wait, late }) => "
            "[panel.op(ref).start, panel.op(ref).end, wait?.hop ?? 0, late]))"
        )
    for schedule, (*counts, rerouted, shed) in zip(many, origins, strict=True):
        assert counts == [schedule.rerouted, schedule.shed] == [rerouted, shed]
    for schedule, dump, unit, peak, chain in zip(many, dumps, units, peaks, chains, strict=True):
        ticks = round(unit / schedule.tick_seconds)
        for seat, ops in zip(schedule.seats, dump, strict=True):
            expected = sorted(schedule.ops(seat.worker), key=lambda op: op.start_ticks)
            assert [(*op[:4], op[4], op[5] * ticks, op[6] * ticks) for op in ops] == [
                (
                    op.kind,
                    -1 if op.slice is None else op.slice,
                    -1 if op.pipeline is None else op.pipeline,
                    -1 if op.microbatch is None else op.microbatch,
                    str(op.worker),
                    op.start_ticks,
                    op.end_ticks,
                )
                for op in expected
            ]
            for planned_op, shown in zip(expected, ops, strict=True):
                assert_waits(schedule, planned_op, shown[7])
        assert peak is None or dict(
            zip((seat.worker for seat in schedule.seats), peak, strict=True)
        ) == memory_peaks(schedule)
        assert_critical(schedule, chain, ticks)


def assert_waits(schedule, op, shown_waits):
    if op.kind not in COMPUTE_KINDS:
        return
    by_key = {
        op_key(other): schedule.op_text(other)
        for other in schedule.all_ops()
        if other.kind in COMPUTE_KINDS
    }
    needed = {
        by_key[key]
        for key in producer_keys(op_key(op), schedule.route_of(op.pipeline, op.microbatch))
        if key in by_key
    }
    assert needed <= set(shown_waits) and len(shown_waits) <= len(needed) + 1
    assert all(f"on {op.worker}" in other for other in set(shown_waits) - needed)


def assert_critical(schedule, chain, ticks):
    """The chain tells of its holes, and lasts as long as the period or longer."""
    if not chain:
        return
    for (_, end, _, _), (start, _, hop, late) in pairwise(chain):
        assert late >= 0 and start == end + hop + late
    assert (chain[-1][1] - chain[0][0] + chain[0][3]) * ticks >= schedule.period_ticks


def test_moved_workers(chromium, tmp_path):
    job = grid(3, 3, 4, times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1")
    moved = normalised(job, (Worker(0, 1), Worker(1, 1)), PlanOptions(method="greedy")).schedule
    assert moved.moves
    with chromium.open(write_page(tmp_path, moved)) as page:
        labels = page.js("timeline.rows.filter((row) => row.seat).map((row) => row.label)")
        for seat in moved.moves:
            assert f"{seat.worker} as {seat.role}" in labels
        assert page.js("timeline.panels[0].follow(0, 0).path.length") == 6
