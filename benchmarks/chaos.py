"""Seeded chaos: workers are killed and come back at random, and the numbers must be those of one process.

    python -m benchmarks.chaos --kills 300 --seed 1 [--grid 3x2] [--iterations 60] [--switch-interval 1e-6]
                               [--node-0 0.3]

Trains a small GPT in float64, again and again, until so many workers have died or lost their connections: by SIGKILL,
SIGSTOP, an exception, a broken connection, or by just ending; before any op, between the staggered optimizer steps, in
the middle of a recovery, while layers are fetched, several at once, or at any time by the clock. Runs differ in whether
gradients are clipped and roles move, and in how fast layers can be fetched. When a stage has no worker left, those that
live go back to the newest checkpoint in place; when fewer live than there are stages, a new run goes on from it. With
`--node-0`, such a share of the runs is led by a process of its own at first, which is killed, too; another one goes on
with its workers. With `--switch-interval`, threads of all processes take turns as often as that, and meet in unlucky
moments. Prints how long recoveries took and the largest deviation of any loss and any parameter from the same training
in one process. Exit status 1 when that is above 1e-9, or when anything else goes wrong.
"""

import argparse
import functools
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from benchmarks.jobs import uniform_job
from planner.job.file import Job
from planner.normalise import normal_form
from planner.options import PlanOptions
from planner.plan import plan_job
from runtime.config import RunConfig, parse_run_config
from runtime.coordinator.planning import NoScheduleError, Scheduler
from runtime.coordinator.recovery import Recovery
from runtime.errors import RunError
from runtime.launch import Resilience, RunOptions, run
from runtime.model.checkpoint import latest
from runtime.model.parameters import load_parameters
from runtime.processes.fork_server import ForkServer
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Action, Injection, Place
from runtime.tools.reference import ReferenceResult, reference_run
from schedules.schedule import Schedule, Worker
from schedules.tables.relabel import relabel

TOLERANCE = 1e-9
STALL_SECONDS = 60.0
ACTIONS: dict[Action, int] = {"kill": 6, "stop": 1, "raise": 2, "cut": 3, "exit": 1}
"""How often each is drawn."""
IN_RECOVERY: tuple[Place, ...] = ("ordered", "met", "moved")
FETCH_BYTES_PER_SECOND = (None, 400e3)
"""As fast as it goes, or so slowly that it lasts for many iterations."""
IN_FETCH: tuple[Place, ...] = ("asked", "loaded")
IN_FETCH_SPAN = 6
"""Iterations: one of them may be where a fetch begins."""
REASONS = ("SIGKILL", "stopped answering", "InjectedError", "exit status 3", "was not found by the new node 0")
"""What is said of a worker that was lost on purpose."""
SURVIVED = ("has no live worker left", "no worker is left", "leave no live worker")
"""What a run says that ends because too many have died at once."""


