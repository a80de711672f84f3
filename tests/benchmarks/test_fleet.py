"""The benchmark: seeds side by side, sensitivity, and what it writes."""

import json
import math
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.fleet import __main__ as command
from benchmarks.fleet import cases as benchmark
from benchmarks.fleet.cases import CASES, Case, fidelity, job_of, returned, run_case, trace_of
from slipstream.planner.simulation.policies import POLICIES
from tests.patience import SECONDS

SMALL = Case(
    name="small",
    title="a small one",
    job="uniform-3",
    parameters=1e9,
    tokens=100,
    days=20,
    gpus_per_worker=2,
    failures="delta-a100",
    slow="greyhound",
    settle_seconds=0.01,
)
FEW = ("slipstream", "slipstream-fixed", "recycle", "torchft", "work-conserving")


@pytest.fixture
def small(monkeypatch):
    """Jobs of 4 stages and 6 micro-batches."""
    monkeypatch.setattr(benchmark, "LARGE_STAGES", 4)
    monkeypatch.setattr(benchmark, "LARGE_MICROBATCHES", 6)
    return SMALL


def test_seeds_side_by_side_are_those_one_after_the_other(small):
    names = FEW[1:]
    together = run_case(small, seeds=3, processes=2, names=names, sensitivity=False)
    alone = run_case(small, seeds=3, processes=1, names=names, sensitivity=False)
    assert [policy.name for policy in together.policies] == list(names)
    assert together == alone and together.failures > 10


def test_a_benchmark_that_is_ended_leaves_no_process_behind():
    """SIGTERM, as of a batch system, and SIGKILL."""
    script = (
        "import time; from benchmarks.fleet.cases import _side_by_side\n"
        "_side_by_side(lambda number: print(number, flush=True) or time.sleep(60), [0, 1], 2)"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        ) as process:
            for _ in range(2):
                process.stdout.readline()
            process.send_signal(number)
            process.communicate(timeout=SECONDS)  # until nobody holds the output's other end


def test_what_is_measured_adds_up(small):
    result = run_case(small, seeds=2, processes=1, names=FEW)
    assert (result.workers, result.gpus, result.hours) == (12, 24, 480.0)
    for policy in result.policies:
        for measures in policy.seeds:
            hours = sum(measures.hours_lost.values())
            assert policy.is_reference or hours == pytest.approx(480 * (1 - measures.goodput))
            assert measures.tokens == pytest.approx(measures.samples_per_second * 480 * 3600 * 100)
            assert measures.dollars_per_million_tokens == pytest.approx(
                2 * 24 * 480 / (measures.tokens / 1e6)
            )
            assert policy.is_reference or measures.hours_lost["slow links"] > 0
    widths = [abs(row.high - row.low) for row in result.sensitivity]
    assert widths == sorted(widths, reverse=True) and len(
        {row.parameter for row in result.sensitivity}
    ) == len(widths)
    by_name = {row.parameter: row for row in result.sensitivity}
    between = by_name["time between failures: half, twice"]
    assert between.low < between.high
    slow = by_name["slow workers and links: none, greyhound"]
    assert slow.low > slow.high
    switch = by_name["switch: 1 s, 180 s as FT-HSDP's stall"]
    assert switch.low > switch.high


def test_the_set_is_what_it_says():
    assert job_of(CASES["llama-3-70b"]).ranks == CASES["llama-3-70b"].gpus_per_worker
    for case in CASES.values():
        job = job_of(case)
        assert f"{job.pipelines * job.stages * case.gpus_per_worker:,} " in case.title
    assert trace_of(CASES["byterobust"], 75 * 16, 1) == trace_of(CASES["byterobust"], 75 * 16, 1)


def test_models_are_within_five_percent_of_what_was_published():
    """ReCycle, Oobleck, Bamboo: each figure that was published."""
    found = fidelity()
    assert {model.policy for model in found} == {"recycle", "oobleck", "bamboo"} and len(found) == 8
    assert max(abs(model.off) for model in found) < 0.05, found


def test_every_policy_says_what_it_is_taken_from():
    assert all(kind.source for kind in POLICIES.values())
    unpublished = {name for name, kind in POLICIES.items() if "our reading" in kind.source}
    assert unpublished == {"elaswave", "malleus", "resihp", "ft-hsdp"}


def test_what_comes_back(small):
    case = benchmark.msgspec.structs.replace(small, name="ft-hsdp")
    result = run_case(
        case, seeds=2, processes=1, names=("slipstream-fixed", "ft-hsdp"), sensitivity=False
    )
    assert returned([result]) == []
    ours = benchmark.msgspec.structs.replace(result.policies[0], name="slipstream")
    (back,) = returned(
        [benchmark.msgspec.structs.replace(result, policies=(ours, *result.policies[1:]))]
    )
    pairs = list(zip(result.policies[0].seeds, result.policies[1].seeds, strict=True))
    assert back.back.mean == pytest.approx(
        sum(measured.ettr - other.ettr for measured, other in pairs) / 2
    )
    assert back.back.mean > 0
    assert back.missing.mean == pytest.approx(1 - sum(other.ettr for _, other in pairs) / 2)
    assert back.kept.mean > 0 and not math.isnan(back.kept.deviation)


