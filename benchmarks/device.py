"""What this machine's device does, as one table: profile, planned against measured, recovery, settling, memory, bf16.

    python -m benchmarks.device [--device cpu|cuda] [--dtypes float32 bf16] [--blocks 6] [--width 256] [--context 128]
        [--batch 4] [--microbatches 4] [--iterations 30] [--markdown] [--json]

Runs the commands themselves for a small GPT in 2 pipelines of 2 stages, four workers: `slipstream profile` measures it,
`slipstream table` plans for it, `slipstream train --layers move` trains it, loses a worker, and settles. On fewer GPUs
than workers these share them, and talk over pinned host memory. Each stage's memory is measured besides, as
`benchmarks.memory` does. `--iterations`: before the failure, and after it has settled. `--markdown` prints the table of
docs/devices.md. It judges nothing: the exit status is 1 only where a command fails.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.memory import STAGES, Line, compare, job_bytes
from slipstream.planner.job.file import read_job
from slipstream.planner.job.writer import job_text
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.device import choose_device
from slipstream.runtime.events import Event, FetchBegun, Resumed, SettlingChosen
from slipstream.runtime.replay.transport import choose_transport
from slipstream.runtime.run_record import RunRecord, RunRecordError, Stretch, read_run

PIPELINES, LOST = 2, "1.1"
LIMIT_SECONDS = 240.0
"""Of one command."""
LOOK_SECONDS = 0.1
MOST_ITERATIONS = 1_000_000
"""The run is ended before."""
NO_FAILURE_SOON = "1000000"


class Row(NamedTuple):
    """One line of the table."""

    what: str
    value: str


class Outcome(NamedTuple):
    """All that one dtype gives; the rows are in the order of the table."""

    dtype: str
    rows: tuple[Row, ...]


def command(*arguments: str) -> str:
    """What a command of `slipstream` prints. Raises CalledProcessError."""
    return subprocess.run([sys.executable, "-m", "slipstream", *arguments], check=True, stdout=subprocess.PIPE,
                          text=True, timeout=LIMIT_SECONDS).stdout


def guess(options: argparse.Namespace, dtype: str) -> str:
    """A job file whose times are to be measured."""
    return job_text({
        "name": "device", "pipelines": PIPELINES, "stages": STAGES, "microbatches": options.microbatches,
        "time": {"forward": 1, "backward_input": 1, "backward_weight": 1},
        "model": {name: getattr(options, name) for name in ("blocks", "width", "context")},
        "training": {"batch": options.batch, "device": options.device, "dtype": dtype}}, {})


def measure(options: argparse.Namespace, dtype: str, folder: Path) -> Outcome:
    """Run all commands for one dtype."""
    job, table, out = (str(folder / name) for name in ("job.toml", "table", "run"))
    (folder / "guess.toml").write_text(guess(options, dtype))
    tables = json.loads(command("profile", "--job", str(folder / "guess.toml"), "--out", job,
                                "--rounds", str(options.rounds), "--json"))["job"]
    command("table", job, "--max-failures", "1", "--exact", "--time-limit", "1", "--out", table)
    with training(job, table, out, options.iterations):
        record = watched(Path(out), lambda run: seen(run, options.iterations))
    read = read_job(Path(job))
    config = parse_run_config(read.model, read.training)
    return Outcome(dtype, (*profile_rows(tables), *run_rows(record),
                           *memory_rows(compare(config, job_bytes(tables))), loss_row(record)))


@contextmanager
def training(job: str, table: str, out: str, lost_at: int) -> Iterator[None]:
    """A run that loses a worker, for as long as the block lasts."""
    with Path(f"{out}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "train", job, "--table", table, "--layers", "move", "--mtbf",
             NO_FAILURE_SOON, "--kill", f"{LOST}@{lost_at}", "--iterations", str(MOST_ITERATIONS), "--checkpoint-every",
             "0", "--out", out], stdout=log, stderr=log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_SECONDS)


def watched(out: Path, enough: Callable[[RunRecord], bool]) -> RunRecord:
    """The record of a run, once there is enough of it."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        try:
            record = read_run(out)
        except RunRecordError:
            continue  # it has not begun
        if enough(record):
            return record
    sys.exit(f"the run has not settled within {LIMIT_SECONDS:.0f} s; it said at last:\n"
             + "\n".join(Path(f"{out}.log").read_text().splitlines()[-10:]))


def seen(run: RunRecord, iterations: int) -> bool:
    """Whether so many iterations are measured with layers moved, or at once where moving them does not pay."""
    chosen = next((one.event for one in reversed(run.events) if isinstance(one.event, SettlingChosen)), None)
    phase = "settled" if chosen is None or chosen.settles else "at once"
    return any(one.order.phase == phase and len(one.committed) > iterations for one in run.stretches)


