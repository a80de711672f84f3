"""Run plans inside torch.distributed.pipelining: exactness, speed, cost of deaths.

    python -m benchmarks.plugged --plans 200    # random plans around dead workers, and one process
    python -m benchmarks.plugged --steps 300    # host time of an op, beside torch's own runtimes
    python -m benchmarks.plugged --kills 100    # workers killed and returning in a training loop

Each part is run if its option is given; with --double, workers are killed over the scripted double
of NCCL. Exits 1 if a number deviates by more than 1e-12.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.plugged_worker import LAST, train_alone
from benchmarks.plugged_worker import main as worker_main
from slipstream.cli.exporters.torch_csv import write_order
from slipstream.planner.job.file import Job, parse_job
from slipstream.runtime.replay.torch_groups import TCPStore
from slipstream.schedules.codec import write
from slipstream.schedules.schedule import COMPUTE_KINDS, Schedule, Worker
from tests.generate import by_chance, planned

TOLERANCE = 1e-12
GRID = (3, 3)
MICROBATCHES = [4, 4, 4]
MOST_DEAD = 2
PLANNED_SHARE = 0.4
TIMES = "[time]\nforward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 2\n"
TIMEOUT_SECONDS = 300.0
"""Longest wait for the next report of any worker."""
Report = Mapping[str, Any]


def make_job(pipelines: int, stages: int, microbatches: Sequence[int], more: str = "") -> Job:
    """Make a job whose ops take equally long."""
    return parse_job(
        f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = "
        f"{[*microbatches]}\n{TIMES}{more}"
    )


def draw_plan(chance: random.Random) -> Schedule:
    """Draw a job, workers that are dead, and who runs what.

    The last is as planned, or any live holder by chance.
    """
    order = chance.choice(["linear", "linear", "v", "interleaved"])
    more = "" if order == "linear" else f"[placement]\nchunks = 2\norder = '{order}'\n"
    pipelines, columns = GRID
    job = make_job(pipelines, columns, [chance.randint(1, 4) for _ in range(pipelines)], more)
    some = [Worker(chance.randrange(pipelines), column) for column in range(columns)]
    dead = chance.sample(some, chance.randint(0, 2))
    how = {
        "backward": chance.choice(["split", "fused"]),
        "optimizer": chance.choice(["staggered", "synchronous"]),
    }
    return (
        planned(job, dead, **how)
        if chance.random() < PLANNED_SHARE
        else by_chance(job, dead, chance, **how)
    )


class Cluster:
    """Workers' processes, forked from one that has imported torch, and their reports."""

    def __init__(self, stack: ExitStack) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.reports = Queue[tuple[Worker, Report | None]]()
        """What each worker reports; None when it has ended."""
        self.processes: dict[Worker, ForkServerProcess] = {}
        self._forked = get_context("forkserver")
        self._forked.set_forkserver_preload(["benchmarks.plugged_worker"])
        stack.callback(self._kill_all)

    def start(self, worker: Worker, mode: str, path: Path, steps: int = 0) -> None:
        """Start a worker's process."""
        ours, theirs = self._forked.Pipe(duplex=False)
        process = self._forked.Process(
            target=worker_main, args=(theirs, mode, self.store.port, worker, path, steps)
        )
        process.start()
        theirs.close()
        self.processes[worker] = process
        threading.Thread(target=self._read, args=(worker, process, ours), daemon=True).start()

    def kill(self, worker: Worker) -> None:
        """Kill a worker's process, and wait for its end."""
        process = self.processes.pop(worker)
        process.kill()
        process.join(TIMEOUT_SECONDS)

    def next_report(self) -> tuple[Worker, Report | None]:
        """Return the next report of any worker. Raises queue.Empty if there is none in time."""
        return self.reports.get(timeout=TIMEOUT_SECONDS)

    def read_to_end(self) -> Iterable[tuple[Worker, Report]]:
        """Iterate over all reports until all processes have ended."""
        while self.processes:
            worker, report = self.next_report()
            if report is not None:
                yield worker, report
            elif self.has_ended(worker):
                del self.processes[worker]

    def has_ended(self, worker: Worker) -> bool:
        """Return whether the process of a worker has ended well.

        Raises SystemExit for one that failed.
        """
        process = self.processes.get(worker)
        if process is None or process.is_alive():
            return False  # one that was killed on purpose, or its successor
        if process.exitcode:
            raise SystemExit(f"worker {worker} ended with {process.exitcode}")
        return True

    def _read(self, worker: Worker, process: ForkServerProcess, reports: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.reports.put((worker, json.loads(reports.recv_bytes())))
        process.join(TIMEOUT_SECONDS)
        self.reports.put((worker, None))

    def _kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(TIMEOUT_SECONDS)


def run_plans(count: int, seed: int) -> float:
    """Run random plans; print and return the largest deviation from one process."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(count):
            write(draw_plan(chance), folder / f"{number:04}.json")
        cluster = Cluster(stack)
        for worker in _all_workers():
            cluster.start(worker, "plans", folder)
        found = [line for _, line in cluster.read_to_end()]
    plans = {line["plan"] for line in found}
    assert len(plans) == count, f"{len(plans)} of {count} plans ran"
    largest = {}
    for what in ("gradients", "loss", "norm"):
        largest[what] = max(line[what] for line in found)
    print(f"| plans | {' | '.join(largest)} |\n|---|{'---|' * len(largest)}")
    print(f"| {count} | {' | '.join(f'{value:.1e}' for value in largest.values())} |", flush=True)
    return max(largest.values())


def run_steps(steps: int) -> None:
    """Print an op's host time in our schedule and in torch's runtimes.

    Both are measured in one run.
    """
    job = make_job(1, 3, [8])
    schedule = planned(job, [], backward="fused")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write(schedule, folder / "plan.json")
        (folder / "order.csv").write_text(write_order(schedule, communication=True))
        cluster = Cluster(stack)
        for worker in schedule.grid.workers():
            cluster.start(worker, "steps", folder, steps)
        found = [line for _, line in cluster.read_to_end()]
    ops = sum(op.kind in COMPUTE_KINDS for op in schedule.all_ops())
    seconds = {}
    for name in found[0]:
        seconds[name] = sum(line[name] for line in found) / (steps * ops)
    usual = seconds["_PipelineScheduleRuntime"]
    print("| schedule | host time of an op | ratio |\n|---|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {value * 1e6:.0f} us | {value / usual:.2f} |", flush=True)


class Chaos:
    """A training run whose workers are killed and come back."""

    def __init__(self, stack: ExitStack, seed: int, *, double: bool = False) -> None:
        self._mode = "train over the double of NCCL" if double else "train"
        self.chance = random.Random(seed)
        self.table = _plan_table(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        self.cluster = Cluster(stack)
        self.losses: dict[int, set[float]] = {}
        self.pauses: list[float] = []
        self.owed = self.kills = self.returns = 0
        self.committed: dict[Worker, int] = {}
        """Iterations that each live worker has committed."""
        self.final: list[Report] = []

    def run(self, kills: int) -> None:
        """Kill so many workers at any moment, let them return, train to the end."""
        for worker in _all_workers():
            self._start(worker)
        self._await_commits(1)
        while self.kills < kills:
            self._kill_some(kills - self.kills)
            self._await_commits(self.chance.randint(1, 4))
            for worker in sorted(set(_all_workers()) - self.committed.keys()):
                if self.chance.random() < 0.8:
                    self._start(worker)
                    self.returns += 1
            self._await_commits(self.chance.randint(1, 4))
        self.cluster.store.set(LAST, str(max(self.committed.values()) + 10))
        for worker, line in self.cluster.read_to_end():
            self._take(worker, line)

    def _start(self, worker: Worker) -> None:
        self.cluster.start(worker, self._mode, self.table)
        self.committed[worker] = -1

    def _kill_some(self, limit: int) -> None:
        """Kill one worker or two, the second perhaps during the recovery from the first."""
        room = MOST_DEAD - (GRID[0] * GRID[1] - len(self.committed))
        for _ in range(min(limit, room, self.chance.randint(1, 2))):
            victim = self.chance.choice(sorted(self.committed))
            threading.Event().wait(self.chance.choice([0, 0.02, 0.1, 0.3]) * self.chance.random())
            self.cluster.kill(victim)
            del self.committed[victim]
            self.kills += 1

    def _await_commits(self, count: int) -> None:
        """Wait until all live workers have committed so many iterations more."""
        goal = max(self.committed.values()) + count
        while min(self.committed.values()) < goal:
            self._take(*self.cluster.next_report())

    def _take(self, worker: Worker, line: Report | None) -> None:
        if line is None:
            if self.cluster.has_ended(worker):
                raise SystemExit(f"worker {worker} ended by itself")
        elif "loss" in line:
            self.losses.setdefault(line["committed"] - 1, set()).add(line["loss"])
            self.owed += "owed" in line
            if worker in self.committed:
                self.committed[worker] = line["committed"]
        elif "pause" in line:
            self.pauses.append(line["pause"])
        else:
            self.final.append(line["parameters"])


def run_kills(kills: int, seed: int, *, double: bool) -> float:
    """Kill workers in a run; print and return the largest deviation from one process."""
    with ExitStack() as stack:
        chaos = Chaos(stack, seed, double=double)
        chaos.run(kills)
    alone = train_alone(GRID[1], MICROBATCHES, 1 + max(chaos.losses))
    losses = max(
        abs(loss - alone.losses[iteration])
        for iteration, found in chaos.losses.items()
        for loss in found
    )
    assert len(chaos.losses) == len(alone.losses), "iterations are missing"
    parameters = max(
        abs(value - other)
        for line in chaos.final
        for stage, values in line.items()
        for value, other in zip(values, alone.parameters[int(stage)], strict=True)
    )
    print(
        "| kills | returns | iterations | steps owed | loss | parameters | pause: median | "
        "longest |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    print(
        f"| {chaos.kills} | {chaos.returns} | {len(chaos.losses)} | {chaos.owed} | {losses:.1e} | "
        f"{parameters:.1e} | {statistics.median(chaos.pauses):.2f} s | {max(chaos.pauses):.2f} s |",
        flush=True,
    )
    return max(losses, parameters)


def _all_workers() -> list[Worker]:
    return [Worker(*place) for place in product(range(GRID[0]), range(GRID[1]))]


def _plan_table(folder: Path) -> Path:
    """Plan a table for up to `MOST_DEAD` dead workers."""
    job = f"pipelines = {GRID[0]}\nstages = {GRID[1]}\nmicrobatches = {MICROBATCHES}\n{TIMES}"
    (folder / "job.toml").write_text(job)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "slipstream",
            "table",
            folder / "job.toml",
            "--max-failures",
            str(MOST_DEAD),
            "--exact",
            "--optimizer",
            "synchronous",
            "--method",
            "greedy",
            "--steps",
            "200",
            "--jobs",
            "1",
            "--out",
            folder / "table",
        ],
        check=True,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
    )
    return folder / "table"


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("plans", "steps", "kills"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--double",
        action="store_true",
        help="kill over the scripted double of NCCL, instead of gloo",
    )
    asked = parser.parse_args()
    deviations = [0.0]
    if asked.plans:
        deviations.append(run_plans(asked.plans, asked.seed))
    if asked.steps:
        run_steps(asked.steps)
    if asked.kills:
        deviations.append(run_kills(asked.kills, asked.seed, double=asked.double))
    sys.exit(max(deviations) > TOLERANCE)


if __name__ == "__main__":
    main()
