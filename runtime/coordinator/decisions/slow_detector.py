"""Find workers that take longer than their peers, by what factor, and since when.

The detector is pure and reads no clock. A worker is compared with the other workers that ran ops of
the same kind on the same layers in the same iteration. So an iteration in which every worker is
slow, or a stage whose times are wrong in the job file, says nothing about any worker. The *ratio*
of a worker in an iteration is the time that its ops took, divided by the time that they take on its
peers:

    ratio = sum n_c t_c / sum n_c r_c    over its cells c: a kind of op on a range of layers

Here t_c is the median of the worker's n_c ops of the cell. r_c is the median over all other workers
that are believed to run at usual speed; if there is none, it is the median over all other workers,
each divided by its believed factor. Medians tolerate single delayed ops and a slow peer. Some plans
that move layers have layers that only one worker runs. For these, r_c is the planned time,
multiplied by the ratio of measured to planned time of the same layers when other workers ran them,
too; while that is not known, the cell is left out.

Iterations are grouped until they took `OBSERVATION_SECONDS`, because a process that is delayed for
a moment delays many short iterations. An *observation* of a worker is the median over such a group
of y = log(ratio / believed factor). A worker has changed if 4 of its last 5 observations, or 16 of
its last 20, lie on one side of a limit; an outlier counts once, however large it is. The limit is
one that a quartile of as much noise never reaches, s (7.5 / sqrt(n) - 0.67) for n observations, and
at least log(1 + `MIN_CHANGE`). s is the spread of y, estimated from differences of successive
observations, so that outliers and changes of level matter little (the share `INLIER_SHARE` of the
differences counts); the largest of the worker's own spread, the median spread and `MIN_SPREAD` is
used. The change is placed where the sum of deviations is least: deviations from 0 before the
change, and from the median after it. That median gives the new factor.

On a noisy machine a worker that has recovered may look like one that is slightly slow, by less than
that limit. The size of a recovery to usual speed is known, however. So a worker has also recovered
if the median of its last `KEPT_OBSERVATIONS` observations is nearer to usual speed than to the
believed factor.

Suppose that two workers are compared with each other only, and one is believed to be slow. Then the
same ratio can mean that this one has recovered or that the other one has become slow. The former is
assumed: a worker that is compared with slow workers only is never found slow. Each time a worker
has recovered, it needs twice as many observations to be found recovered again, so that a worker
whose speed alternates keeps its lighter load.
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
"""Shortest duration of an observation's iterations: processes may get no core for seconds."""
WINDOW_LENGTHS = 5, 20
"""Numbers of last observations that are examined together for a change of speed."""
KEPT_OBSERVATIONS = 60
"""Number of observations of each worker that are kept."""
MIN_SPREAD = 0.04
"""Smallest spread of log ratios that is assumed; smaller ones make no difference."""
MIN_CHANGE = 0.15
"""Smallest change of a speed factor that counts: larger / smaller - 1."""
INLIER_SHARE = 0.8
"""Share of successive observations' differences that gives the spread."""
_SPREAD_SCALE = math.sqrt(2) * statistics.NormalDist().inv_cdf((1 + INLIER_SHARE) / 2)
MIN_OBSERVATIONS = 3
"""Smallest number of observations from which a new speed factor is measured."""


class CellTime(NamedTuple):
    """Times of a worker's ops of one kind on the same layers in an iteration."""

    kind: OpKind
    layers: LayerRange
    number: int
    seconds: float
    """Median seconds of these ops."""
    planned_seconds: float
    """Planned seconds of one such op on a worker of usual speed."""


class SpeedChange(NamedTuple):
    """Change of a worker's speed from what was believed before."""

    worker: Worker
    factor: float
    """Factor by which the worker's ops take longer than those of its peers. 1 is usual."""
    before: float
    """Factor that was believed before."""
    since: int
    """First iteration with the new factor."""
    iterations: int
    """Number of iterations over which the factor was measured."""


IterationTimes = Mapping[Worker, Sequence[CellTime]]
"""Times of each worker in an iteration, by kind of op and range of layers."""


