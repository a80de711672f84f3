"""The timeline page, in a real browser: what it knows, what it draws, and what pointer and keys do."""

import json
import re
import shutil
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from cli.app import app
from cli.timeline_page import MAX_OPS, Shown, timeline_page
from planner.assemble import build_schedule
from planner.job import parse_job
from planner.normalise import PlanOptions, normalised
from planner.problem import build_problem
from schedules.codec import write
from schedules.graph import op_key, producers
from schedules.memory import memory_peaks
from schedules.schedule import COMPUTE_KINDS, Grid, OpKind, ProgramOp, Seat, Stage, Worker
from schedules.trace import MeasuredIteration, MeasuredOp, Trace, write_trace
from tests.generate import BROKEN, by_hand, list_schedule, schedules
from tests.jobs import grid

EXAMPLE = grid(3, 4, 6, times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 3",
               more="[memory]\ncapacity = 8\nactivation = 1\nweight_stash = 0.5")


def planned(job, failed=(), **options):
    problem = build_problem(job, failed, **options)
    return build_schedule(problem, list_schedule(problem), lower_bound=1, method="greedy")


@pytest.fixture(scope="module")
def schedule():
    return planned(EXAMPLE, [Worker(1, 2)])


def write_page(folder, *shown, measured=()):
    path = folder / "page.html"
    path.write_bytes(timeline_page([one if isinstance(one, Shown) else Shown(f"schedule {index}", one)
                                    for index, one in enumerate(shown)], measured))
    return path


@pytest.fixture
def page(chromium, tmp_path, schedule):
    with chromium.open(write_page(tmp_path, schedule)) as opened:
        opened.frame()
        yield opened


def measured_of(schedule, number=0, factor=1.5):
    return MeasuredIteration(number, tuple(
        MeasuredOp(op.worker, op.kind, op.stage, op.pipeline, op.microbatch, schedule.seconds(op.start_ticks) * factor,
                   schedule.seconds(op.end_ticks) * factor) for op in schedule.all_ops()))


def middle(page, kind, stage, pipeline, microbatch, panel=0):
    """Where an op is on the screen."""
    place = page.js(f"""(() => {{
        const ref = timeline.panels[{panel}].find(KINDS.indexOf("{kind}"), {stage}, {pipeline}, {microbatch});
        const box = timeline.painter.box(ref, timeline.rowOf), chart = timeline.chart.getBoundingClientRect();
        return [chart.left + (box.left + box.right) / 2, chart.top + box.middle]; }})()""")
    return tuple(place)


def chosen(page):
    return page.js("timeline.chosen && timeline.chosen.panel.title(timeline.chosen)")


def span(page):
    return page.js("timeline.times.t1 - timeline.times.t0")


# --- The file ---------------------------------------------------------------------------------------------------------


def test_one_file_that_needs_nothing(tmp_path, schedule):
    text = write_page(tmp_path, schedule).read_text()
    assert "http" not in re.sub(r'http-equiv="', "", text)
    assert "default-src 'none'" in text and "src=" not in text and "{{" not in text
    assert timeline_page([Shown("a", schedule)]) == timeline_page([Shown("a", schedule)])


def test_equal_programs_are_written_once(tmp_path):
    sizes = [len(timeline_page([Shown("a", planned(grid(count, 4, 8)))])) for count in (1, 64)]
    assert sizes[1] - sizes[0] < 64 * 4 * 40


def test_command(tmp_path, schedule):
    write(schedule, tmp_path / "broken.json")
    write(planned(EXAMPLE), tmp_path / "whole.json")
    write_trace(Trace(job="job", iterations=(measured_of(schedule, 3),)), tmp_path / "trace.json")
    both, one = [str(tmp_path / "whole.json"), str(tmp_path / "broken.json")], str(tmp_path / "broken.json")
    run = CliRunner().invoke
    done = run(app, ["show", *both, "--html", str(tmp_path / "both.html")])
    assert done.exit_code == 0 and "open it in a browser" in done.stderr
    answer = json.loads(run(app, ["show", *both, "--json"]).stdout)
    assert [each["failed"] for each in answer["schedules"]] == [[], ["1.2"]]
    assert run(app, ["show", one, "--measured", str(tmp_path / "trace.json"), "--html", str(tmp_path / "page.html"),
                     "--json"]).exit_code == 0
    assert "measured, iteration 3" in (tmp_path / "page.html").read_text()
    for option in ("--svg", "--perfetto", "--measured"):
        done = run(app, ["show", *both, option, str(tmp_path / "trace.json")])
        assert done.exit_code == 2 and option in done.stderr