def run(*arguments):
    app = typer.Typer()
    app.command()(command.benchmark)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_writes_a_page_and_json(small, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CASES", {"small": small})
    table = {
        "format": "slipstream-entry-1",
        "name": "theirs",
        "title": "T <b>",
        "source": "S",
        "cases": {
            "small": [
                {"down": 0, "samples_per_second": 1.0},
                {"down": 3, "samples_per_second": 0.5},
            ]
        },
    }
    (tmp_path / "theirs.json").write_text(json.dumps(table))
    chosen = [part for name in FEW for part in ("--policy", name)]
    result = run(
        "--seeds",
        2,
        "--processes",
        1,
        "--out",
        tmp_path / "out",
        "--entry",
        tmp_path / "theirs.json",
        *chosen,
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert report["set"] == "1" and report["cpu_seconds"]["small"] > 0
    assert "theirs" in [policy["name"] for policy in report["cases"][0]["policies"]]
    assert len(report["cases"][0]["policies"][0]["seeds"]) == 2 and len(report["published"]) == 8
    page = (tmp_path / "out" / "benchmark.html").read_text()
    assert "T &lt;b&gt;" in page and "prefers-color-scheme: dark" in page
    tables = (tmp_path / "out" / "benchmark.md").read_text()
    assert (
        "| theirs | " in tables
        and "| small | switch: " in tables
        and "| bamboo | 350M, over the" in tables
    )
    assert "- **small**: a small one; seeds: 2" in tables
    assert "http" not in page.replace("http://www.w3.org", "")
    for name in FEW:
        assert name in page and name in result.stdout
    for text in ("small: a small one", "bamboo, 350M, over the published trace: published 11.86"):
        assert text in result.stdout


def test_cases_are_added_to_what_is_there(small, tmp_path, monkeypatch):
    """Each at its own number of seeds. What is not of this set is refused."""
    both = {name: benchmark.msgspec.structs.replace(small, name=name) for name in "ab"}
    for module in (command, benchmark):
        monkeypatch.setattr(module, "CASES", both)
    few = ("--policy", "torchft", "--processes", 1, "--out", tmp_path)
    assert run("--case", "b", "--seeds", 2, *few).exit_code == 0
    first = json.loads((tmp_path / "benchmark.json").read_text())["cases"]
    assert run("--case", "a", "--seeds", 1, "--add", *few).exit_code == 0
    cases = json.loads((tmp_path / "benchmark.json").read_text())["cases"]
    assert [case["case"]["name"] for case in cases] == ["a", "b"] and cases[1:] == first
    assert [len(case["policies"][0]["seeds"]) for case in cases] == [1, 2]
    assert (
        "- **a**: a small one; seeds: 1\n- **b**: a small one; seeds: 2"
        in (tmp_path / "benchmark.md").read_text()
    )
    both["b"] = small
    refused = run("--case", "a", "--seeds", 1, "--add", *few)
    assert (
        refused.exit_code == 2
        and "case b is not as in set 1 now; write to another folder" in refused.stderr
    )
    (tmp_path / "benchmark.json").write_text("{")
    refused = run("--case", "a", "--add", *few)
    assert (
        refused.exit_code == 2
        and "expected what `python -m benchmarks.fleet` writes" in refused.stderr
    )


def test_an_interrupt_keeps_the_cases_that_were_finished(small, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CASES", {"a": small, "b": small})
    results = iter([lambda: run_case(small, seeds=1, names=("torchft",), sensitivity=False)])

    def one_case(*_, **__):
        found = next(results, None)
        if found is None:
            raise KeyboardInterrupt
        return found()

    monkeypatch.setattr(command, "run_case", one_case)
    result = run("--out", tmp_path, "--policy", "torchft")
    assert result.exit_code == 130 and "some cases are missing" in result.stderr
    assert len(json.loads((tmp_path / "benchmark.json").read_text())["cases"]) == 1


@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        (
            "slipstream",
            "spot-24",
            "--entry slipstream: another system has this name; expected one of its own",
        ),
        ("mine", "spot-25", "--entry mine: cases.spot-25: expected one of spot-24, "),
    ],
)
def test_entries_have_names_of_their_own_and_cases_of_the_set(name, case, says, tmp_path):
    table = {
        "format": "slipstream-entry-1",
        "name": name,
        "title": "T",
        "source": "S",
        "cases": {case: [{"down": 0, "samples_per_second": 1.0}]},
    }
    (tmp_path / "a.json").write_text(json.dumps(table))
    result = run("--entry", tmp_path / "a.json", "--out", tmp_path)
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--case", "spot"], "--case spot: expected one of spot-24, "),
        (["--policy", "x"], "--policy x: expected one of slipstream, "),
        (["--entry", "x"], "--entry x: neither a .json file nor an installed entry point"),
        (["--entry", "x.json"], "--entry x.json: cannot be read"),
    ],
)
def test_wrong_options_are_refused_in_a_line(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr
