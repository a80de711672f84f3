"""Fail workers at random, and require the numbers of training in one process.

    python -m benchmarks.chaos --events 300 --seed 1 [--grid 3x2] [--iterations 60] [--kind NAME]
                               [--seconds 400] [--switch-interval 1e-6 | --double] [--node-0 0.3]
                               [--pairs] [--log FILE] [--keep FOLDER]

The benchmark trains a small GPT in float64 repeatedly, until the given number of events has
happened to the runs. Workers die or lose their connections: by SIGKILL, SIGSTOP, an exception, a
broken connection, a plain exit, or all of a node at once. This happens before any op, between the
staggered optimizer steps, in the middle of a recovery, while layers are fetched, to several workers
at once, or at any time by the clock. Workers come back, and are slow for a while. Runs differ in
whether gradients are clipped, roles move, nodes die, workers are slow, and layers move to better
schedules, and in how fast layers can be fetched (`benchmarks.chaos_scenario`). When a stage has no
worker left, the live workers return to the newest checkpoint in place; when fewer workers live than
there are stages, a new run resumes from it.

Options: with `--node-0`, this share of the runs is first led by a separate process, which is
killed, too; another one continues with its workers. With `--switch-interval`, threads of all
processes switch that often, and meet at unlucky moments. With `--double`, tensors travel over the
scripted double of NCCL that tests use instead of gloo. With `--pairs`, two things fail within one
iteration: a worker and its buddy, or another worker, or one that has just come back, or node 0 and
one of them. The seeds of the runs are consecutive.

After each run the benchmark checks losses and parameters against the same training in one process;
that no worker was restarted without having been lost, and none lost as silent unless it had been
stopped; that no run has told nothing for 30 s; that no process, thread or open descriptor is left;
and that the folder holds no unneeded files. It prints how long recoveries took and the largest
deviation. The exit status is 1 when the deviation is above 1e-9 or anything else goes wrong;
`--keep` then keeps the folder of the run, and the other runs continue. `--log` appends a line for
each run.
"""

import argparse
import functools
import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.chaos_checks import (
    SILENT_SECONDS,
    ChaosError,
    Leaks,
    Silence,
    Survivors,
    Tally,
    require_no_litter,
    worker_of,
    workers_below,
)
from benchmarks.chaos_scenario import (
    CHECKPOINT_EVERY,
    ChaosScenario,
    resilience,
    settings,
    watching_closely,
)
from slipstream.planner.plan import plan_job
from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.device import choose_device
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import Event
from slipstream.runtime.launch import RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.tools.reference import ReferenceResult, reference_run
from slipstream.schedules.dealing.compiled import load_kernels as load_dealing

TOLERANCE = 1e-9
STALL_SECONDS = 60.0
LEADER_SECONDS = 600.0
"""Time limit, in seconds, for a node 0 that is a process of its own."""
CALM = 8
SURVIVED = ("has no live worker left", "no worker is left", "leave no live worker")
"""Texts in the errors of runs that end because too many workers died at once."""


class Storm(threading.Thread):
    """Thread that kills or stops workers by the clock.

    It ends this process when iterations stop committing. Each victim since the last committed
    iteration doubles the pause before the next one, up to `CALM` times: otherwise a slow machine
    would never commit anything between two of them. No worker is stopped before the first commit,
    because a start waits for workers that have not connected.
    """

    def __init__(self, fork_server: ForkServer, rng: random.Random, seconds: float) -> None:
        super().__init__(daemon=True)
        self._fork_server = fork_server
        self._rng = rng
        self._seconds = seconds
        self._over = threading.Event()
        self._progressed = time.monotonic()
        self._pause = seconds
        self._committed = False
        self.stalled = False
        """True if this thread has ended this process."""
        self.stopped: set[str] = set()
        """Workers of which this thread has stopped a process."""

    def progress(self, _: int = -1) -> None:
        """Record that an iteration was committed."""
        self._progressed = time.monotonic()
        self._pause = self._seconds
        self._committed = True

    def run(self) -> None:
        """Kill or stop workers until `stop` is called."""
        while not self._over.wait(self._rng.uniform(0.2, 1.8) * self._pause):
            if time.monotonic() - self._progressed > STALL_SECONDS:
                self.stalled = True
                os.kill(os.getpid(), signal.SIGINT)
                return
            pids = sorted(self._fork_server.pids.items())
            if pids:
                what = (
                    signal.SIGSTOP
                    if self._rng.random() < 0.2 and self._committed
                    else signal.SIGKILL
                )
                name, pid = self._rng.choice(pids)
                if what == signal.SIGSTOP:
                    self.stopped.add(worker_of(name))
                try:
                    os.kill(pid, what)
                except ProcessLookupError:  # it has just died by itself
                    continue
                self._pause = min(2 * self._pause, CALM * self._seconds)

    def stop(self) -> None:
        """Stop killing workers, and wait for the thread to end."""
        self._over.set()
        self.join()


