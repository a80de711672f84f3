"""The timeline page as a file.

It needs nothing else, and is what `slipstream show` writes.
"""

import json
import re
import shutil
import subprocess

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.timeline_page import MAX_OPS, ShownSchedule, timeline_page
from slipstream.schedules.codec import write
from slipstream.schedules.measured_trace import MeasuredTrace, write_measured_trace
from slipstream.schedules.schedule import OpKind, ProgramOp
from tests.cli.page.pages import EXAMPLE, write_page
from tests.generate import BROKEN, by_hand, measured_of, planned
from tests.jobs import grid
from tests.patience import SECONDS


def test_one_file_that_needs_nothing(tmp_path, schedule):
    text = write_page(tmp_path, schedule).read_text()
    assert "http" not in re.sub(r'http-equiv="', "", text)
    assert "default-src 'none'" in text and "src=" not in text and "{{" not in text
    assert timeline_page([ShownSchedule("a", schedule)]) == timeline_page(
        [ShownSchedule("a", schedule)]
    )


def test_equal_programs_are_written_once(tmp_path):
    sizes = [
        len(timeline_page([ShownSchedule("a", planned(grid(count, 4, 8)))])) for count in (1, 64)
    ]
    assert sizes[1] - sizes[0] < 64 * 4 * 40


def test_command(tmp_path, schedule):
    write(schedule, tmp_path / "broken.json")
    write(planned(EXAMPLE), tmp_path / "whole.json")
    write_measured_trace(
        MeasuredTrace(job="job", iterations=(measured_of(schedule, 3),)), tmp_path / "trace.json"
    )
    both, broken = (
        [str(tmp_path / "whole.json"), str(tmp_path / "broken.json")],
        str(tmp_path / "broken.json"),
    )
    run = CliRunner().invoke
    done = run(app, ["show", *both, "--html", str(tmp_path / "both.html")])
    assert done.exit_code == 0 and "open it in a browser" in done.stderr
    answer = json.loads(run(app, ["show", *both, "--json"]).stdout)
    assert [each["failed"] for each in answer["schedules"]] == [[], ["1.2"]]
    assert (
        run(
            app,
            [
                "show",
                broken,
                "--measured",
                str(tmp_path / "trace.json"),
                "--html",
                str(tmp_path / "page.html"),
                "--json",
            ],
        ).exit_code
        == 0
    )
    assert "measured, iteration 3" in (tmp_path / "page.html").read_text()
    for option in ("--svg", "--perfetto", "--measured"):
        done = run(app, ["show", *both, option, str(tmp_path / "trace.json")])
        assert done.exit_code == 2 and option in done.stderr


def test_too_many_ops_are_refused(schedule):
    long = replace(
        schedule,
        programs=tuple(
            (ProgramOp(OpKind.O, None, None, 0),) * (MAX_OPS // 4) for _ in schedule.programs
        ),
    )
    with pytest.raises(ValueError, match="too many for a page"):
        timeline_page([ShownSchedule("long", long)])


def test_scripts_parse():
    """Where there is no browser, at least a JavaScript engine should read them."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    text = timeline_page([ShownSchedule("a", by_hand(BROKEN))]).decode()
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    assert (
        subprocess.run(
            [node, "--check", "-"], input=script.encode(), timeout=SECONDS, check=False
        ).returncode
        == 0
    )


def test_names_are_never_markup(chromium, tmp_path, schedule):
    name = "</script><img src=x onerror=hacked=1><b>&amp; {{DATA}}"
    hostile = ShownSchedule(name, replace(schedule, job=name), violation=name)
    with chromium.open(write_page(tmp_path, hostile, schedule)) as page:
        assert page.js("document.title") == f"{name}, schedule 1 · Slipstream"
        assert (
            page.js("document.querySelectorAll('img, .card b').length + (window.hacked ?? 0)") == 0
        )
        assert name in page.js("document.querySelector('.card').textContent")
        assert page.requests() == [f"file://{tmp_path}/page.html"]
