"""Compare the measured memory of weight-work stashes and undo copies with the profile.

    python -m benchmarks.memory [--width 256] [--blocks 4] [--context 256] [--batch 4]
                                [--device cpu] [--json]

Profiles a small GPT in two stages with `slipstream profile`, takes the numbers of the job file, and
then measures each stage in a separate process, by the memory that the system reports (Linux) or
that torch has allocated on its GPU: a few micro-batches between F and I, between I and W, and the
stage itself with the optimizer, with and without the copies. Exit status 1 when the profile is more
than 10 % below the measurement, or 25 % above: a plan with too small numbers runs out of memory.
"""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.jobs import gpt_job
from benchmarks.stage_memory import ROW, STAGES, compare, job_bytes
from slipstream.cli.profile import job_tables
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.placement import split_layers
from slipstream.runtime.tools.profile import profile_stages

LEAST = 0.9
MOST = 1.25


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("width", 256), ("blocks", 4), ("context", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    job = gpt_job(STAGES, ROW, options, device=options.device)
    config = parse_run_config(job.model, job.training)
    profiled = profile_stages(
        config,
        split_layers(options.blocks + 2, STAGES),
        copies=1,
        workers=STAGES,
        microbatches=ROW,
        rounds=1,
    )
    lines = compare(
        config,
        {
            **job_bytes(job_tables(job, profiled)),
            "undo copies": [stage.undo_bytes for stage in profiled.stages],
        },
    )
    if options.json:
        print(json.dumps([{**line._asdict(), "ratio": line.ratio} for line in lines]))
    else:
        table = Table("stage", "what", "profiled MiB", "measured MiB", "profiled / measured")
        for line in lines:
            table.add_row(
                str(line.stage),
                line.what,
                f"{line.profiled / 2**20:.2f}",
                f"{line.measured / 2**20:.2f}",
                f"{line.ratio:.3f}",
            )
        Console().print(table)
    sys.exit(not all(LEAST <= line.ratio <= MOST for line in lines))


if __name__ == "__main__":
    main()
