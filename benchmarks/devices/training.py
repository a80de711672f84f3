"""Run whole trainings on this machine's devices.

They measure survival of a death, and times and memory of large layers.
"""

import math
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.devices.card_memory import CardMemory
from benchmarks.devices.report import Report, mebibytes, milliseconds, read_rows
from benchmarks.per_op import cpu_seconds
from benchmarks.stage_memory import compare, job_bytes
from slipstream.cli.profile import build_layer_table, job_tables
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.job.toml import job_text
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.runtime.config import RunConfig, TrainingConfig, parse_run_config
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.events import (
    Event,
    FetchBegun,
    HandedOver,
    OrderGiven,
    Resumed,
    SettlingChosen,
)
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.placement import split_layers
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.processes.stop_signals import RunStopped
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.runtime.run_record import GenerationRecord, RunRecord, RunRecordError, read_run
from slipstream.runtime.tools.profile import Profile, profile_stages
from slipstream.runtime.tools.reference import reference_run
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import COMPUTE_KINDS, OpKind, Schedule, Worker

PIPELINES = STAGES = 2
LOST = Worker(1, 1)
TOLERANCES = {"float64": 1e-9, "float32": 1e-3}
"""Maximum deviation of losses from those of one process.

In float32, the order of sums matters more after each step.
"""
SHORT_ITERATIONS = 16
SHORT_LOST = 4
SHORT_BACK = 7
MANY = 1_000_000
"""Number of iterations of a run that is ended earlier."""
LOOK_SECONDS = 0.1
E = TypeVar("E", bound=Event)


class Size(NamedTuple):
    """Size of the model that is trained, and of the measurement."""

    blocks: int
    width: int
    heads: int
    context: int
    batch: int
    microbatches: int
    vocabulary: int
    iterations: int
    """Number of iterations before the failure."""
    after: int
    """Number of iterations after the run has settled."""
    rounds: int
    """Number of rounds of the profile."""

    def model(self) -> dict[str, int]:
        """Return the `[model]` table."""
        return {
            "blocks": self.blocks,
            "width": self.width,
            "heads": self.heads,
            "context": self.context,
            "vocabulary": self.vocabulary,
        }


SMALL = Size(2, 64, 2, 32, 2, 4, 256, 3, 3, 1)
LARGE = Size(2, 4096, 32, 2048, 1, 4, 4096, 8, 5, 1)
"""Size with blocks as wide as those of Llama 3 8B.

Their gradients take half a second over the loopback of one card.
"""


def training(device: str, transport: str, **more: object) -> dict[str, Any]:
    """Return the `[training]` table."""
    shares = (
        device == "cuda" and transport == "nccl" and torch.cuda.device_count() < PIPELINES * STAGES
    )
    allowed = (
        {"share_devices": True}
        if shares and "share_devices" in TrainingConfig.__struct_fields__
        else {}
    )
    return {"device": device, "backend": transport, **allowed, **more}


def guess(size: Size, table: Mapping[str, Any]) -> Job:
    """Return a job whose times are to be measured."""
    return parse_job(
        job_text(
            {
                "name": "device",
                "pipelines": PIPELINES,
                "stages": STAGES,
                "microbatches": size.microbatches,
                "time": {"forward": 1, "backward_input": 1, "backward_weight": 1, "optimizer": 1},
                "model": size.model(),
                "training": dict(table),
            },
            {},
        )
    )


class Watch:
    """Events of a run, and times at which its iterations were committed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.commits: list[float] = []

    def progress(self, *_: object) -> None:
        """Record that an iteration was committed."""
        self.commits.append(time.monotonic())

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


def survive_a_death(
    report: Report, device: str, transport: str, dtype: str, fork_server: ForkServer
) -> None:
    """Train while a worker dies and returns; compare losses with one process's."""
    name = f"{dtype}, {transport}"
    job = guess(
        SMALL,
        training(device, transport, dtype=dtype, batch=SMALL.batch, iterations=SHORT_ITERATIONS),
    )
    config = parse_run_config(job.model, job.training)
    first = plan_only(PlanOptions(method="greedy", time_limit=1.0), job, ()).schedule
    watch = Watch()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            result = run(
                first,
                config,
                out=Path(folder) / "run",
                fork_server=fork_server,
                progress=watch.progress,
                options=RunOptions(
                    observe=watch.events.append, notify=lambda news: print(news, flush=True)
                ),
                resilience=Resilience(
                    scheduler=FailurePlanner(job, first).after,
                    heartbeat_timeout_seconds=15.0,
                    injections=(Injection(LOST, SHORT_LOST, 3),),
                    returns=(Return(LOST, SHORT_BACK),),
                ),
            )
        except Exception:
            print_logs(Path(folder) / "run")
            raise
    judged = reference_run(config, job.microbatches, SHORT_ITERATIONS, torch.device(device))
    deviation = max(
        abs(found - expected) for found, expected in zip(result.losses, judged.losses, strict=True)
    )
    well = deviation <= TOLERANCES[dtype]
    report.row(
        f"{name}: losses against one process, a worker lost",
        f"{deviation:.1e} apart at most" + ("" if well else f", above {TOLERANCES[dtype]:g}"),
        transport=transport,
        dtype=dtype,
        deviation=deviation,
        works=well,
    )
    resumed, orders = watch.of(Resumed), watch.of(OrderGiven)
    pauses = [resumption for resumption in resumed if resumption.live == PIPELINES * STAGES - 1]
    text = (
        f"{watch.commits[0] - began:.1f} to the first commit, of which "
        f"{orders[0].seconds:.1f} to the first order"
    )
    for resumption in pauses:
        text += f"; pause {resumption.pause:.2f} after the death"
    for begun, done in zip(watch.of(FetchBegun), watch.of(HandedOver), strict=False):
        text += f"; {done.seconds - begun.seconds:.2f} to fetch layers and join"
    for resumption in resumed:
        if resumption not in pauses:
            text += f"; {resumption.pause:.2f} to hand over"
    report.row(
        f"{name}: seconds",
        text,
        pause=pauses[0].pause if pauses else None,
    )


