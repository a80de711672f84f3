"""Reads traces that others have published. The files stay with their owners; the formats are these.

SkyPilot's spot traces (github.com/skypilot-org/spot-traces, "Can't Be Late", NSDI 2024): JSON
`{"metadata": {"gap_seconds": 300}, "data": [16, 16, 0, ...]}`, how many instances are available at each tick.

AcmeTrace (github.com/InternLM/AcmeTrace, "Characterization of Large Language Model Development in the Datacenter",
NSDI 2024): CSV, one line for each job, with `job_id,user,node_num,gpu_num,...,type,state,submit_time,start_time,
end_time`; Kalos also has `fail_time`. It has no failures of machines. A job that fails (`FAILED`, `TIMEOUT`,
`NODE_FAIL`) takes one of the servers, drawn at random, until the next job of its user of that size begins.

InfiniteHBD-Trace (github.com/stepfun-ai/InfiniteHBD-Trace, SIGCOMM 2025, arXiv 2502.03885): JSON, a list of
`{"node_id": "06...", "event_time": 8.61, "event_type": "fault_start", "fault_type": {...}}` in days, and `fault_end`.
It names the servers that had a fault, of 400. Faults of a server that overlap are one time out of service.

StragglerAnalysis (github.com/ByteDance-Seed/StragglerAnalysis, "Understanding Stragglers in Large Model Training Using
What-if Analysis", OSDI 2025, arXiv 2505.05713): Parquet, one row for each op, with `dp_rank`, `stage`, `step`,
`optype`, `start_ts` and `duration` in seconds. Nobody fails; a worker is as slow as its compute ops are, in the
median, over those of all workers of its stage.
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

from slipstream.cli.fleet.availability_trace import AvailabilityTrace, Change
from slipstream.planner.job.profiler_trace import ProfilerTraceError
from slipstream.planner.job.straggler_trace import KINDS, read_columns, spans

FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL")
ACME_FIELDS = ("job_id", "user", "node_num", "gpu_num", "type", "state", "start_time", "end_time")
TRAINING = "Pretrain"
"""The type of jobs that are read, where a file has any; else all of several servers."""
LONGEST_AWAY, USUALLY_AWAY = 86_400.0, 360.0
"""A job that does not come back within a day is not the same one: its server is taken to be back in six minutes."""
STRAGGLER_FIELDS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
DIGITS = 1
"""Of slowness, after the point."""


class _Spot(msgspec.Struct):
    gap_seconds: float


class _SpotTrace(msgspec.Struct):
    metadata: _Spot
    data: list[float]


_SPOT_TRACE = msgspec.json.Decoder(_SpotTrace)


def spot_counts(text: str) -> tuple[list[tuple[float, int]], float]:
    """(pairs of seconds and instances from then on, seconds in all) of one of SkyPilot's traces. Raises ValueError."""
    try:
        found = _SPOT_TRACE.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f'expected {{"metadata": {{"gap_seconds": 300}}, "data": [...]}} (a spot trace): {error}') \
            from None
    gap = found.metadata.gap_seconds
    if not 0 < gap < math.inf:
        raise ValueError(f"gap_seconds is {gap:g}; expected more than 0")
    for number, value in enumerate(found.data):
        if value < 0 or value != int(value):
            raise ValueError(f"data[{number}] is {value:g}; expected a number of instances")
    counts = [(number * gap, int(value)) for number, value in enumerate(found.data)
              if not number or value != found.data[number - 1]]
    return counts, len(found.data) * gap


# --- InfiniteHBD-Trace ------------------------------------------------------------------------------------------------


INFINITE_HBD_SERVERS = 400
"""Of the fleet; the file names those with a fault."""


class _Fault(msgspec.Struct):
    node_id: str
    event_time: Annotated[float, msgspec.Meta(ge=0, le=36_525)]
    """Days."""
    event_type: Literal["fault_start", "fault_end"]


_FAULTS = msgspec.json.Decoder(list[_Fault])