class ChaosError(RuntimeError):
    """Something that must not happen. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosScenario:
    """What to train, and how often something happens."""

    job: Job
    config: RunConfig
    iterations: int
    moves: bool
    """Whether roles are assigned anew after each failure, by normal forms."""
    gap: tuple[int, int] = (4, 16)
    """Iterations between two failures that are planned."""
    heartbeat_timeout_seconds: float = 1.0


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    recoveries: list[Recovery] = field(default_factory=list)
    lost: int = 0
    """Times that fewer workers were left than there are stages."""
    back: int = 0
    """Times that the others went back to a checkpoint, because a stage had no worker left."""
    leaders: int = 0
    """Times that node 0 was killed, and another one went on."""
    deviation: float = 0.0
    """The largest, of any loss and any parameter."""
    reasons: Counter[str] = field(default_factory=Counter)
    runs: int = 0

    @property
    def kills(self) -> int:
        """Workers that were lost, and connections that were."""
        return self.lost + sum(max(len(one.dead), not one.returned) for one in self.recoveries)

    def add(self, recovery: Recovery) -> None:
        """Count a recovery. Raises ChaosError where a worker was lost that should not."""
        self.recoveries.append(recovery)
        self.back += recovery.went_back_to is not None
        for reason in recovery.reasons:
            known = next((known for known in REASONS if known in reason), None)
            if known is None:
                raise ChaosError(f"a worker was lost for no reason of ours: {reason}")
            self.reasons[known] += 1
        self.reasons["connections"] += not recovery.dead and not recovery.returned

    def report(self) -> str:
        """A few lines."""
        seconds = sorted(one.seconds for one in self.recoveries if one.dead or not one.returned)
        middle, worst = (statistics.median(seconds), seconds[-1]) if seconds else (0.0, 0.0)
        back = sum(len(one.returned) for one in self.recoveries)
        causes = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        meanwhile = sum(one.meanwhile for one in self.recoveries)
        return (f"{self.runs} runs, {self.kills} kills ({causes}), {back} returns ({meanwhile} iterations while "
                f"layers were fetched), {self.back} times back to a checkpoint, {self.lost} times too few were left, "
                f"node 0 killed {self.leaders} times\n"
                f"recovery: median {middle * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms\n"
                f"largest deviation {self.deviation:.3g}")


def failures(setting: ChaosScenario, rng: random.Random, first: int) -> tuple[list[Injection], list[Return]]:
    """Failures at places, and when those that they hit come back."""
    workers = [Worker(pipeline, column) for pipeline in range(setting.job.pipelines)
               for column in range(setting.job.stages)]
    ops = 3 * max(setting.job.microbatches)
    places: tuple[Place, ...] = (*range(ops), "A", "O", "stepped", "reported")
    injections, returns = [], []
    at = first
    while (at := at + rng.randint(*setting.gap)) < setting.iterations:
        for worker in rng.sample(workers, rng.choices((1, 2, 3), (8, 3, 1))[0]):
            injections.append(Injection(worker, at, rng.choice(places), _action(rng)))
        if rng.random() < 0.4:
            worker, place = rng.choice(workers), rng.choice(IN_RECOVERY)
            injections += [Injection(worker, iteration, place, _action(rng)) for iteration in (at, at + 1)]
        if rng.random() < 0.3:
            worker, place, action = rng.choice(workers), rng.choice(IN_FETCH), _action(rng)
            injections += [Injection(worker, iteration, place, action)
                           for iteration in range(at, min(at + IN_FETCH_SPAN, setting.iterations))]
        returns += [Return(worker, at + rng.randint(1, 4)) for worker in workers]
    return injections, returns


def _action(rng: random.Random) -> Action:
    return rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]


def scheduler(setting: ChaosScenario) -> Scheduler:
    """Schedules by the list schedulers; moved to a normal form where the setting says so."""
    options = PlanOptions(method="greedy", time_limit=1.0)

    most = (setting.job.pipelines - 1) * setting.job.stages

    @functools.cache
    def normal(failures: int) -> Schedule:
        return normal_form(setting.job, failures, options).schedule

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        lost = [column for column in range(setting.job.stages)
                if all(Worker(pipeline, column) in down for pipeline in range(setting.job.pipelines))]
        if lost:
            found = relabel(normal(len(down)), down, held_elsewhere=True) if len(down) <= most else None
            if found is None:
                raise NoScheduleError(f"the failures leave no live worker in column {lost[0]}")
            return found
        moved = relabel(normal(len(down)), down) if setting.moves else None
        return moved or plan_job(setting.job, down, method="greedy").schedule

    return schedule


class Storm(threading.Thread):
    """Kills or stops workers by the clock; ends this process when nothing is committed any more."""

    def __init__(self, fork_server: ForkServer, rng: random.Random, seconds: float) -> None:
        super().__init__(daemon=True)
        self._fork_server = fork_server
        self._rng = rng
        self._seconds = seconds
        self._over = threading.Event()
        self._progressed = time.monotonic()
        self.stalled = False
        """Whether it has ended this process."""

    def progress(self, *_: object) -> None:
        """An iteration was committed."""
        self._progressed = time.monotonic()

    def run(self) -> None:
        """Until `stop`."""
        while not self._over.wait(self._rng.uniform(0.2, 1.8) * self._seconds):
            if time.monotonic() - self._progressed > STALL_SECONDS:
                self.stalled = True
                os.kill(os.getpid(), signal.SIGINT)
                return
            pids = sorted(self._fork_server.pids.items())
            if pids:
                what = signal.SIGSTOP if self._rng.random() < 0.2 else signal.SIGKILL
                try:
                    os.kill(self._rng.choice(pids)[1], what)
                except ProcessLookupError:  # it has just died by itself
                    continue

    def stop(self) -> None:
        """Kill no more."""
        self._over.set()
        self.join()


@contextmanager
def storming(fork_server: ForkServer, rng: random.Random, seconds: float) -> Iterator[Storm]:
    """A storm for as long as the context lasts."""
    storm = Storm(fork_server, rng, seconds)
    storm.start()
    try:
        yield storm
    except KeyboardInterrupt:
        if storm.stalled:
            raise ChaosError(f"nothing was committed for {STALL_SECONDS:.0f} s") from None
        raise
    finally:
        storm.stop()


def train_through(setting: ChaosScenario, rng: random.Random, fork_server: ForkServer, out: Path, tally: Tally, *,
                  storm_seconds: float = 3.0, node_0_dies: bool = False) -> None:
    """One training to its end, whatever happens; enters what happened. Raises ChaosError.

    Where `node_0_dies`, a process of its own leads it at first.
    """
    reference = judge(setting.config, setting.job.microbatches, setting.iterations)
    whole = plan_job(setting.job, method="greedy").schedule
    tally.runs += 1

    def tell(news: Recovery | str) -> None:
        if isinstance(news, Recovery):
            tally.add(news)

    for life in itertools.count():
        if node_0_dies and life == 0:
            tally.leaders += led_by_another(setting, rng, out, tally)
        resume = latest(out / "checkpoints")
        injections, returns = failures(setting, rng, 0 if resume is None else resume.iteration)
        resilience = Resilience(
            scheduler=scheduler(setting), heartbeat_timeout_seconds=setting.heartbeat_timeout_seconds,
            checkpoint_every=7, resume=resume, injections=tuple(injections),
            returns=tuple(returns),
            fetch_bytes_per_second=rng.choice(FETCH_BYTES_PER_SECOND))
        try:
            with storming(fork_server, rng, storm_seconds) as storm:
                run(whole, setting.config, out=out, fork_server=fork_server, resilience=resilience,
                    options=RunOptions(notify=tell, force=True), progress=storm.progress)
        except RunError as error:
            if not any(reason in str(error) for reason in SURVIVED) or life > setting.iterations:
                raise ChaosError(f"{out}: {error}") from None
            tally.lost += 1
            _compare_losses(out, reference, tally)
            continue
        if _compare_losses(out, reference, tally) != setting.iterations:
            raise ChaosError(f"{out}: losses are missing")
        _compare_parameters(out, reference, tally)
        return


def led_by_another(setting: ChaosScenario, rng: random.Random, out: Path, tally: Tally) -> bool:
    """Have another process lead the training; whether it was killed on the way. Raises ChaosError."""
    news = out / "news.jsonl"
    dies = rng.randint(1, setting.iterations - 2)
    words = [settings_name(setting), str(setting.iterations), str(rng.random()), str(out), str(news), str(dies),
             rng.choice(("committed", "later"))]
    with subprocess.Popen([sys.executable, "-m", "benchmarks.chaos_leader", *words]) as leader:
        try:
            status = leader.wait(10 * STALL_SECONDS)
        except subprocess.TimeoutExpired:
            leader.kill()
            raise ChaosError(f"{out}: a node 0 of its own does not end") from None
    for line in news.read_bytes().splitlines() if news.exists() else ():
        tally.add(msgspec.json.decode(line, type=Recovery))
    if status not in (0, 1, -signal.SIGKILL):
        raise ChaosError(f"{out}: a node 0 of its own ended with status {status}")
    return status < 0


@functools.cache
def judge(config: RunConfig, microbatches: tuple[int, ...], iterations: int) -> ReferenceResult:
    """The same training in one process; computed once."""
    return reference_run(config, microbatches, iterations)


def _compare_losses(out: Path, reference: ReferenceResult, tally: Tally) -> int:
    """How many iterations are on disk."""
    lines = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    found = [line["iteration"] for line in lines]
    place = next((place for place, iteration in enumerate(found) if place != iteration), None)
    if place is not None:
        raise ChaosError(f"{out}: losses are not those of all iterations, in order: line {place + 1} is of iteration "
                         f"{found[place]}, after {found[max(0, place - 3):place]}")
    for line in lines:
        tally.deviation = max(tally.deviation, abs(line["loss"] - reference.losses[line["iteration"]]))
    return len(lines)


def _compare_parameters(out: Path, reference: ReferenceResult, tally: Tally) -> None:
    parameters = load_parameters(out)
    if parameters.keys() != reference.parameters.keys():
        raise ChaosError(f"{out}: parameters are missing")
    for name, theirs in reference.parameters.items():
        tally.deviation = max(tally.deviation, float((parameters[name] - theirs).abs().max()))


def settings_name(setting: ChaosScenario) -> str:
    """The grid, and which of `settings` it is."""
    grid = f"{setting.job.pipelines}x{setting.job.stages}"
    index = 2 * (setting.config.training.clip_norm is not None) + setting.moves
    return f"{grid}:{index}"


def settings(grid: str, iterations: int) -> list[ChaosScenario]:
    """Plain, clipped now and then, with roles that move, with both."""
    pipelines, stages = map(int, grid.split("x"))
    job = uniform_job(pipelines, stages, 2, op=1, optimizer=1, transfer=0)
    model = {"blocks": max(2, stages - 2), "width": 16, "heads": 2, "context": 16, "dropout": 0.1}
    made = []
    for clip_norm, moves in itertools.product((None, 1.8), (False, True)):
        config = parse_run_config(model, {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": iterations,
                                          "clip_norm": clip_norm})
        made.append(ChaosScenario(job=job, config=config, iterations=iterations, moves=moves))
    return made


@contextmanager
def switching(seconds: float | None) -> Iterator[None]:
    """Threads of this process and of those it starts meanwhile take turns so often; None: as usual, every 5 ms.

    Python imports `sitecustomize` at its start, wherever its path has it.
    """
    if seconds is None:
        yield
        return
    before, path = sys.getswitchinterval(), os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(f"import sys\nsys.setswitchinterval({seconds!r})\n")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, path)))
        sys.setswitchinterval(seconds)
        try:
            yield
        finally:
            sys.setswitchinterval(before)
            os.environ["PYTHONPATH"] = path or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grid", default="3x2", help="pipelines x stages")
    parser.add_argument("--iterations", type=int, default=60, help="of each run")
    parser.add_argument("--switch-interval", type=float, metavar="SECONDS", help="of all threads; usually 5e-3")
    parser.add_argument("--node-0", type=float, default=0.0, metavar="SHARE", help="of the runs in which node 0 dies")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally, rng = Tally(), random.Random(options.seed)
    made = itertools.cycle(settings(options.grid, options.iterations))
    try:
        with switching(options.switch_interval), ForkServer() as fork_server:
            while tally.kills < options.kills:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    train_through(next(made), rng, fork_server, Path(folder), tally,
                                  node_0_dies=rng.random() < options.node_0)
                print(tally.report(), flush=True)
    except ChaosError as error:
        print(tally.report())
        sys.exit(str(error))
    sys.exit(tally.deviation > TOLERANCE)


if __name__ == "__main__":
    main()
