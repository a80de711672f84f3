"""A real SLURM plans a table by the batch script of docs/planning.md.

An array has a share a task.
"""

import subprocess
import sys

import pytest

from slipstream.schedules.tables.table import Table
from tests.launchers import slurm
from tests.launchers.documents import PLANNING, blocks, replaced
from tests.launchers.processes import wait_until
from tests.patience import SECONDS
from tests.planner.tables.test_build import JOB, contents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(600),
]


def test_an_array_of_shares_writes_the_table_of_one_machine(tmp_path):
    (tmp_path / "job.toml").write_bytes(JOB)
    options = "--max-failures 2 --method greedy --steps 1000"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "slipstream",
            "table",
            "job.toml",
            *options.split(),
            "--out",
            "whole",
        ],
        cwd=tmp_path,
        check=True,
        timeout=SECONDS,
        capture_output=True,
    )
    script = next(
        block for block in blocks("On many machines", "sh", PLANNING) if "#SBATCH" in block
    )
    (tmp_path / "script.sh").write_text(
        replaced(
            script,
            {
                "--array=0-7": "--array=0-2",
                "--cpus-per-task=8": "--cpus-per-task=1",
                "--jobs 8": "--jobs 1",
                "--max-failures 6": options,
            },
        )
    )
    (tmp_path / "slurm").mkdir()
    with slurm.cluster(tmp_path / "slurm", 3) as cluster:
        cluster.command(
            "sbatch", f"--chdir={tmp_path}", "--output=share-%a.log", str(tmp_path / "script.sh")
        )

        def said() -> str:
            return (
                "\n".join(path.read_text() for path in tmp_path.glob("share-*.log"))
                + cluster.said()
            )

        wait_until(lambda: not cluster.command("squeue", "--noheader"), said)
    assert (tmp_path / "table" / "index.json").exists(), said()
    assert contents(tmp_path / "table") == contents(tmp_path / "whole")
    Table.load(tmp_path / "table").verify()
    assert len(list(tmp_path.glob("share-*.log"))) == 3
