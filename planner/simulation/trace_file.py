"""Availability trace files. We define two forms; the first line shows which one a file has.

    2021-12-11, 11:11:30, 55        availability: date, time, machines alive
    60000,add,node19                events: milliseconds, add or remove, the machine's name
    60000,slow,node19,1.5           ... from now on it takes 1.5 times as long; 1: as usual
    60000,gpus,node19,7             ... from now on 7 of its GPUs are alive

Files that others have published are read in their own formats (`public_traces`).

Recordings have errors, which are corrected as follows. Notes of the trace count them, except for
equal times:

- Times run backwards: lines are sorted by time, lines of equal time keep their order, and of two
  counts at one instant the last is used.
- Samples are missing for more than `MAX_STEP_RATIO` times the usual step: the last count is assumed
  to hold.
- A machine is removed, slow or short of GPUs that is not there, or added although it is there: the
  line is ignored.

A line that cannot be read is refused with its number. Blank lines, and text after a #, are skipped.
The availability form gives only the number of machines that leave; which ones is drawn at random,
with a seed.
"""

import random
import re
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from slipstream.planner.job.profiler_trace import ProfilerTraceError
from slipstream.planner.simulation.availability_trace import AvailabilityTrace, Change
from slipstream.planner.simulation.public_traces import (
    ACME_FIELDS,
    parse_acme_trace,
    parse_fault_trace,
    parse_spot_counts,
    read_slow_worker_trace,
)
from slipstream.schedules.files import read_at_most

MAX_BYTES = 256 * 2**20
PARQUET_MAGIC = b"PAR1"
MAX_PLACES = 2**20
MAX_SECONDS = 100 * 365 * 86400.0
MAX_FACTOR = 1000.0
"""Maximum slowdown factor of a machine. A slower one is as good as down."""
MAX_STEP_RATIO = 20
"""Samples are missing where a step is over this many times the median step."""

_SAMPLE = re.compile(r"(\d{4}-\d{2}-\d{2})\s*,\s*(\d{2}:\d{2}:\d{2})\s*,\s*(\d{1,9})")
_EVENT = re.compile(r"(\d{1,18})\s*,\s*(add|remove|slow|gpus)\s*,\s*(\S.*)")
_VALUE = {"slow": re.compile(r"\d{1,6}(?:\.\d{1,9})?"), "gpus": re.compile(r"\d{1,6}")}
_EVENTS = (
    "`MILLISECONDS,add|remove,NAME`, `MILLISECONDS,slow,NAME,FACTOR` or "
    "`MILLISECONDS,gpus,NAME,COUNT`"
)
_FORMS = f"expected `YYYY-MM-DD, HH:MM:SS, COUNT` (availability) or {_EVENTS} (events)"

Line = tuple[int, str]
"""Number and text of a line of a trace file."""


class TraceFileError(ValueError):
    """Error for a trace file that cannot be used. The message is one line."""


def read_availability_trace(
    path: Path, seed: int = 0, gpus_per_worker: int = 1
) -> AvailabilityTrace:
    """Read a trace file of any form. Raises TraceFileError, which names the file.

    If the file does not name the machines that leave, they are drawn at random with `seed`. In the
    form of events, a machine is a worker with `gpus_per_worker` GPUs; otherwise it counts as one
    GPU. The error also names a line that is at fault. Parquet files are read with pyarrow.
    """
    data = read_at_most(path, MAX_BYTES, TraceFileError)
    try:
        if data.startswith(PARQUET_MAGIC):
            return read_slow_worker_trace(path)
        return parse_availability_trace(data.decode("utf-8-sig"), path.stem, seed, gpus_per_worker)
    except UnicodeDecodeError:
        raise TraceFileError(f"{path}: not UTF-8 text; {_FORMS}") from None
    except ProfilerTraceError as error:
        raise TraceFileError(str(error)) from None
    except ValueError as error:
        raise TraceFileError(f"{path}: {error}") from None


def parse_availability_trace(
    text: str, name: str = "trace", seed: int = 0, gpus_per_worker: int = 1
) -> AvailabilityTrace:
    """Read the trace `name` from text of any form. Raises ValueError.

    If the text does not name the machines that leave, they are drawn at random with `seed`. In the
    form of events, a machine is a worker with `gpus_per_worker` GPUs; otherwise it counts as one
    GPU. The error names a line that is at fault.
    """
    lines = [
        (number, line)
        for number, raw in enumerate(text.splitlines(), 1)
        if (line := raw.split("#")[0].strip())
    ]
    if not lines:
        raise TraceFileError(f"no lines; {_FORMS}")
    # The first line shows the form; what others have published comes first.
    if lines[0][1].startswith("{"):
        return _parse_spot(text, name, seed)
    if lines[0][1].startswith("["):
        return parse_fault_trace(text, name)
    if lines[0][1].startswith(ACME_FIELDS[0]):
        return parse_acme_trace(text, name, seed)
    if _SAMPLE.fullmatch(lines[0][1]):
        return _parse_samples(lines, name, seed)
    if _parse_event(lines[0][1]):
        return _parse_events(lines, name, gpus_per_worker)
    raise TraceFileError(f"line {lines[0][0]}: {_quote_line(lines[0][1])}; {_FORMS}")


