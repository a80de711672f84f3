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
short iterations. An *observation* of a worker is the median over these of y = log(ratio / believed factor). A worker
has changed where three quarters of its last `WINDOWS` observations are on one side of a limit: an outlier counts once,
however large it is. The limit is what a quartile of so much noise never reaches, s (7.5 / sqrt(n) - 0.67) for n
observations, and at least log(1 + `LEAST_CHANGE`). s is the spread of y by differences of successive observations,
which bear outliers and changes of level (`WITHIN` of them count), the greater of the worker's own and the median one.
The change began where that leaves the least deviations: from 0 before, and after it from their median, which is the new
factor.

On a noisy machine a worker that has recovered may be taken for one that is a little slow, by less than that limit. But
of a recovery to the usual speed it is known how large it is: so one has recovered, too, whose last `KEPT` observations
are nearer to it than to what is believed, by their median.

Of two workers that are compared with nobody else, one of which is believed to be slow, the same ratio tells that this
one has recovered and that the other has become slow. It is taken for the former: who is compared with slow workers only
is not found slow. A worker that has recovered before has to show twice as many observations that it has recovered again
each time, so that one that flaps keeps its lighter load.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from slipstream.schedules.schedule import LayerRange, OpKind, Worker

Floats = NDArray[np.float64]

OBSERVATION_SECONDS = 1.0
"""Iterations are put together until they took so long. Where processes share cores, one may get none for seconds."""
WINDOWS = 5, 20
"""Observations that are looked at together."""
KEPT = 60
"""Observations of each worker that are kept."""
LEAST_SPREAD = 0.04
"""Of log ratios: below that, nothing depends on it."""
LEAST_CHANGE = 0.15
"""By how much more than 1 the greater of two factors is, divided by the other: less is no change."""
WITHIN = 0.8
"""Share of the differences by which the spread is told: as many outliers as that leaves do not count."""
_NORMAL = math.sqrt(2) * statistics.NormalDist().inv_cdf((1 + WITHIN) / 2)
FEWEST = 3
"""Observations that a change is measured over."""


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


class _Watched(msgspec.Struct, frozen=True):
    """What is known of one worker."""

    factor: float = 1.0
    values: tuple[tuple[int, float], ...] = ()
    """Its last observations, with their first iterations."""
    recoveries: int = 0
    spread: float = 0.0

    def limit(self, window: int, common: float) -> float:
        """Beyond which three quarters of so many observations are a change."""
        spread = max(LEAST_SPREAD, common, self.spread)
        return max(math.log(1 + LEAST_CHANGE), spread * (7.5 / math.sqrt(window) - 0.67))


class SlowDetector:
    """Takes the times of iterations, one after the other.

    Parameters
    ----------
    factors
        What is known of workers that are slow from the start.
    """

    def __init__(self, factors: Mapping[Worker, float] = {}) -> None:
        self._watched = {worker: _Watched(factor) for worker, factor in factors.items()}
        self._rates: dict[tuple[OpKind, int], float] = {}
        """What was measured by what was planned, of a kind of op on a layer that several workers ran."""
        self._open: tuple[Mapping[Worker, float], ...] = ()
        """Log ratios of the iterations that are put together."""
        self._first = self._last = 0
        self._seconds = 0.0

    def copy(self) -> "SlowDetector":
        """One that changes by itself."""
        new = copy(self)
        new._watched, new._rates = self._watched.copy(), dict(self._rates)
        return new

    def factor(self, worker: Worker) -> float:
        """What is believed of a worker."""
        return self._watched[worker].factor if worker in self._watched else 1.0

    def believe(self, worker: Worker, factor: float) -> None:
        """A worker's factor is known otherwise. What was measured of it is dropped, but for the spread."""
        self._watched[worker] = replace(self._watched.get(worker, _Watched()), factor=factor, values=())

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
        by_length: dict[int, list[Worker]] = defaultdict(list)
        for worker, y in observed.items():
            before = self._watched.get(worker, _Watched())
            y = min(y, 0.0) if worker in beside_slow else y
            self._watched[worker] = replace(before, values=(*before.values[1 - KEPT:], (self._first, y)))
            by_length[len(self._watched[worker].values)].append(worker)
        rows = {length: np.array([[y for _, y in self._watched[worker].values] for worker in workers])
                for length, workers in by_length.items() if length >= WINDOWS[0]}
        for length, values in rows.items():  # of all at once: there are thousands
            for worker, spread in zip(by_length[length], _spreads(values).tolist(), strict=True):
                self._watched[worker] = replace(self._watched[worker], spread=spread)
        spreads = [self._watched[worker].spread for length in rows for worker in by_length[length]]
        common = statistics.median(spreads) if spreads else 0.0
        return [change for length, found in rows.items() for change in self._changes(by_length[length], found, common)]

    def _changes(self, workers: Sequence[Worker], values: Floats, common: float) -> Iterator[SpeedChange]:
        """Those of workers with equally many observations."""
        found = dict[Worker, int]()
        for window in (one for one in WINDOWS if one <= values.shape[1]):
            ordered, quarter = np.sort(values[:, -window:], axis=1), (window - 1) // 4
            for worker, low, high in zip(workers, ordered[:, quarter].tolist(), ordered[:, -1 - quarter].tolist(),
                                         strict=True):
                watched = self._watched[worker]
                if low > (limit := watched.limit(window, common)) or (
                        high < -limit and window >= WINDOWS[0] * 2 ** watched.recoveries):
                    found.setdefault(worker, window)
        if values.shape[1] == KEPT:
            for worker, middle in zip(workers, np.median(values, axis=1).tolist(), strict=True):
                factor, patience = self.factor(worker), WINDOWS[1] * 2 ** self._watched[worker].recoveries
                if patience <= KEPT and factor > 1 + LEAST_CHANGE and middle < -math.log(factor) / 2:
                    found.setdefault(worker, KEPT)
        for worker, window in found.items():
            watched = self._watched[worker]
            since, level = _change_in(watched.values[-window:])
            factor = watched.factor * math.exp(level)
            factor = 1.0 if factor < 1.0 + LEAST_CHANGE else factor
            if max(factor / watched.factor, watched.factor / factor) >= 1.0 + LEAST_CHANGE:
                self._watched[worker] = replace(watched, factor=factor, values=(),
                                                recoveries=watched.recoveries + (factor == 1.0))
                yield SpeedChange(worker, factor, watched.factor, since, self._last + 1 - since)


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


def _spreads(values: Floats) -> Floats:
    """Of each row, the standard deviation of normal values whose successive ones differ by as little."""
    ordered = np.sort(np.abs(np.diff(values, axis=1)), axis=1)
    return np.asarray(ordered[:, int(WITHIN * ordered.shape[1])] / _NORMAL)


def _middle(ordered: Floats) -> float:
    """The median of sorted values; between two, the geometric mean, so that noise makes a ratio to it neither greater
    nor less."""
    return math.sqrt(ordered[(len(ordered) - 1) // 2] * ordered[len(ordered) // 2])


def _middles_without_each(ordered: Floats, values: Floats) -> Floats:
    """The same for each of the values, without that one. They are what is sorted."""
    first, second, left_out = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2, np.searchsorted(ordered, values)
    return np.asarray(np.sqrt(ordered[first + (first >= left_out)] * ordered[second + (second >= left_out)]))
