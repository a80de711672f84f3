"""What the timeline page draws, in a real browser, and how fast."""

from msgspec.structs import replace

from slipstream.planner.job.file import parse_job
from slipstream.schedules.schedule import Grid, OpKind, ProgramOp, Seat, VirtualStage, Worker
from tests.cli.page.pages import write_page
from tests.general import layers_moved
from tests.generate import planned

COLOURS = """(() => {
    const { base } = timeline.painter;
    const { data } = base.getContext("2d").getImageData(0, 0, base.width, base.height);
    const seen = {};
    for (let i = 0; i < data.length; i += 4) {
        const parts = [data[i], data[i + 1], data[i + 2]];
        const name = "#" + parts.map((c) => c.toString(16).padStart(2, "0")).join("");
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
    memory_colour = "#8096ad"
    assert page.js(COLOURS)[memory_colour] > 200
    page.click_on("#memory")
    page.frame()
    assert memory_colour not in page.js(COLOURS)
    page.js("timeline.chart.focus()")
    page.key("m")
    page.frame()
    assert page.js(COLOURS)[memory_colour] > 200
    assert "of 8" in page.js("timeline.rows.find((row) => row.seat).peak")


def test_scale_factor(chromium, tmp_path, schedule):
    with chromium.open(write_page(tmp_path, schedule), scale=2) as page:
        page.frame()
        assert page.js("timeline.painter.base.width") == 2 * page.js("timeline.chart.clientWidth")


def long_schedule(workers, microbatches):
    """A schedule that is long, but not valid.

    Workers run F, I and W in turn, each by a program of its own.
    """
    length = 3
    ops = []
    for w in range(workers):
        program = []
        for m in range(microbatches):
            for place, kind in enumerate((OpKind.F, OpKind.I, OpKind.W)):
                start = (m * 3 + place) * length + m % (w + 2)
                program.append(ProgramOp(kind, 0, m, start, 1 if m % 17 == w % 17 and w else None))
        ops.append(tuple(program))
    shape = Grid(
        pipelines=workers,
        columns=1,
        microbatches=(microbatches,) * workers,
        stages=(VirtualStage(column=0),),
    )
    base = planned(
        parse_job(
            "pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 2\nbackward_input = 2\n"
            "backward_weight = 2"
        )
    )
    times = replace(base.times, forward=(2,), backward_input=(2,), backward_weight=(2,))
    return replace(
        base,
        grid=shape,
        times=times,
        programs=tuple(ops),
        period_ticks=9 * microbatches,
        seats=tuple(Seat(Worker(w, 0), Worker(w, 0), w) for w in range(workers)),
    )


def test_a_hundred_thousand_ops(chromium, tmp_path):
    """Zooming and panning draws as many shapes as the screen has room for.

    They are counted, not timed.
    """
    with chromium.open(write_page(tmp_path, long_schedule(64, 530))) as page:
        page.frame()
        drawn = page.js("""(async () => {
            let shapes = 0;
            const calls = ["fillRect", "strokeRect", "rect", "lineTo", "fillText", "drawImage"];
            for (const name of calls) {
                const draw = CanvasRenderingContext2D.prototype[name];
                CanvasRenderingContext2D.prototype[name] = function (...given) {
                    shapes++;
                    draw.apply(this, given);
                };
            }
            const frames = [];
            for (let i = 0; i < 40; i++) {
                const before = shapes;
                if (i < 20) timeline.zoom(0.75, 700);
                else if (i < 30) timeline.pan(0.1);
                else timeline.zoom(1.9, 500);
                await new Promise(requestAnimationFrame);
                frames.push(shapes - before);
            }
            return frames; })()""")
        assert sum(count > 0 for count in drawn) >= 30 and max(drawn) < 100_000 / 4, drawn


def test_colours_of_pipelines_and_layers_moved(chromium, tmp_path):
    """Of origin: blue, orange, ...

    by pipeline; shed ops have dashed frames, re-routed ones are hatched.
    """
    with chromium.open(write_page(tmp_path, layers_moved())) as page:
        page.frame()
        legend = page.js("document.getElementById('legend').innerText")
        assert (
            "re-routed: f1.3" in legend
            and "shed: the same" in legend
            and "layers 4 to 6, no whole stage" in legend
        )
        card = page.js("document.querySelector('.card').innerText.replace(/\\s+/g, ' ')")
        assert "re-routed 2 shed 1" in card
        assert page.js("timeline.rows.filter((row) => row.seat).map((row) => row.label)") == [
            "0.0",
            "0.1",
            "1.0 [0–2]",
        ]
        kinds = page.js(COLOURS)
        assert kinds["#009e73"] > 200 and "pipeline 0" not in legend
        page.js("timeline.chart.focus()")
        page.key("o")
        page.frame()
        origins = page.js(COLOURS)
        assert "#009e73" not in origins and origins["#56b4e9"] > kinds["#56b4e9"]
        assert "pipeline 0" in page.js("document.getElementById('legend').innerText")
        assert page.js("element('colour').value") == "origin"
        page.js("timeline.set('equal', true)")
        facts = (
            "(() => { const p = timeline.panels[0]; timeline.choose(p.find(F, %s)); "
            "return document.getElementById('facts').innerText; })()"
        )
        shed, rerouted, part = (
            page.js(facts % which) for which in ("0, 0, 1", "3, 1, 0", "2, 1, 0")
        )
        assert "its own worker 0.0 is alive" in shed and "holds\nlayers 0 to 2" in shed
        assert "its own worker 1.1 is down" in rerouted and "slice\nlayer 3" in rerouted
        assert "F(micro-batch 1.0, layers 0 to 2) on 1.0" in part


def test_blocks_of_many_ops_show_their_pipelines(chromium, tmp_path):
    with chromium.open(write_page(tmp_path, long_schedule(8, 800))) as page:
        page.js("timeline.setColour('origin')")
        page.frame()
        origins = page.js(COLOURS)
        assert origins["#56b4e9"] > 1000 and origins["#8fb8ff"] > 1000  # pipelines 0 and 7
