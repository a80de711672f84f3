"""What is installed from a built wheel, outside the tree."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.patience import SECONDS
from tests.runtime.running import tiny_text

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built of a copy of what git knows, as a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    names = "\n".join(name for name in tracked if name and (ROOT / name).exists())
    (folder / "names").write_text(names)
    run("tar", "cf", folder / "tree.tar", "-C", ROOT, "-T", folder / "names", cwd=folder)
    (folder / "tree").mkdir()
    run("tar", "xf", folder / "tree.tar", "-C", folder / "tree", cwd=folder)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder,
        folder / "tree",
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The programs of an environment that has the wheel.

    The libraries that it needs are those of this environment.
    """
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "bin" / "python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        wheel,
        cwd=folder,
    )
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    paths = {path for path in sys.path if Path(path).name == "site-packages"}
    # Their own .pth files are not read: no tree.
    (packages / "libraries.pth").write_text("\n".join(sorted(paths)))
    return folder / "bin"


@pytest.mark.slow
def test_a_wheel_has_one_package_and_all_of_its_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {
        "slipstream",
        "slipstream_train",
    }
    tracked = [
        name
        for name in run(
            "git", "ls-files", *("planner", "runtime", "schedules", "cli"), cwd=ROOT
        ).split()
        if (ROOT / name).exists()
    ]
    assert {f"slipstream/{name}" for name in tracked} <= set(names)


@pytest.mark.slow
def test_an_installed_wheel_plans_checks_and_trains_beside_folders_of_the_same_names(
    installed, tmp_path
):
    for name in ("cli", "runtime", "planner", "schedules"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('not ours')\n")
    (tmp_path / "job.toml").write_text(tiny_text(pipelines=2, iterations=2))
    where = run(
        installed / "python", "-c", "import slipstream; print(slipstream.__file__)", cwd=tmp_path
    )
    assert where.startswith(str(installed.parent))
    run(
        installed / "slipstream",
        "plan",
        "job.toml",
        "--failed",
        "1.0",
        "--method",
        "greedy",
        "--out",
        "plan.json",
        "--json",
        cwd=tmp_path,
    )
    assert "valid" in run(installed / "slipstream", "check", "plan.json", cwd=tmp_path)
    run(installed / "slipstream", "show", "plan.json", "--html", "plan.html", cwd=tmp_path)
    run(
        installed / "slipstream",
        "train",
        "job.toml",
        "--schedule",
        "plan.json",
        "--out",
        "run",
        "--json",
        cwd=tmp_path,
    )
    assert (tmp_path / "run" / "losses.jsonl").read_text().count("\n") == 2
