"""Read traces that others have published. The files stay with their owners; the formats are these.

SkyPilot's spot traces (github.com/skypilot-org/spot-traces, "Can't Be Late", NSDI 2024): JSON
`{"metadata": {"gap_seconds": 300}, "data": [16, 16, 0, ...]}`, the number of available instances,
every `gap_seconds`.

AcmeTrace (github.com/InternLM/AcmeTrace, "Characterization of Large Language Model Development in
the Datacenter", NSDI 2024): CSV, one line for each job, with
`job_id,user,node_num,gpu_num,...,type,state,submit_time,start_time,end_time`; Kalos also has
`fail_time`. It has no failures of machines. A job that fails (`FAILED`, `TIMEOUT`, `NODE_FAIL`)
removes one of the servers, drawn at random, until the next job of its user of that size begins.

InfiniteHBD-Trace (github.com/stepfun-ai/InfiniteHBD-Trace, SIGCOMM 2025, arXiv 2502.03885): JSON, a
list of `{"node_id": "06...", "event_time": 8.61, "event_type": "fault_start", "fault_type": {...}}`
in days, and `fault_end`. It names the servers that had a fault, of 400. Overlapping faults of a
server count as one time out of service.

StragglerAnalysis (github.com/ByteDance-Seed/StragglerAnalysis, "Understanding Stragglers in Large
Model Training Using What-if Analysis", OSDI 2025, arXiv 2505.05713): Parquet, one row for each op,
with `dp_rank`, `stage`, `step`, `optype`, `start_ts` and `duration` in seconds. No machine fails;
the slowness of a worker is the median duration of its compute ops relative to that of all workers
of its stage.
"""

import csv
import io
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.planner.job.profiler_trace import ProfilerTraceError
from slipstream.planner.job.straggler_trace import KINDS, iteration_spans, read_columns
from slipstream.planner.simulation.availability_trace import AvailabilityTrace, Change

FAILED_STATES = ("FAILED", "TIMEOUT", "NODE_FAIL")
ACME_FIELDS = ("job_id", "user", "node_num", "gpu_num", "type", "state", "start_time", "end_time")
TRAINING_TYPE = "Pretrain"
"""Type of AcmeTrace's jobs that are read. If none has it, all jobs on several servers are."""
MAX_ABSENCE_SECONDS = 86_400.0
"""Longest time within which a user's next job replaces a failed one."""
USUAL_ABSENCE_SECONDS = 360.0
"""Seconds for which a failed job's server is away if its user starts none soon."""
STRAGGLER_FIELDS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
SLOWNESS_DIGITS = 1
"""Number of decimal places to which slowdown factors are rounded."""


class _SpotMetadata(msgspec.Struct):
    """Metadata of a spot trace: the seconds between two counts."""

    gap_seconds: float


class _SpotTrace(msgspec.Struct):
    """JSON object of a spot trace of SkyPilot."""

    metadata: _SpotMetadata
    data: list[float]


_SPOT_TRACE = msgspec.json.Decoder(_SpotTrace)


def parse_spot_counts(text: str) -> tuple[list[tuple[float, int]], float]:
    """Return a spot trace as pairs (seconds, instances), and its length in seconds.

    The instances are those from that time on; equal neighbours are merged. Raises ValueError if the
    text has another form, or values that are no counts or no interval.
    """
    try:
        trace = _SPOT_TRACE.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f'expected {{"metadata": {{"gap_seconds": 300}}, "data": [...]}} (a spot trace): '
            f"{error}"
        ) from None
    gap = trace.metadata.gap_seconds
    if not 0 < gap < math.inf:
        raise ValueError(f"gap_seconds is {gap:g}; expected more than 0")
    for number, value in enumerate(trace.data):
        if value < 0 or value != int(value):
            raise ValueError(f"data[{number}] is {value:g}; expected a number of instances")
    # Only counts that differ from the one before say something.
    counts = [
        (number * gap, int(value))
        for number, value in enumerate(trace.data)
        if not number or value != trace.data[number - 1]
    ]
    return counts, len(trace.data) * gap


# --- InfiniteHBD-Trace ----------------------------------------------------------------------------


INFINITE_HBD_SERVERS = 400
"""Number of servers of the fleet in InfiniteHBD-Trace. Its file names only those with a fault."""


class _Fault(msgspec.Struct):
    """Beginning or end of a fault of one server in InfiniteHBD-Trace."""

    node_id: str
    event_time: Annotated[float, msgspec.Meta(ge=0, le=36_525)]
    """Time in days since the trace began."""
    event_type: Literal["fault_start", "fault_end"]


_FAULTS = msgspec.json.Decoder(list[_Fault])


