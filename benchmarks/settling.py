"""Measure the throughput that a run keeps after a failure, at once and settled.

    python -m benchmarks.settling [--pipelines 4] [--stages 4] [--microbatches 16]
        [--layers-a-stage 4] [--layer-megabytes 50] [--width 256] [--op-ms 10]
        [--megabytes-per-second 15] [--json]

Layers sleep through their ops, so that two cores are enough for all workers, and are as large as
real ones: the bytes that a layer of this width lacks are parameters that are not trained, which
move, but are neither stepped nor reduced. A worker is killed, and the run settles, as `train
--layers move` does. Prints the share of the fault-free throughput before the failure, at once, and
settled; the iterations that were planned, those that the run predicted when it chose to settle, and
those measured; what moved; and the longest time between two commits from when layers began to move
until the run has settled. Exit status 1 when less than 0.88 is left, settled iterations are 5 % off
those predicted, or that time is above 1.3 iterations.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.events import Event, FetchBegun, HandedOver, OrderGiven, SettlingChosen
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.schedules.schedule import Worker

HEALTHY = 8
"""Number of iterations before the failure."""
AFTER = 8
"""Number of iterations after the run has settled."""
LEAST_LEFT = 0.88
MOST_OFF = 0.05
LONGEST_GAP = 1.3
TRANSFER_SECONDS = 0.0005
ADAM_COPIES = 3
"""Number of values that move with a trained parameter: itself and AdamW's moments."""
TRAINED_BYTES = 4
"""Bytes of each such value."""


class Watch:
    """Times at which iterations were committed, and the events of the run."""

    def __init__(self) -> None:
        self.commits: list[float] = []
        self.events: list[tuple[float, Event]] = []

    def progress(self, *_: object) -> None:
        """Record that an iteration was committed."""
        self.commits.append(time.monotonic())

    def observe(self, event: Event) -> None:
        """Record an event of the run."""
        self.events.append((time.monotonic(), event))

    def at(self, kind: type[Event], number: int = 0) -> tuple[float, Event]:
        """Return the time of an event of a kind, and the event."""
        return [(at, event) for at, event in self.events if isinstance(event, kind)][number]

    def period(self, begin: float, end: float) -> float:
        """Return the median time between commits.

        The first two iterations do not count: they begin with empty pipelines.
        """
        within = [at for at in self.commits if begin <= at <= end]
        return statistics.median(later - earlier for earlier, later in pairwise(within[2:]))

    def longest(self, begin: float, end: float) -> float:
        """Return the longest time between commits that overlaps with an interval."""
        return max(
            later - earlier
            for earlier, later in pairwise(self.commits)
            if later >= begin and earlier <= end
        )


def job_of(options: argparse.Namespace) -> Job:
    """Return a job whose stages take as long as their layers sleep."""
    op = options.op_ms / 1e3 * options.layers_a_stage
    inputs, weights = [0.0] + [op] * (options.stages - 1), [2 * op] + [op] * (options.stages - 1)
    return parse_job(
        f"pipelines = {options.pipelines}\nstages = {options.stages}\n"
        f"microbatches = {options.microbatches}\n[time]\nforward = {op}\nbackward_input = "
        f"{inputs}\n"
        f"backward_weight = {weights}\noptimizer = 0\ntransfer = {TRANSFER_SECONDS}\n"
        f"[placement]\nlayers = {[options.layers_a_stage] * options.stages}\n"
    )


