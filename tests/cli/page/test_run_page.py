"""The page of a run, and `slipstream show --run` in the terminal.

The page is tested in a real browser and without scripts.
"""

import json
import re

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.drawing.run_charts import MAX_POINTS, build_points, choose_ticks, find_settling
from slipstream.cli.run_page import MAX_EVENTS, run_page
from slipstream.cli.run_page import _read_schedules as read_schedules
from slipstream.cli.shared.summaries import describe_event, event_group, schedule_path
from slipstream.runtime.run_record import read_run
from slipstream.schedules.codec import encode
from slipstream.schedules.schedule import Slow, Worker
from tests.cli.runs import SAMPLES, Writer, long_run, settled_run


def show(*arguments):
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    return settled_run(tmp_path / "run")


@pytest.fixture
def file(folder, tmp_path):
    page = tmp_path / "page.html"
    done = show("--run", folder, "--html", page)
    assert done.exit_code == 0, done.output
    assert f"written to {page}" in done.stderr
    return page


@pytest.fixture
def page(chromium, file):
    with chromium.open(file) as opened:
        yield opened


def view(page):
    return page.js("[page.t0, page.t1]")


# --- The terminal ---------------------------------------------------------------------------------


def test_in_the_terminal(folder):
    done = show("--run", folder)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "example <b>: still running, or was killed · 31 of 1000 iterations in 86.2 s · "
        "11.5 samples/s · 4 workers · 1 failure"
    )
    rows = [" ".join(line.split()) for line in lines[2:6]]
    assert rows == [
        "5.0 s 0-10 whole 4 1 s 100 % 1.8 s 100 % 16",
        "28.0 s 11-16 at once 3 2 s 50 % 3.6 s 50 % 8",
        "52.2 s 17-24 settled 3 1.25 s 80 % 2.25 s 80 % 12.8",
        "74.2 s 25-30 whole 4 1 s 100 % 1.8 s 100 % 16",
    ]
    text = done.stdout
    for said in (
        "worker 1.1 was killed by <SIGKILL>",
        "after a pause of 250 ms",
        "workers 0.1, 1.0 fetch 3 layers",
        "layers are to move: 100 MB in 8 s would make the period 1.25 s instead of 2 s, which "
        "pays after 9",
        "restarted from iteration 25",
        "ended early: node 0 was asked to end",
    ):
        assert said in text
    assert all(len(line) <= 80 for line in lines[1:6])


