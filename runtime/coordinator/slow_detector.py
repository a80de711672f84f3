"""Slow-worker detector: which workers take longer than their peers, by what factor, and since when. Pure: no clock.

A worker is compared with the others that ran ops of the same kind on the same layers in the same iteration, so that an
iteration in which everybody is slow, or a stage whose times the job file has wrong, says nothing about anybody. Its
*ratio* in an iteration is the time that its ops took, by what they take on its peers:

    ratio = sum n_c t_c / sum n_c r_c          over its cells c: a kind of op on a range of layers

t_c is the median of its n_c ops of the cell, r_c that of those of all others that are believed to be as fast as usual;
where none is, of all others, each by the factor that is believed of it. Medians bear single ops that were held up, and
a peer that is slow, too. Layers that nobody else runs, as in plans that move some, have the r_c that they would have by
the plan, times what was measured by what was planned of the same layers while somebody else ran them; as long as that
is not known, they are left out.

Iterations are put together until they took `OBSERVATION_SECONDS`: what holds up a process for a moment holds up many
short iterations. An *observation* of a worker is the median over these of y = log(ratio / believed factor). Two sums
wait for it to leave zero, one for each side: Page's CUSUM (Biometrika 41, 1954), which finds a lasting change in the
fewest observations for its rate of false alarms (Lorden, Ann. Math. Statist. 42, 1971):

    S <- max(0, S + min(y, 3 k) - k)           alarm where S reaches 7.9 k

k, the allowance, is the spread of y by the deviation from the median that `WITHIN` of them have at most, which bears
outliers (Huber, Robust Statistics, 1981), the greater of the worker's own and the median one, and at least
`LEAST_SPREAD`. Noise that lasts for several observations has sums that spread more: k is that of the means of `BATCH`
successive ones, times the root of `BATCH`, where this is more (batch means; Law and Kelton, Simulation Modeling and
Analysis). Observations that may belong to a change do not count until it is clear that they do not. For normal noise a
worker has a false alarm every exp(15.8) / 2 = 3.6 million observations (Siegmund, Sequential Analysis, 1985). Noise of
processes has heavy tails: what is above 3 k counts as 3 k, so that no fewer than 4 observations raise an alarm, however
large they are. The change began after S was 0 last, where that leaves the least deviations: from 0 before, and after it
from their median, which is the new factor.

A change is measured over a few observations. On a noisy machine a worker that has recovered may be taken for one that
is a little slow, by less than k, and would stay so. But of a recovery to the usual speed it is known how large it is:
d = log(believed factor). Where d / 2 is less than k, d / 2 is taken off instead, and the alarm is where S reaches
7.9 k^2 / (d / 2): the same likelihood ratio of the two levels, for normal noise of spread k (Page).

Of two workers that are compared with nobody else, one of which is believed to be slow, the same ratio tells that this
one has recovered and that the other has become slow. It is taken for the former: who is compared with slow workers only
is not found slow.

A change of less than `LEAST_CHANGE` is none. A worker that has recovered before has to show twice as many observations
that it has recovered again each time, so that one that flaps keeps its lighter load.
"""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from slipstream.schedules.schedule import LayerRange, OpKind, Worker

Floats = NDArray[np.float64]

OBSERVATION_SECONDS = 1.0
"""Iterations are put together until they took so long. Where processes share cores, one may get none for seconds."""
LEAST_SPREAD = 0.04
"""Of log ratios: below that, nothing depends on it."""
ALLOWANCE, CAP, ALARM = 1.0, 3.0, 7.9
"""In spreads: what is taken off each observation, what it counts at most, the sum that raises an alarm."""
LEAST_CHANGE = 0.15
"""By how much more than 1 the greater of two factors is, divided by the other: less is no change."""
HISTORY = 64
"""Observations that tell the spread, but for those that may be a change."""
WITHIN = 0.8
"""Share of the observations by which the spread is told: as many outliers as that leaves do not count."""
_NORMAL = statistics.NormalDist().inv_cdf((1 + WITHIN) / 2)
BATCH = 4
"""Observations whose mean shows noise that lasts."""
FIRST = 5
"""Observations of a worker before which nobody knows the spread. Then they all count at once."""
FEWEST = 3
"""Observations that a change is measured over."""
MOST_DOUBLINGS = 5
"""Of what a worker has to show that it has recovered."""


class CellTime(NamedTuple):
    """The ops of one kind on the same layers that a worker ran in an iteration."""

    kind: OpKind
    layers: LayerRange
    number: int
    seconds: float
    """Median of the ops."""
    planned_seconds: float
    """Of one op on a worker of usual speed."""


