"""Reads traces that others have published. The files stay with their owners; the formats are these.

SkyPilot's spot traces (github.com/skypilot-org/spot-traces, "Can't Be Late", NSDI 2024): JSON
`{"metadata": {"gap_seconds": 300}, "data": [16, 16, 0, ...]}`, how many instances are available at each tick.

AcmeTrace (github.com/InternLM/AcmeTrace, "Characterization of Large Language Model Development in the Datacenter",
NSDI 2024): CSV, one line for each job, with `job_id,user,node_num,gpu_num,...,type,state,submit_time,start_time,
end_time`; Kalos also has `fail_time`. It has no failures of machines. A job that fails (`FAILED`, `TIMEOUT`,
`NODE_FAIL`) takes one of the servers, drawn at random, until the next job of its user of that size begins.

StragglerAnalysis (github.com/ByteDance-Seed/StragglerAnalysis, "Understanding Stragglers in Large Model Training Using
What-if Analysis", OSDI 2025, arXiv 2505.05713): Parquet, one row for each op, with `dp_rank`, `stage`, `step`,
`optype`, `start_ts` and `duration` in seconds. Nobody fails; a worker is as slow as its compute ops are, in the
median, over those of all workers of its stage.
"""

import csv
import io
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from slipstream.cli.fleet.availability_trace import AvailabilityTrace, Change

FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL")
ACME_FIELDS = ("job_id", "user", "node_num", "gpu_num", "type", "state", "start_time", "end_time")
TRAINING = "Pretrain"
"""The type of jobs that are read, where a file has any; else all of several servers."""
LONGEST_AWAY, USUALLY_AWAY = 86_400.0, 360.0
"""A job that does not come back within a day is not the same one: its server is taken to be back in six minutes."""
STRAGGLER_FIELDS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
COMPUTE = ("forward-compute", "backward-compute")
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
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError("reading Parquet needs pyarrow: pip install 'slipstream-train[parquet]'") from None
    try:
        columns = parquet.read_table(path, columns=list(STRAGGLER_FIELDS)).to_pydict()
    except (ArrowException, OSError, KeyError) as error:
        raise ValueError(f"not a Parquet file of StragglerAnalysis: {str(error).splitlines()[0]}") from None
    missing = [field for field in STRAGGLER_FIELDS if field not in columns]
    if missing or not columns["step"]:
        raise ValueError(f"no column {missing[0]}" if missing else "no rows")
    return _from_ops(zip(*(columns[field] for field in STRAGGLER_FIELDS), strict=True), path.stem)


def _from_ops(rows: Iterator[tuple[int, int, int, str, float, float]], name: str) -> AvailabilityTrace:
    times = defaultdict[tuple[int, int, int, str], list[float]](list)
    ends, begins, pipelines, stages = dict[int, float](), dict[int, float](), 0, 0
    for pipeline, stage, step, kind, start, seconds in rows:
        pipelines, stages = max(pipelines, pipeline + 1), max(stages, stage + 1)
        begins[step] = min(begins.get(step, math.inf), start)
        ends[step] = max(ends.get(step, 0.0), start + seconds)
        if kind in COMPUTE:
            times[step, stage, pipeline, kind].append(seconds)
    clock, changes, before = 0.0, list[Change](), dict[int, float]()
    for step in sorted(begins):
        slowed = []
        for stage in range(stages):
            for pipeline, factor in _slowness(times, step, stage, pipelines).items():
                place = pipeline * stages + stage
                if factor != before.get(place, 1.0):
                    slowed.append((place, factor))
                before[place] = factor
        changes += [Change(clock, slowed=tuple(sorted(slowed)))] if slowed else []
        clock += ends[step] - begins[step]
    places = pipelines * stages
    return AvailabilityTrace(name=name, places=places, live=tuple(range(places)), changes=tuple(changes),
                             length_seconds=clock, notes=(
        f"StragglerAnalysis: {len(begins)} steps of {pipelines} x {stages} workers; a worker is as slow as the median "
        "of its compute ops over that of its stage",))


def _slowness(times: Mapping[tuple[int, int, int, str], Sequence[float]], step: int, stage: int, pipelines: int) -> \
        dict[int, float]:
    """How many times as long each pipeline's worker of a stage takes in a step as the median one."""
    found = {}
    medians = {(pipeline, kind): statistics.median(ops) for pipeline in range(pipelines) for kind in COMPUTE
               if (ops := times.get((step, stage, pipeline, kind)))}
    usual = {kind: statistics.median([value for (_, of), value in medians.items() if of == kind])
             for kind in {kind for _, kind in medians}}
    for pipeline in range(pipelines):
        own = [medians[pipeline, kind] for kind in usual if (pipeline, kind) in medians]
        whole = sum(usual[kind] for kind in usual if (pipeline, kind) in medians)
        found[pipeline] = max(1.0, round(sum(own) / whole, DIGITS)) if whole else 1.0
    return found
