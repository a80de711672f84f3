"""Trace files of two forms, told apart by their first line.

    2021-12-11, 11:11:30, 55        availability: date, time, machines alive
    60000,add,node19                events: milliseconds, add or remove, the machine's name

Real recordings are dirty, and this is what is done about it. Times that run backwards (clocks are set, collectors
race): lines are sorted by time, equal times keep their order, of two counts at one instant the last holds. Holes (no
sample for more than `HOLE` times the usual step): the last count is taken to hold. A removal of a machine that is not
there, or an addition of one that is: ignored. All of these are counted in the trace's notes. Whatever cannot be read
is refused, with the number of its line. Blank lines, and what follows a #, are skipped.

Availability says how many machines leave, not which; these are drawn at random, with a seed.
"""

import random
import re
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from planner.fleet.availability import Change, Trace
from schedules.files import read_at_most

MAX_BYTES = 64 * 2**20
MAX_PLACES = 2**20
MAX_SECONDS = 100 * 365 * 86400.0
HOLE = 20
"""Samples further apart than so many times the median step are told of as a hole."""

_SAMPLE = re.compile(r"(\d{4}-\d{2}-\d{2})\s*,\s*(\d{2}:\d{2}:\d{2})\s*,\s*(\d{1,9})")
_EVENT = re.compile(r"(\d{1,18})\s*,\s*(add|remove)\s*,\s*(\S.*)")
_FORMS = "expected `YYYY-MM-DD, HH:MM:SS, COUNT` (availability) or `MILLISECONDS,add|remove,NAME` (events)"

Line = tuple[int, str]
"""Number and text."""


class TraceFileError(ValueError):
    """A trace file that cannot be used. The message is one line."""


def read_trace(path: Path, seed: int = 0) -> Trace:
    """Read a trace file of either form; `seed` draws which machines leave where the file does not say.

    Raises TraceFileError.
    """
    data = read_at_most(path, MAX_BYTES, TraceFileError)
    try:
        return parse_trace(data.decode("utf-8-sig"), path.stem, seed)
    except UnicodeDecodeError:
        raise TraceFileError(f"{path}: not UTF-8 text; {_FORMS}") from None
    except TraceFileError as error:
        raise TraceFileError(f"{path}: {error}") from None


def parse_trace(text: str, name: str = "trace", seed: int = 0) -> Trace:
    """Read a trace from text. Raises TraceFileError that names the line."""
    lines = [(number, line) for number, raw in enumerate(text.splitlines(), 1) if (line := raw.split("#")[0].strip())]
    if not lines:
        raise TraceFileError(f"no lines; {_FORMS}")
    if _SAMPLE.fullmatch(lines[0][1]):
        return _from_samples(lines, name, seed)
    if _EVENT.fullmatch(lines[0][1]):
        return _from_events(lines, name)
    raise TraceFileError(f"line {lines[0][0]}: {_shown(lines[0][1])}; {_FORMS}")


def from_counts(counts: Sequence[tuple[float, int]], length_seconds: float, name: str, seed: int = 0,
                notes: Sequence[str] = ()) -> Trace:
    """A trace from (seconds, machines alive from then on), ascending, the first at 0.

    Machines that leave are drawn at random from those alive, machines that come from the places that are free.
    """
    places = max(count for _, count in counts)
    choice = random.Random(seed)
    live = set(range(places)) if counts[0][1] == places else set(choice.sample(range(places), counts[0][1]))
    first, changes = tuple(sorted(live)), []
    for seconds, count in counts[1:]:
        more = count - len(live)
        if more < 0:
            removed = tuple(sorted(choice.sample(sorted(live), -more)))
            live -= set(removed)
            changes.append(Change(seconds, removed=removed))
        elif more > 0:
            added = tuple(sorted(choice.sample(sorted(set(range(places)) - live), more)))
            live |= set(added)
            changes.append(Change(seconds, added=added))
    return Trace(name=name, places=places, live=first, changes=tuple(changes), length_seconds=length_seconds,
                 notes=tuple(notes))


# --- Availability -----------------------------------------------------------------------------------------------------