def parse_fault_trace(text: str, name: str) -> AvailabilityTrace:
    """Return InfiniteHBD-Trace as a trace `name` of servers, which are down during faults.

    Raises ValueError if the text has another form, no event, or a fault that only ends.
    """
    try:
        events = sorted(_FAULTS.decode(text), key=lambda event: event.event_time)
    except msgspec.MsgspecError as error:
        raise ValueError(
            'expected [{"node_id": "...", "event_time": DAYS, "event_type": "fault_start"}, ...] '
            f"(InfiniteHBD-Trace): {error}"
        ) from None
    if not events:
        raise ValueError("no faults; expected at least one event")
    nodes = sorted({event.node_id for event in events})
    place_of = {node: place for place, node in enumerate(nodes)}
    # Faults of a server may overlap: it is down while any of them lasts.
    faults, changes = dict.fromkeys(place_of.values(), 0), []
    for days, together in groupby(events, key=lambda event: event.event_time):
        before = dict[int, int]()
        for event in together:
            place = place_of[event.node_id]
            before.setdefault(place, faults[place])
            faults[place] += 1 if event.event_type == "fault_start" else -1
            if faults[place] < 0:
                raise ValueError(
                    f"a fault of {event.node_id} ends on day {days:g}, but has not begun"
                )
        removed = tuple(
            sorted(place for place, count in before.items() if not count and faults[place])
        )
        added = tuple(
            sorted(place for place, count in before.items() if count and not faults[place])
        )
        changes += [Change(days * 86_400, removed=removed, added=added)] if removed or added else []
    places = max(INFINITE_HBD_SERVERS, len(place_of))
    return AvailabilityTrace(
        name=name,
        places=places,
        live=tuple(range(places)),
        changes=tuple(changes),
        length_seconds=max(1.0, events[-1].event_time * 86_400),
        notes=(
            f"InfiniteHBD-Trace: {places} servers, {len(place_of)} of which had faults; "
            "overlapping faults of a server are one time out of service",
        ),
    )


# --- AcmeTrace ------------------------------------------------------------------------------------


class _AcmeJob(NamedTuple):
    """Job of AcmeTrace, with its times in seconds."""

    user: str
    servers: int
    gpus: int
    failed: bool
    begin: float
    end: float


def parse_acme_trace(text: str, name: str, seed: int = 0) -> AvailabilityTrace:
    """Return AcmeTrace as a trace `name` of servers.

    Each failed job takes a server, drawn with `seed`, until its user begins the next job of that
    size; for `USUAL_ABSENCE_SECONDS` if that is not within `MAX_ABSENCE_SECONDS`. Of jobs that fail
    at one instant, only the first counts; none counts while all servers are away. Raises ValueError
    for a line of another form, which it names, or if no job on several servers has a start and a
    later end.
    """
    jobs = list(_parse_acme_jobs(text))
    if not jobs:
        raise ValueError("no job on several servers has both a start and an end time")
    first = min(job.begin for job in jobs)
    places = _peak_servers(jobs)
    absence_of = _seconds_to_next_jobs(jobs)
    # In order of failures: servers whose time is up return first, then one of the others leaves.
    choice, down, changes = random.Random(seed), dict[int, float](), []
    for job in sorted((job for job in jobs if job.failed), key=lambda job: job.end):
        now = job.end - first
        for place in [place for place, until in down.items() if until <= now]:
            changes.append(Change(down.pop(place), added=(place,)))
        free = [place for place in range(places) if place not in down]
        if not free or (changes and changes[-1].seconds >= now):
            continue  # of jobs that fail at one instant, only the first removes a server
        place = choice.choice(free)
        changes.append(Change(now, removed=(place,)))
        down[place] = now + absence_of.get(job, USUAL_ABSENCE_SECONDS)
    length = max(job.end for job in jobs) - first
    changes += [Change(until, added=(place,)) for place, until in down.items() if until < length]
    return AvailabilityTrace(
        name=name,
        places=places,
        live=tuple(range(places)),
        length_seconds=length,
        changes=tuple(
            sorted(
                (event for event in changes if event.seconds < length),
                key=lambda event: event.seconds,
            )
        ),
        notes=(
            f"AcmeTrace: {len(jobs)} jobs, {sum(job.failed for job in jobs)} of which failed; each "
            "failure takes a "
            "server, drawn at random, until the user's next job of that size begins",
        ),
    )


