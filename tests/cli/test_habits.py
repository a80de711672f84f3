"""What every command has in common: completion, version, hints, colours, plain output in pipes,
Ctrl-C.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli.app import COMMANDS, app
from slipstream.schedules.codec import write
from tests.generate import BROKEN, by_hand
from tests.patience import SECONDS

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "cli" / "jobs"
SLIPSTREAM = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'slipstream'; from slipstream.cli.start import main; main()",
]
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])[;m]")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
}


def environment(**more):
    return {
        **ENVIRONMENT,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "TERM": "xterm-256color",
        **more,
    }


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    path = tmp_path_factory.mktemp("habits") / "schedule.json"
    write(by_hand(BROKEN), path)
    return path


# --- Version and hints ----------------------------------------------------------------------------


def test_version():
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"slipstream {expected}\n")


def test_version_of_a_source_tree_that_is_not_installed(monkeypatch):
    def none(name):
        raise PackageNotFoundError(name)

    expected = slipstream.__version__
    monkeypatch.setattr("importlib.metadata.distribution", none)
    assert slipstream.__version__ == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plann"], "no such command 'plann'; did you mean 'plan'? (see slipstream --help)"),
        (["chek", "x.json"], "did you mean 'check'?"),
        (["frobnicate"], "no such command 'frobnicate' (see slipstream --help)"),
        (["--verson"], "no such option: --verson; did you mean --version?"),
        (
            ["plan", "job.toml", "--faild", "1.2"],
            "did you mean --failed, --failed-node? (see slipstream plan --help)",
        ),
        (["plan"], "missing argument 'JOB' (see slipstream plan --help)"),
        (["plan", "job.toml", "--time-limit", "soon"], "invalid value for '--time-limit'"),
        (["lookup", "gpt-1.6b"], "did you mean 'gpt-1.5b'?"),
        (["plan", str(JOBS / "small-gpt.toml"), "--method", "cpsat"], "did you mean 'cp-sat'?"),
        (
            ["simulate", str(JOBS / "small-gpt.toml"), "--policy", "oblek"],
            "did you mean 'oobleck'?",
        ),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line_with_the_mend(arguments, says):
    result = CliRunner().invoke(app, arguments, prog_name="slipstream")
    assert result.exit_code == 2 and says in result.stderr
    assert (
        result.stderr.startswith("slipstream: ")
        and result.stderr.count("\n") == 1
        and not result.stdout
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("microbatchs = 2", "microbatches"), ("[tme]", "time"), ("[time]\nfoward = 1", "forward")],
)
def test_a_wrong_key_names_the_nearest(tmp_path, wrong, right):
    text = (
        "pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 1\n"
        "backward_input = 1\nbackward_weight = 1\n"
    )
    if wrong.startswith("[time]"):
        text = text.replace("[time]", wrong)
    else:
        text = f"{wrong}\n{text}" if "=" in wrong else f"{text}{wrong}\n"
    (tmp_path / "job.toml").write_text(text)
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "job.toml")])
    assert result.exit_code == 2 and f"did you mean '{right}'" in result.stderr.replace("time.", "")


def test_without_a_command_help_is_shown():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and "Usage: " in result.stdout and not result.stderr


# --- Completion -----------------------------------------------------------------------------------


def test_completion_in_bash(tmp_path):
    """By the script that --show-completion prints, in a real bash."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    program = tmp_path / "slipstream"
    program.write_text(
        f'#!{bash}\nexec {" ".join(map(repr, SLIPSTREAM[:2]))} "{SLIPSTREAM[2]}" "$@"\n'
    )
    program.chmod(0o755)
    script = """
        eval "$(slipstream --show-completion bash)"
        try() {
            COMP_WORDS=("$@")
            COMP_CWORD=$(($# - 1))
            _slipstream_completion slipstream
            echo "${COMPREPLY[*]}"
        }
        try slipstream pl
        try slipstream plan --fail
        try slipstream plan job.toml --method ''
        try slipstream lookup gpt-1
    """
    variables = environment(
        PATH=f"{tmp_path}:{os.environ['PATH']}", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    done = subprocess.run(
        [bash, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        env=variables,
    )
    assert done.stdout.splitlines() == [
        "plan",
        "--failed --failed-node",
        "cp-sat greedy 1f1b recycle",
        "gpt-1.5b",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_of_other_shells(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", shell], prog_name="slipstream")
    assert result.exit_code == 0 and "_SLIPSTREAM_COMPLETE=complete_" in result.stdout


# --- Colours and control characters ---------------------------------------------------------------


def quick_commands(folder, schedule):
    """Command lines that end soon, one for each command that can."""
    job = JOBS / "worked-example.toml"
    return {
        "plan": ["plan", job, "--failed", "1.2", "--method", "greedy"],
        "table": [
            "table",
            job,
            "--max-failures",
            "1",
            "--method",
            "greedy",
            "--jobs",
            "1",
            "--out",
            folder / "table",
        ],
        "lookup": ["lookup", "gpt-1.5b", "--failed", "2.5"],
        "check": ["check", schedule],
        "show": ["show", schedule, "--html", folder / "page.html"],
        "export": ["export", ROOT / "nowhere.json", "--to", "torch-csv"],
        "doctor": ["doctor", "--quick"],
        "help": ["--help"],
        "plan help": ["plan", "--help"],
        "refusal": ["plan", "\x1b[31mno\x1b[0m.toml"],
    }


@pytest.mark.slow
def test_no_control_characters_in_pipes(tmp_path, schedule, monkeypatch):
    for name in set(os.environ) - set(ENVIRONMENT):
        monkeypatch.delenv(name)
    for name, arguments in quick_commands(tmp_path, schedule).items():
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code in (0, 2), (name, result.output)
        assert not CONTROL.search(result.stdout + result.stderr), (name, result.output)


def in_terminal(arguments, **more):
    """What a program writes to a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*SLIPSTREAM, *map(str, arguments)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(**more),
        start_new_session=True,
    )
    os.close(follower)
    written = b""
    try:
        while data := _read(leader):
            written += data
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(leader)
    return written.decode()


def _read(leader):
    try:
        return os.read(leader, 65536)
    except OSError:  # Linux: the other end is closed
        return b""


def test_names_of_files_are_told_as_they_are(tmp_path):
    """Names of files with brackets and long ones are told as they are.

    Rich would take brackets for markup, and break what is longer than a line.
    """
    folder = tmp_path / ("long" * 30) / "["
    job, plan, order = folder / "b] [red].toml", folder / "b].json", folder / "b].csv"
    for arguments, words in (
        (["new", "--preset", "gpt-1.5b", "--out", job], job),
        (["plan", JOBS / "worked-example.toml", "--method", "1f1b", "--out", plan], plan),
        (["check", plan], plan),
        (["export", plan, "--out", order], order),
    ):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 0 and str(words) in result.output, (
            result.output,
            result.exception,
        )


def test_colours_in_terminals_unless_no_color(tmp_path, schedule):
    arguments = quick_commands(tmp_path, schedule)["show"]
    assert COLOUR.search(in_terminal(arguments))
    assert not COLOUR.search(in_terminal(arguments, NO_COLOR="1"))


# --- Where answers go -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
@pytest.mark.parametrize("name", ["check", "plan", "show", "plan help"])
def test_a_full_disk_is_told_in_one_line(name, tmp_path, schedule):
    arguments = quick_commands(tmp_path, schedule)[name]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*SLIPSTREAM, *map(str, arguments)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1]
        == "slipstream: the answer cannot be written: No space left on device"
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("name", ["check", "plan", "show"])
def test_a_reader_that_has_gone_is_no_error(name, tmp_path, schedule):
    reader, writer = os.pipe()
    os.close(reader)
    arguments = quick_commands(tmp_path, schedule)[name]
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [*SLIPSTREAM, *map(str, arguments)],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 141, "1 would say that a schedule breaks a rule"
    assert not re.search("Traceback|Exception|Broken", done.stderr), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", JOBS / "worked-example.toml", "--out"],
        ["profile", "--out"],
        ["reproduce", "failure-cost", "--out"],
        ["simulate", JOBS / "worked-example.toml", "--html"],
        ["show", "--run", ".", "--html"],
        ["show", "none.json", "--svg"],
        ["show", "none.json", "--perfetto"],
        ["export", "none.json", "--out"],
    ],
)
@pytest.mark.parametrize(
    ("place", "reason"), [("folder", "Is a directory"), ("file/below", "Not a directory")]
)
def test_no_work_is_done_whose_outcome_cannot_be_written(arguments, place, reason, tmp_path):
    (tmp_path / "folder" / "failure-cost.json").mkdir(parents=True)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [*map(str, arguments), str(tmp_path / place)])
    assert result.exit_code == 2 and result.stdout == ""
    assert f"cannot be written: {reason}" in result.stderr and result.stderr.count("\n") == 1


def test_no_demonstration_begins_whose_runs_have_no_folder(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--short", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "schedule.json: cannot be written: Not a directory" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", JOBS / "worked-example.toml", "--out"],
        ["new", "--preset", "gpt-1.5b", "--out"],
        ["lookup"],
        ["check"],
        ["simulate", JOBS / "worked-example.toml", "--table"],
        ["train", JOBS / "small-gpt.toml", "--resume"],
    ],
)
def test_a_path_that_cannot_even_be_looked_at_is_refused(arguments):
    """A path whose lookup fails is refused, as in a folder of somebody else's.

    Here its name is too long, which root meets, too.
    """
    result = CliRunner().invoke(app, [*map(str, arguments), "x" * 300])
    assert result.exit_code == 2 and result.stdout == "" and "File name too long" in result.stderr
    assert result.stderr.count("\n") == 1


# --- Ctrl-C ---------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading
from slipstream.cli import app
load = app.load_command

def loaded(name):
    command = load(name)
    timer = threading.Timer({delay}, lambda: os.killpg(0, signal.SIGINT))
    timer.daemon = True
    timer.start() if {delay} else os.killpg(0, signal.SIGINT)
    return command

app.load_command = loaded
from slipstream.cli.start import main
main()
"""
"""Send Ctrl-C so many seconds after the module of a command has been imported.

A terminal sends it to all processes of the command.
"""

LONG = {
    "profile": (["profile"], 1.0),
    "simulate": (
        ["simulate", JOBS / "worked-example.toml", "--days", "3000", "--seeds", "500"],
        0.5,
    ),
    "jitter": (["jitter", "SCHEDULE", "--replays", "1000000"], 0.5),
    "doctor": (["doctor"], 0.5),
    "demo": (["demo", "--out", "OUT"], 0.5),
}
"""Command lines that take long, and when to strike.

The others are struck as they begin; what Ctrl-C leaves of a plan, a table and a training run is
tested with those.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_clean(name, tmp_path, schedule):
    """Exit 130; no traceback; no process is left."""
    arguments, delay = LONG.get(name, ([name], 0))
    places = {"SCHEDULE": schedule, "OUT": tmp_path / "out"}
    command = [
        sys.executable,
        "-c",
        INTERRUPTED.format(delay=delay),
        *(str(places.get(argument, argument)) for argument in arguments),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        gone = ended(process.pid)
        if not gone:
            os.killpg(process.pid, 9)
            process.wait(10)
    assert process.returncode == 130, (process.returncode, errors)
    assert (
        "Traceback" not in errors
        and "Exception ignored" not in errors
        and not CONTROL.search(errors)
    ), errors
    assert "interrupted" in errors and gone, errors


def ended(group, seconds=60):
    """Whether all processes of a group end soon."""
    for _ in range(seconds * 20):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# --- Where the output goes ------------------------------------------------------------------------


def test_both_streams_in_one_file_have_the_order_in_which_they_were_written(tmp_path):
    (tmp_path / "one.csv").write_text("2026-01-01, 00:00:00, 12\n2026-01-02, 00:00:00, 12\n")
    with (tmp_path / "said").open("w") as file:
        subprocess.run(
            [
                *SLIPSTREAM,
                "simulate",
                str(JOBS / "worked-example.toml"),
                "--trace",
                "one.csv",
                "--policy",
                "fault-scaled",
                "--html",
                "page.html",
            ],
            cwd=tmp_path,
            stdout=file,
            stderr=file,
            check=True,
            env=environment(),
            timeout=SECONDS,
        )
    said = (tmp_path / "said").read_text()
    assert 0 < said.index("samples/s") < said.index("report written to page.html")


def test_torchrun_is_told_the_line_that_ends_a_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "missing.toml")])
    assert result.exit_code == 2
    assert json.loads((tmp_path / "error.json").read_text())["message"][
        "message"
    ] == result.stderr.rstrip("\n")


def test_titles_are_no_wider_than_a_terminal_where_lines_are_not_folded(capsys):
    from slipstream.cli.shared.console import out

    out.rule("a title")
    printed = capsys.readouterr().out
    assert "a title" in printed and len(printed) <= 121
