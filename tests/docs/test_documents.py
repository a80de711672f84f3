"""The documents say what the code does.

Numbers are recomputed, named files exist, links lead somewhere.
"""

import json
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from slipstream.cli.app import app, load_command
from slipstream.cli.figures import failure_cost
from slipstream.planner import PlanOptions, parse_job, plan_job
from slipstream.planner.job.presets import preset_text
from slipstream.planner.plan import plan_only
from slipstream.schedules.schedule import Worker
from tests.patience import HEARTBEATS, SECONDS
from tests.runtime.launchers import Launcher

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]
)
README = (ROOT / "README.md").read_text()
FORMATS = (ROOT / "docs" / "formats.md").read_text()
SMALL = """
pipelines = 2
stages = 1
microbatches = 1
[time]
forward = 1
backward_input = 1
backward_weight = 1
[model]
blocks = 1
width = 8
heads = 1
context = 8
[training]
iterations = 2
batch = 1
device = "cpu"
"""
ONE = [Worker.parse("2.1")]
FIVE = [Worker.parse(name) for name in ("2.1", "5.0", "0.2", "7.3", "4.1")]


def test_lengths():
    assert len(README.splitlines()) <= 150
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("- "):
            rest = takewhile(lambda more: more.startswith("  "), lines[number + 1 :])
            assert 1 + len(list(rest)) <= 5, line


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists() or target.startswith("generated/"), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_rendered_with_their_pictures(path):
    """Pages are rendered as on GitHub, with each picture.

    Nothing of a link or a picture is left as text.
    """
    tokens = [
        child
        for token in MarkdownIt("commonmark").enable("table").parse(path.read_text())
        for child in token.children or ()
    ]
    for token in tokens:
        assert token.type != "text" or not re.search(r"!\[|\]\(", token.content), token.content
        if token.type == "image" and "://" not in str(token.attrs["src"]):
            assert (path.parent / str(token.attrs["src"])).is_file() or "generated/" in str(
                token.attrs["src"]
            )
    assert (
        path.name != "README.md"
        or path.parent != ROOT
        or "image" in {token.type for token in tokens}
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_modules_are_there(path):
    folders = ("schedules", "planner", "runtime", "cli", "tests", "examples", "benchmarks")
    modules = [
        f"/{module.relative_to(ROOT)}"
        for folder in folders
        for module in (ROOT / folder).rglob("*")
    ]
    invented = {"rerouting_1f1b.py", "my_llama.py"}
    for name in re.findall(r"`([\w/]+\.(?:py|js))[`:]", path.read_text()):
        assert name.split("/")[-1] in invented or any(
            module.endswith(f"/{name}") for module in modules
        ), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_such_options(path):
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for name, rest in re.findall(
                r"(?:^|[ ;])slipstream ([a-z]+)( [^;|>]*)?", line.partition("#")[0]
            ):
                load_command(name).make_context(f"slipstream {name}", shlex.split(rest))


def samples(row: str) -> list[float]:
    """The numbers of a row of README's table.

    They are with all workers alive, one dead and five dead.
    """
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {row}"))
    return [float(number) for number in re.findall(r"\| (\d+\.\d)", line)]


STEPS = 400_000
"""Steps of each plan: a fifth of those of README, which find nearly the same."""


@pytest.mark.parametrize(
    ("row", "plan"),
    [
        (
            "Slipstream, settled",
            lambda job, failed: plan_only(PlanOptions(steps=STEPS, layers="move"), job, failed),
        ),
        ("Slipstream, at once", lambda job, failed: plan_job(job, failed, steps=STEPS)),
    ],
)
def test_what_a_failure_costs(row, plan):
    """What is said is planned, or at most 2 % less.

    The table has the best of several plans.
    """
    job = parse_job(preset_text("llama-3-8b"))
    for failed, said in zip(([], ONE, FIVE), samples(row), strict=True):
        found = sum(job.microbatches) / plan(job, failed).period
        assert said * (1 - 0.02) <= found <= said * 1.02


def test_what_a_failure_costs_under_each_policy(tmp_path, counted_steps):
    """`simulate` prints what the table has.

    Rows of this planner are searched for, and asked of `plan` above.
    """
    job = tmp_path / "job.toml"
    job.write_text(preset_text("llama-3-8b"))
    rows = {
        name: text
        for name, text in failure_cost.POLICY_LABELS.items()
        if not name.startswith("slipstream")
    }
    chosen = [part for name in rows for part in ("--policy", name)]
    for place, dead in ((1, ONE), (2, FIVE)):
        failed = [part for worker in dead for part in ("--failed", str(worker))]
        done = CliRunner().invoke(
            app,
            [
                "simulate",
                str(job),
                *failed,
                "--steps",
                "2000000",
                "--parameters",
                "8e9",
                "--json",
                *chosen,
            ],
        )
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)
        for policy, row in rows.items():
            assert answer["policies"][policy] == pytest.approx(samples(row)[place], abs=0.06)
            # Less what checkpoints cost.
            assert answer["fault_free"][policy] >= samples(row)[0] - 0.06
    assert list(map(str, FIVE)) == list(failure_cost.DEAD_WORKERS)


