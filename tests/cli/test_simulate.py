"""`slipstream simulate`, `reproduce` and `jitter` as a user meets them."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.drawing.simulation_report import COLOURS, policy_colour
from slipstream.cli.simulate import DEFAULT_PARAMETERS
from slipstream.cli.simulate import _estimate_parameters as parameters_of
from slipstream.planner.job.file import read_job
from slipstream.planner.simulation import settled
from slipstream.planner.simulation.policies import POLICIES
from tests.browser import find_browser
from tests.patience import SECONDS

pytestmark = pytest.mark.usefixtures("counted_steps")

JOB = """
name = "small"
pipelines = 3
stages = 2
microbatches = 6
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 1
"""
TRACE = """2021-12-11, 10:00:00, 6
2021-12-11, 11:00:00, 5
2021-12-11, 12:00:00, 6
2021-12-11, 13:00:00, 4
2021-12-11, 14:00:00, 4
"""


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose folder is the present one.

    The plans for it are searched for a moment only.
    """
    monkeypatch.setattr(settled, "SETTLE_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.txt").write_text(TRACE)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_a_job_and_a_trace_are_enough(job, tmp_path):
    result = slipstream("simulate", job, "--trace", "trace.txt", "--html", "page.html")
    assert result.exit_code == 0 and all(name in result.stdout for name in POLICIES)
    assert "slipstream trains" in result.stdout and "x oobleck" in result.stdout
    assert "drawn at random: the file gives only their number" in result.stderr.replace("\n", " ")
    text = (tmp_path / "page.html").read_text()
    assert text.startswith("<!doctype html>") and "Hours lost to failures, by cause" in text
    assert text.count('<div class="wide">') == text.count('<div class="narrow">') == 2, (
        "bars with text of one size"
    )
    assert '<select id="theme">' in text and "dataset.theme" in text
    assert (
        "slipstream trains most: " in text and ", the last. With the same schedules it is " in text
    )
    assert "With the same schedules it is " in result.stdout, (
        "the first ratios also tell of the schedule"
    )
    assert "simulating: 13 of 13 runs" in result.stderr, "a log has no bar"
    # Nothing is fetched from anywhere.
    assert (
        "http" not in text.replace("http://www.w3.org/2000/svg", "")
        and "src=" not in text
        and "@import" not in text
    )


def test_a_new_policy_has_a_colour_of_its_own(job, monkeypatch):
    class Newcomer(POLICIES["recycle"]):
        name = "newcomer"

    monkeypatch.setitem(POLICIES, "newcomer", Newcomer)
    result = slipstream("simulate", job, "--trace", "trace.txt", "--html", "page.html")
    assert result.exit_code == 0, result.output
    colours = {name: policy_colour(name) for name in POLICIES}
    assert len(set(colours.values())) == len(POLICIES)
    assert colours["newcomer"] in Path("page.html").read_text()


def test_dead_workers_cost_what_plan_says_for_them(job):
    """The figure is that of `plan` where every worker keeps its layers.

    Micro-batches are cut in both.
    """
    job.write_text(JOB.replace("= 6", "= 5"))
    steps = ("--steps", 40_000)
    for dead in (["0.1"], ["0.1", "2.0"]):
        failed = [part for name in dead for part in ("--failed", name)]
        answer = json.loads(slipstream("simulate", job, *failed, "--json", *steps).stdout)
        assert answer["trace"]["removals"] == len(dead) and answer["trace"]["seconds"] == 86400
        rates = answer["policies"]
        plan = json.loads(slipstream("plan", job, *failed, "--json", *steps).stdout)
        assert rates["slipstream-fixed"] == pytest.approx(15 / plan["period"], rel=2e-3)
        moved = json.loads(
            slipstream("plan", job, *failed, "--layers", "move", "--json", *steps).stdout
        )
        assert rates["slipstream"] >= 15 / moved["period"] * (1 - 2e-3)
        assert rates["recycle"] <= rates["slipstream-fixed"] <= rates["slipstream"]
    said = slipstream(
        "simulate", job, "--failed", "0.1", "--policy", "slipstream", "--steps", 4000, "--seeds", 2
    )
    assert "all 2 runs over 0.1 dead would be equal" in said.stderr and "1 trace" in said.stdout
    said = slipstream(
        "simulate", job, "--failed", "0.1", "--policy", "slipstream", "--steps", 4000, "--days", 2
    )
    assert (
        "0.1 dead: 48 h, 1 worker lost" in said.stdout
        and "searched for 4,000 counted steps each" in said.stderr
    )


