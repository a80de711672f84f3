"""Compare what the planner claims of tiny random jobs with an exact reference.

    python -m benchmarks.exact [--jobs 100] [--seed 0] [--scope "any layers"] [--steps 20000]
                               [--keep DIR] [--json]

Plans this many jobs for each scope of bounds, one for each seed from `--seed` on, and finds their
shortest periods by `tests/exact`, written from the documents alone. A scope counts the jobs
that were asked for it; the claims compared are those of the scope that the plan names. Wrong claims
are printed with job file and command, and written to `--keep`. Distances are of periods from
the shortest ones, over the jobs for which those are known. Exit status 1 when a claim is wrong.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.schedules import codec
from tests.exact.claims import STEPS, Verdict, judge
from tests.exact.generate import SCOPES, draw_case
from tests.exact.question import NotCoveredError

FAR = 0.02
"""Distance from the shortest period above which a job is named."""


def measure_scope(scope: str, seeds: range, steps: int, keep: Path | None) -> dict[str, Any]:
    """Return what was found for the jobs of these seeds, and print each wrong claim."""
    began, verdicts, uncovered = time.process_time(), dict[int, Verdict](), 0
    for seed in seeds:
        try:
            verdict = judge(draw_case(seed, scope), steps=steps)
        except NotCoveredError:
            uncovered += 1
            continue
        verdicts[seed] = verdict
        if verdict.wrong:
            report(verdict, seed, keep)
    distances = [verdict.distance for verdict in verdicts.values() if verdict.distance is not None]
    worst = max(verdicts, key=lambda seed: verdicts[seed].distance or 0.0, default=None)
    return {
        "scope": scope,
        "jobs": len(verdicts),
        "not_covered": uncovered,
        "decided": sum(verdict.is_decided for verdict in verdicts.values()),
        "wrong": dict(Counter(kind for verdict in verdicts.values() for kind in verdict.wrong)),
        "mean_distance": statistics.fmean(distances) if distances else None,
        "worst_distance": max(distances, default=None),
        "worst_seed": worst,
        "far_seeds": [
            seed for seed, verdict in verdicts.items() if (verdict.distance or 0.0) > FAR
        ],
        "seconds_per_job": (time.process_time() - began) / max(1, len(seeds)),
    }


def report(verdict: Verdict, seed: int, keep: Path | None) -> None:
    """Print a job with wrong claims, and write it with both schedules to `keep`."""
    case = verdict.case
    sentences = "\n".join(f"{kind}: {sentence}" for kind, sentence in verdict.wrong.items())
    print(f"\n# {case.scope}, seed {seed}\n# {case.command}\n{sentences}\n{case.text}", flush=True)
    if keep is not None:
        folder = keep / f"{case.scope.replace(' ', '-')}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.toml").write_text(case.text)
        (folder / "claims.txt").write_text(f"{case.command}\n{sentences}\n")
        for name, schedule in (("planned", verdict.schedule), ("exact", verdict.answer.schedule)):
            if schedule is not None:
                codec.write(schedule, folder / f"{name}.json")


def print_table(found: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "scope",
        "jobs",
        "decided",
        "wrong claims",
        "mean distance",
        "worst",
        "its seed",
        f"over {FAR:.0%}",
        "s per job",
    )
    for row in found:
        wrong = ", ".join(f"{count} {kind}" for kind, count in row["wrong"].items()) or "0"
        distances = []
        for key in ("mean_distance", "worst_distance"):
            distances.append("–" if row[key] is None else f"{row[key]:.2%}")
        table.add_row(
            row["scope"],
            str(row["jobs"]),
            str(row["decided"]),
            wrong,
            *distances,
            str(row["worst_seed"]),
            str(len(row["far_seeds"])),
            f"{row['seconds_per_job']:.2f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100, help="jobs of each scope")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job")
    parser.add_argument("--scope", action="append", choices=SCOPES, help="only this scope")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each plan")
    parser.add_argument("--keep", type=Path, help="folder for jobs with wrong claims")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.jobs)
    found = [
        measure_scope(scope, seeds, given.steps, given.keep) for scope in given.scope or SCOPES
    ]
    if given.json:
        print(json.dumps(found))
    else:
        print_table(found)
    sys.exit(any(row["wrong"] for row in found))


if __name__ == "__main__":
    main()