class SpeedChange(NamedTuple):
    """A worker that takes longer, or less long, than was believed."""

    worker: Worker
    factor: float
    """By which its ops take longer than those of its peers; 1 is usual."""
    before: float
    """What was believed."""
    since: int
    """The first iteration of it."""
    iterations: int
    """How many it was measured over."""


Measured = Mapping[Worker, Sequence[CellTime]]
"""One iteration."""


@dataclass(slots=True)
class _Sum:
    """A one-sided CUSUM, and the observations since it was zero: their first iterations and their values."""

    value: float = 0.0
    since: list[tuple[int, float]] = field(default_factory=list)

    def add(self, iteration: int, y: float, spread: float, allowance: float) -> None:
        self.value = max(0.0, self.value + min(y, CAP * spread) - allowance)
        self.since.append((iteration, y))
        if not self.value:
            self.since.clear()

    def clear(self) -> None:
        self.value = 0.0
        self.since.clear()

    def copy(self) -> "_Sum":
        return _Sum(self.value, list(self.since))


@dataclass(slots=True)
class _Watched:
    """What is known of one worker."""

    factor: float = 1.0
    slower: _Sum = field(default_factory=_Sum)
    faster: _Sum = field(default_factory=_Sum)
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """Observations, without those of the sums."""
    pending: list[float] = field(default_factory=list)
    """Observations that may be part of a change."""
    waiting: list[tuple[int, float]] = field(default_factory=list)
    """Observations that no sum has yet, with their first iterations."""
    recoveries: int = 0

    spread: float = 0.0
    """Of the history, or of the first observations about their median: a worker may be slow from the start."""
    added: int = 0
    """Observations since that was found."""

    def copy(self) -> "_Watched":
        """One that changes by itself."""
        return _Watched(self.factor, self.slower.copy(), self.faster.copy(), self.history.copy(), list(self.pending),
                        list(self.waiting), self.recoveries, self.spread, self.added)

    def allowance(self, spread: float) -> float:
        """What is taken off the observations that may tell of a recovery."""
        usual = ALLOWANCE * spread
        return min(usual, math.log(self.factor) / 2) if self.factor >= 1.0 + LEAST_CHANGE else usual

    def is_known(self) -> bool:
        """Whether there are enough observations for a spread."""
        return len(self.history) + len(self.pending) + len(self.waiting) >= FIRST

    def believe(self, factor: float) -> None:
        """What was measured is dropped, but for what tells the spread."""
        self.factor = factor
        self.slower.clear()
        self.faster.clear()
        self.pending.clear()
        self.waiting.clear()

    def settle(self) -> None:
        """What is not a change is noise."""
        possible = max(len(self.slower.since), len(self.faster.since))
        while len(self.pending) > possible:
            self.history.append(self.pending.pop(0))
            self.added += 1

    def is_due(self) -> bool:
        """Whether the spread of the history is to be found anew."""
        return self.added > 0 and self.added >= min(BATCH, len(self.history) / BATCH)