def print_logs(folder: Path) -> None:
    """Print the ends of the logs of a run that has failed."""
    for path in sorted((folder / "logs").glob("*.log")):
        print(
            f"--- {path.name}",
            *path.read_text(errors="replace").splitlines()[-15:],
            sep="\n",
            flush=True,
        )


def train_large_layers(
    report: Report, device: str, transport: str, fork_server: ForkServer, seconds: float
) -> None:
    """Profile, plan, train, lose a worker and settle, with large layers.

    Parameters are in bfloat16, with float32 masters.
    """
    size = LARGE if device == "cuda" else SMALL
    until, began = time.monotonic() + seconds, time.monotonic()
    wanted = guess(
        size,
        training(
            device,
            transport,
            dtype="bf16",
            master_weights=True,
            reduce_dtype="bf16",
            batch=size.batch,
            iterations=MANY,
        ),
    )
    config = parse_run_config(wanted.model, wanted.training)
    report.row(
        "model",
        f"{size.blocks} blocks of width {size.width:,}, context {size.context:,}, batch "
        f"{size.batch}, {size.microbatches} micro-batches in each of {PIPELINES} pipelines, over "
        f"{transport}",
    )
    layers = size.blocks + 2
    measured = measure(config, split_layers(layers, STAGES), size, fork_server)
    every_layer = [(layer, layer + 1) for layer in range(layers)]
    by_layer = measure(config, every_layer, size, fork_server)
    job = measured_job(wanted, measured, by_layer)
    report.row(
        "profiled",
        f"in {time.monotonic() - began:.0f} s, {measured.workers} at a time, over "
        f"{measured.transport}: " + "; ".join(profile_texts(measured)),
    )
    memory = job_bytes(job_tables(wanted, measured))
    report.row("held always, by stage", ", ".join(map(mebibytes, memory["always"])), bytes=memory)
    first = plan_only(PlanOptions(time_limit=2.0), job, ()).schedule
    record, card, host = trained(job, config, first, size, fork_server, until)
    for row in run_rows(record, first, size, host):
        report.row(*row)
    for row in memory_rows(
        (first, FailurePlanner(job, first).after((LOST,))), job, measured, memory["always"], card
    ):
        report.row(*row)


def profile_texts(measured: Profile) -> Iterator[str]:
    """Yield the seconds of each kind of op, by stage."""
    for kind, name in (
        ("F", "forward"),
        ("I", "backward_input"),
        ("W", "backward_weight"),
        ("O", "optimizer"),
        ("A", "all_reduce"),
    ):
        yield f"{kind} {', '.join(milliseconds(getattr(stage, name)) for stage in measured.stages)}"
    yield f"transfer {milliseconds(measured.transfer)}"


def measure(
    config: RunConfig, ranges: Sequence[tuple[int, int]], size: Size, fork_server: ForkServer
) -> Profile:
    """Return the profile that `slipstream profile` measures."""
    return profile_stages(
        config,
        ranges,
        copies=PIPELINES,
        workers=PIPELINES * STAGES,
        rounds=size.rounds,
        microbatches=PIPELINES * size.microbatches,
        fork_server=fork_server,
    )


def measured_job(wanted: Job, measured: Profile, by_layer: Profile) -> Job:
    """Return the job that `slipstream profile` writes."""
    tables = job_tables(wanted, measured)
    ranges = split_layers(len(by_layer.stages), STAGES)
    tables["placement"] = {"layers": [end - begin for begin, end in ranges]}
    tables["layers"] = build_layer_table(by_layer, ranges[0][1])
    return parse_job(job_text(tables, {}))


