"""All processes of a run of torchtitan on CPUs.

They are forked from one that has imported it, which takes seconds.

    python -m tests.interop.titan_forks COUNT FOLDER FLAG...

FOLDER gets a log and metrics of each rank. Says the exit status of each, as JSON: of one that was
killed, -9.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from tests.interop import titan_cpu


def run_rank(rank: int, folder: Path, flags: list[str]) -> None:
    """Run torchtitan's program as one rank; does not return."""
    status = 1
    try:
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "TITAN_METRICS": str(folder / f"metrics-{rank}"),
        }
        sys.argv = ["titan_cpu", "torchtitan.train", *flags]
        titan_cpu.main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    count, folder, flags = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    import torchtitan.trainer  # noqa: F401

    import tests.interop.titan_rerouted  # noqa: F401

    os.environ["WORLD_SIZE"] = str(count)
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if not pids[-1]:
            run_rank(rank, folder, ["--dump_folder", str(folder), *flags])
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main()