class SlowDetector:
    """Takes the times of iterations, one after the other.

    Parameters
    ----------
    factors
        What is known of workers that are slow from the start.
    """

    def __init__(self, factors: Mapping[Worker, float] | None = None) -> None:
        self._watched: defaultdict[Worker, _Watched] = defaultdict(_Watched)
        for worker, factor in (factors or {}).items():
            self._watched[worker].factor = factor
        self._rates: dict[tuple[OpKind, int], float] = {}
        """What was measured by what was planned, of a kind of op on a layer that several workers ran."""
        self._open: tuple[Mapping[Worker, float], ...] = ()
        """Log ratios of the iterations that are put together."""
        self._first = self._last = 0
        self._seconds = 0.0

    def copy(self) -> "SlowDetector":
        """One that changes by itself. What is watched of workers is copied only where it changes."""
        new = copy(self)
        new._watched, new._rates = self._watched.copy(), dict(self._rates)
        return new

    def factor(self, worker: Worker) -> float:
        """What is believed of a worker."""
        return self._watched[worker].factor if worker in self._watched else 1.0

    def believe(self, worker: Worker, factor: float) -> None:
        """A worker's factor is known otherwise, such as from a test of its own. What was measured of it is dropped."""
        self._watched[worker] = watched = self._watched[worker].copy()
        watched.believe(factor)

    def interrupt(self) -> None:
        """Iterations do not go on from those before: what has not become an observation is dropped."""
        self._open, self._seconds = (), 0.0

    def lost(self, worker: Worker) -> None:
        """A worker is gone. One that is started again may be on another machine."""
        self._watched.pop(worker, None)
        self._open = tuple({one: y for one, y in its.items() if one != worker} for its in self._open)

    def observe(self, iteration: int, seconds: float, measured: Measured) -> list[SpeedChange]:
        """Enter an iteration that took so many seconds; the workers whose speed has changed."""
        if not self._seconds:
            self._first = iteration
        self._last = iteration
        self._seconds += seconds
        self._open = (*self._open, {worker: math.log(ratio) - math.log(self.factor(worker))
                                    for worker, ratio in self.ratios(measured).items()})
        if self._seconds < OBSERVATION_SECONDS:
            return []
        logs: dict[Worker, list[float]] = defaultdict(list)
        for its in self._open:
            for worker, y in its.items():
                logs[worker].append(y)
        observed = {worker: statistics.median(ys) for worker, ys in logs.items()}
        self.interrupt()
        return self._conclude(observed, self._beside_slow_ones(measured))

    def ratios(self, measured: Measured) -> dict[Worker, float]:
        """Of each worker that can be compared with others: the time of its ops by what they take on those."""
        times: dict[tuple[OpKind, LayerRange], dict[Worker, float]] = defaultdict(dict)
        unusual = set()
        for worker, cells in measured.items():
            factor = self.factor(worker)
            if factor != 1.0:
                unusual.add(worker)
            for cell in cells:
                times[cell.kind, cell.layers][worker] = cell.seconds / factor
        others = {cell: _of_others(seconds, unusual) for cell, seconds in times.items()}
        ratios = {}
        for worker, cells in measured.items():
            expected = took = 0.0
            for cell in cells:
                usual = others[cell.kind, cell.layers].get(worker)
                usual = self.usual_seconds(cell) if usual is None else usual
                if usual is not None:
                    expected += cell.number * usual
                    took += cell.number * cell.seconds
            if expected > 0 and took / expected > 0:
                ratios[worker] = took / expected
        self._learn(measured, times)
        return ratios

    def usual_seconds(self, cell: CellTime) -> float | None:
        """What ops of a cell take by what was measured before, on a worker of usual speed; None: it is not known."""
        rates = [self._rates.get((cell.kind, layer)) for layer in range(*cell.layers)]
        known = [rate for rate in rates if rate is not None]
        return cell.planned_seconds * statistics.fmean(known) if rates and len(known) == len(rates) else None

    def _beside_slow_ones(self, measured: Measured) -> set[Worker]:
        """Those who are compared with workers that are believed to be slow, and with no other."""
        slow = {worker for worker in measured if self.factor(worker) > 1}
        if not slow:
            return set()
        running: Counter[tuple[OpKind, LayerRange]] = Counter()
        usual: Counter[tuple[OpKind, LayerRange]] = Counter()
        for worker, cells in measured.items():
            alike = {(cell.kind, cell.layers) for cell in cells}
            running.update(alike)
            usual.update(alike if worker not in slow else ())
        found = set()
        for worker, cells in measured.items():
            alike, own = {(cell.kind, cell.layers) for cell in cells}, worker not in slow
            if any(running[cell] > 1 for cell in alike) and all(usual[cell] == own for cell in alike):
                found.add(worker)
        return found

    def _learn(self, measured: Measured, times: Mapping[tuple[OpKind, LayerRange], Mapping[Worker, float]]) -> None:
        for cell in {(cell.kind, cell.layers): cell for cells in measured.values() for cell in cells}.values():
            seconds = times[cell.kind, cell.layers].values()
            if len(seconds) > 1 and cell.planned_seconds > 0:
                rate = _middle(np.sort(list(seconds))) / cell.planned_seconds
                self._rates |= {(cell.kind, layer): rate for layer in range(*cell.layers)}

    def _conclude(self, observed: Mapping[Worker, float], beside_slow: Collection[Worker]) -> list[SpeedChange]:
        """Enter one observation of each worker."""
        self._watched = defaultdict(_Watched, {worker: one.copy() for worker, one in self._watched.items()})
        for worker, y in observed.items():
            self._watched[worker].waiting.append((self._first, y))
        _find_first_spreads([one for one in self._watched.values() if len(one.history) < FIRST and one.is_known()])
        spreads = [one.spread for one in self._watched.values() if one.is_known()]
        common = statistics.median(spreads) if spreads else 0.0
        changes: list[SpeedChange] = []
        for worker in observed:
            watched = self._watched[worker]
            if not watched.is_known():
                continue
            spread = max(LEAST_SPREAD, common, watched.spread)
            for iteration, y in watched.waiting:  # several: nobody knew the spread before
                watched.pending.append(y)
                if worker in beside_slow:
                    watched.slower.clear()
                else:
                    watched.slower.add(iteration, y, spread, ALLOWANCE * spread)
                watched.faster.add(iteration, -y, spread, watched.allowance(spread))
            watched.waiting.clear()
            if max(watched.slower.value, watched.faster.value) >= ALARM * spread:
                changes += self._changes(worker, watched, spread)
            watched.settle()
        due: dict[int, list[_Watched]] = defaultdict(list)
        for watched in map(self._watched.__getitem__, observed):
            if watched.is_due():
                due[len(watched.history)].append(watched)
        for alike in due.values():
            for watched, found in zip(alike, _spreads([list(one.history) for one in alike]), strict=True):
                watched.spread, watched.added = float(found), 0
        return changes

    def _changes(self, worker: Worker, watched: _Watched, spread: float) -> Iterator[SpeedChange]:
        patience = 2 ** min(watched.recoveries, MOST_DOUBLINGS)
        usual = ALARM * spread
        recovered = patience * usual * ALLOWANCE * spread / watched.allowance(spread)
        for total, sign, alarm in ((watched.slower, 1, usual), (watched.faster, -1, recovered)):
            if total.value < alarm:
                continue
            before, (since, level) = watched.factor, _change_in(total.since)
            factor = before * math.exp(sign * level)
            factor = 1.0 if factor < 1.0 + LEAST_CHANGE else factor
            if max(factor / before, before / factor) < 1.0 + LEAST_CHANGE:
                total.clear()
                continue
            watched.recoveries += factor == 1.0
            watched.believe(factor)
            yield SpeedChange(worker, factor, before, since, self._last + 1 - since)
            return