def _parse_acme_jobs(text: str) -> Iterator[_AcmeJob]:
    rows = csv.DictReader(io.StringIO(text))
    missing = [field for field in ACME_FIELDS if field not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(
            f"line 1: no column {missing[0]}; expected those of AcmeTrace's job traces"
        )
    training, several = list[_AcmeJob](), list[_AcmeJob]()
    for number, row in enumerate(rows, 2):
        try:
            # Jobs on one server tell little about training on many.
            if not row["start_time"] or not row["end_time"] or int(float(row["node_num"] or 0)) < 2:
                continue
            begin, end = (
                datetime.fromisoformat(row[field]).timestamp()
                for field in ("start_time", "end_time")
            )
            end = (
                datetime.fromisoformat(row["fail_time"]).timestamp()
                if row.get("fail_time")
                else end
            )
            job = _AcmeJob(
                row["user"],
                int(float(row["node_num"])),
                int(float(row["gpu_num"])),
                row["state"] in FAILED_STATES,
                begin,
                end,
            )
        except (ValueError, TypeError, OverflowError):
            raise ValueError(
                f"line {number}: expected numbers and times as `2023-03-01 00:18:54+08:00`"
            ) from None
        if job.end > job.begin:
            several.append(job)
            training += [job] if row["type"] == TRAINING_TYPE else []
    yield from training or several


def _peak_servers(jobs: Sequence[_AcmeJob]) -> int:
    """Return the largest number of servers that the jobs use at a time."""
    steps = [(job.begin, job.servers) for job in jobs]
    steps += [(job.end, -job.servers) for job in jobs]
    now = peak = 0
    for _, step in sorted(steps):
        now += step
        peak = max(peak, now)
    return peak


def _seconds_to_next_jobs(jobs: Sequence[_AcmeJob]) -> Mapping[_AcmeJob, float]:
    """Return the seconds from each job's end to its user's next similar job, if soon."""
    similar = defaultdict[tuple[str, int], list[_AcmeJob]](list)
    for job in sorted(jobs, key=lambda job: job.begin):
        similar[job.user, job.gpus].append(job)
    seconds_to_next = dict[_AcmeJob, float]()
    for ordered in similar.values():
        for index, job in enumerate(ordered):
            after = next(
                (later.begin - job.end for later in ordered[index + 1 :] if later.begin > job.end),
                math.inf,
            )
            if after <= MAX_ABSENCE_SECONDS:
                seconds_to_next[job] = after
    return seconds_to_next


# --- StragglerAnalysis ----------------------------------------------------------------------------


def read_slow_worker_trace(path: Path) -> AvailabilityTrace:
    """Return a trace of how slow the workers of a recorded job were, by iteration.

    ByteDance recorded the job (StragglerAnalysis). The place of a worker is its dp_rank x stages +
    its stage. Raises ValueError if pyarrow is not installed, or the file cannot be read or has no
    rows of that form.
    """
    column = read_columns(path, STRAGGLER_FIELDS)
    steps, step = np.unique(column["step"], return_inverse=True)
    if not len(steps):
        raise ProfilerTraceError(f"{path}: no rows")
    pipelines, stages = (int(column[name].max()) + 1 for name in ("dp_rank", "stage"))
    begin = column["start_ts"].astype(np.float64)
    lengths = iteration_spans(
        step, begin, begin + column["duration"], np.ones(len(step), bool), len(steps)
    )
    # An iteration's slowness holds from its begin to its end.
    clock, changes, before = 0.0, list[Change](), np.ones(pipelines * stages)
    for number, length in enumerate(lengths.tolist()):
        factors = _slowness_factors(
            {name: of[step == number] for name, of in column.items()}, pipelines, stages
        )
        slowed = [
            (place, float(factors[place])) for place in np.flatnonzero(factors != before).tolist()
        ]
        changes += [Change(clock, slowed=tuple(slowed))] if slowed else []
        before, clock = factors, clock + length
    return AvailabilityTrace(
        name=path.stem,
        places=pipelines * stages,
        live=tuple(range(pipelines * stages)),
        changes=tuple(changes),
        length_seconds=clock,
        notes=(
            f"StragglerAnalysis: {len(steps)} steps of {pipelines} x {stages} workers; a worker is "
            "as slow as the median of its compute ops over that of its stage",
        ),
    )


def _slowness_factors(
    ops: Mapping[str, npt.NDArray[Any]], pipelines: int, stages: int
) -> npt.NDArray[np.float64]:
    """Return each worker's slowdown factor, at least 1, from an iteration's columns `ops`."""
    # Median duration of each kind of op by worker, then the median over a stage's workers.
    medians = np.full((pipelines, stages, len(KINDS)), np.nan)
    for number, kind in enumerate(KINDS):
        of = np.flatnonzero(ops["optype"] == kind)
        worker = ops["dp_rank"][of] * stages + ops["stage"][of]
        order = np.argsort(worker, kind="stable")
        names, begins = np.unique(worker[order], return_index=True)
        for name, seconds in zip(
            names.tolist(), np.split(ops["duration"][of[order]], begins[1:]), strict=False
        ):
            medians[*divmod(name, stages), number] = np.median(seconds)
    present, usual = np.isfinite(medians), np.zeros_like(medians)
    for stage, number in np.ndindex(stages, len(KINDS)):
        if (measured := present[:, stage, number]).any():
            usual[:, stage, number] = np.median(medians[measured, stage, number])
    # Only kinds of op that a worker ran count, in its own sum and in the usual one.
    seconds, whole = medians.sum(axis=2, where=present), usual.sum(axis=2, where=present)
    factors: npt.NDArray[np.float64] = np.divide(
        seconds, whole, out=np.ones_like(seconds), where=whole > 0
    )
    return np.maximum(1.0, factors.round(SLOWNESS_DIGITS).reshape(-1))