def fault_trace(text: str, name: str) -> AvailabilityTrace:
    """Read when the servers of InfiniteHBD-Trace are out of service. Raises ValueError."""
    try:
        events = sorted(_FAULTS.decode(text), key=lambda event: event.event_time)
    except msgspec.MsgspecError as error:
        raise ValueError('expected [{"node_id": "...", "event_time": DAYS, "event_type": "fault_start"}, ...] '
                         f"(InfiniteHBD-Trace): {error}") from None
    if not events:
        raise ValueError("no faults")
    place_of = {node: place for place, node in enumerate(sorted({event.node_id for event in events}))}
    faults, changes = dict.fromkeys(place_of.values(), 0), []
    for days, together in groupby(events, key=lambda event: event.event_time):
        before = dict[int, int]()
        for event in together:
            place = place_of[event.node_id]
            before.setdefault(place, faults[place])
            faults[place] += 1 if event.event_type == "fault_start" else -1
            if faults[place] < 0:
                raise ValueError(f"a fault of {event.node_id} ends on day {days:g} that has not begun")
        removed = tuple(sorted(place for place, count in before.items() if not count and faults[place]))
        added = tuple(sorted(place for place, count in before.items() if count and not faults[place]))
        changes += [Change(days * 86_400, removed=removed, added=added)] if removed or added else []
    places = max(INFINITE_HBD_SERVERS, len(place_of))
    return AvailabilityTrace(
        name=name, places=places, live=tuple(range(places)), changes=tuple(changes),
        length_seconds=max(1.0, events[-1].event_time * 86_400), notes=(
            f"InfiniteHBD-Trace: {places} servers, {len(place_of)} of which had faults; overlapping faults of a server "
            "are one time out of service",))


# --- AcmeTrace --------------------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    user: str
    servers: int
    gpus: int
    failed: bool
    begin: float
    end: float


def acme_trace(text: str, name: str, seed: int = 0) -> AvailabilityTrace:
    """The servers that failing jobs of AcmeTrace cost. Raises ValueError, whose message names the line."""
    jobs = list(_acme_jobs(text))
    if not jobs:
        raise ValueError("no job on several servers that began and ended")
    first = min(job.begin for job in jobs)
    places = _most_at_once(jobs)
    back = _next_begins(jobs)
    choice, down, changes = random.Random(seed), dict[int, float](), []
    for job in sorted((job for job in jobs if job.failed), key=lambda job: job.end):
        now = job.end - first
        for place in [place for place, until in down.items() if until <= now]:
            changes.append(Change(down.pop(place), added=(place,)))
        free = [place for place in range(places) if place not in down]
        if not free or (changes and changes[-1].seconds >= now):
            continue  # two at one instant: one server is enough to end both
        place = choice.choice(free)
        changes.append(Change(now, removed=(place,)))
        down[place] = now + back.get(job, USUALLY_AWAY)
    length = max(job.end for job in jobs) - first
    changes += [Change(until, added=(place,)) for place, until in down.items() if until < length]
    return AvailabilityTrace(
        name=name, places=places, live=tuple(range(places)), length_seconds=length,
        changes=tuple(sorted((one for one in changes if one.seconds < length), key=lambda one: one.seconds)),
        notes=(f"AcmeTrace: {len(jobs)} jobs, {sum(job.failed for job in jobs)} of which failed; each failure takes a "
               "server, drawn at random, until the user's next job of that size begins",))


def _acme_jobs(text: str) -> Iterator[_Job]:
    rows = csv.DictReader(io.StringIO(text))
    missing = [field for field in ACME_FIELDS if field not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"line 1: no column {missing[0]}; expected those of AcmeTrace's job traces")
    training, several = list[_Job](), list[_Job]()
    for number, row in enumerate(rows, 2):
        try:
            if not row["start_time"] or not row["end_time"] or int(float(row["node_num"] or 0)) < 2:
                continue
            begin, end = (datetime.fromisoformat(row[field]).timestamp() for field in ("start_time", "end_time"))
            end = datetime.fromisoformat(row["fail_time"]).timestamp() if row.get("fail_time") else end
            job = _Job(row["user"], int(float(row["node_num"])), int(float(row["gpu_num"])), row["state"] in FAILED,
                       begin, end)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"line {number}: expected numbers and times as `2023-03-01 00:18:54+08:00`") from None
        if job.end > job.begin:
            several.append(job)
            training += [job] if row["type"] == TRAINING else []
    yield from training or several


