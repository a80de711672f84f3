"""Run `benchmarks.chaos` on the devices of this machine until the time is over."""

import itertools
import time

import torch

from benchmarks.chaos import TOLERANCE, make_parser, one_run
from benchmarks.chaos_checks import Leaks, Tally
from benchmarks.devices.report import Report
from benchmarks.devices.training import training
from slipstream.runtime.processes.fork_server import ForkServer

KINDS = ["plain", "settling", "sharded-settling", "roles-clipped", "slow-settling"]
"""Kinds of scenarios whose workers are one process each."""
FIRST_SEED = 300
RUN_SECONDS = 20.0
"""Minimum of the time left, in seconds, with which a run is begun."""
WRONG_RUNS = 5
"""Number of failed runs after which the step ends."""


def storm(
    report: Report, device: str, transport: str, fork_server: ForkServer, seconds: float
) -> None:
    """Run the step."""
    torch.set_num_threads(1)
    options = make_parser().parse_args(
        ["--grid", "2x2", "--iterations", "40", *(f"--kind={kind}" for kind in KINDS)]
    )
    total, leaks, until, wrong = Tally(), Leaks(), time.monotonic() + seconds, list[str]()
    for seed in itertools.count(FIRST_SEED):
        if time.monotonic() > until - RUN_SECONDS or len(wrong) == WRONG_RUNS:
            return
        run_tally = Tally()
        failed = one_run(seed, options, fork_server, leaks, run_tally, training(device, transport))
        total.join(run_tally)
        if failed is not None:
            wrong.append(f"seed {seed}: {failed.splitlines()[0]}")
            report.row(f"chaos, seed {seed}", failed.splitlines()[0], works=False)
        lines = total.report().splitlines()
        report.row(
            "chaos",
            f"{'; '.join(lines)}{'' if total.deviation <= TOLERANCE else ', too large'}; "
            f"{len(wrong)} runs went wrong",
            events=total.events,
            deviation=total.deviation,
        )