def test_as_json(folder):
    done = show("--run", folder, "--json")
    answer = json.loads(done.stdout)
    assert (answer["iterations"], answer["of"], answer["starts"], answer["failures"]) == (
        31,
        1000,
        2,
        1,
    )
    assert answer["longest_pause"] == 0.25 and answer["state"] == "still running, or was killed"
    settled = answer["orders"][2]
    assert (
        settled["phase"] == "settled"
        and settled["planned_share"] == settled["measured_share"] == 0.8
    )
    assert settled["throughput"] == SAMPLES / 2.5 and settled["first_iteration"] == 17
    assert show(settled["schedule"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--run", "nowhere"],
            "nowhere: no such folder; give the --out folder of slipstream train",
        ),
        (["--run", "x", "schedule.json"], "--run shows a run: leave out schedule files"),
        (["--run", "x", "--svg", "y.svg"], "--run shows a run: leave out --svg"),
        ([], "give schedule files, or --run DIR"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(arguments, says):
    refused = show(*arguments)
    assert refused.exit_code == 2 and refused.stderr == f"slipstream: {says}\n"


def test_half_a_line_is_refused_before_a_page_is_written(folder, tmp_path):
    file = folder / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    refused = show("--run", folder, "--html", tmp_path / "page.html")
    assert (
        refused.exit_code == 2
        and "is cut off" in refused.stderr
        and refused.stderr.count("\n") == 1
    )
    assert not (tmp_path / "page.html").exists()


# --- The file -------------------------------------------------------------------------------------


def test_one_file_that_needs_nothing_and_takes_no_text_for_markup(file):
    text = file.read_text()
    assert "http" not in re.sub(
        r'http-equiv="|http://www.w3.org/2000/svg', "", text.replace("http-equiv=\\", "")
    )
    assert "{{DATA}}" not in text.partition('id="data"')[0] and "src=" not in text
    assert "<SIGKILL>" not in text and "example <b>" not in text and "example &lt;b&gt;" in text


def test_without_scripts_all_is_there(file, chromium):
    """But the buttons, which do nothing then."""
    file.write_text(re.sub(r"<script>.*</script>", "", file.read_text(), flags=re.DOTALL))
    with chromium.open(file) as page:
        assert page.js("[...document.querySelectorAll('#orders tbody tr')].length") == 4
        assert "worker 1.1 was killed by <SIGKILL>" in page.js(
            "document.getElementById('events').innerText"
        )
        assert page.js("document.getElementById('tools').offsetHeight") == 0
        box = page.js(
            "(() => { const b = document.querySelector('.chart.throughput path.line:last-of-type')"
            ".getBoundingClientRect(); return [b.width, b.height]; })()"
        )
        assert box[0] > 700 and box[1] > 50
        marks = page.js("[...document.querySelectorAll('.mark')].map((one) => one.offsetLeft)")
        assert len(marks) > 10 and marks == sorted(marks) and marks[-1] > 700
        links = page.js(
            "[...document.querySelectorAll('[data-schedule]')].map((one) => "
            "one.getAttribute('href'))"
        )
        assert len(links) == 4 and all((file.parent / link).is_file() for link in links)


def test_charts_hold_what_was_measured(folder):
    run = read_run(folder)
    found = build_points(run)
    assert [point.count for point in found] == [1] * 31
    assert found[1].rate == pytest.approx(16) and found[11].rate == pytest.approx(SAMPLES / 4.25)
    assert find_settling(run) == [(pytest.approx(44.25), pytest.approx(52.25))]


def test_a_long_run_stays_small(tmp_path):
    """Each point of a run of 20,000 iterations stands for many of them.

    None are lost, and no point spans two orders.
    """
    run = read_run(long_run(tmp_path / "run", 20_000, 1000))
    found = build_points(run)
    assert (
        len(found) <= MAX_POINTS + len(run.generations)
        and sum(point.count for point in found) == 20_000
    )
    assert {point.count for point in found} == {10}
    for point in found:
        assert point.slowest <= point.rate <= point.fastest
    text = run_page(run, tmp_path / "page.html")
    assert len(text) < 1_500_000 and b"Each point of the charts is up to 10 iterations" in text


def test_more_events_than_a_page_has_room_for(tmp_path):
    """The failures stay longest."""
    run = read_run(long_run(tmp_path / "run", 8 * MAX_EVENTS // 3, 2 * 2))
    text = run_page(run, tmp_path / "page.html").decode()
    kept = len(re.findall(r'<tr id="event-', text))
    assert kept <= MAX_EVENTS and "events are left out" in text
    assert len(re.findall(r'class="mark failure"', text)) == kept == MAX_EVENTS * 2 // 3


def test_a_run_that_has_just_begun_has_a_page(tmp_path, chromium):
    writer = Writer(tmp_path / "run")
    writer.start()
    (tmp_path / "page.html").write_bytes(run_page(read_run(writer.close()), tmp_path / "page.html"))
    with chromium.open(tmp_path / "page.html") as page:
        page.key("+")
        assert "started" in page.js("document.getElementById('events').innerText")


def test_a_schedule_that_is_gone_is_said_to_be(folder, tmp_path):
    for path in (folder / "schedules").iterdir():
        path.unlink()
    text = run_page(read_run(folder), tmp_path / "page.html").decode()
    assert "(not there)" in text and "data-schedule=" not in text.partition("<script")[0]


def test_every_kind_of_event_has_words(folder):
    for event in read_run(folder).events:
        assert describe_event(event.event) and (
            event_group(event.event) or event.event.__class__.__name__ == "FetchProgressed"
        )


@pytest.mark.parametrize("total", [0.001, 1, 45, 700, 4000, 90_000, 3e6])
def test_axes_have_round_times(total):
    found = choose_ticks(total)
    assert 2 <= len(found) <= 14 and found[-1] <= total


# --- The browser ----------------------------------------------------------------------------------


def test_zoom_and_keys(page):
    total = page.js("page.total")
    assert view(page) == [0, total]
    page.key("+")
    page.key("ArrowRight")
    first, last = view(page)
    assert 0 < first < last < total and last - first == pytest.approx(total / 1.5)
    box = page.js("document.querySelector('.chart.loss svg').getAttribute('viewBox')").split()
    assert [float(box[0]), float(box[2])] == pytest.approx([first, last - first])
    page.key("0")
    assert view(page) == [0, total]
    page.key("t")
    assert page.js("document.documentElement.dataset.theme") == "light"
    page.key("?")
    assert page.js("document.getElementById('help').open")


def test_from_event_to_event(page):
    page.key("ArrowRight", shift=True)
    page.key("ArrowRight", shift=True)
    page.key("ArrowRight", shift=True)
    said = page.js("document.getElementById('said').textContent")
    assert said == "28.0 s: worker 1.1 was killed by <SIGKILL>"
    assert page.js("document.querySelector('tr.chosen').innerText").split("\t")[-1] in said
    page.key("Enter")
    first, last = view(page)
    assert first < 28 < last and last - first < 10
    page.key("ArrowLeft", shift=True)
    assert page.js("document.getElementById('said').textContent").endswith(
        "whole: 4 workers train, with a period of 1 s planned"
    )
    page.key("Escape")
    assert page.js("document.querySelectorAll('.chosen').length") == 0


def test_what_is_known_of_a_time(page):
    text = page.js("page.known(60)")
    assert text.split("\n")[1:] == [
        "settled, 3 workers, from 52.2 s on, planned at 80 % of fault-free",
        "iteration 20",
        "12.80 samples/s",
        "loss 2.0000",
    ]
    page.js("document.querySelector('#orders tbody tr:nth-child(2) a').click()")
    assert view(page) == pytest.approx([28, 52.25], abs=0.01)


def test_light_and_dark(page):
    back = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.js(back) == "rgb(255, 255, 255)"
    page.prefer(dark=True)
    assert page.js(back) == "rgb(20, 23, 26)"


def test_a_schedule_opens_its_timeline(page, chromium, tmp_path):
    """The page that a click opens, which is in this one."""
    opened = page.js("""new Promise((opened) => {
        window.open = opened;
        document.querySelector("[data-schedule]").click(); })""")
    assert opened.startswith("blob:")
    text = page.js(
        "page.timeline(document.querySelectorAll('[data-schedule]')[1].dataset.schedule)"
    )
    (tmp_path / "timeline.html").write_text(text)
    with chromium.open(tmp_path / "timeline.html") as timeline:
        timeline.frame()
        card = timeline.js("document.querySelector('.card').innerText.replace(/\\s+/g, ' ')")
        assert card.startswith("at once, 3 workers") and "down 1.1" in card


def test_a_schedule_too_large_for_the_page_leaves_room_for_smaller_ones(folder, monkeypatch):
    run = read_run(folder)
    ops = [sum(map(len, schedule.programs)) for _, schedule in read_schedules(run).values()]
    assert len(ops) == 2 and ops[0] != ops[1]
    for room in (min(ops), max(ops)):
        monkeypatch.setattr("slipstream.cli.run_page.MAX_OPS", room)
        (kept,) = (schedule for _, schedule in read_schedules(run).values())
        fitting = [count for count in ops if count <= room]
        assert sum(map(len, kept.programs)) == fitting[0]


def test_a_program_counts_once_for_each_speed_at_which_workers_run_it(
    folder, tmp_path, monkeypatch
):
    run = read_run(folder)
    digest = run.generations[0].order.schedule
    _, schedule = read_schedules(run)[digest]
    slow = replace(schedule.times, slow=(Slow(Worker(1, 0), 2000),))
    schedule_path(run, run.generations[0]).write_bytes(encode(replace(schedule, times=slow)))
    stored = sum(map(len, schedule.programs))
    for room, is_shown in ((stored, False), (stored + len(schedule.programs[0]), True)):
        for module in ("run_page", "timeline_page"):
            monkeypatch.setattr(f"slipstream.cli.{module}.MAX_OPS", room)
        page = tmp_path / f"{room}.html"
        done = show("--run", folder, "--html", page)
        assert done.exit_code == 0, done.output
        assert (digest in read_schedules(run)) == is_shown


def test_the_start_of_a_run_is_named(file):
    text = file.read_text()
    assert '<rect class="starting" x="0.000" width="5.000"' in text, "until its first order"
    assert '<i class="swatch starting"></i>starting' in text