def build_from_counts(
    counts: Sequence[tuple[float, int]],
    length_seconds: float,
    name: str,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> AvailabilityTrace:
    """Return a trace of `length_seconds` from pairs (seconds, machines alive from then on).

    The pairs are ascending, the first at 0; the largest number is that of places. Which machines
    leave, and which free places new ones take, is drawn at random with `seed`. The lines `notes`
    say what was assumed or corrected.
    """
    places = max(count for _, count in counts)
    choice = random.Random(seed)
    live = (
        set(range(places))
        if counts[0][1] == places
        else set(choice.sample(range(places), counts[0][1]))
    )
    first, changes = tuple(sorted(live)), []
    # Every change of the number removes or adds random machines.
    for seconds, count in counts[1:]:
        difference = count - len(live)
        if difference < 0:
            removed = tuple(sorted(choice.sample(sorted(live), -difference)))
            live -= set(removed)
            changes.append(Change(seconds, removed=removed))
        elif difference > 0:
            added = tuple(sorted(choice.sample(sorted(set(range(places)) - live), difference)))
            live |= set(added)
            changes.append(Change(seconds, added=added))
    return AvailabilityTrace(
        name=name,
        places=places,
        live=first,
        changes=tuple(changes),
        length_seconds=length_seconds,
        notes=tuple(notes),
    )


def _parse_spot(text: str, name: str, seed: int) -> AvailabilityTrace:
    counts, length = parse_spot_counts(text)
    if not counts or not max(count for _, count in counts):
        raise TraceFileError("no instance is ever available")
    if max(count for _, count in counts) > MAX_PLACES or length > MAX_SECONDS:
        raise TraceFileError(
            f"the trace is too large; expected at most {MAX_PLACES} instances and 100 years"
        )
    return build_from_counts(
        counts,
        length,
        name,
        seed,
        ["leaving instances are drawn at random: the file has only counts"],
    )


# --- Availability ---------------------------------------------------------------------------------


def _parse_samples(lines: Sequence[Line], name: str, seed: int) -> AvailabilityTrace:
    samples: list[tuple[float, int]] = []
    for number, line in lines:
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise TraceFileError(
                f"line {number}: {_quote_line(line)}; expected `YYYY-MM-DD, HH:MM:SS, COUNT` as "
                "above it"
            )
        try:
            time = datetime.strptime(f"{match[1]} {match[2]}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise TraceFileError(
                f"line {number}: {_quote_line(line)}; there is no such date and time"
            ) from None
        samples.append(((time - datetime(1970, 1, 1)).total_seconds(), int(match[3])))
        if samples[-1][1] > MAX_PLACES:
            raise TraceFileError(f"line {number}: {samples[-1][1]} machines; at most {MAX_PLACES}")
    notes = _sort_by_time(samples, lambda sample: sample[0])
    # Of two counts at one instant, the last one stays.
    begin = samples[0][0]
    counts = {seconds - begin: count for seconds, count in samples}
    length = samples[-1][0] - begin
    _require_length(length, lines[-1][0])
    if not max(counts.values()):
        raise TraceFileError("no machine is ever alive")
    notes += _describe_missing_samples(sorted(counts))
    notes.append("machines that leave are drawn at random: the file gives only their number")
    return build_from_counts(sorted(counts.items()), length, name, seed, notes)


def _describe_missing_samples(times: Sequence[float]) -> list[str]:
    steps = [after - before for before, after in pairwise(times)]
    usual = statistics.median(steps)
    missing = [step for step in steps if step > MAX_STEP_RATIO * usual]
    if not missing:
        return []
    return [
        f"{len(missing)} gaps without samples, {sum(missing) / 3600:.1f} h in all: the last count "
        "is taken to hold"
    ]


# --- Events ---------------------------------------------------------------------------------------


class TraceEvent(NamedTuple):
    """Line of a trace of events: what happens to one machine."""

    seconds: float
    what: str
    machine: str
    value: float = 1.0
    """Slowdown factor of a slow machine, or number of its GPUs that are alive."""


def _parse_valid_event(number: int, line: str, gpus_per_worker: int) -> TraceEvent:
    event = _parse_event(line)
    if event is None:
        raise TraceFileError(f"line {number}: {_quote_line(line)}; expected {_EVENTS}, as above it")
    if event.what == "slow" and not 1 <= event.value <= MAX_FACTOR:
        raise TraceFileError(
            f"line {number}: {_quote_line(line)}; expected a factor from 1 (its usual speed) to "
            f"{MAX_FACTOR:g}"
        )
    if event.what == "gpus" and not 1 <= event.value <= gpus_per_worker:
        raise TraceFileError(
            f"line {number}: {_quote_line(line)}; expected 1 to {gpus_per_worker} GPUs, as many as "
            "a worker has (--gpus-per-worker); where none is left, remove it"
        )
    return event


def _parse_event(line: str) -> TraceEvent | None:
    match = _EVENT.fullmatch(line)
    if match is None:
        return None
    seconds, what, machine = int(match[1]) / 1000, match[2], match[3]
    if what not in _VALUE:
        return TraceEvent(seconds, what, machine)
    machine, _, value = (part.strip() for part in machine.rpartition(","))
    return (
        TraceEvent(seconds, what, machine, float(value))
        if machine and _VALUE[what].fullmatch(value)
        else None
    )


def _parse_events(lines: Sequence[Line], name: str, gpus_per_worker: int) -> AvailabilityTrace:
    events = [_parse_valid_event(number, line, gpus_per_worker) for number, line in lines]
    notes = _sort_by_time(events, lambda event: event.seconds)
    begin = events[0].seconds
    _require_length(events[-1].seconds - begin, lines[-1][0])
    # Names are mapped to places in order of time, so that a freed place is used again.
    places = _MachinePlaces()
    for event in events:
        places.record_event(event._replace(seconds=event.seconds - begin))
    if places.ignored:
        notes.append(
            f"{places.ignored} events ignored: additions of machines that were already there, "
            "other events of machines that were not"
        )
    trace = places.build_trace(name, events[-1].seconds - begin, notes)
    return msgspec.structs.replace(trace, gpus_per_worker=gpus_per_worker)


class _ChangeSets(NamedTuple):
    """Changes of machines at one instant, by place, collected while lines are read."""

    removed: set[int]
    added: set[int]
    slowed: dict[int, float]
    gpus: dict[int, int]


class _MachinePlaces:
    """Map of a trace file's machines, by name, to the lowest free places."""

    def __init__(self) -> None:
        self.ignored = 0
        self._place: dict[str, int] = {}
        self._free: list[int] = []
        self._places = 0
        self._changes: dict[float, _ChangeSets] = {}

    def record_event(self, event: TraceEvent) -> None:
        if (event.what == "add") == (event.machine in self._place):
            self.ignored += 1
            return
        removed, added, slowed, gpus = self._changes.setdefault(
            event.seconds, _ChangeSets(set(), set(), {}, {})
        )
        if event.what == "slow":
            slowed[self._place[event.machine]] = event.value
        elif event.what == "gpus":
            gpus[self._place[event.machine]] = int(event.value)
        elif event.what == "add":
            place = self._take_free_place()
            self._place[event.machine] = place
            # A place that is freed and taken at one instant stays in both sets: its parameters are
            # lost.
            added.add(place)
        else:
            place = self._place.pop(event.machine)
            self._free.append(place)
            slowed.pop(place, None)
            gpus.pop(place, None)
            if place in added:
                added.remove(place)
            else:
                removed.add(place)

    def _take_free_place(self) -> int:
        if self._free:
            self._free.sort(reverse=True)
            return self._free.pop()
        self._places += 1
        return self._places - 1

    def build_trace(
        self, name: str, length_seconds: float, notes: Sequence[str]
    ) -> AvailabilityTrace:
        """Return an availability trace of `length_seconds` that consists of all recorded events."""
        changes = []
        for seconds, (removed, added, slowed, gpus) in self._changes.items():
            states = tuple(sorted(slowed.items())), tuple(sorted(gpus.items()))
            if removed & added:
                # The new machine lacks the parameters of the one that left, so it is added an
                # instant later.
                changes.append(
                    Change(seconds, tuple(sorted(removed)), tuple(sorted(added - removed)))
                )
                changes.append(Change(seconds + 1e-3, (), tuple(sorted(removed & added)), *states))
            elif removed or added or slowed or gpus:
                changes.append(
                    Change(seconds, tuple(sorted(removed)), tuple(sorted(added)), *states)
                )
        # What the file adds at time 0 is there from the beginning.
        live: tuple[int, ...] = ()
        if changes and changes[0].seconds == 0:
            first = changes.pop(0)
            live = first.added
            if first.slowed or first.gpus:
                changes.insert(0, Change(0.0, slowed=first.slowed, gpus=first.gpus))
        return AvailabilityTrace(
            name=name,
            places=self._places,
            live=live,
            changes=tuple(changes),
            length_seconds=length_seconds,
            notes=tuple(notes),
        )


# --- Both -----------------------------------------------------------------------------------------


def _sort_by_time(rows: list, time: Callable[..., float]) -> list[str]:  # type: ignore[type-arg]
    """Sort rows in place by `time(row)`; return a note if they were not in order."""
    backwards = sum(time(after) < time(before) for before, after in pairwise(rows))
    rows.sort(key=time)
    return [f"time ran backwards {backwards} times: lines were sorted by time"] if backwards else []


def _require_length(seconds: float, number: int) -> None:
    if seconds <= 0:
        raise TraceFileError(
            f"line {number}: all lines have the same time; expected a span of time"
        )
    if seconds > MAX_SECONDS:
        raise TraceFileError(
            f"line {number}: the trace would span more than a century; check the times"
        )


def _quote_line(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:57] + "...")