class _WorkerHistory(msgspec.Struct, frozen=True):
    """Recent observations of one worker, and its believed speed factor."""

    factor: float = 1.0
    values: tuple[tuple[int, float], ...] = ()
    """Last observations, each after the first iteration of its group."""
    recoveries: int = 0
    spread: float = 0.0

    def change_limit(self, window: int, common: float) -> float:
        """Return the size that three quarters of the last `window` observations must exceed.
        `common` is the median spread over all workers."""
        spread = max(MIN_SPREAD, common, self.spread)
        return max(math.log(1 + MIN_CHANGE), spread * (7.5 / math.sqrt(window) - 0.67))


class SlowDetector:
    """Detector of changes of workers' speeds, from the op times of successive iterations.

    Parameters
    ----------
    factors
        Factors by which the ops of workers that are slow from the start take longer than usual.
    """

    def __init__(self, factors: Mapping[Worker, float] = {}) -> None:
        self._watched = {worker: _WorkerHistory(factor) for worker, factor in factors.items()}
        self._rates: dict[tuple[OpKind, int], float] = {}
        """Measured time divided by planned time, of each kind of op on a layer."""
        self._open: tuple[Mapping[Worker, float], ...] = ()
        """Log ratios of the iterations that are being grouped."""
        self._first = self._last = 0
        self._seconds = 0.0

    def copy(self) -> "SlowDetector":
        """Return a copy of this detector that can change independently."""
        new = copy(self)
        new._watched, new._rates = self._watched.copy(), dict(self._rates)
        return new

    def believed_factor(self, worker: Worker) -> float:
        """Return the factor by which a worker's ops are believed to take longer than usual."""
        return self._watched[worker].factor if worker in self._watched else 1.0

    def set_factor(self, worker: Worker, factor: float) -> None:
        """Set a worker's believed factor; drop its observations except for their spread."""
        self._watched[worker] = replace(self._watched.get(worker, _WorkerHistory()), factor=factor, values=())

    def drop_open_iterations(self) -> None:
        """Drop the iterations that do not yet form an observation, as an order ends."""
        self._open, self._seconds = (), 0.0

    def remove_worker(self, worker: Worker) -> None:
        """Remove a lost worker. If it is started again, it may be on another machine."""
        self._watched.pop(worker, None)
        self._open = tuple({other: y for other, y in ratios.items() if other != worker} for ratios in self._open)

    def add_iteration(self, iteration: int, seconds: float, measured: IterationTimes) -> list[SpeedChange]:
        """Add an iteration's `measured` op times; return the changes of speed detected now.
        `seconds` is the longest time from any worker's first op to the end of its step."""
        if not self._seconds:
            self._first = iteration
        self._last = iteration
        self._seconds += seconds
        self._open = (*self._open, {worker: math.log(ratio) - math.log(self.believed_factor(worker))
                                    for worker, ratio in self.compute_ratios(measured).items()})
        if self._seconds < OBSERVATION_SECONDS:
            return []
        logs: dict[Worker, list[float]] = defaultdict(list)
        for ratios in self._open:
            for worker, y in ratios.items():
                logs[worker].append(y)
        observed = {worker: statistics.median(ys) for worker, ys in logs.items()}
        self.drop_open_iterations()
        return self._add_observations(observed, self._find_compared_with_slow(measured))

    def compute_ratios(self, measured: IterationTimes) -> dict[Worker, float]:
        """Return each worker's seconds for its ops, divided by those at usual speed.

        Usual times are other workers' for the same ops, or estimates by earlier measurements. A
        worker without comparable ops is left out. The rate of each layer (measured / planned time)
        is updated, too.
        """
        times: dict[tuple[OpKind, LayerRange], dict[Worker, float]] = defaultdict(dict)
        unusual = set()
        for worker, cells in measured.items():
            factor = self.believed_factor(worker)
            if factor != 1.0:
                unusual.add(worker)
            for cell in cells:
                times[cell.kind, cell.layers][worker] = cell.seconds / factor
        others = {cell: _compute_peer_medians(seconds, unusual) for cell, seconds in times.items()}
        ratios = {}
        for worker, cells in measured.items():
            expected = took = 0.0
            for cell in cells:
                usual = others[cell.kind, cell.layers].get(worker)
                usual = self.estimate_usual_seconds(cell) if usual is None else usual
                if usual is not None:
                    expected += cell.number * usual
                    took += cell.number * cell.seconds
            if expected > 0 and took / expected > 0:
                ratios[worker] = took / expected
        self._learn_rates(measured, times)
        return ratios

    def estimate_usual_seconds(self, cell: CellTime) -> float | None:
        """Return the seconds of such an op at usual speed. None if a layer was never measured. They
        are the planned ones, scaled by earlier measurements."""
        rates = [self._rates.get((cell.kind, layer)) for layer in range(*cell.layers)]
        known = [rate for rate in rates if rate is not None]
        return cell.planned_seconds * statistics.fmean(known) if rates and len(known) == len(rates) else None

    def _find_compared_with_slow(self, measured: IterationTimes) -> set[Worker]:
        """Return the workers that can be compared with slow ones only."""
        slow = {worker for worker in measured if self.believed_factor(worker) > 1}
        if not slow:
            return set()
        running: Counter[tuple[OpKind, LayerRange]] = Counter()
        usual: Counter[tuple[OpKind, LayerRange]] = Counter()
        for worker, cells in measured.items():
            cells_run = {(cell.kind, cell.layers) for cell in cells}
            running.update(cells_run)
            usual.update(cells_run if worker not in slow else ())
        compared = set()
        for worker, cells in measured.items():
            cells_run, own = {(cell.kind, cell.layers) for cell in cells}, worker not in slow
            if any(running[cell] > 1 for cell in cells_run) and all(usual[cell] == own for cell in cells_run):
                compared.add(worker)
        return compared

    def _learn_rates(self, measured: IterationTimes,
                     times: Mapping[tuple[OpKind, LayerRange], Mapping[Worker, float]]) -> None:
        for cell in {(cell.kind, cell.layers): cell for cells in measured.values() for cell in cells}.values():
            seconds = times[cell.kind, cell.layers].values()
            if len(seconds) > 1 and cell.planned_seconds > 0:
                rate = _geometric_median(np.sort(list(seconds))) / cell.planned_seconds
                self._rates |= {(cell.kind, layer): rate for layer in range(*cell.layers)}

    def _add_observations(self, observed: Mapping[Worker, float], beside_slow: Collection[Worker]) -> list[SpeedChange]:
        """Add one observation of each worker, and return the changes of speed detected now."""
        # No worker in `beside_slow`, which is compared only with slow ones, is found slow.
        by_length: dict[int, list[Worker]] = defaultdict(list)
        for worker, y in observed.items():
            before = self._watched.get(worker, _WorkerHistory())
            y = min(y, 0.0) if worker in beside_slow else y
            self._watched[worker] = replace(before, values=(*before.values[1 - KEPT_OBSERVATIONS:], (self._first, y)))
            by_length[len(self._watched[worker].values)].append(worker)
        rows = {length: np.array([[y for _, y in self._watched[worker].values] for worker in workers])
                for length, workers in by_length.items() if length >= WINDOW_LENGTHS[0]}
        for length, values in rows.items():  # all workers at once, as there may be thousands
            for worker, spread in zip(by_length[length], _estimate_spreads(values).tolist(), strict=True):
                self._watched[worker] = replace(self._watched[worker], spread=spread)
        spreads = [self._watched[worker].spread for length in rows for worker in by_length[length]]
        common = statistics.median(spreads) if spreads else 0.0
        return [change for length, found in rows.items()
                for change in self._find_changes(by_length[length], found, common)]

    def _find_changes(self, workers: Sequence[Worker], values: Floats, common: float) -> Iterator[SpeedChange]:
        """Yield the changes of speed among workers with equally many observations; adopt them."""
        # Each row of `values` has one worker's; `common` is the median spread of all.
        changed = dict[Worker, int]()
        for window in (length for length in WINDOW_LENGTHS if length <= values.shape[1]):
            ordered, quarter = np.sort(values[:, -window:], axis=1), (window - 1) // 4
            for worker, low, high in zip(workers, ordered[:, quarter].tolist(), ordered[:, -1 - quarter].tolist(),
                                         strict=True):
                watched = self._watched[worker]
                if low > (limit := watched.change_limit(window, common)) or (
                        high < -limit and window >= WINDOW_LENGTHS[0] * 2 ** watched.recoveries):
                    changed.setdefault(worker, window)
        if values.shape[1] == KEPT_OBSERVATIONS:
            for worker, middle in zip(workers, np.median(values, axis=1).tolist(), strict=True):
                factor = self.believed_factor(worker)
                patience = WINDOW_LENGTHS[1] * 2 ** self._watched[worker].recoveries
                if patience <= KEPT_OBSERVATIONS and factor > 1 + MIN_CHANGE and middle < -math.log(factor) / 2:
                    changed.setdefault(worker, KEPT_OBSERVATIONS)
        for worker, window in changed.items():
            watched = self._watched[worker]
            since, level = _locate_change(watched.values[-window:])
            factor = watched.factor * math.exp(level)
            factor = 1.0 if factor < 1.0 + MIN_CHANGE else factor
            if max(factor / watched.factor, watched.factor / factor) >= 1.0 + MIN_CHANGE:
                self._watched[worker] = replace(watched, factor=factor, values=(),
                                                recoveries=watched.recoveries + (factor == 1.0))
                yield SpeedChange(worker, factor, watched.factor, since, self._last + 1 - since)


