"""`slipstream doctor --devices`: what this machine's devices do, as one page in the form of docs/devices.md.

Transports are checked for what they promise (`runtime.tools.conformance`). A run in float64 loses a worker, and its
losses are compared with those of one process. Then the commands themselves run for a small GPT in 2 pipelines of 2
stages, four workers, once in each dtype: `slipstream profile` measures it, `slipstream table` plans for it, `slipstream
train --layers move` trains it, loses a worker, and settles; memory is measured besides. On fewer GPUs than workers
these share them, and talk over pinned host memory.
"""

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
from typing import Any, Literal, NamedTuple

import torch

from slipstream.planner.job.file import read_job
from slipstream.planner.job.toml import job_text
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.events import Event, FetchBegun, Phase, Resumed, SettlingChosen
from slipstream.runtime.replay.transport import choose_transport
from slipstream.runtime.run_record import RunRecord, RunRecordError, Stretch, read_run
from slipstream.runtime.tools import conformance
from slipstream.runtime.tools.reference import reference_run
from slipstream.runtime.tools.stage_memory import STAGES, Line, compare, job_bytes

PIPELINES, LOST = 2, "1.1"
LIMIT_SECONDS = 240.0
"""Of one command."""
LOOK_SECONDS = 0.1
MOST_ITERATIONS = 1_000_000
"""The run is ended before."""
NO_FAILURE_SOON = "1000000"
EXACT_ITERATIONS, EXACT_LOST = 8, 3
TOLERANCE = 1e-9
"""Of losses, in float64."""


class DevicesError(Exception):
    """What must hold on any device does not, or a command has failed. The message says which."""


class Size(NamedTuple):
    """Of the model that is trained, and of the measurement."""

    blocks: int = 6
    width: int = 256
    context: int = 128
    batch: int = 4
    microbatches: int = 4
    iterations: int = 30
    """Before the failure, and after it has settled."""
    rounds: int = 7
    dtypes: tuple[str, ...] = ("float32", "bf16")


SIZE = Size()


class Row(NamedTuple):
    """One line of the table."""

    what: str
    value: str


def command(*arguments: str) -> str:
    """What a command of `slipstream` prints. Raises DevicesError."""
    try:
        return subprocess.run([sys.executable, "-m", "slipstream", *arguments], check=True, capture_output=True,
                              text=True, timeout=LIMIT_SECONDS).stdout
    except subprocess.TimeoutExpired:
        raise DevicesError(f"`slipstream {arguments[0]}` did not end within {LIMIT_SECONDS:.0f} s: is the machine busy "
                           "with something else?") from None
    except subprocess.CalledProcessError as error:
        said = str(error.stderr or error).strip().splitlines()
        raise DevicesError(f"`slipstream {arguments[0]}` failed: {said[-1]}") from None


def conforming(device: str) -> Row:
    """The transports that this machine has keep their promises. Raises DevicesError."""
    cards = torch.cuda.device_count() if device == "cuda" else 0
    transports = [conformance.GLOO, *[conformance.STAGED] * (cards > 0),
                  *[conformance.NCCL] * (cards >= len(conformance.WORKERS))]
    try:
        return Row("checks of transports", ", ".join(f"{one}: {conformance.run(one)} of {len(conformance.CHECKS)}"
                                                    for one in transports))
    except conformance.NotConformingError as error:
        raise DevicesError(str(error)) from None


def exactness(device: str, folder: Path) -> Row:
    """Losses of a run that loses a worker are those of one process. Raises DevicesError."""
    job, table, out = (folder / name for name in ("exact.toml", "exact", "exact-run"))
    job.write_text(guess(Size(2, 64, 32, 2), device, "float64"))
    command("table", str(job), "--max-failures", "1", "--time-limit", "1", "--out", str(table))
    command("train", str(job), "--table", str(table), "--kill", f"{LOST}@{EXACT_LOST}",
            "--iterations", str(EXACT_ITERATIONS), "--checkpoint-every", "0", "--out", str(out))
    read, record = read_job(job), read_run(out)
    judged = reference_run(parse_run_config(read.model, read.training), [SIZE.microbatches] * PIPELINES,
                           EXACT_ITERATIONS, torch.device(device))
    losses = [float("nan") if one.loss is None else one.loss for one in record.committed]
    if len(losses) != EXACT_ITERATIONS or not any(isinstance(one.event, Resumed) for one in record.events):
        raise DevicesError("a run that loses a worker did not commit all iterations")
    deviation = max(abs(found - expected) for found, expected in zip(losses, judged.losses, strict=True))
    if not deviation <= TOLERANCE:
        raise DevicesError(f"losses of a run deviate from those of one process by {deviation:.1e}")
    return Row("losses against one process, float64, a worker lost", f"{deviation:.1e} apart at most")


def guess(size: Size, device: str, dtype: str) -> str:
    """A job file whose times are to be measured."""
    return job_text({
        "name": "device", "pipelines": PIPELINES, "stages": STAGES, "microbatches": size.microbatches,
        "time": {"forward": 1, "backward_input": 1, "backward_weight": 1},
        "model": {"blocks": size.blocks, "width": size.width, "context": size.context},
        "training": {"batch": size.batch, "device": device, "dtype": dtype}}, {})


def measure(size: Size, device: str, dtype: str, folder: Path) -> list[Row]:
    """Run all commands for one dtype."""
    job, table, out = (str(folder / name) for name in ("job.toml", "table", "run"))
    (folder / "guess.toml").write_text(guess(size, device, dtype))
    tables = json.loads(command("profile", "--job", str(folder / "guess.toml"), "--out", job,
                                "--rounds", str(size.rounds), "--json"))["job"]
    command("table", job, "--max-failures", "1", "--exact", "--time-limit", "1", "--out", table)
    with training(job, table, out, size.iterations):
        record = watched(Path(out), lambda run: seen(run, size.iterations))
    read = read_job(Path(job))
    config = parse_run_config(read.model, read.training)
    return [*profile_rows(tables), *run_rows(record), *memory_rows(compare(config, job_bytes(tables))),
            loss_row(record)]


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
    raise DevicesError(f"the run has not settled within {LIMIT_SECONDS:.0f} s; it said at last:\n"
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


def longest_gap(run: RunRecord, phases: Mapping[Phase, Stretch]) -> str:
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
    transport = choose_transport("auto", device, PIPELINES * STAGES, cards, shared=False)
    staged = ", through pinned host memory" if cards and transport == "gloo" else ""
    return f"{where}, {PIPELINES * STAGES} workers, {transport}{staged}, torch {torch.__version__}"


def page(device: Literal["cpu", "cuda"], told: Callable[[str], None]) -> tuple[str, dict[str, dict[str, str]]]:
    """The title, and what was found by dtype; `told` what is done at the moment. Raises DevicesError."""
    told("checking transports")
    rows = [conforming(device)]
    with tempfile.TemporaryDirectory() as folder:
        told("comparing a run with one process")
        rows.append(exactness(device, Path(folder)))
    found = {}
    for dtype in SIZE.dtypes:
        told(f"measuring {dtype}")
        with tempfile.TemporaryDirectory() as folder:
            found[dtype] = dict([*rows, *measure(SIZE, device, dtype, Path(folder))])
    return f"{datetime.now().date()}: {hardware(device)}", found


def markdown(title: str, found: Mapping[str, Mapping[str, str]]) -> str:
    """The page, in the form of docs/devices.md."""
    lines = [("", *found), *[["---"] * (len(found) + 1)],
             *((what, *(rows[what] for rows in found.values())) for what in next(iter(found.values())))]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)])
