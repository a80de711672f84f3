"""Tables planned by a real Dask cluster and by MPI, with workers that die."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.planner.tables.process_pool import ExecutorError, open_executor
from tests.patience import SECONDS
from tests.planner.tables.test_build import JOB, contents

WORDS = (
    "table",
    "job.toml",
    "--max-failures",
    "2",
    "--exact",
    "--method",
    "greedy",
    "--steps",
    "400000",
)
CLUSTER = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""
needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None,
    reason="distributed is not installed: pip install -e '.[dask]'",
)
needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None,
    reason="mpi4py or mpirun is not installed: pip install -e '.[mpi]', make launchers",
)


def slipstream(*words: str) -> list[str]:
    return [sys.executable, "-m", "slipstream", *words]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with a job, and its table by this machine's processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (tmp_path / "job.toml").write_bytes(JOB)
    subprocess.run(
        slipstream(*WORDS, "--out", "here"), check=True, timeout=SECONDS, capture_output=True
    )
    return tmp_path


def test_workers_that_import_the_main_module_run_no_command() -> None:
    """As those of MPI and of multiprocessing do, under other names."""
    command = [
        sys.executable,
        "-c",
        "import runpy; runpy.run_module('slipstream', run_name='__worker__')",
        "--version",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def kill_once_a_part_is_there(folder: Path, command: subprocess.Popen[str], pid: int) -> None:
    deadline = time.monotonic() + SECONDS
    while not list(folder.glob("there/parts/*.gz")) and command.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def dask():
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cluster.stdin is not None and cluster.stdout is not None
    try:
        yield cluster.stdout.readline().strip().replace("tcp", "dask")
        cluster.stdin.close()
        cluster.wait(SECONDS)
    finally:
        cluster.kill()


@pytest.mark.slow
@needs_dask
def test_a_dask_worker_that_dies_loses_an_entry_and_not_the_table(folder, dask):
    with open_executor(dask) as executor:
        pid = executor.submit(os.getpid).result(SECONDS)
    command = subprocess.Popen(
        slipstream(*WORDS, "--executor", dask, "--out", "there"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    kill_once_a_part_is_there(folder, command, pid)
    said, _ = command.communicate(timeout=SECONDS)
    assert command.returncode == 0, said
    assert contents(folder / "here") == contents(folder / "there")


@pytest.mark.slow
@needs_dask
def test_seeds_are_simulated_by_a_dask_cluster_with_the_same_figures(folder, dask):
    words = (
        "simulate",
        "job.toml",
        "--mtbf",
        "10",
        "--days",
        "2",
        "--seeds",
        "3",
        "--policy",
        "slipstream",
        "--json",
    )
    found = [
        subprocess.run(
            slipstream(*words, *more),
            check=True,
            timeout=SECONDS,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout
        for more in ((), ("--executor", dask), ("--jobs", "2"))
    ]
    assert found[0] == found[1] == found[2]


def test_who_does_not_answer_is_named_in_one_line():
    if importlib.util.find_spec("distributed") is None:
        with (
            pytest.raises(ExecutorError, match="dask needs the package distributed: pip install"),
            open_executor("dask://127.0.0.1:1"),
        ):
            pass
    with (
        pytest.raises(
            ExecutorError, match="'ray' is not an executor; expected mpi or dask://HOST:PORT"
        ),
        open_executor("ray"),
    ):
        pass


def by_mpi(folder: Path) -> subprocess.Popen[str]:
    script = shutil.which("slipstream", path=str(Path(sys.executable).parent)) or ""
    words = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "3",
        sys.executable,
        "-m",
        "mpi4py.futures",
        script,
        *WORDS,
        "--executor",
        "mpi",
        "--out",
        "there",
    ]
    return subprocess.Popen(
        words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
@needs_mpi
def test_processes_of_mpi_end_together_and_the_same_command_goes_on(folder):
    command = by_mpi(folder)
    deadline = time.monotonic() + SECONDS
    ranks: list[int] = []
    while len(ranks) < 3:
        assert time.monotonic() < deadline and command.poll() is None
        ranks = [
            int(process)
            for process in subprocess.run(
                ["pgrep", "--parent", str(command.pid), "--full", "mpi4py"],
                text=True,
                stdout=subprocess.PIPE,
                check=False,
            ).stdout.split()
        ]
        time.sleep(0.05)
    kill_once_a_part_is_there(folder, command, max(ranks))
    command.communicate(timeout=SECONDS)
    assert command.returncode != 0 and not (folder / "there" / "index.json").exists()
    parts_left = len(list(folder.glob("there/parts/*.gz")))
    again = by_mpi(folder)
    said, _ = again.communicate(timeout=SECONDS)
    assert again.returncode == 0 and parts_left > 0, said
    assert contents(folder / "here") == contents(folder / "there")
