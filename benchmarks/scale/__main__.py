"""Measure how the control plane scales: from 16 workers to 16,384.

    python -m benchmarks.scale [--workers 64 256 1024] [--table DIR] [--plan-then]
                               [--phases start busy steady ahead death back restart]
                               [--heartbeat-timeout 5] [--patience 120] [--profile FILE]
                               [--json FILE]

The coordinator is the real one, the workers are fake.

- start: all workers connect, prove that they know the secret, and get their first order;
- busy: workers answer at once, so that this is the least that an iteration takes;
- steady: iterations of a second, and the share of a core that node 0 needs for them;
- ahead: possible next failures are planned for, until all of them are; otherwise a death is
  answered by a new plan;
- death: one worker dies; from then until it is missed, all are told to stop, a schedule is planned
  (or looked up in --table), the order is made, and the last survivor has it; bytes sent for it;
- back: the dead worker comes back; the pause is from the last acknowledgement to the last worker's
  order;
- restart: node 0 is killed, and another one continues with its workers; from the time at which that
  one listens.

Results are wall-clock seconds, and CPU seconds of node 0; those of the processes that it forks for
plans are separate. Fake workers are all in one other process, which takes a core of its own: on two
cores, CPU time tells more than the clock.
"""

import argparse
import asyncio
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.scale.cluster import Cluster, Found

PHASES = ("start", "busy", "steady", "ahead", "death", "back", "restart")


async def measure(
    workers: int, folder: Path, options: argparse.Namespace, console: Console
) -> Found:
    """Run all phases with this number of workers."""
    cluster = Cluster(workers, folder, options)
    found: Found = {"workers": workers}
    await cluster.launch()
    beating = asyncio.create_task(cluster.beat())
    try:
        for phase in options.phases:
            if options.profile is not None and phase == options.profile_from:
                cluster.profile()
            found[phase] = answer = await getattr(cluster, phase)()
            console.print(
                f"{workers:>6,} {phase:7} " + ", ".join(map(_told, answer.items())),
                highlight=False,
                soft_wrap=True,
            )
            if not answer["ok"]:
                break
    finally:
        beating.cancel()
        cluster.end()
    return found


def _told(found: tuple[str, Any]) -> str:
    name, value = found
    if isinstance(value, float):
        return f"{name} {value:.3f}"
    return f"{name} {value:,}" if type(value) is int else f"{name} {value}"


def main() -> int:
    """Return 0 if all phases have come to their ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--phases", choices=PHASES, nargs="+", default=PHASES)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plan-then", action="store_true", help="plan nothing ahead of failures")
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each phase")
    parser.add_argument("--profile", type=Path, help="of node 0")
    parser.add_argument("--profile-from", choices=PHASES, default="busy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    console, rows = Console(), []
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measure(workers, Path(folder), options, console)))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return not all(row[phase]["ok"] for row in rows for phase in options.phases if phase in row)


if __name__ == "__main__":
    raise SystemExit(main())