def _of_others(seconds: Mapping[Worker, float], unusual: Collection[Worker]) -> dict[Worker, float]:
    """For each worker that ran a cell, what the others took, of which those of usual speed tell where there are any.
    Whoever was the only one is left out."""
    values, usual = np.array(list(seconds.values())), np.array([one not in unusual for one in seconds])
    of_usual, of_all = np.sort(values[usual]), np.sort(values)
    found = np.full(len(values), np.nan)
    if len(of_all) > 1:
        found = _middles_without_each(of_all, values)
    if len(of_usual) > 1:
        found[usual] = _middles_without_each(of_usual, values[usual])
    if len(of_usual):
        found[~usual] = _middle(of_usual)
    return {one: value for one, value in zip(seconds, found.tolist(), strict=True) if not math.isnan(value)}


def _change_in(values: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Where a change from 0 to another level began, of values with their iterations, and that level."""
    def cost(begin: int) -> float:
        before, after = values[:begin], [value for _, value in values[begin:]]
        level = statistics.median(after)
        return sum(abs(value) for _, value in before) + sum(abs(value - level) for value in after)

    begin = min(range(max(1, len(values) - FEWEST + 1)), key=cost)
    return values[begin][0], statistics.median([value for _, value in values[begin:]])


def _spreads(rows: Sequence[Sequence[float]]) -> Floats:
    """Of rows of equally many values, for each the standard deviation of one of them, or that which the means of
    `BATCH` successive ones tell of. All at once: there are thousands."""
    values = np.array(rows)
    found = _deviations(values)
    if values.shape[1] < BATCH:
        return found
    return np.maximum(found, math.sqrt(BATCH) * _deviations(sliding_window_view(values, BATCH, axis=1).mean(axis=2)))


def _deviations(values: Floats) -> Floats:
    """The standard deviations of normal values of which as many are as near to the median of their row."""
    distances = np.sort(np.abs(values - np.median(values, axis=1, keepdims=True)), axis=1)
    return distances[:, int(WITHIN * values.shape[1])] / _NORMAL


def _find_first_spreads(watched: Sequence[_Watched]) -> None:
    """Of workers of which little is known yet."""
    alike: dict[int, list[tuple[_Watched, list[float]]]] = defaultdict(list)
    for one in watched:
        values = [*one.history, *one.pending, *(y for _, y in one.waiting)]
        alike[len(values)].append((one, values))
    for known in alike.values():
        for (one, _), spread in zip(known, _spreads([values for _, values in known]), strict=True):
            one.spread = float(spread)


def _middle(ordered: Floats) -> float:
    """The median of sorted values; between two, the geometric mean, so that noise makes a ratio to it neither greater
    nor less."""
    return math.sqrt(ordered[(len(ordered) - 1) // 2] * ordered[len(ordered) // 2])


def _middles_without_each(ordered: Floats, values: Floats) -> Floats:
    """The same for each of the values, without that one. They are what is sorted."""
    first, second, left_out = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2, np.searchsorted(ordered, values)
    return np.asarray(np.sqrt(ordered[first + (first >= left_out)] * ordered[second + (second >= left_out)]))
