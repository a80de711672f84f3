"""Ranks of torch.distributed, each a process that runs a module of these tests."""

import subprocess
import sys


def run_ranks(module: str, count: int, *arguments: str, seconds: float) -> None:
    """Run `python -m module RANK ARGUMENTS...` for each rank; all must exit 0 in time."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(said)