def _compute_peer_medians(seconds: Mapping[Worker, float], unusual: Collection[Worker]) -> dict[Worker, float]:
    """Return, for each worker, the median of the others' times for ops of one kind."""
    # Those in `unusual` count only if no other worker is at usual speed.
    values, usual = np.array(list(seconds.values())), np.array([worker not in unusual for worker in seconds])
    of_usual, of_all = np.sort(values[usual]), np.sort(values)
    medians = np.full(len(values), np.nan)
    if len(of_all) > 1:
        medians = _leave_one_out_medians(of_all, values)
    if len(of_usual) > 1:
        medians[usual] = _leave_one_out_medians(of_usual, values[usual])
    if len(of_usual):
        medians[~usual] = _geometric_median(of_usual)
    return {worker: value for worker, value in zip(seconds, medians.tolist(), strict=True) if not math.isnan(value)}


def _locate_change(values: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return the iteration from which observations differ from 0, and their median after."""
    # Each of `values` is the first iteration of an observation, and the observation.
    def cost(begin: int) -> float:
        before, after = values[:begin], [value for _, value in values[begin:]]
        level = statistics.median(after)
        return sum(abs(value) for _, value in before) + sum(abs(value - level) for value in after)

    begin = min(range(max(1, len(values) - MIN_OBSERVATIONS + 1)), key=cost)
    return values[begin][0], statistics.median([value for _, value in values[begin:]])


def _estimate_spreads(values: Floats) -> Floats:
    """Return a robust estimate of the spread of each row, from successive differences."""
    # It is the standard deviation of a normal distribution whose successive values differ by as
    # much.
    ordered = np.sort(np.abs(np.diff(values, axis=1)), axis=1)
    return np.asarray(ordered[:, int(INLIER_SHARE * ordered.shape[1])] / _SPREAD_SCALE)


def _geometric_median(ordered: Floats) -> float:
    """Return the median of sorted values."""
    # Of an even number it is the geometric mean of the middle two, so that ratios to it are
    # unbiased.
    return math.sqrt(ordered[(len(ordered) - 1) // 2] * ordered[len(ordered) // 2])


def _leave_one_out_medians(ordered: Floats, values: Floats) -> Floats:
    """Return, for each value, the `_geometric_median` of the others in `ordered`."""
    first, second, left_out = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2, np.searchsorted(ordered, values)
    return np.asarray(np.sqrt(ordered[first + (first >= left_out)] * ordered[second + (second >= left_out)]))