def _from_samples(lines: Sequence[Line], name: str, seed: int) -> Trace:
    samples: list[tuple[float, int]] = []
    for number, line in lines:
        found = _SAMPLE.fullmatch(line)
        if found is None:
            raise TraceFileError(f"line {number}: {_shown(line)}; expected `YYYY-MM-DD, HH:MM:SS, COUNT` as above it")
        try:
            time = datetime.strptime(f"{found[1]} {found[2]}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise TraceFileError(f"line {number}: {_shown(line)}; there is no such date and time") from None
        samples.append(((time - datetime(1970, 1, 1)).total_seconds(), int(found[3])))
        if samples[-1][1] > MAX_PLACES:
            raise TraceFileError(f"line {number}: {samples[-1][1]} machines; at most {MAX_PLACES}")
    notes = _sort(samples, lambda sample: sample[0])
    begin = samples[0][0]
    counts = {seconds - begin: count for seconds, count in samples}
    length = samples[-1][0] - begin
    _require_length(length, lines[-1][0])
    if not max(counts.values()):
        raise TraceFileError("no machine is ever alive")
    notes += _holes(sorted(counts))
    notes.append("which machines leave is drawn at random: the file says how many")
    return from_counts(sorted(counts.items()), length, name, seed, notes)


def _holes(times: Sequence[float]) -> list[str]:
    steps = [after - before for before, after in pairwise(times)]
    usual = statistics.median(steps)
    holes = [step for step in steps if step > HOLE * usual]
    if not holes:
        return []
    return [f"{len(holes)} holes without samples, {sum(holes) / 3600:.1f} h in all: the last count is taken to hold"]


# --- Events -----------------------------------------------------------------------------------------------------------


def _from_events(lines: Sequence[Line], name: str) -> Trace:
    events: list[tuple[float, str, str]] = []
    for number, line in lines:
        found = _EVENT.fullmatch(line)
        if found is None:
            raise TraceFileError(f"line {number}: {_shown(line)}; expected `MILLISECONDS,add|remove,NAME` as above it")
        events.append((int(found[1]) / 1000, found[2], found[3]))
    notes = _sort(events, lambda event: event[0])
    begin = events[0][0]
    _require_length(events[-1][0] - begin, lines[-1][0])
    fleet = _Fleet()
    for seconds, what, machine in events:
        fleet.note(seconds - begin, what, machine)
    if fleet.ignored:
        notes.append(f"{fleet.ignored} events ignored: additions of machines that were there, removals of others")
    return fleet.trace(name, events[-1][0] - begin, notes)


class _Fleet:
    """Machines by name, each in the lowest place that was free when it came."""

    def __init__(self) -> None:
        self.ignored = 0
        self._place: dict[str, int] = {}
        self._free: list[int] = []
        self._places = 0
        self._changes: dict[float, tuple[set[int], set[int]]] = {}

    def note(self, seconds: float, what: str, machine: str) -> None:
        """One event."""
        if (what == "add") == (machine in self._place):
            self.ignored += 1
            return
        removed, added = self._changes.setdefault(seconds, (set(), set()))
        if what == "add":
            place = self._take()
            self._place[machine] = place
            # Where one machine follows another within an instant, the place has lost what it held all the same.
            added.add(place)
        else:
            place = self._place.pop(machine)
            self._free.append(place)
            if place in added:
                added.remove(place)
            else:
                removed.add(place)

    def _take(self) -> int:
        if self._free:
            self._free.sort(reverse=True)
            return self._free.pop()
        self._places += 1
        return self._places - 1

    def trace(self, name: str, length_seconds: float, notes: Sequence[str]) -> Trace:
        """All that was noted."""
        changes = []
        for seconds, (removed, added) in self._changes.items():
            if removed & added:
                # The newcomer is not the one who left: first gone, then there, an instant later.
                changes.append(Change(seconds, tuple(sorted(removed)), tuple(sorted(added - removed))))
                changes.append(Change(seconds + 1e-3, (), tuple(sorted(removed & added))))
            elif removed or added:
                changes.append(Change(seconds, tuple(sorted(removed)), tuple(sorted(added))))
        live: tuple[int, ...] = ()
        if changes and changes[0].seconds == 0:
            live = changes.pop(0).added
        return Trace(name=name, places=self._places, live=live, changes=tuple(changes),
                     length_seconds=length_seconds, notes=tuple(notes))


# --- Both -------------------------------------------------------------------------------------------------------------


def _sort(rows: list, time: Callable[..., float]) -> list[str]:  # type: ignore[type-arg]
    """Sort rows by time; a note where that changed something."""
    back = sum(time(after) < time(before) for before, after in pairwise(rows))
    rows.sort(key=time)
    return [f"time ran backwards {back} times: lines are sorted by it"] if back else []


def _require_length(seconds: float, number: int) -> None:
    if seconds <= 0:
        raise TraceFileError(f"line {number}: all lines are of one instant; expected a span of time")
    if seconds > MAX_SECONDS:
        raise TraceFileError(f"line {number}: the trace would span more than a century; times are wrong")


def _shown(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:57] + "...")
