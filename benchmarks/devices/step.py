"""Run one step in its process: import, wait for its turn, write its rows.

    python -m benchmarks.devices.step NAME

takes one line of standard input: `Turn` as JSON.
"""

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.conformance import CHECKS, GLOO, NCCL, STAGED
from benchmarks.devices import pair
from benchmarks.devices.machine import describe_machine
from benchmarks.devices.pair import run_pairs
from benchmarks.devices.pipelining import compare_pipelining
from benchmarks.devices.report import Report
from benchmarks.devices.storm import storm
from benchmarks.devices.teams import DOUBLE, check_in_processes
from benchmarks.devices.training import compare_memory, survive_a_death, train_large_layers
from slipstream.runtime.processes.fork_server import ForkServer


class Turn(NamedTuple):
    """Message that starts a step."""

    folder: str
    """Output folder of the page."""
    log: str
    device: str
    transport: str
    """Best transport that has worked so far."""
    seconds: float
    """Time limit of the step."""
    environment: dict[str, str]


def machine(turn: Turn, report: Report, fork_server: ForkServer) -> None:  # noqa: ARG001
    describe_machine(report, turn.device)


def two_processes(turn: Turn, report: Report, fork_server: ForkServer) -> None:
    on_card = turn.device == "cuda"
    if not on_card:
        report.row("nccl", "needs a card")
    run_pairs(
        report,
        turn.device,
        Path(turn.log),
        fork_server,
        (pair.BLOCKING, pair.NOT_BLOCKING, pair.PLAIN) if on_card else (pair.GLOO,),
    )


def conformance(turn: Turn, report: Report, fork_server: ForkServer) -> None:
    on_card = turn.device == "cuda"
    transports = (NCCL, STAGED, GLOO) if on_card else (GLOO, DOUBLE)
    for place, transport in enumerate(transports):
        left = turn.seconds / len(transports) * (2 if transport == NCCL else 1)
        found = check_in_processes(
            transport,
            fork_server,
            Path(turn.log),
            left,
            tell=lambda text, transport=transport: print(f"{transport}: {text}", flush=True),
        )
        report.row(
            transport,
            str(found),
            transport=transport,
            passed=found.passed,
            left=found.left,
            place=place,
            works=found.passed + found.left == len(CHECKS),
            failures=found.failures,
        )
    for transport in () if on_card else (STAGED, NCCL):
        report.row(transport, "needs a card")


def deaths(turn: Turn, report: Report, fork_server: ForkServer) -> None:
    on_card = turn.device == "cuda"
    if not on_card:
        report.row("nccl", "needs a card")
    for transport, dtype in (
        (("nccl", "float64"), ("gloo", "float64"), ("nccl", "float32"))
        if on_card
        else (("gloo", "float64"), ("gloo", "float32"))
    ):
        try:
            survive_a_death(report, turn.device, transport, dtype, fork_server)
        except Exception as error:
            traceback.print_exc()
            report.row(
                f"{dtype}, {transport}: failed", first_line(error), transport=transport, works=False
            )
            fork_server.kill_all()


def large_layers(turn: Turn, report: Report, fork_server: ForkServer) -> None:
    train_large_layers(report, turn.device, turn.transport, fork_server, turn.seconds - END_SECONDS)


def memory(turn: Turn, report: Report, fork_server: ForkServer) -> None:
    compare_memory(report, turn.device, fork_server)


def pipelining(turn: Turn, report: Report, fork_server: ForkServer) -> None:
    compare_pipelining(report, turn.device, turn.transport, fork_server)


def chaos(turn: Turn, report: Report, fork_server: ForkServer) -> None:
    storm(report, turn.device, turn.transport, fork_server, turn.seconds)


END_SECONDS = 12.0
"""Time, in seconds, reserved for a run's end and the rows of its measurements."""
STEPS: dict[str, Callable[[Turn, Report, ForkServer], None]] = {
    "what is there": machine,
    "two processes": two_processes,
    "conformance": conformance,
    "a death survived": deaths,
    "large layers": large_layers,
    "memory": memory,
    "pipelining": pipelining,
    "chaos": chaos,
}


def first_line(error: BaseException) -> str:
    """Return the first line of an error, for a row."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def main(name: str) -> None:
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    with ExitStack() as stack:
        fork_server = stack.enter_context(ForkServer())
        line = sys.stdin.readline()
        if not line:  # nobody wants it
            return
        turn = Turn(**json.loads(line))
        if turn.environment:  # what is forked has that of its server
            os.environ.update(turn.environment)
            fork_server = stack.enter_context(ForkServer())
        report = Report(Path(turn.folder), name)
        try:
            STEPS[name](turn, report, fork_server)
        except Exception as error:
            traceback.print_exc()
            report.row("failed", first_line(error), works=False)
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # past what CUDA does at exit, which has taken half a minute