def profile_rows(tables: dict[str, Any]) -> list[Row]:
    """What `slipstream profile` has measured, of each stage."""
    times = tables["time"]
    names = {"F": "forward", "I": "backward_input", "W": "backward_weight", "O": "optimizer", "A": "all_reduce"}
    return [*(Row(f"{kind} of a stage", ", ".join(map(milliseconds, times[name]))) for kind, name in names.items()),
            Row("transfer", milliseconds(times["transfer"]))]


def run_rows(run: RunRecord) -> list[Row]:
    """What the run has measured."""
    phases = {one.order.phase: one for one in sorted(run.stretches, key=lambda one: len(one.committed))}  # the longest
    chosen, resumed = (last(run, kind) for kind in (SettlingChosen, Resumed))
    assert isinstance(chosen, SettlingChosen) and isinstance(resumed, Resumed)
    return [periods("all four workers", phases["whole"], None),
            Row("pause after a SIGKILL", milliseconds(resumed.pause)),
            periods("at once, three workers", phases["at once"], chosen.present_period),
            Row("layers moved", f"{chosen.moves_bytes / 1e6 if chosen.settles else 0:.1f} MB"),
            Row("longest time between commits meanwhile", longest_gap(run, phases) if chosen.settles else "-"),
            periods("settled, three workers", phases["settled"], chosen.settled_period) if chosen.settles else
            Row("settled, three workers", f"does not pay: predicted {milliseconds(chosen.settled_period)}")]


def longest_gap(run: RunRecord, phases: Mapping[str, Stretch]) -> str:
    """While layers move, in iterations of the schedule that runs meanwhile."""
    begun = next(one.at for one in run.events if isinstance(one.event, FetchBegun))
    settled = phases["settled"].committed[1].at
    gap = max(one.took for one in run.committed if begun <= one.at <= settled)
    return f"{gap / usual(phases['at once']):.2f} iterations"


def last(run: RunRecord, kind: type[Event]) -> Event:
    """The last event of a kind."""
    return next(one.event for one in reversed(run.events) if isinstance(one.event, kind))


def periods(what: str, phase: Stretch, predicted: float | None) -> Row:
    """Planned, predicted and measured seconds of an iteration."""
    measured, planned = usual(phase), phase.order.planned_period
    foreseen = "" if predicted is None else f"predicted {milliseconds(predicted)}, "
    return Row(what, f"planned {milliseconds(planned)}, {foreseen}measured {milliseconds(measured)} "
                     f"({measured / (predicted or planned):.2f})")


def usual(phase: Stretch) -> float:
    """The median time from one commit to the next."""
    assert phase.iteration_seconds is not None
    return phase.iteration_seconds


def memory_rows(lines: Sequence[Line]) -> list[Row]:
    """What a stage holds, profiled by measured."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.what, []).append(line)
    return [Row(f"memory, {what}", ", ".join(f"{line.measured / 2**20:.2f} MiB ({line.ratio:.2f})" for line in group))
            for what, group in found.items()]


def loss_row(run: RunRecord) -> Row:
    """What has been learned."""
    losses = [one.loss for one in run.committed if one.loss is not None]
    begin, end = (statistics.fmean(some) for some in (losses[:10], losses[-10:]))
    return Row("loss, first and last ten iterations", f"{begin:.3f} to {end:.3f}")


def milliseconds(seconds: float) -> str:
    """For a reader."""
    return f"{seconds * 1e3:.4g} ms"


def hardware(device: str) -> str:
    """The device in words."""
    cards = torch.cuda.device_count() if device == "cuda" else 0
    where = f"{cards} x {torch.cuda.get_device_name(0)}" if cards else \
        f"{os.cpu_count()} CPU cores ({platform.machine()})"
    transport = choose_transport("auto", device, PIPELINES * STAGES, cards)
    staged = ", through pinned host memory" if cards and transport == "gloo" else ""
    return f"{where}, {PIPELINES * STAGES} workers, {transport}{staged}, torch {torch.__version__}"


def print_outcomes(title: str, outcomes: Sequence[Outcome], *, markdown: bool) -> None:
    """One table, a column for each dtype."""
    named = [row.what for row in outcomes[0].rows]
    lines = [(what, *(row.value for row in rows)) for what, rows in
             zip(named, zip(*(one.rows for one in outcomes), strict=True), strict=True)]
    heads = ("", *(one.dtype for one in outcomes))
    if markdown:
        print(title, "", *(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)), sep="\n")
        return
    table = Table(*heads, title=title)
    for line in lines:
        table.add_row(*line)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=choose_device("auto"))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "float64", "bf16"], default=["float32", "bf16"])
    for name, default in (("blocks", 6), ("width", 256), ("context", 128), ("batch", 4), ("microbatches", 4),
                          ("iterations", 30), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("markdown", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    outcomes = []
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(measure(options, dtype, Path(folder)))
    title = f"{datetime.now().date()}: {hardware(options.device)}"
    if options.json:
        print(json.dumps({"title": title, **{one.dtype: dict(one.rows) for one in outcomes}}))
    else:
        print_outcomes(title, outcomes, markdown=options.markdown)


if __name__ == "__main__":
    main()