def test_losses_of_the_table():
    """The percentages are against the first number of their row."""
    for line in README.splitlines():
        for number, percent in re.findall(r"(\d+\.\d) \(-(\d+) %\)", line):
            whole = float(re.search(r"\| (\d+\.\d) \|", line)[1])
            assert float(percent) == pytest.approx(100 * (1 - float(number) / whole), abs=0.8)


def test_tutorial_prints_what_the_commands_print(tmp_path, monkeypatch, counted_steps):
    """Each line of the tutorial's `plan` blocks is printed.

    Words are the same, and numbers nearly the same.
    """
    monkeypatch.chdir(tmp_path)
    slipstream("new", "--preset", "llama-3-8b", "--out", "job.toml")
    printed = " ".join(
        "".join(
            slipstream("plan", "job.toml", *options)
            for options in (
                (),
                ("--failed", "2.1"),
                ("--failed", "2.1", "--layers", "move", "--steps", str(STEPS)),
                ("--failed", "2.1", "--method", "1f1b"),
            )
        ).split()
    )
    blocks = re.findall(
        r"```text\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL
    )
    lines = [line.split("; planned in")[0] for block in blocks for line in block.splitlines()]
    claims = [line for line in lines if not line.startswith(("written to", "worker 1.1"))]
    assert len(claims) == 6
    number = re.compile(r"\d+(?:\.\d+)?")
    for claim in claims:
        pattern = f"({number.pattern})".join(map(re.escape, number.split(claim)))
        said = [float(text) for text in number.findall(claim)]
        found = [list(map(float, match.groups())) for match in re.finditer(pattern, printed)]
        tolerance_of = {True: 0.02, False: 0.2}
        tolerances = [tolerance_of["." in text] for text in number.findall(claim)]
        near = []
        for numbers in found:
            values = zip(numbers, said, tolerances, strict=True)
            if all(abs(value - other) <= tolerance * other for value, other, tolerance in values):
                near.append(numbers)
        assert near, (claim, found)
    assert "period 3.42 s" in printed


def slipstream(*arguments: str) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def named_files(heading: str) -> set[str]:
    """The first column of the table under a heading of docs/formats.md."""
    section = FORMATS.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def written_files(folder: Path) -> set[str]:
    """Files below a folder, numbers and digests as docs/formats.md names them."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for pattern, word in (
        (r"([-/])[0-9a-f]{16}\.", r"\1DIGEST."),
        (r"layer-\d{4}", "layer-NNNN"),
        (r"worker-\d+\.\d+", "worker-D.S"),
        (r"iteration-\d+", "iteration-N"),
        (r"(entries|parts)/[^/.]+", r"\1/KEY"),
    ):
        names = {re.sub(pattern, word, name) for name in names}
    return names


def test_formats_name_the_files_of_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(SMALL)
    slipstream(
        "table",
        "job.toml",
        "--max-failures",
        "1",
        "--method",
        "greedy",
        "--jobs",
        "1",
        "--out",
        "table",
    )
    assert written_files(tmp_path / "table") | {"parts/KEY.json.gz"} == named_files(
        "Table (folder)"
    )


def test_formats_name_the_files_of_a_run(tmp_path):
    (tmp_path / "job.toml").write_text(SMALL)
    status = Launcher(
        "tests.runtime.launchers:command_in",
        tmp_path,
        "train",
        "job.toml",
        "--checkpoint-every",
        1,
        *HEARTBEATS,
        "--out",
        "run",
        log=tmp_path / "said",
    ).wait(SECONDS)
    assert status == 0, (tmp_path / "said").read_text()
    saved = {f"checkpoints/iteration-N/{name}" for name in named_files("Checkpoint (folder)")}
    # Of other models; during a run.
    elsewhere = {
        "checkpoints/iteration-N/",
        "hugging-face/",
        ".running.json",
    }
    assert written_files(tmp_path / "run") == named_files("A run (folder)") - elsewhere | saved