def test_slow_workers_of_the_job_are_told_to_be_left_out(job):
    job.write_text(JOB + 'slow = {"0.1" = 1.5}\n')
    result = slipstream("simulate", job, "--trace", "trace.txt", "--policy", "slipstream", "--json")
    assert result.exit_code == 0 and "time.slow is left out" in result.stderr


def test_memory_of_single_workers_is_told_to_be_left_out(job):
    simulated = ("simulate", job, "--trace", "trace.txt", "--policy", "slipstream", "--json")
    memory = "[memory]\ncapacity = 3\nactivation = 1\n"
    job.write_text(JOB + memory)
    usual = slipstream(*simulated)
    job.write_text(JOB + memory + 'capacity_of = {"2.0" = 1}\n')
    unlike = slipstream(*simulated)
    assert unlike.exit_code == 0 and "memory.capacity_of is left out" in unlike.stderr
    assert "left out" not in usual.stderr
    rates = [json.loads(result.stdout)["policies"] for result in (usual, unlike)]
    assert rates[0] == rates[1]


def test_json_names_every_policy_and_its_samples_a_second(job, tmp_path):
    result = slipstream("simulate", job, "--trace", "trace.txt", "--json")
    answer = json.loads(result.stdout)
    assert list(answer["policies"]) == list(POLICIES) and not list(tmp_path.glob("*.html"))
    assert answer["policies"]["slipstream"] > answer["policies"]["bamboo"] > 0
    assert answer["fault_free"]["slipstream"] == pytest.approx(18 / 19)
    assert answer["trace"]["seconds"] == 4 * 3600 and answer["trace"]["mean_live"] == pytest.approx(
        21 / 4
    )
    some = slipstream(
        "simulate",
        job,
        "--trace",
        "trace.txt",
        "--policy",
        "oobleck",
        "--policy",
        "recycle",
        "--json",
        "--html",
        tmp_path / "some.html",
    )
    assert (
        list(json.loads(some.stdout)["policies"]) == ["recycle", "oobleck"]
        and (tmp_path / "some.html").exists()
    )


def test_samples_are_counted_in_the_jobs_batch(job):
    base = json.loads(slipstream("simulate", job, "--trace", "trace.txt", "--json").stdout)[
        "policies"
    ]
    job.write_text(JOB + "[training]\nbatch = 4\n")
    four = json.loads(slipstream("simulate", job, "--trace", "trace.txt", "--json").stdout)[
        "policies"
    ]
    assert four["recycle"] == pytest.approx(4 * base["recycle"])
    assert four["slipstream"] == pytest.approx(4 * base["slipstream"])


def test_traces_are_drawn_where_none_is_given(job):
    arguments = ("simulate", job, "--mtbf", "20", "--days", "2", "--json")
    first, again = slipstream(*arguments, "--seed", 1), slipstream(*arguments, "--seed", 1)
    assert first.exit_code == 0 and again.exit_code == 0
    answer, same = json.loads(first.stdout), json.loads(again.stdout)
    assert answer["policies"] == same["policies"] and answer["trace"] == same["trace"]
    assert answer["trace"]["removals"] > 3 and "(--mtbf)" in answer["trace"]["notes"][0]
    many = json.loads(slipstream(*arguments, "--seeds", 20).stdout)
    assert many["seeds"] == 20 and many["spread"]["oobleck"]["p5"] < many["policies"]["oobleck"]
    assert "20 traces" in slipstream(*arguments[:-1], "--seeds", 20).stdout


def test_seeds_of_a_trace_that_leaves_nothing_to_draw_are_one_run(job, tmp_path):
    (tmp_path / "events.csv").write_text(
        "".join(f"0,add,m{index}\n" for index in range(6)) + "60000,remove,m1\n3600000,add,m7\n"
    )
    arguments = ("simulate", job, "--policy", "recycle", "--seeds", 50)
    result = slipstream(*arguments, "--trace", "events.csv", "--json")
    assert result.exit_code == 0 and "there is nothing to draw" in result.stderr
    assert json.loads(result.stdout)["seeds"] == 1
    # Says how many leave, not which.
    drawn = slipstream(*arguments, "--trace", "trace.txt", "--json")
    assert json.loads(drawn.stdout)["seeds"] == 50 and "nothing to draw" not in drawn.stderr


def test_the_report_has_the_fields_measures(job, tmp_path):
    job.write_text(JOB + "[model]\ncontext = 1024\n")
    arguments = (
        "simulate",
        job,
        "--trace",
        "trace.txt",
        "--policy",
        "slipstream",
        "--policy",
        "recycle",
    )
    answer = json.loads(slipstream(*arguments, "--json", "--html", "page.html").stdout)
    rate = answer["policies"]["slipstream"]
    assert answer["tokens_per_gpu_hour"]["slipstream"] == pytest.approx(
        rate * 1024 * 3600 / (21 / 4)
    )
    assert answer["goodput"]["slipstream"] == pytest.approx(
        rate / answer["fault_free"]["slipstream"]
    )
    assert (
        0.99 < answer["ettr"]["recycle"] < 1 and 0 < answer["seconds_to_recover"]["slipstream"] < 60
    )
    page = (tmp_path / "page.html").read_text()
    assert all(
        word in page
        for word in ("ETTR", "goodput", "s to recover", "tokens / GPU-hour", "HPCA 2025")
    )
    shown = slipstream(*arguments).stdout
    assert all(word in shown for word in ("ETTR", "goodput", "s to recover", "tokens/GPU-hour"))
    other = json.loads(slipstream(*arguments, "--json", "--tokens", 2048).stdout)
    assert other["tokens_per_gpu_hour"]["recycle"] == pytest.approx(
        2 * answer["tokens_per_gpu_hour"]["recycle"]
    )
    job.write_text(JOB)
    assert (
        json.loads(slipstream(*arguments, "--json").stdout)["tokens_per_gpu_hour"]["slipstream"]
        is None
    )


def test_a_reference_line_has_no_goodput(job, tmp_path):
    """The limit of all systems has no goodput.

    It was shown with more than 100 %, relative to the best of these.
    """
    # So that no system is at the limit.
    job.write_text(JOB.replace("microbatches = 6", "microbatches = 1"))
    (tmp_path / "calm.txt").write_text("2026-01-01, 00:00:00, 6\n2026-01-01, 23:00:00, 6\n")
    arguments = ("simulate", job, "--trace", "calm.txt", "--html", "page.html")
    answer = json.loads(slipstream(*arguments, "--json").stdout)
    references = {name for name, kind in POLICIES.items() if kind.is_reference}
    systems = {name: share for name, share in answer["goodput"].items() if name not in references}
    assert answer["policies"]["work-conserving"] > max(answer["policies"][name] for name in systems)
    assert 0 < min(systems.values()) <= max(systems.values()) <= 1
    assert all(answer["goodput"][name] is None for name in references)
    rows = slipstream(*arguments).stdout.splitlines()
    row = [line for line in rows if line.strip().startswith("work-conserving")][-1]
    assert row.split()[1:3] == ["100.0%", "-"]
    row = next(
        part
        for part in (tmp_path / "page.html").read_text().split("<tr")
        if "work-conserving</td>" in part
    )
    assert "<td>100.0%</td><td>-</td>" in row