class PairStorm(Storm):
    """Thread that sometimes kills two workers within an iteration, more often around a checkpoint.

    The workers are of one stage, as a worker and its buddy are, or of two stages, or the first one
    has just come back. The processes `found` are the parents of workers that another node 0 has
    left.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        rng: random.Random,
        seconds: float,
        tally: Tally,
        found: Mapping[str, int],
    ) -> None:
        super().__init__(fork_server, rng, seconds)
        self._tally, self._tops = tally, (os.getpid(), *found.values())
        self._victims = queue.SimpleQueue[tuple[float, int]]()
        self._seen: dict[str, int] = {}

    def progress(self, iteration: int = -1) -> None:
        """Record that an iteration was committed, and choose victims now and then."""
        super().progress()
        now, saves = workers_below(*self._tops), (iteration + 1) % CHECKPOINT_EVERY in (0, 1)
        new = [name for name, pid in now.items() if self._seen.get(name, pid) != pid]
        self._seen |= now
        chance = 0.06
        if new:
            chance = 0.5
        elif saves:
            chance = 0.3
        if len(now) < 3 or not self._victims.empty() or self._rng.random() > chance:
            return
        first = self._rng.choice(new or sorted(now))
        others = sorted(now.keys() - {first})
        peers = [name for name in others if name.partition(".")[2] == first.partition(".")[2]]
        second = self._rng.choice(peers if peers and self._rng.random() < 0.6 else others)
        what = "joiner and " if new else "worker and "
        what += "peer" if second in peers else "worker"
        what += " at a checkpoint" if saves else ""
        self._tally.pairs[what] += 1
        for name, pause in (
            (first, self._rng.uniform(0, 0.15)),
            (second, self._rng.uniform(0, 0.05)),
        ):
            self._victims.put((pause, now[name]))

    def run(self) -> None:
        """Kill the chosen victims until `stop` is called."""
        while not self._over.wait(0.01):
            if time.monotonic() - self._progressed > STALL_SECONDS:
                self.stalled = True
                os.kill(os.getpid(), signal.SIGINT)
                return
            while not self._victims.empty() and not self._over.is_set():
                pause, pid = self._victims.get()
                time.sleep(pause)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def storming(storm: Storm) -> Iterator[Storm]:
    """Run a storm for as long as the context lasts."""
    storm.start()
    try:
        yield storm
    except KeyboardInterrupt:
        if storm.stalled:
            raise ChaosError(f"nothing was committed for {STALL_SECONDS:.0f} s") from None
        raise
    finally:
        storm.stop()


def train_through(
    setting: ChaosScenario,
    rng: random.Random,
    fork_server: ForkServer,
    out: Path,
    tally: Tally,
    *,
    leaks: Leaks | None = None,
    storm_seconds: float = 3.0,
    node_0_dies: bool = False,
    pairs: bool = False,
) -> None:
    """Train to the end despite all failures, and count them in `tally`. Raises ChaosError.

    With `node_0_dies`, a separate process leads the training at first. With `pairs`, two things
    fail at a time.
    """
    reference = judge(setting.config, setting.job.microbatches, setting.iterations)
    found = dict[str, int]()
    tally.runs += 1
    with watching_closely():
        if node_0_dies:
            found = led_by_another(setting, rng, out, tally, pairs=pairs)
        for life in itertools.count():
            try:
                _live(
                    setting,
                    rng,
                    fork_server,
                    out,
                    tally,
                    storm_seconds=storm_seconds,
                    found={} if life else found,
                    pairs=pairs,
                )
                break
            except RunError as error:
                if (
                    not any(reason in str(error) for reason in SURVIVED)
                    or life > setting.iterations
                ):
                    raise ChaosError(f"{out}: {error}") from None
                tally.lost += 1
                tally.compare_losses(out, reference)
    if tally.compare_losses(out, reference) != setting.iterations:
        raise ChaosError(f"{out}: losses are missing")
    tally.compare_parameters(out, reference)
    require_no_litter(out)
    if leaks is not None:
        leaks.require(found)


def _live(
    setting: ChaosScenario,
    rng: random.Random,
    fork_server: ForkServer,
    out: Path,
    tally: Tally,
    *,
    storm_seconds: float,
    found: dict[str, int],
    pairs: bool,
) -> None:
    """Run until the end, or until too few workers are left. Raises RunError and ChaosError."""
    survivors = Survivors(found, lambda: fork_server.pids)

    def tell(news: Recovery | SpeedEvent | str) -> None:
        silence.end()
        if isinstance(news, Recovery):
            tally.add(news, setting.nodes)
            if not found:  # another node 0 may have had others stopped
                tally.count_innocent(news, {*storm.stopped, *injected})
        elif isinstance(news, SpeedEvent):
            tally.add_speeds(news)
        else:
            tally.told.append(news)

    def observe(event: Event) -> None:
        silence.end()
        survivors.observe(event)

    def progress(iteration: int, _: float) -> None:
        silence.end()
        storm.progress(iteration)
        survivors.look(fork_server.pids)

    how = resilience(setting, rng, open_latest(out / "checkpoints"))
    # Before the storm: the planner may have to be compiled.
    whole = plan_job(setting.job, method="greedy").schedule
    load_dealing()
    injected = {str(injection.worker) for injection in how.injections if injection.action == "stop"}
    kind = (
        PairStorm(fork_server, rng, storm_seconds, tally, found)
        if pairs
        else Storm(fork_server, rng, storm_seconds)
    )
    silence = Silence()
    try:
        with storming(kind) as storm:
            run(
                whole,
                setting.config,
                out=out,
                fork_server=fork_server,
                resilience=how,
                progress=progress,
                options=RunOptions(
                    notify=tell, force=True, observe=observe, topology=setting.nodes
                ),
            )
    finally:
        silence.end()
        tally.silence = max(tally.silence, silence.longest)
    tally.slowdowns += sum(slowdown.iteration < setting.iterations for slowdown in how.slowdowns)
    survivors.require()


def led_by_another(
    setting: ChaosScenario, rng: random.Random, out: Path, tally: Tally, *, pairs: bool = False
) -> dict[str, int]:
    """Have another process lead the training until it dies; return its children by name.

    With `pairs`, a worker dies together with that process, more often than not at a checkpoint; it
    may have just come back. The process may also end earlier because too few workers are left.
    Raises ChaosError.
    """
    dies = rng.randint(3 if pairs else 1, setting.iterations - 2)
    if pairs and rng.random() < 0.6:
        dies = max(3, dies // CHECKPOINT_EVERY * CHECKPOINT_EVERY - rng.randint(1, 2))
    partner = rng.choice(("", "before", "after")) if pairs else ""
    pids: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        news = Path(folder) / "news.jsonl"
        words = [
            setting.name,
            str(setting.iterations),
            str(rng.random()),
            str(out),
            str(news),
            str(dies),
            rng.choice(("committed", "later", "joining") if pairs else ("committed", "later")),
            partner,
        ]
        with subprocess.Popen([sys.executable, "-m", "benchmarks.chaos_leader", *words]) as leader:
            try:
                status = leader.wait(LEADER_SECONDS)
            except subprocess.TimeoutExpired:
                leader.kill()
                raise ChaosError(f"{out}: a node 0 of its own does not end") from None
        for line in news.read_bytes().splitlines() if news.exists() else ():
            if b'"fork server"' in line:
                pids = json.loads(line)
            else:
                tally.add(msgspec.json.decode(line, type=Recovery), setting.nodes)
    if status not in (0, 1, -signal.SIGKILL):
        raise ChaosError(f"{out}: a node 0 of its own ended with status {status}")
    tally.leaders += status < 0
    if pairs and status < 0:
        what = "worker and node 0" if partner else "node 0"
        if words[-2] == "joining":
            what = "joiner and node 0"
        tally.pairs[what + " at a checkpoint" * ((dies + 1) % CHECKPOINT_EVERY in (0, 1))] += 1
    return pids if status < 0 else {}


@functools.cache
def judge(config: RunConfig, microbatches: tuple[int, ...], iterations: int) -> ReferenceResult:
    """Return the result of the same training in one process, computed only once."""
    return reference_run(
        config, microbatches, iterations, torch.device(choose_device(config.training.device))
    )


@contextmanager
def switching(seconds: float | None) -> Iterator[None]:
    """Make threads of this process and of its new child processes switch at an interval.

    None keeps the usual 5 ms.
    """
    if seconds is None:
        yield
        return
    before = sys.getswitchinterval()
    with starting_with(f"import sys\nsys.setswitchinterval({seconds!r})\n"):
        sys.setswitchinterval(seconds)
        try:
            yield
        finally:
            sys.setswitchinterval(before)


@contextmanager
def over_double() -> Iterator[None]:
    """Use the double of NCCL from now on, in this process and its children."""
    with starting_with("import benchmarks.chaos_double\n"):
        import_module("benchmarks.chaos_double")
        yield


@contextmanager
def starting_with(lines: str) -> Iterator[None]:
    """Make Python run these lines first in all child processes started within the context.

    Python imports `sitecustomize` at its start, from anywhere on its path.
    """
    path = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(lines)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (folder, str(Path(__file__).parents[1]), path))
        )
        try:
            yield
        finally:
            os.environ["PYTHONPATH"] = path or ""


def one_run(
    seed: int,
    options: argparse.Namespace,
    fork_server: ForkServer,
    leaks: Leaks,
    tally: Tally,
    training: Mapping[str, Any] = {},
) -> str | None:
    """Run the training of one seed, and return an error in one line.

    `training` replaces keys of `[training]`.
    """
    rng = random.Random(seed)
    made = [
        setting
        for name, setting in settings(options.grid, options.iterations, training).items()
        if not options.kind or name in options.kind
    ]
    setting, node_0_dies = made[seed % len(made)], rng.random() < options.node_0
    wrong = None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "out"
        try:
            train_through(
                setting,
                rng,
                fork_server,
                out,
                tally,
                leaks=leaks,
                node_0_dies=node_0_dies,
                pairs=options.pairs,
            )
            if tally.deviation > TOLERANCE:
                wrong = f"deviation {tally.deviation:.3g}"
            elif tally.silence > SILENT_SECONDS:
                wrong = f"a run told nothing for {tally.silence:.0f} s"
            elif tally.innocent:
                wrong = f"{tally.innocent} workers were lost as silent, and nobody had stopped them"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None and options.keep is not None and out.exists():
            shutil.copytree(out, options.keep / f"seed-{seed}", dirs_exist_ok=True)
            (options.keep / f"seed-{seed}" / "told.log").write_text("\n".join(tally.told))
    if options.log is not None:
        with options.log.open("a") as file:
            file.write(
                json.dumps(
                    {
                        "seed": seed,
                        "setting": setting.name,
                        "node_0_dies": node_0_dies,
                        "events": tally.events,
                        "kills": tally.kills,
                        "returns": tally.returns,
                        "slowdowns": tally.slowdowns,
                        "leaders": tally.leaders,
                        "nodes": tally.nodes,
                        "settled": tally.settled,
                        "pairs": tally.pairs,
                        "found": tally.found,
                        "left_out": tally.left_out,
                        "back": tally.back,
                        "lost": tally.lost,
                        "silence": tally.silence,
                        "innocent": tally.innocent,
                        "deviation": tally.deviation,
                        "wrong": wrong,
                    }
                )
                + "\n"
            )
    return wrong


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which no other run begins"
    )
    parser.add_argument("--grid", default="3x2", help="pipelines x stages")
    parser.add_argument("--iterations", type=int, default=60, help="of each run")
    parser.add_argument(
        "--kind",
        action="append",
        choices=list(settings("1x1", 1)),
        metavar="NAME",
        help="of runs (benchmarks/README.md); may be repeated; by default all, in turn",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--switch-interval", type=float, metavar="SECONDS", help="of all threads; usually 5e-3"
    )
    how.add_argument("--double", action="store_true", help="train over the double of NCCL")
    parser.add_argument(
        "--node-0",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the runs in which node 0 dies",
    )
    parser.add_argument(
        "--pairs", action="store_true", help="two different things fail within one iteration"
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="append what happened, a line a run"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="copy there what is left of runs that go wrong"
    )
    return parser


def main() -> None:
    options = make_parser().parse_args()
    torch.set_num_threads(1)
    total, failed, began, leaks = Tally(), list[str](), time.monotonic(), Leaks()
    manners = over_double() if options.double else switching(options.switch_interval)
    with manners, ForkServer() as fork_server:
        for seed in itertools.count(options.seed):
            if total.events >= options.events or time.monotonic() - began > options.seconds:
                break
            run_tally = Tally()
            wrong = one_run(seed, options, fork_server, leaks, run_tally)
            total.join(run_tally)
            print(f"{total.report()}\n", flush=True)
            if wrong is not None:
                failed.append(f"seed {seed}: {wrong}")
                print(failed[-1], file=sys.stderr, flush=True)
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