def test_too_many_ops_are_refused(schedule):
    long = replace(schedule, programs=tuple((ProgramOp(OpKind.O, None, None, 0),) * (MAX_OPS // 4)
                                            for _ in schedule.programs))
    with pytest.raises(ValueError, match="too many for a page"):
        timeline_page([Shown("long", long)])


def test_scripts_parse():
    """Where there is no browser, at least a JavaScript engine should read them."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    text = timeline_page([Shown("a", by_hand(BROKEN))]).decode()
    script = text[text.rindex("<script>") + 8:text.rindex("</script>")]
    assert subprocess.run([node, "--check", "-"], input=script.encode(), timeout=60, check=False).returncode == 0


def test_names_are_never_markup(chromium, tmp_path, schedule):
    name = "</script><img src=x onerror=hacked=1><b>&amp; {{DATA}}"
    hostile = Shown(name, replace(schedule, job=name), violation=name)
    with chromium.open(write_page(tmp_path, hostile, schedule)) as page:
        assert page.js("document.title") == f"{name}, schedule 1 · Slipstream"
        assert page.js("document.querySelectorAll('img, .card b').length + (window.hacked ?? 0)") == 0
        assert name in page.js("document.querySelector('.card').textContent")
        assert page.requests() == [f"file://{tmp_path}/page.html"]


# --- What it knows, against the rooms ---------------------------------------------------------------------------------

DUMP = """timeline.panels.map((panel) => panel.seats.map((seat, number) => [...seat.track.kinds.keys()].map((index) => {
    const ref = { panel, seat: number, index }, op = panel.op(ref);
    return [KINDS[op.kind], op.stage, op.microbatch < 0 ? -1 : op.pipeline, op.microbatch, op.worker, op.start, op.end,
        panel.waits(ref).map((wait) => panel.title(wait.ref))]; })))"""


@settings(max_examples=3)
@given(st.lists(schedules(), min_size=12, max_size=12))
def test_ops_waits_and_memory_of_any_schedules(chromium, tmp_path_factory, many):
    """Split and fused, bidirectional, chunks, slow workers: as schedules.graph and schedules.memory have them."""
    with chromium.open(write_page(tmp_path_factory.mktemp("page"), *many)) as page:
        dumps = page.js(DUMP)
        units = page.js("timeline.panels.map((panel) => panel.second)")
        peaks = page.js("timeline.panels.map((panel) => panel.memory && panel.seats.map(s => panel.memoryOf(s).peak))")
        chains = page.js("timeline.panels.map((panel) => panel.critical.map(({ ref, wait, late }) => "
                         "[panel.op(ref).start, panel.op(ref).end, wait?.hop ?? 0, late]))")
    for schedule, dump, unit, peak, chain in zip(many, dumps, units, peaks, chains, strict=True):
        ticks = round(unit / schedule.tick_seconds)
        for seat, ops in zip(schedule.seats, dump, strict=True):
            expected = sorted(schedule.ops(seat.worker), key=lambda op: op.start_ticks)
            assert [(*op[:4], op[4], op[5] * ticks, op[6] * ticks) for op in ops] == [
                (op.kind, -1 if op.stage is None else op.stage, -1 if op.pipeline is None else op.pipeline,
                 -1 if op.microbatch is None else op.microbatch, str(op.worker), op.start_ticks, op.end_ticks)
                for op in expected]
            for one, told in zip(expected, ops, strict=True):
                assert_waits(schedule, one, told[7])
        assert peak is None or dict(zip((seat.worker for seat in schedule.seats), peak, strict=True)) == \
            memory_peaks(schedule)
        assert_critical(schedule, chain, ticks)


def assert_waits(schedule, op, told):
    if op.kind not in COMPUTE_KINDS:
        return
    by_key = {op_key(other): str(other) for other in schedule.all_ops() if other.kind in COMPUTE_KINDS}
    needed = {by_key[key] for key in producers(op_key(op), schedule.grid.depth) if key in by_key}
    assert needed <= set(told) and len(told) <= len(needed) + 1
    assert all(f"on {op.worker}" in other for other in set(told) - needed)


def assert_critical(schedule, chain, ticks):
    """The chain has no holes that it does not tell of, and lasts as long as the period or longer."""
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


# --- What it draws ----------------------------------------------------------------------------------------------------

COLOURS = """(() => {
    const { base } = timeline.painter, data = base.getContext("2d").getImageData(0, 0, base.width, base.height).data;
    const seen = {};
    for (let i = 0; i < data.length; i += 4) {
        const name = "#" + [data[i], data[i + 1], data[i + 2]].map((c) => c.toString(16).padStart(2, "0")).join("");
        seen[name] = (seen[name] ?? 0) + 1;
    }
    return seen; })()"""


def test_light_and_dark(page):
    light = page.js(COLOURS)
    assert max(light, key=light.get) == "#ffffff"
    for colour in ("#56b4e9", "#e69f00", "#009e73", "#b8b8b8"):
        assert light[colour] > 1000
    assert light["#b3261e"] > 500  # the dead worker's row
    page.prefer(dark=True)
    page.frame()
    dark = page.js(COLOURS)
    assert max(dark, key=dark.get) == "#14171a" and dark["#ff8a80"] > 500
    page.key("t")
    page.frame()
    light = page.js(COLOURS)
    assert max(light, key=light.get) == "#ffffff"  # though the system is dark
    page.key("t")
    assert page.js("document.documentElement.dataset.theme") == "dark"


def test_numbers_and_legend(page, schedule):
    card = page.js("document.querySelector('.card').innerText.replace(/\\s+/g, ' ')")
    assert f"period {schedule.seconds(schedule.period_ticks):g} s" in card
    assert "down 1.2" in card and "re-routed 6" in card and "bound" in card and "bubbles" in card
    legend = page.js("document.getElementById('legend').innerText")
    assert "F forward" in legend and "re-routed" in legend and "worker down" in legend
    assert "B backward" not in legend


def test_memory_strip(page):
    held = "#8096ad"
    assert page.js(COLOURS)[held] > 200
    page.click_on("#memory")
    page.frame()
    assert held not in page.js(COLOURS)
    page.js("timeline.chart.focus()")
    page.key("m")
    page.frame()
    assert page.js(COLOURS)[held] > 200
    assert "of 8" in page.js("timeline.rows.find((row) => row.seat).peak")


def test_scale_factor(chromium, tmp_path, schedule):
    with chromium.open(write_page(tmp_path, schedule), scale=2) as page:
        page.frame()
        assert page.js("timeline.painter.base.width") == 2 * page.js("timeline.chart.clientWidth")


# --- Pointer and keys -------------------------------------------------------------------------------------------------


def test_hover(page):
    page.move(*middle(page, "F", 2, 1, 1))
    page.frame()
    tip = page.js("document.getElementById('tip').innerText.replace(/\\s+/g, ' ')")
    host = "2.2" if "on 2.2" in tip else "0.2"
    assert f"F(micro-batch 1.1, stage 2) on {host}" in tip and f"host worker {host}" in tip
    assert "its own worker 1.2 is down" in tip and "waits for" in tip
    assert "its input: F(micro-batch 1.1, stage 1) on 1.1" in tip and "start" in tip and "end" in tip
    page.move(5, 5)
    assert page.js("document.getElementById('tip').hidden")


def test_click_follows_and_marks(page, tmp_path):
    plain = page.screenshot(tmp_path / "plain.png")
    page.click(*middle(page, "F", 1, 1, 3))
    page.frame()
    assert chosen(page) == "F(micro-batch 1.3, stage 1) on 1.1"
    assert page.js("timeline.marks().followed[0].path.length") == 8
    assert page.js("timeline.marks().followed[0].weights.length") == 4
    assert page.js("timeline.marks().path.length") > 8
    assert page.screenshot(tmp_path / "followed.png") != plain
    assert "Waits for" in page.js("document.getElementById('facts').innerText")
    page.click_on("#facts li button")
    assert chosen(page) != "F(micro-batch 1.3, stage 1) on 1.1"
    page.key("Escape")
    page.frame()
    assert chosen(page) is None and page.js("document.getElementById('details').hidden")
    assert page.js("timeline.marks().path.length") == 0


def test_critical_path_up_to_an_op(page):
    page.click(*middle(page, "I", 0, 1, 0))
    page.key("c")
    assert page.js("timeline.path") == "op"
    assert page.js("timeline.marks().path.at(-1).ref.index === timeline.chosen.index")
    assert "Chain up to it" in page.js("document.getElementById('facts').innerText")


def test_zoom_and_pan(page):
    whole = span(page)
    x, y = middle(page, "F", 1, 1, 3)
    for _ in range(4):
        page.wheel(x, y, dy=-120)
    page.frame()
    assert span(page) < whole / 2
    assert middle(page, "F", 1, 1, 3)[0] == pytest.approx(x, abs=40)  # what is under the pointer stays there
    before = page.js("timeline.times.t0")
    page.drag((x, y), (x - 60, y), (x - 200, y))
    assert page.js("timeline.times.t0") > before and chosen(page) is None
    before = page.js("timeline.times.t0")
    page.wheel(x, y, dx=-100)
    page.frame()
    assert page.js("timeline.times.t0") < before
    page.key("0")
    assert span(page) == pytest.approx(whole)
    page.key("+")
    assert span(page) == pytest.approx(whole / 1.5)
    page.key("-")
    page.click_on("#in")
    assert span(page) == pytest.approx(whole / 1.5)
    before = page.js("timeline.times.t0")
    page.key("ArrowRight")
    assert page.js("timeline.times.t0") > before
    page.key("ArrowLeft")
    assert page.js("timeline.times.t0") == pytest.approx(before)


def test_grouping(page):
    heads = "timeline.rows.filter((row) => row.head).map((row) => row.head)"
    assert page.js(heads) == ["Pipeline 0", "Pipeline 1", "Pipeline 2"]
    page.key("g")
    assert page.js(heads) == ["Stage 0", "Stage 1", "Stage 2", "Stage 3"]
    assert page.js("document.getElementById('group').value") == "stage"
    page.frame()
    page.click(*middle(page, "W", 3, 2, 5))
    assert chosen(page) == "W(micro-batch 2.5, stage 3) on 2.3"


def test_equal_pipelines_once(chromium, tmp_path):
    """200 pipelines, one broken: a few rows; following a hidden one shows all again."""
    with chromium.open(write_page(tmp_path, planned(grid(200, 2, 4), [Worker(150, 1)]))) as page:
        heads = page.js("timeline.rows.filter((row) => row.head).map((row) => row.head)")
        assert len(heads) < 10 and any("the same programs" in head for head in heads) and "Pipeline 150" in heads
        page.key("d")
        assert page.js("document.getElementById('said').textContent") == "Worker 150.1 is down"
        hidden = page.js("""[...Array(200).keys()].find((pipeline) =>
            !timeline.rows.some((row) => row.pipeline === pipeline && row.seat))""")
        assert page.js(f"timeline.find('{hidden}.1')")
        assert page.js("timeline.rows.filter((row) => row.head).length") == 200
        assert not page.js("document.getElementById('equal').checked")
        page.frame()
        assert page.js("timeline.painter.box(timeline.chosen, timeline.rowOf).visible")


def test_keyboard_alone(page):
    """From op to op, choosing, finding; help; and every control can be reached with Tab."""
    page.js("timeline.chart.focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.key(key, shift=True)
    assert "on 0.1" in page.js("document.getElementById('said').textContent")
    page.key("Enter")
    assert "on 0.1" in chosen(page)
    page.key("Escape")
    page.key("/")
    assert page.js("document.activeElement.id") == "find"
    for letter in "1.9":
        page.key(letter)
    page.key("Enter")
    assert page.js("document.activeElement.getAttribute('aria-invalid')") == "true"
    page.js("document.activeElement.value = '1.3'")
    page.key("Enter")
    assert chosen(page) == "F(micro-batch 1.3, stage 0) on 1.0"
    page.key("?")
    assert page.js("document.getElementById('help').open")
    page.key("Escape")
    assert not page.js("document.getElementById('help').open") and chosen(page) is not None
    page.js("document.activeElement.blur()")
    seen = set()
    for _ in range(16):
        page.key("Tab")
        seen.add(page.js("document.activeElement.id"))
    assert {"group", "path", "memory", "find", "out", "in", "whole", "theme", "ask", "chart", "close"} <= seen


def test_planned_beside_measured(chromium, tmp_path, schedule):
    iterations = [measured_of(schedule, 3, 1.2), measured_of(schedule, 4, 1.4)]
    with chromium.open(write_page(tmp_path, schedule, measured=iterations)) as page:
        page.frame()
        assert page.js("timeline.shown.map((panel) => panel.name)") == ["schedule 0", "measured, iteration 4"]
        page.key("b")
        labels = page.js("timeline.rows.filter((row) => !row.head).map((row) => row.label)")
        assert labels[:4] == ["0.0 A", "0.0 C", "0.1 A", "0.1 C"]
        page.frame()
        page.click(*middle(page, "F", 2, 0, 0, panel=2))
        assert page.js("timeline.marks().followed.length") == 2
        page.click_on("[data-panel='1']")
        assert page.js("timeline.shown.length") == 3
        card = page.js("document.querySelectorAll('.card')[2].innerText.replace(/\\s+/g, ' ')")
        assert f"period {schedule.seconds(schedule.period_ticks) * 1.4:.4g} s planned" in card


def long_schedule(workers, microbatches):
    """Not valid, but long: workers that run F, I and W in turn, each by a program of its own."""
    length = 3
    ops = [tuple(ProgramOp(kind, 0, m, (m * 3 + place) * length + m % (w + 2), 1 if m % 17 == w % 17 and w else None)
                 for m in range(microbatches) for place, kind in enumerate((OpKind.F, OpKind.I, OpKind.W)))
           for w in range(workers)]
    shape = Grid(pipelines=workers, columns=1, microbatches=(microbatches,) * workers, stages=(Stage(column=0),))
    base = planned(parse_job("pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 2\nbackward_input = 2\n"
                             "backward_weight = 2"))
    times = replace(base.times, forward=(2,), backward_input=(2,), backward_weight=(2,))
    return replace(base, grid=shape, times=times, programs=tuple(ops), period_ticks=9 * microbatches,
                   seats=tuple(Seat(Worker(w, 0), Worker(w, 0), w) for w in range(workers)))


def test_a_hundred_thousand_ops(chromium, tmp_path):
    """Zooming and panning draws in a few milliseconds; the limit leaves room for a busy machine without a GPU."""
    with chromium.open(write_page(tmp_path, long_schedule(64, 530))) as page:
        page.frame()
        page.js("""(async () => {
            timeline.drawn.length = 0;
            for (let i = 0; i < 40; i++) {
                if (i < 20) timeline.zoom(0.75, 700); else if (i < 30) timeline.pan(0.1); else timeline.zoom(1.9, 500);
                await new Promise(requestAnimationFrame);
            } })()""")
        drawn = sorted(page.js("timeline.drawn"))
        assert len(drawn) >= 30 and drawn[len(drawn) // 2] < 50, drawn
