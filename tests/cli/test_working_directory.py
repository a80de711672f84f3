"""Nothing in the working directory runs that the job does not name, in whichever process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import SECONDS
from tests.runtime.launchers import Launcher
from tests.runtime.running import command_environment, tiny_text

pytestmark = pytest.mark.slow

SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
"""The installed command."""
SHADOWS = (
    "msgspec.py",
    "pickle.py",
    "torch.py",
    "runtime/__init__.py",
    "planner/__init__.py",
    "cli/__init__.py",
)
MODEL = """
import helper
from slipstream.runtime.models.gpt import GPT

def model(config, seed, dtype, device):
    return GPT(config, seed, dtype, device)
"""


@pytest.fixture
def here(tmp_path):
    """A working directory with modules that have the names of others.

    They are ours, a library's and Python's.
    """
    folder = tmp_path / "here"
    for name in SHADOWS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"with open({str(tmp_path / 'ran')!r}, 'a') as file:\n    file.write({name!r})\n"
        )
    for name, pipelines in (("job", 1), ("two", 2)):
        (folder / f"{name}.toml").write_text(tiny_text(pipelines, iterations=1))
    return folder


def run(here: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        cwd=here,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def slipstream(here: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(here, SLIPSTREAM, *arguments)


@pytest.mark.parametrize(
    "command",
    [
        [SLIPSTREAM, "train", "job.toml", "--method", "greedy"],
        [sys.executable, "-m", "slipstream", "train", "job.toml", "--method", "greedy"],
        [
            SLIPSTREAM,
            "table",
            "two.toml",
            "--max-failures",
            "1",
            "--method",
            "greedy",
            "--time-limit",
            "0.1",
            "--jobs",
            "1",
            "--out",
            "t",
        ],
    ],
    ids=["the fork server and its workers", "python -m slipstream", "the planner's processes"],
)
def test_modules_there_are_not_imported(command, here):
    done = run(here, *command)
    assert done.returncode == 0, done.stderr
    assert not (here.parent / "ran").exists(), (here.parent / "ran").read_text()


def test_the_module_that_the_job_names_is_found_there_and_so_is_what_it_imports(tmp_path):
    (tmp_path / "job.toml").write_text(
        tiny_text(1, 1).replace("[model]", "[model]\nname = 'own:model'")
    )
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("")
    done = slipstream(tmp_path, "train", "job.toml", "--method", "greedy")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "model", "clash"),
    [
        ("queue:model", MODEL, "queue"),
        ("msgspec:model", MODEL, "msgspec"),
        ("own:model", "import colorsys\n" + MODEL, "colorsys"),
        ("own:model", "import slipstream\n" + MODEL, "slipstream"),
        ("own:model", "from slipstream.speed import fast\n", "slipstream"),
    ],
    ids=[
        "named",
        "named, and loaded already",
        "imported",
        "imported, and ours",
        "imported, and not there in ours",
    ],
)
def test_two_modules_of_one_name_are_refused_with_both_files(name, model, clash, tmp_path):
    """By a command that is forked where torch is imported already."""
    (tmp_path / "job.toml").write_text(
        tiny_text(1, 1).replace("[model]", f"[model]\nname = '{name}'")
    )
    for file in ("own", "helper", clash):
        (tmp_path / f"{file}.py").write_text(model if file == name.partition(":")[0] else "")
    status = Launcher(
        "tests.runtime.launchers:command_in",
        tmp_path,
        "train",
        "job.toml",
        "--method",
        "greedy",
        log=tmp_path / "said",
    ).wait(SECONDS)
    said, theirs = (tmp_path / "said").read_text(), __import__(clash).__file__
    assert status == 2 and "Traceback" not in said, said
    assert f"two modules '{clash}': {tmp_path / clash}.py, and {theirs}," in said.splitlines()[-1]