def test_slow_workers_and_lost_gpus_in_a_trace(job, tmp_path):
    (tmp_path / "events.csv").write_text(
        "".join(f"0,add,m{index}\n" for index in range(6))
        + "60000,slow,m1,2\n900000,gpus,m2,3\n3600000,slow,m1,1\n"
    )
    arguments = ("simulate", job, "--trace", "events.csv", "--json")
    refused = slipstream(*arguments)
    assert refused.exit_code == 2 and "--gpus-per-worker" in refused.stderr
    answer = json.loads(slipstream(*arguments, "--gpus-per-worker", 4).stdout)
    assert (answer["trace"]["slowdowns"], answer["trace"]["partial_losses"]) == (1, 1)
    assert answer["policies"]["recycle"] < answer["policies"]["slipstream"]
    job.write_text(JOB + "[training]\ntensor_parallel = 4\n")
    again = json.loads(slipstream(*arguments).stdout)
    assert again["trace"] == answer["trace"], "a worker has as many GPUs as the job says"
    assert again["policies"] == answer["policies"]


def test_workers_of_a_node_fail_together(job, tmp_path):
    job.write_text(JOB + "[topology]\nworkers_per_node = 3\n")
    (tmp_path / "events.csv").write_text(
        "0,add,a\n0,add,b\n60000,remove,b\n1800000,add,b\n3600000,slow,a,1\n"
    )
    arguments = ("simulate", job, "--json", "--policy", "recycle", "--policy", "fault-scaled")
    recorded = json.loads(slipstream(*arguments, "--trace", "events.csv").stdout)["trace"]
    assert (recorded["workers"], recorded["removals"]) == (6, 3)
    drawn = json.loads(
        slipstream(*arguments, "--mtbf", "20", "--days", "2", "--gpus-per-worker", "2").stdout
    )["trace"]
    assert drawn["removals"] % 3 == 0 < drawn["removals"] and drawn["partial_losses"] == 0
    assert "2 nodes: a whole node is down while any machine of it is" in drawn["notes"]


@pytest.mark.slow
def test_slow_workers_are_drawn(job):
    arguments = (
        "simulate",
        job,
        "--mtbf",
        "20",
        "--days",
        "2",
        "--json",
        "--policy",
        "slipstream",
        "--policy",
        "recycle",
    )
    usual, slow = (
        json.loads(slipstream(*arguments, *more).stdout) for more in ((), ("--fail-slow",))
    )
    assert slow["trace"]["slowdowns"] > usual["trace"]["slowdowns"] == 0
    assert "Greyhound" in slow["trace"]["notes"][-1]
    assert slow["policies"]["recycle"] < usual["policies"]["recycle"]
    groups = json.loads(slipstream(*arguments, "--gpus-per-worker", 8).stdout)
    assert (
        groups["trace"]["partial_losses"] > 0
        and groups["policies"]["slipstream"] > groups["policies"]["recycle"]
    )


def test_periods_are_taken_from_a_table(job, tmp_path):
    planning = slipstream(
        "table", job, "--max-failures", 2, "--time-limit", 1, "--jobs", 1, "--out", "table"
    )
    assert planning.exit_code == 0
    result = slipstream("simulate", job, "--trace", "trace.txt", "--table", "table", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["policies"]["slipstream"] > 0
    job.write_text(JOB.replace("= 6", "= 5"))
    refused = slipstream("simulate", job, "--trace", "trace.txt", "--table", "table")
    assert refused.exit_code == 2 and "the table is of another job" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "none.txt"], "none.txt: cannot be read"),
        (["--trace", "job.toml"], "job.toml: line 2: 'name = \"small\"'; expected `YYYY"),
        (["--policy", "magic"], "--policy magic: expected one of slipstream, "),
        (
            ["--preset", "magic"],
            "--preset magic: expected one of llama-3, llama-3-domains, meta-rsc",
        ),
        (["--mtbf", "0.001", "--days", "30000"], "shorten it to at most 5 million"),
        (["--table", "none"], "--table: none"),
        (
            ["--trace", "trace.txt", "--fail-slow"],
            "--fail-slow: not with --trace; a trace has its own failures",
        ),
        (["--trace", "trace.txt", "--mtbf", 5], "a trace has its own failures"),
        (["--trace", "trace.txt", "--preset", "llama-3"], "--preset: not with --trace"),
        (["--trace", "trace.txt", "--days", 5], "--days: not with --trace"),
        (["--trace", "trace.txt", "--failed", "0.1"], "--failed: not with --trace"),
        (
            ["--failed", "0.1", "--mtbf", 5],
            "--mtbf: only where failures are drawn, not with --failed",
        ),
        (
            ["--failed", "3.0"],
            "--failed: the job has no worker 3.0; expected pipeline 0 to 2 and stage 0 to 1",
        ),
        (
            ["--seeds", 2, "--html", "page.html"],
            "--html: the report is of one trace; leave out --seeds",
        ),
        (["--trace", "trace.txt", "--html", "/dev/null/page.html"], "cannot be written"),
    ],
)
def test_bad_input_exits_2_with_one_line(job, arguments, says):
    job.write_text(JOB.replace("[time]", "[time]\nslow = {'0.0' = 2}"))
    result = slipstream("simulate", job, *arguments)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_job_without_any_plan_exits_1(job):
    job.write_text(JOB + "[memory]\ncapacity = 1\nactivation = 2\n")
    result = slipstream("simulate", job, "--trace", "trace.txt")
    assert result.exit_code == 1 and "no schedule can run it" in result.stderr


