"""Compare what tables answer with fresh plans of the same failures, for tiny random jobs.

    python -m benchmarks.answers [--jobs 80] [--seed 0] [--steps 20000] [--json]

For each job that `tests/exact` draws with failures, a table of as many failures is built, and
looked up: at once, with roles moved, and settled. A fresh plan, that of `slipstream plan`, may do
the same and has the same number of steps. Longer is more than 0.01 % longer.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table as Grid

from slipstream.planner import NoPlanError, PlanOptions, normalised, parse_job
from slipstream.planner.job.file import Job
from slipstream.planner.plan import plan_only
from slipstream.planner.tables.build import build_table
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.table import Table
from tests.exact.generate import Case, draw_case

KINDS = ("at once", "roles moved", "settled")
TOLERANCE = 1e-4


class Comparison(NamedTuple):
    """Periods in seconds that answer the same failures."""

    seed: int
    kind: str
    looked_up: float
    fresh: float

    @property
    def excess(self) -> float:
        """Share by which the table's answer is longer, 0 if it is not."""
        return max(0.0, self.looked_up / self.fresh - 1)


def compare_job(seed: int, steps: int) -> Iterator[Comparison]:
    """Iterate over the comparisons of a seed's job; none if it has no plan."""
    case = draw_case(seed, "roles")
    job, failed = parse_job(case.text), tuple(Worker(*worker) for worker in case.failed)
    options = PlanOptions(
        steps=steps,
        seed=seed,
        backward=case.backward,
        optimizer=case.optimizer,  # type: ignore[arg-type]
    )
    if not failed:
        return
    try:
        table = build_small_table(case, job, options, len(failed))
    except NoPlanError:
        return
    for kind in KINDS:
        found = table.lookup(failed, settled=kind == "settled", roles_move=kind == "roles moved")
        fresh = plan_fresh(kind, job, failed, options)
        if found is not None and fresh is not None:
            schedule = found.schedule
            yield Comparison(seed, kind, schedule.seconds(schedule.period_ticks), fresh)


def build_small_table(case: Case, job: Job, options: PlanOptions, failures: int) -> Table:
    """Build a table in this process and read it again."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        build_table(
            job, case.text.encode(), Path(folder), options, max_failures=failures, executor=pool
        )
        table = Table.load(folder)
        table.verify()
        return table


def plan_fresh(
    kind: str, job: Job, failed: tuple[Worker, ...], options: PlanOptions
) -> float | None:
    """Return a new plan's period, in seconds, under an answer's rules."""
    try:
        if kind == "at once":
            return plan_only(options, job, failed).period
        layers = "move" if kind == "settled" else "fixed"
        return normalised(job, failed, msgspec.structs.replace(options, layers=layers)).period
    except NoPlanError:
        return None


def summarise(found: list[Comparison]) -> list[dict[str, object]]:
    """Return a row for each kind of answer."""
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        compared = [comparison for comparison in found if comparison.kind == kind]
        longer = [comparison for comparison in compared if comparison.excess > TOLERANCE]
        worst = max(longer, key=lambda comparison: comparison.excess, default=None)
        excesses = [comparison.excess for comparison in compared]
        shorter = sum(pair.fresh > pair.looked_up * (1 + TOLERANCE) for pair in compared)
        row: dict[str, object] = {
            "kind": kind,
            "compared": len(compared),
            "longer": len(longer),
            "mean_excess": statistics.fmean(excesses) if excesses else 0.0,
            "worst_excess": worst.excess if worst else 0.0,
            "shorter": shorter,
            "longer_seeds": [comparison.seed for comparison in longer],
        }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of each plan and entry")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.jobs)
    found = [comparison for seed in seeds for comparison in compare_job(seed, given.steps)]
    rows = summarise(found)
    if given.json:
        print(json.dumps(rows))
        return
    grid = Grid("answer", "compared", "longer", "shorter", "mean excess", "worst", "its seeds")
    for row in rows:
        grid.add_row(
            row["kind"],
            str(row["compared"]),
            str(row["longer"]),
            str(row["shorter"]),
            f"{row['mean_excess']:.3%}",
            f"{row['worst_excess']:.2%}",
            ", ".join(map(str, row["longer_seeds"])),
        )
    Console().print(grid)


if __name__ == "__main__":
    main()