def trained(
    job: Job, config: RunConfig, first: Schedule, size: Size, fork_server: ForkServer, until: float
) -> tuple[RunRecord, CardMemory, float | None]:
    """Run a training that loses a worker and settles.

    Returns its record, what its processes held on the card, and their CPU time per iteration.
    """
    planner = FailurePlanner(job, first, settled_seconds=2.0)
    host, marks = HostTime(fork_server), (size.iterations // 2, size.iterations)

    def progress(iteration: int, _: float) -> None:
        if iteration + 1 in marks:
            host.mark()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "run"
        with (
            CardMemory(fork_server) as card,
            stopped_when(out, lambda record: has_settled(record, size.after), until),
            suppress(RunStopped),
        ):
            run(
                first,
                config,
                out=out,
                fork_server=fork_server,
                progress=progress,
                options=RunOptions(notify=lambda news: print(news, flush=True)),
                resilience=Resilience(
                    scheduler=planner.after,
                    rebalancer=planner,
                    settling=Rebalancing(mtbf_seconds=1e6),
                    heartbeat_timeout_seconds=30.0,
                    join_timeout_seconds=120.0,
                    injections=(Injection(LOST, size.iterations, 3),),
                ),
            )
        try:
            return read_run(out), card, host.seconds_an_iteration(marks[1] - marks[0])
        finally:
            print_logs(out)


class HostTime:
    """CPU seconds of the workers' processes on the host."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._marks: list[float] = []

    def mark(self) -> None:
        """Record the current CPU time."""
        self._marks.append(sum(map(cpu_seconds, self._fork_server.pids.values())))

    def seconds_an_iteration(self, iterations: int) -> float | None:
        """Return the CPU seconds per iteration between two marks; None without two."""
        return (self._marks[1] - self._marks[0]) / iterations if len(self._marks) == 2 else None


@contextmanager
def stopped_when(out: Path, enough: Callable[[RunRecord], bool], until: float) -> Iterator[None]:
    """End this process's run once `enough` is true of its record, or late."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            with suppress(RunRecordError):
                if time.monotonic() > until or enough(read_run(out)):
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def has_settled(record: RunRecord, iterations: int) -> bool:
    """Return whether so many iterations were measured with layers moved.

    If moving layers does not pay, iterations at once count.
    """
    chosen = next(
        (
            entry.event
            for entry in reversed(record.events)
            if isinstance(entry.event, SettlingChosen)
        ),
        None,
    )
    phase = "settled" if chosen is None or chosen.settles else "at once"
    return any(
        generation.order.phase == phase and len(generation.committed) > iterations
        for generation in record.generations
    )


def run_rows(
    record: RunRecord, first: Schedule, size: Size, host: float | None
) -> Iterator[tuple[str, str]]:
    """Yield the rows of a run's measurements."""
    phases = {
        generation.order.phase: generation
        for generation in sorted(
            record.generations, key=lambda generation: len(generation.committed)
        )
    }
    tokens = size.batch * size.context * size.microbatches * PIPELINES
    alone = op_seconds(first)
    if whole := phases.get("whole"):
        measured = whole.iteration_seconds or math.nan
        yield periods("all four workers", whole, None)
        yield (
            "ops of an iteration, as profiled",
            (
                f"{milliseconds(max(alone))} on the busiest worker, {milliseconds(sum(alone))} on "
                f"all, which share the cards: measured / that {measured / sum(alone):.2f}"
            ),
        )
        yield "tokens/s", f"{tokens / measured:,.0f}"
        if host is not None:
            count = sum(
                op.kind in COMPUTE_KINDS for seat in first.seats for op in first.ops(seat.worker)
            )
            yield (
                "CPU time of an op",
                f"{host / count * 1e6:,.0f} us, with all waiting for the card",
            )
    chosen = last(record, SettlingChosen)
    if resumed := last(record, Resumed, PIPELINES * STAGES - 1):
        yield "pause after a SIGKILL", f"{resumed.pause:.2f} s"
    if at_once := phases.get("at once"):
        yield periods("at once, three workers", at_once, chosen.present_period if chosen else None)
    if chosen is None:
        yield "settled, three workers", "not reached in the time"
    elif not chosen.settles:
        yield (
            "settled, three workers",
            f"does not pay: predicted {milliseconds(chosen.settled_period)}",
        )
    elif settled := phases.get("settled"):
        yield (
            "layers moved",
            f"{chosen.moves_bytes / 1e6:,.1f} MB, expected {chosen.move_seconds:.1f} s",
        )
        if at_once and len(settled.committed) > 1:
            yield "longest time between commits meanwhile", longest_gap(record, at_once, settled)
        yield periods("settled, three workers", settled, chosen.settled_period)
    losses = [generation.loss for generation in record.committed if generation.loss is not None]
    if losses:
        begin, end = (statistics.fmean(some) for some in (losses[:10], losses[-10:]))
        yield (
            "loss, first and last ten iterations",
            f"{begin:.3f} to {end:.3f}, in {len(losses)} iterations",
        )


def op_seconds(schedule: Schedule) -> list[float]:
    """Return the planned seconds of each worker's ops in an iteration."""
    seconds = []
    for seat in schedule.seats:
        ops = (op for op in schedule.ops(seat.worker) if op.kind is not OpKind.A)
        seconds.append(schedule.seconds(sum(op.end_ticks - op.start_ticks for op in ops)))
    return seconds


def periods(what: str, generation: GenerationRecord, predicted: float | None) -> tuple[str, str]:
    """Return a row of planned, predicted and measured seconds of an iteration."""
    measured, planned = generation.iteration_seconds, generation.order.planned_period
    if measured is None:
        return what, f"planned {milliseconds(planned)}, none committed"
    foreseen = "" if predicted is None else f"predicted {milliseconds(predicted)}, "
    return what, (
        f"planned {milliseconds(planned)}, {foreseen}measured {milliseconds(measured)} "
        f"({measured / (predicted or planned):.2f}), {len(generation.committed)} iterations"
    )


def longest_gap(record: RunRecord, at_once: GenerationRecord, settled: GenerationRecord) -> str:
    """Describe the longest time between commits while layers move.

    It is in iterations of the schedule that runs meanwhile.
    """
    begun = next(entry.at for entry in record.events if isinstance(entry.event, FetchBegun))
    gap = max(
        iteration.took
        for iteration in record.committed
        if begun <= iteration.at <= settled.committed[1].at
    )
    return f"{gap / (at_once.iteration_seconds or math.nan):.2f} iterations"


def last(record: RunRecord, kind: type[E], live: int | None = None) -> E | None:
    """Return the last event of a kind, with `live` workers if that is given."""
    return next(
        (
            entry.event
            for entry in reversed(record.events)
            if isinstance(entry.event, kind)
            and (live is None or getattr(entry.event, "live", live) == live)
        ),
        None,
    )


def memory_rows(
    plans: Sequence[Schedule], job: Job, measured: Profile, always: Sequence[int], card: CardMemory
) -> Iterator[tuple[str, str]]:
    """Yield a row of memory for each worker: planned and reported peak of its card.

    The planned peak is that of the schedules that were run, with the memory outside of torch.
    """
    if not card.most:
        yield "memory of each worker on the card", "needs a card"
        return
    peaks: dict[Worker, float] = {}
    for plan in plans:
        assert plan.memory is not None and job.memory is not None
        for worker, peak in memory_peaks(plan).items():
            peaks[worker] = max(
                peaks.get(worker, 0.0), peak * plan.memory.unit * job.memory.unit_bytes
            )
    for worker, peak in sorted(peaks.items()):
        planned = always[worker.column] + peak + measured.outside_bytes
        found = card.most.get(str(worker))
        yield (
            f"memory of worker {worker}",
            f"planned {mebibytes(planned)}, "
            + (
                "not seen by the driver"
                if found is None
                else f"by the driver {mebibytes(found)} ({found / planned:.2f}); "
                f"of it {mebibytes(measured.outside_bytes)} outside of torch, as profiled"
            ),
        )
    yield "memory of the card, all processes", f"{mebibytes(card.used)} of {mebibytes(card.total)}"


def compare_memory(report: Report, device: str, fork_server: ForkServer) -> None:
    """Compare the profiled bytes of each stage with those in use.

    Those are what torch has allocated, or what the process holds. The profile is that of the
    previous step, if it was run.
    """
    size = LARGE if device == "cuda" else SMALL
    wanted = guess(
        size,
        training(
            device, "gloo", dtype="bf16", master_weights=True, reduce_dtype="bf16", batch=size.batch
        ),
    )
    config = parse_run_config(wanted.model, wanted.training)
    profiled = next(
        (row.facts["bytes"] for row in read_rows(report.folder) if "bytes" in row.facts), None
    )
    if profiled is None:
        profiled = job_bytes(
            job_tables(
                wanted, measure(config, split_layers(size.blocks + 2, STAGES), size, fork_server)
            )
        )
    for line in compare(config, profiled):
        report.row(
            f"{line.what}, stage {line.stage}",
            f"profiled {mebibytes(line.profiled)}, measured "
            f"{mebibytes(line.measured)} ({line.ratio:.2f})",
            ratio=line.ratio,
        )