def _most_at_once(jobs: Sequence[_Job]) -> int:
    """How many servers the jobs ever have at a time."""
    steps = sorted([(job.begin, job.servers) for job in jobs] + [(job.end, -job.servers) for job in jobs])
    now = most = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def _next_begins(jobs: Sequence[_Job]) -> Mapping[_Job, float]:
    """Seconds from the end of a job to the begin of the next one of its user and size, where that is within a day."""
    alike = defaultdict[tuple[str, int], list[_Job]](list)
    for job in sorted(jobs, key=lambda job: job.begin):
        alike[job.user, job.gpus].append(job)
    found = dict[_Job, float]()
    for ordered in alike.values():
        for index, job in enumerate(ordered):
            after = next((one.begin - job.end for one in ordered[index + 1:] if one.begin > job.end), math.inf)
            if after <= LONGEST_AWAY:
                found[job] = after
    return found


# --- StragglerAnalysis ------------------------------------------------------------------------------------------------


def straggler_trace(path: Path) -> AvailabilityTrace:
    """The slow workers of a job recorded by ByteDance. Place: dp_rank x stages + stage. Raises ValueError."""
    column = read_columns(path, STRAGGLER_FIELDS)
    steps, step = np.unique(column["step"], return_inverse=True)
    if not len(steps):
        raise ProfilerTraceError(f"{path}: no rows")
    pipelines, stages = (int(column[name].max()) + 1 for name in ("dp_rank", "stage"))
    begin = column["start_ts"].astype(np.float64)
    lengths = spans(step, begin, begin + column["duration"], np.ones(len(step), bool), len(steps))
    clock, changes, before = 0.0, list[Change](), np.ones(pipelines * stages)
    for number, length in enumerate(lengths.tolist()):
        factors = _slowness({name: of[step == number] for name, of in column.items()}, pipelines, stages)
        slowed = [(place, float(factors[place])) for place in np.flatnonzero(factors != before).tolist()]
        changes += [Change(clock, slowed=tuple(slowed))] if slowed else []
        before, clock = factors, clock + length
    return AvailabilityTrace(
        name=path.stem, places=pipelines * stages, live=tuple(range(pipelines * stages)), changes=tuple(changes),
        length_seconds=clock, notes=(
            f"StragglerAnalysis: {len(steps)} steps of {pipelines} x {stages} workers; a worker is as slow as the "
            "median of its compute ops over that of its stage",))


def _slowness(ops: Mapping[str, npt.NDArray[Any]], pipelines: int, stages: int) -> npt.NDArray[np.float64]:
    """[places] how many times as long each takes as the middle of its stage, by the medians of its ops."""
    medians = np.full((pipelines, stages, len(KINDS)), np.nan)
    for number, kind in enumerate(KINDS):
        of = np.flatnonzero(ops["optype"] == kind)
        worker = ops["dp_rank"][of] * stages + ops["stage"][of]
        order = np.argsort(worker, kind="stable")
        names, begins = np.unique(worker[order], return_index=True)
        for name, seconds in zip(names.tolist(), np.split(ops["duration"][of[order]], begins[1:]), strict=False):
            medians[*divmod(name, stages), number] = np.median(seconds)
    there, usual = np.isfinite(medians), np.zeros_like(medians)
    for stage, number in np.ndindex(stages, len(KINDS)):
        if (some := there[:, stage, number]).any():
            usual[:, stage, number] = np.median(medians[some, stage, number])
    own, whole = medians.sum(axis=2, where=there), usual.sum(axis=2, where=there)
    found: npt.NDArray[np.float64] = np.divide(own, whole, out=np.ones_like(own), where=whole > 0)
    return np.maximum(1.0, found.round(DIGITS).reshape(-1))
