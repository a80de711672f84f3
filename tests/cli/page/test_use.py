"""The timeline page under pointer and keys, in a real browser."""

import pytest

from slipstream.schedules.schedule import Worker
from tests.cli.page.pages import chosen, middle, span, write_page
from tests.generate import measured_of, planned
from tests.jobs import grid


def test_hover(page):
    page.move(*middle(page, "F", 2, 1, 1))
    page.frame()
    tip = page.js("document.getElementById('tip').innerText.replace(/\\s+/g, ' ')")
    host = "2.2" if "on 2.2" in tip else "0.2"
    assert f"F(micro-batch 1.1, stage 2) on {host}" in tip and f"host worker {host}" in tip
    assert "its own worker 1.2 is down" in tip and "waits for" in tip
    assert (
        "its input: F(micro-batch 1.1, stage 1) on 1.1" in tip and "start" in tip and "end" in tip
    )
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
    # What is under the pointer stays there.
    assert middle(page, "F", 1, 1, 3)[0] == pytest.approx(x, abs=40)
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
        assert (
            len(heads) < 10
            and any("the same programs" in head for head in heads)
            and "Pipeline 150" in heads
        )
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
    assert {
        "group",
        "path",
        "memory",
        "find",
        "out",
        "in",
        "whole",
        "theme",
        "ask",
        "chart",
        "close",
    } <= seen


def test_planned_beside_measured(chromium, tmp_path, schedule):
    iterations = [measured_of(schedule, 3, 1.2), measured_of(schedule, 4, 1.4)]
    with chromium.open(write_page(tmp_path, schedule, measured=iterations)) as page:
        page.frame()
        assert page.js("timeline.shown.map((panel) => panel.name)") == [
            "schedule 0",
            "measured, iteration 4",
        ]
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


@pytest.mark.parametrize(("width", "share"), [(1400, 0.4), (500, 0.2)])
def test_most_of_the_screen_is_for_the_rows_of_two_schedules(
    width, share, chromium, tmp_path, schedule
):
    with chromium.open(write_page(tmp_path, schedule, schedule), width=width, height=850) as page:
        page.frame()
        assert (
            page.js("document.getElementById('chart').getBoundingClientRect().top / innerHeight")
            < share
        )
        clipped = page.js("""[...document.querySelectorAll('#tools select')].filter(select => {
            const longest = Math.max(...[...select.options].map(option => option.text.length));
            const width = select.getBoundingClientRect().width;
            return !select.closest('[hidden]') && width < 6 * longest; }).length""")
        assert clipped == 0


def test_no_label_of_a_re_routed_op_is_hatched(page):
    plates, hatched = page.js("""(() => {
        const painter = timeline.painter, batch = new Batch(), found = [];
        const add = batch.add.bind(batch);
        batch.add = (fill, x, y, w, h) => {
            if (fill === 'hatch') found.push([x, w]);
            add(fill, x, y, w, h);
        };
        painter.batch = batch;
        for (const row of timeline.rows.filter(one => one.seat)) painter.paintStrip(row, 0);
        const plates = batch.texts.filter(([, , , plate]) => plate);
        return [plates.length, plates.filter(([text, x]) => found.some(
            ([left, width]) => left < x && x < left + width
                && width - text.length * LETTER < 18)).length]; })()""")
    assert plates and not hatched
