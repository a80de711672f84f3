"""Measure the time to deal an iteration's samples to a schedule, and what dealing gains.

    python -m benchmarks.dealing [--grids 8x4x16 32x8x32] [--swaps 6000] [--iterations 5] [--json]

Plans each grid by the list scheduler, with all workers alive and with one dead, and deals samples
of packed documents to it (log-normal lengths, sigma 1.5; half of F and of I grows with their
squares). Times are CPU seconds per iteration; a dealer is built once for each schedule. Exit status
1 when dealing takes more than 60 ms with up to 512 micro-batches, or more than 1 s with more.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.replay import sleeping_job
from slipstream.planner.plan import plan_job
from slipstream.schedules.dealing import Costs, Dealer, costs_of
from slipstream.schedules.schedule import Schedule, Worker

CONTEXT = 32_768
"""Tokens of a sample."""
SIGMA = 1.5
"""Standard deviation of the logarithm of documents' lengths."""
ATTENTION = 0.5
FEW = 512
MOST_SECONDS_OF_FEW = 0.06
"""Limit of dealing at most `FEW` samples, in seconds."""
MOST_SECONDS = 1.0
"""Limit of dealing more samples, in seconds."""


def packed(samples: int, random: np.random.Generator) -> Costs:
    """Return the costs, of shape [samples, 3], of samples filled with whole documents."""
    found: list[list[int]] = [[]]
    while len(found) <= samples:
        length = int(min(CONTEXT, max(16, random.lognormal(7, SIGMA))))
        if sum(found[-1]) + length > CONTEXT:
            found.append([])
        found[-1].append(length)
    return costs_of(found[:samples], ATTENTION)


def measure(schedule: Schedule, swaps: int, iterations: int) -> dict[str, Any]:
    """Return the CPU seconds of dealing, and the seconds of an iteration."""
    began = time.process_time()
    dealer = Dealer(schedule)
    made = time.process_time() - began
    random = np.random.default_rng(0)
    costs = [packed(dealer.samples, random) for _ in range(iterations)]
    dealer.deal(costs[0], seed=0, swaps=1)  # compiled
    began = time.process_time()
    dealt = [
        dealer.deal(batch, seed=number, swaps=swaps).sample for number, batch in enumerate(costs)
    ]
    took = (time.process_time() - began) / iterations
    even = [dealer.deal(batch, seed=0, swaps=1).sample for batch in costs]
    undealt = [np.arange(dealer.samples)] * iterations
    return {
        "samples": dealer.samples,
        "swaps": dealer.affordable_swaps(swaps),
        "made_seconds": made,
        "dealt_seconds": took,
        "equal": schedule.seconds(schedule.period_ticks),
        **{
            name: float(dealer.iteration_seconds(costs, samples).mean())
            for name, samples in (
                ("as_they_come", undealt),
                ("even_totals", even),
                ("dealt", dealt),
            )
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--grids",
        nargs="+",
        default=["8x4x16", "32x8x32"],
        help="pipelines x stages x micro-batches",
    )
    parser.add_argument("--swaps", type=int, default=6000)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for grid in options.grids:
        job = sleeping_job(*map(int, grid.split("x")), 0.02)
        for failed in ((), (Worker(1, 1),)):
            schedule = plan_job(job, failed, method="greedy").schedule
            rows.append(
                {
                    "grid": grid,
                    "dead": len(failed),
                    **measure(schedule, options.swaps, options.iterations),
                }
            )
    if options.json:
        print(json.dumps(rows))
    else:
        table = Table(
            "grid",
            "dead",
            "swaps",
            "made, ms",
            "dealt, ms",
            "equal, s",
            "as they come",
            "even",
            "dealt",
        )
        for row in rows:
            table.add_row(
                row["grid"],
                str(row["dead"]),
                f"{row['swaps']:,}",
                f"{row['made_seconds'] * 1e3:.0f}",
                f"{row['dealt_seconds'] * 1e3:.1f}",
                *(f"{row[name]:.3f}" for name in ("equal", "as_they_come", "even_totals", "dealt")),
            )
        Console().print(table)
    is_slow = False
    for row in rows:
        limit = MOST_SECONDS_OF_FEW if row["samples"] <= FEW else MOST_SECONDS
        is_slow |= row["dealt_seconds"] > limit
    sys.exit(bool(is_slow))


if __name__ == "__main__":
    main()