# --- The report in a browser ----------------------------------------------------------------------


@pytest.fixture
def browser():
    """The path of Chromium; skips, with the reason, where there is none."""
    try:
        return find_browser()
    except LookupError as error:
        pytest.skip(str(error))


def browse(browser, page, *options):
    """What a headless Chromium without any network makes of a page."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=2000",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        cwd=page.parent,
        env={"HOME": str(page.parent), "PATH": "/usr/bin:/bin"},
    ).stdout


def test_the_report_in_a_browser(browser, job, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    page = tmp_path / "page.html"
    assert slipstream("simulate", job, "--trace", "trace.txt", "--html", page).exit_code == 0
    browse(browser, page, "--window-size=1050,3000", f"--screenshot={tmp_path / 'page.png'}")
    pixels = (image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert pixels.shape == (3000, 1050, 3)
    for name in ("slipstream", "oobleck", "checkpoint-restart"):  # in legends, or drawn
        wanted = [int(COLOURS[name][index : index + 2], 16) for index in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(axis=2) < 8).sum() > 150, name
    filled = (pixels.min(axis=2) < 200).mean()
    assert 0.02 < filled < 0.4
    # Nothing is cut off to the right.
    assert (pixels[:, -20:].min(axis=2) < 250).mean() < 0.001


def test_lines_can_be_switched_off(browser, job, tmp_path):
    page = tmp_path / "page.html"
    assert slipstream("simulate", job, "--trace", "trace.txt", "--html", page).exit_code == 0
    text = page.read_text()
    first = [part.split(">")[0] for part in text.split("<polyline ")[1:]]
    before = {
        line.split('data-name="')[1].split('"')[0] for line in first if "display: none" not in line
    }
    assert "slipstream" in before and 3 <= len(before) <= 4  # and the live workers
    click = "".join(
        f"document.querySelector('input[value={name}]').click();"
        for name in ("slipstream", "bamboo")
    )
    page.write_text(text.replace("</body>", f"<script>{click}</script></body>"))
    shown = browse(browser, page, "--dump-dom")
    lines = [part.split(">")[0] for part in shown.split("<polyline ")[1:]]
    after = {
        line.split('data-name="')[1].split('"')[0] for line in lines if "display: none" not in line
    }
    assert len(lines) == len(POLICIES) + 1 and after == (before ^ {"slipstream", "bamboo"})


@pytest.mark.parametrize("more", [[], ["--shard-optimizer"]])
def test_a_job_from_a_preset_knows_how_many_parameters_it_has(more, tmp_path):
    path = tmp_path / "job.toml"
    assert slipstream("new", "--preset", "llama-3-8b", "--out", path, *more).exit_code == 0
    assert parameters_of(read_job(path)) == pytest.approx(8.03e9, rel=0.01)


def test_a_job_without_bytes_has_the_usual_number_of_parameters(job):
    assert parameters_of(read_job(job)) == DEFAULT_PARAMETERS