def measure(
    options: argparse.Namespace, job: Job, fork_server: ForkServer, out: Path
) -> dict[str, object]:
    """Run until the failure has been answered and the run has settled."""
    watch = Watch()
    first = plan_only(PlanOptions(time_limit=3.0), job, ()).schedule
    config = parse_run_config(
        {**MODEL, "width": options.width, "blocks": options.stages * options.layers_a_stage},
        {**TRAINING, "optimizer": "adamw", "iterations": options.iterations},
    )
    lost = Worker(1, options.stages // 2)
    run(
        first,
        config,
        out=out,
        fork_server=fork_server,
        progress=watch.progress,
        options=RunOptions(observe=watch.observe, notify=lambda news: print(news, file=sys.stderr)),
        resilience=Resilience(
            scheduler=FailurePlanner(job, first).after,
            injections=(Injection(lost, HEALTHY, 3),),
            fetch_bytes_per_second=options.megabytes_per_second * 1e6,
            heartbeat_timeout_seconds=30.0,
            rebalancer=FailurePlanner(job, first),
            settling=Rebalancing(),
        ),
    )
    return report(watch, first.seconds(first.period_ticks))


def report(watch: Watch, planned: float) -> dict[str, object]:
    """Return the figures of a run."""
    (began, _), (failed, at_once) = watch.at(OrderGiven), watch.at(OrderGiven, 1)
    (fetched, _), (handed, _), (_, settled) = (
        watch.at(FetchBegun),
        watch.at(HandedOver),
        watch.at(OrderGiven, 2),
    )
    _, chosen = watch.at(SettlingChosen)
    assert (
        isinstance(at_once, OrderGiven)
        and isinstance(settled, OrderGiven)
        and isinstance(chosen, SettlingChosen)
    )
    lost = next(at for at, event in watch.events if event.__class__.__name__ == "Failed")
    periods = {
        "before": (watch.period(began, lost), planned, None),
        "at once": (watch.period(failed, handed), at_once.planned_period, chosen.present_period),
        "settled": (
            watch.period(handed, watch.commits[-1]),
            settled.planned_period,
            chosen.settled_period,
        ),
    }
    healthy = periods["before"][0]
    after = next(index for index, at in enumerate(watch.commits) if at > handed)
    return {
        "periods": {
            name: {
                "planned": wanted,
                "predicted": predicted,
                "measured": measured,
                "share": healthy / measured,
                "off": measured / (predicted or wanted) - 1,
            }
            for name, (measured, wanted, predicted) in periods.items()
        },
        "moved_bytes": chosen.moves_bytes,
        "expected_move_seconds": chosen.move_seconds,
        "move_seconds": handed - fetched,
        "longest_gap": watch.longest(
            fetched, watch.commits[min(after + 2, len(watch.commits) - 1)]
        ),
        "gap_in_iterations": watch.longest(
            fetched, watch.commits[min(after + 2, len(watch.commits) - 1)]
        )
        / periods["at once"][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("pipelines", 4),
        ("stages", 4),
        ("microbatches", 16),
        ("layers-a-stage", 4),
        ("layer-megabytes", 50),
        ("width", 256),
        ("op-ms", 10),
        ("iterations", 36),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--megabytes-per-second", type=float, default=15.0, help="from each source to each target"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    op = options.op_ms / 1e3
    trained = ADAM_COPIES * TRAINED_BYTES * options.width**2
    frozen = max(0, options.layer_megabytes * 1_000_000 - trained)
    with (
        tempfile.TemporaryDirectory() as folder,
        sleeping(op, op, op, 0.0, frozen),
        ForkServer() as fork_server,
    ):
        found = measure(options, job_of(options), fork_server, Path(folder))
    if options.json:
        print(json.dumps(found))
    periods = found["periods"]
    assert isinstance(periods, dict)
    for name, row in periods.items():
        expected = (
            "" if row["predicted"] is None else f"{row['predicted'] * 1e3:.0f} ms predicted, "
        )
        print(
            f"{name:>8}: {row['planned'] * 1e3:.0f} ms planned, "
            f"{expected}{row['measured'] * 1e3:.0f} ms measured ({row['off']:+.1%}), "
            f"{row['share']:.3f} of the throughput before",
            file=sys.stderr,
        )
    print(
        f"{found['moved_bytes'] / 1e6:.0f} MB "  # type: ignore[operator]
        f"moved in {found['move_seconds']:.1f} s "
        f"({found['expected_move_seconds']:.1f} s expected); longest time between two commits "
        f"meanwhile and at the handover: {found['gap_in_iterations']:.2f} iterations",
        file=sys.stderr,
    )
    settled = periods["settled"]
    sys.exit(
        settled["share"] < LEAST_LEFT
        or abs(settled["off"]) > MOST_OFF
        or found["gap_in_iterations"] > LONGEST_GAP
    )  # type: ignore[operator]


if __name__ == "__main__":
    main()
