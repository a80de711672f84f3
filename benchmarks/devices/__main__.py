"""Measure what this machine's devices do, in minutes, and write it as a page.

    python -m benchmarks.devices --out DIR [--minutes 8] [--device auto|cpu|cuda]
                                 [--only STEP[,STEP]] [--transport nccl|gloo] [--not-blocking]

One card is enough, without a network. From a clone, with `PYTHONPATH=src`, nothing needs to be
installed. Workers of one card use NCCL, each as a separate machine. The most valuable steps run
first. Each is a process of its own with a time limit. What it finds is written to DIR/devices.json
at once, one row per line. When its time is over, the stacks of all of its processes go to
DIR/devices.log, they are killed, and the next step begins. What has worked is used from then on. At
the end the page is printed, and written to DIR/devices.md. `--device cpu` rehearses all of it over
gloo. Exit status 1 when a step has failed.

    what is there      cards, driver, libraries; meanwhile the planner is compiled
    two processes      NCCL, blocking and not: connecting, transfers, an abort, a peer that is
                       killed; memory
    conformance        what transports promise (`benchmarks.conformance`), a process a worker
    a death survived   losses of runs that lose a worker, against those of one process
    large layers       layers as wide as Llama 3 8B's: profile, plan, iterations, a kill, a settled
                       schedule; memory
    memory             of stages, profiled and measured
    pipelining         the same layers in torch.distributed.pipelining
    chaos              `benchmarks.chaos`, until the time is over
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos_checks import below
from benchmarks.devices.page import page
from benchmarks.devices.process_tree import dump_stacks, end_tree
from benchmarks.devices.report import Report, Row, read_rows

SWITCH = "SLIPSTREAM_NCCL_BLOCKING"
COMPILED = ("slipstream.planner.compiled", "slipstream.schedules.dealing.compiled")
LEAST_SECONDS = 8.0
"""Minimum of the time left, in seconds, with which a step is begun."""
REST = 1e6
MODULE = "benchmarks.devices.step"
ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 0.1


class Limits(NamedTuple):
    """Time limits of a step, in seconds: on a card, and on two busy cores."""

    on_card: float
    on_cpu: float
    plans: bool = False
    """True if the step plans, so that the planner must be compiled before."""


STEPS = {
    "what is there": Limits(25, 60),
    "two processes": Limits(40, 60),
    "conformance": Limits(80, 120),
    "a death survived": Limits(60, 120, plans=True),
    "large layers": Limits(100, 150, plans=True),
    "memory": Limits(90, 120),
    "pipelining": Limits(90, 120, plans=True),
    "chaos": Limits(REST, REST, plans=True),
}


class Choices:
    """Variant that has worked best so far."""

    def __init__(self, device: str, transport: str | None, *, blocking: bool) -> None:
        self._given = transport
        self._on_card = device == "cuda"
        self.blocking = blocking
        self._nccl = True

    @property
    def transport(self) -> str:
        """Transport of tensors."""
        return self._given or ("nccl" if self._on_card and self._nccl else "gloo")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of processes."""
        return {} if self.blocking else {SWITCH: "0"}

    def learn(self, rows: Sequence[Row]) -> None:
        """Update the choices by the rows of a step."""
        variants = {
            row.facts["variant"]: row.facts["works"]
            for row in rows
            if {"variant", "works"} <= row.facts.keys()
        }
        if (blocking := variants.get("nccl, blocking")) is False and variants.get(
            "nccl, not blocking"
        ):
            self.blocking = False
        if blocking is False and not variants.get("nccl, not blocking"):
            self._nccl = False
        runs = [
            row.facts["works"]
            for row in rows
            if row.facts.get("transport") == "nccl" and "works" in row.facts
        ]
        if runs:
            self._nccl = any(runs)


class Waiting:
    """Process that was started ahead, so that its imports take no card time."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self._log = name, log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, name],
                text=True,
                stdin=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )

    def run(self, turn: dict[str, Any], report: Report) -> bool:
        """Let the process do its work, and return whether it was done in time."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(turn) + "\n")
            self.process.stdin.close()
        except BrokenPipeError:  # it says why in the log
            pass
        deadline = time.monotonic() + turn["seconds"]
        while (status := self.process.poll()) is None:
            if time.monotonic() > deadline:
                pids = [self.process.pid, *below(self.process.pid)]
                report.row(
                    "did not end",
                    f"within {turn['seconds']:.0f} s; the stacks of {len(pids)} processes are in "
                    f"{self._log.name}",
                    works=False,
                )
                dump_stacks(pids, self._log)
                return False
            time.sleep(LOOK_SECONDS)
        if status not in (0, 1):
            report.row("ended", f"with status {status}", works=False)
        elif status == 1 and not any(row.step == self.name for row in read_rows(self._log.parent)):
            report.row("failed", f"before it began: {self._log.name} says why", works=False)
        return status == 0

    def end(self) -> None:
        """End the process and all that it has started."""
        end_tree(self.process.pid)
        self.process.wait()


def run_steps(
    names: Sequence[str],
    folder: Path,
    device: str,
    choices: Choices,
    until: float,
    compiling: Sequence["subprocess.Popen[bytes]"],
) -> bool:
    """Run the steps one after the other, as far as there is time.

    Returns whether all have done their work.
    """
    log, well = folder / "devices.log", True
    waiting = Waiting(names[0], log)
    try:
        for name, following in zip(names, [*names[1:], None], strict=True):
            current, report = waiting, Report(folder, name)
            if following is not None:
                waiting = Waiting(following, log)
            for compiler in compiling if STEPS[name].plans else ():
                compiler.wait()
            left = until - time.monotonic()
            if left < LEAST_SECONDS:
                report.row("not begun", "there was no time left")
            else:
                limits = STEPS[name]
                turn = {
                    "folder": str(folder),
                    "log": str(log),
                    "device": device,
                    "transport": choices.transport,
                    "seconds": min(limits.on_card if device == "cuda" else limits.on_cpu, left),
                    "environment": choices.environment,
                }
                print(
                    f"--- {name}: {turn['seconds']:.0f} s at most, {turn['transport']}"
                    f"{'' if choices.blocking else ', not blocking'}; {left:.0f} s left",
                    flush=True,
                )
                well &= current.run(turn, report)
            current.end()
            choices.learn([row for row in read_rows(folder) if row.step == name])
    finally:
        waiting.end()
    return well


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--only", metavar="STEP[,STEP]", help="by their names, or how these begin")
    parser.add_argument("--transport", choices=["nccl", "gloo"], help="whatever has worked best")
    parser.add_argument(
        "--not-blocking",
        action="store_true",
        help="communicators that do not block, from the start",
    )
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    # An empty name begins all names.
    wanted = [name.strip() for name in (options.only or "").split(",")]
    names = [name for name in STEPS if any(map(name.startswith, wanted))]
    if not names:
        parser.error(f"--only {options.only}: there are {', '.join(STEPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")))
    )
    device = options.device
    if device == "auto":
        device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    with (options.out / "devices.log").open("a") as log:
        compiling = [
            subprocess.Popen([sys.executable, "-m", module], stdout=log, stderr=log)
            for module in COMPILED
        ]
    choices = Choices(device, options.transport, blocking=not options.not_blocking)
    try:
        well = run_steps(names, options.out, device, choices, until, compiling)
    finally:
        for compiler in compiling:
            end_tree(compiler.pid)
            compiler.wait()
        text = page(
            read_rows(options.out), f"python -m benchmarks.devices {' '.join(sys.argv[1:])}"
        )
        (options.out / "devices.md").write_text(text)
        print(text, flush=True)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
