"""Find workers that take longer than their peers, by what factor, and since when.

A worker is compared with the other workers that ran ops of the same kind on the same layers in the
same iteration. So an iteration in which every worker is slow, or a stage whose times are wrong in
the job file, says nothing about any worker. A *cell* is a kind of op on a range of layers. The
*ratio* of a worker in an iteration is the time that its ops took, divided by the time that such ops
take on its peers:

    ratio = sum n_c t_c / sum n_c r_c    over its cells c

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
s (7.5 / sqrt(n) - 0.67), which a quartile of n observations of noise never reaches, and at least
log(1 + `MIN_CHANGE`). s is the spread of y, estimated from the `INLIER_SHARE` quantile of the
differences of successive observations, so that outliers and changes of level matter little; the
largest of the worker's own spread, the median spread and `MIN_SPREAD` is used. The change is placed
where the sum of deviations is least: deviations from 0 before the change, and from the median after
it. That median gives the new factor.

On a noisy machine a worker that has recovered may look like one that is slightly slow, by less than
that limit. The size of a recovery to usual speed is known, however. So a worker has also recovered
if the median of its last `KEPT_OBSERVATIONS` observations is nearer to usual speed than to the
believed factor.

Suppose that two workers are compared with each other only, and one is believed to be slow. Then the
same ratio can mean that this one has recovered or that the other one has become slow. The former is
assumed: a worker that is compared with slow workers only is never found slow. Each time a worker
has recovered, it needs twice as many observations to be found recovered again, and after three
times it never is, so that a worker whose speed alternates keeps its lighter load.
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
"""Shortest duration of an observation's iterations: a process may get no core for long."""
WINDOW_LENGTHS = 5, 20
"""Numbers of last observations that are examined together for a change of speed."""
KEPT_OBSERVATIONS = 60
"""Number of observations of each worker that are kept."""
MIN_SPREAD = 0.04
"""Smallest spread of log ratios that is assumed."""
MIN_CHANGE = 0.15
"""Smallest change of a speed factor that counts: larger / smaller factor - 1."""
INLIER_SHARE = 0.8
"""Quantile of the differences between successive observations that gives the spread."""
_SPREAD_SCALE = math.sqrt(2) * statistics.NormalDist().inv_cdf((1 + INLIER_SHARE) / 2)
MIN_OBSERVATIONS = 3
"""Smallest number of observations from which a new speed factor is measured."""


class CellTime(NamedTuple):
    """Time of a worker's ops of one kind on the same layers in an iteration."""

    kind: OpKind
    layers: LayerRange
    number: int
    """Number of these ops."""
    seconds: float
    """Median seconds of these ops."""
    planned_seconds: float
    """Planned seconds of one such op on a worker of usual speed."""


class SpeedChange(NamedTuple):
    """Change of a worker's speed that was detected."""

    worker: Worker
    factor: float
    """Factor by which the worker's ops take longer than its peers'; 1 is usual."""
    before: float
    """Factor that the worker was believed to have before."""
    since: int
    """First iteration with the new factor."""
    iterations: int
    """Number of iterations over which the factor was measured."""


IterationTimes = Mapping[Worker, Sequence[CellTime]]
"""Times of each worker's ops in an iteration, by kind and range of layers."""


class _WorkerHistory(msgspec.Struct, frozen=True):
    """Recent observations of one worker, and its believed speed factor."""

    factor: float = 1.0
    values: tuple[tuple[int, float], ...] = ()
    """Last observations, as pairs of the first iteration of the group and the observation."""
    recoveries: int = 0
    spread: float = 0.0

    def change_limit(self, window: int, common: float) -> float:
        """Return the limit that most of `window` observations exceed after a change of speed."""
        # The head of this module explains the formula; `common` is the median of all spreads.
        spread = max(MIN_SPREAD, common, self.spread)
        return max(math.log(1 + MIN_CHANGE), spread * (7.5 / math.sqrt(window) - 0.67))


class SlowDetector:
    """Detector of changes of workers' speeds, given the `factors` of those slow at the start."""

    def __init__(self, factors: Mapping[Worker, float] = {}) -> None:
        self._watched = {worker: _WorkerHistory(factor) for worker, factor in factors.items()}
        self._rates: dict[tuple[OpKind, int], float] = {}
        """Measured divided by planned time, by kind of op and layer, as far as known."""
        self._open: tuple[Mapping[Worker, float], ...] = ()
        """Log ratios of the iterations that are being grouped into an observation."""
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
        """Set the factor that a worker is believed to have, and drop its observations."""
        self._watched[worker] = replace(
            self._watched.get(worker, _WorkerHistory()), factor=factor, values=()
        )

    def drop_open_iterations(self) -> None:
        """Drop the iterations since the last observation, because an order ends."""
        self._open, self._seconds = (), 0.0

    def remove_worker(self, worker: Worker) -> None:
        """Forget a lost worker's speed, as the worker may start again on another machine."""
        self._watched.pop(worker, None)
        remaining = []
        for ratios in self._open:
            remaining.append({other: y for other, y in ratios.items() if other != worker})
        self._open = tuple(remaining)

    def add_iteration(
        self, iteration: int, seconds: float, measured: IterationTimes
    ) -> list[SpeedChange]:
        """Add an iteration that took `seconds`; return the changes of speed detected with it."""
        # Add the iteration to the group.
        if not self._seconds:
            self._first = iteration
        self._last = iteration
        self._seconds += seconds
        log_ratios = {
            worker: math.log(ratio) - math.log(self.believed_factor(worker))
            for worker, ratio in self.compute_ratios(measured).items()
        }
        self._open = (*self._open, log_ratios)
        if self._seconds < OBSERVATION_SECONDS:
            return []
        # The group is long enough: its medians are an observation of each worker.
        logs: dict[Worker, list[float]] = defaultdict(list)
        for ratios in self._open:
            for worker, y in ratios.items():
                logs[worker].append(y)
        observed = {worker: statistics.median(ys) for worker, ys in logs.items()}
        self.drop_open_iterations()
        return self._add_observations(observed, self._find_compared_with_slow(measured))

    def compute_ratios(self, measured: IterationTimes) -> dict[Worker, float]:
        """Return how many times as long each worker's ops took as on its peers.

        Where no peer ran the same op, earlier measurements say what it usually takes; these are
        extended by `measured`. Workers of which no op has anything to compare with are left out.
        """
        # Find, for each cell, what it takes on the other workers.
        times: dict[tuple[OpKind, LayerRange], dict[Worker, float]] = defaultdict(dict)
        unusual = set()
        for worker, cells in measured.items():
            factor = self.believed_factor(worker)
            if factor != 1.0:
                unusual.add(worker)
            for cell in cells:
                times[cell.kind, cell.layers][worker] = cell.seconds / factor
        others = {cell: _compute_peer_medians(seconds, unusual) for cell, seconds in times.items()}
        # Compare each worker with that, over all its cells.
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
        """Return an op's planned seconds, corrected by rates of all its layers; None without."""
        # All layers of the op must have been measured on several workers.
        layers = range(*cell.layers)
        rates = [
            self._rates[cell.kind, layer] for layer in layers if (cell.kind, layer) in self._rates
        ]
        if not layers or len(rates) < len(layers):
            return None
        return cell.planned_seconds * statistics.fmean(rates)

    def _find_compared_with_slow(self, measured: IterationTimes) -> set[Worker]:
        slow = {worker for worker in measured if self.believed_factor(worker) > 1}
        if not slow:
            return set()
        # Count how many workers ran each cell, and how many of these are at usual speed.
        running: Counter[tuple[OpKind, LayerRange]] = Counter()
        usual: Counter[tuple[OpKind, LayerRange]] = Counter()
        for worker, cells in measured.items():
            cells_run = {(cell.kind, cell.layers) for cell in cells}
            running.update(cells_run)
            usual.update(cells_run if worker not in slow else ())
        compared = set()
        for worker, cells in measured.items():
            cells_run = {(cell.kind, cell.layers) for cell in cells}
            # A worker at usual speed is itself one of those that run a cell at usual speed.
            itself = worker not in slow
            only_slow_peers = all(usual[cell] == itself for cell in cells_run)
            if only_slow_peers and any(running[cell] > 1 for cell in cells_run):
                compared.add(worker)
        return compared

    def _learn_rates(
        self,
        measured: IterationTimes,
        times: Mapping[tuple[OpKind, LayerRange], Mapping[Worker, float]],
    ) -> None:
        # What several workers measured tells how far the planned times of these layers are wrong.
        by_key = {(cell.kind, cell.layers): cell for cells in measured.values() for cell in cells}
        for cell in by_key.values():
            seconds = times[cell.kind, cell.layers].values()
            if len(seconds) > 1 and cell.planned_seconds > 0:
                rate = _geometric_median(np.sort(list(seconds))) / cell.planned_seconds
                self._rates |= {(cell.kind, layer): rate for layer in range(*cell.layers)}

    def _add_observations(
        self, observed: Mapping[Worker, float], beside_slow: Collection[Worker]
    ) -> list[SpeedChange]:
        # A worker in `beside_slow` is compared only with slow ones, and so never found slow.
        by_length: dict[int, list[Worker]] = defaultdict(list)
        for worker, y in observed.items():
            before = self._watched.get(worker, _WorkerHistory())
            if worker in beside_slow:
                y = min(y, 0.0)
            self._watched[worker] = replace(
                before, values=(*before.values[1 - KEPT_OBSERVATIONS :], (self._first, y))
            )
            by_length[len(self._watched[worker].values)].append(worker)
        # All workers with as many observations at once, as there may be thousands.
        rows: dict[int, Floats] = {}
        for length, workers in by_length.items():
            if length >= WINDOW_LENGTHS[0]:
                ys = [y for worker in workers for _, y in self._watched[worker].values]
                rows[length] = np.array(ys).reshape(len(workers), length)
        for length, values in rows.items():
            for worker, spread in zip(
                by_length[length], _estimate_spreads(values).tolist(), strict=True
            ):
                self._watched[worker] = replace(self._watched[worker], spread=spread)
        # A worker with few differences may look steadier than it is: all spreads count, too.
        spreads = [self._watched[worker].spread for length in rows for worker in by_length[length]]
        common = statistics.median(spreads) if spreads else 0.0
        return [
            change
            for length, values in rows.items()
            for change in self._find_changes(by_length[length], values, common)
        ]

    def _find_changes(
        self, workers: Sequence[Worker], values: Floats, common: float
    ) -> Iterator[SpeedChange]:
        # Each row of `values` has one worker's observations; `common` is the median spread of all.
        changed = dict[Worker, int]()
        # Do nearly all of the last 5 or 20 observations lie on one side of the limit?
        for window in (length for length in WINDOW_LENGTHS if length <= values.shape[1]):
            ordered, quarter = np.sort(values[:, -window:], axis=1), (window - 1) // 4
            for worker, low, high in zip(
                workers,
                ordered[:, quarter].tolist(),
                ordered[:, -1 - quarter].tolist(),
                strict=True,
            ):
                watched = self._watched[worker]
                if low > (limit := watched.change_limit(window, common)) or (
                    high < -limit and window >= WINDOW_LENGTHS[0] * 2**watched.recoveries
                ):
                    changed.setdefault(worker, window)
        # Is the median of many observations nearer to usual speed than to the believed factor?
        if values.shape[1] == KEPT_OBSERVATIONS:
            for worker, middle in zip(workers, np.median(values, axis=1).tolist(), strict=True):
                factor = self.believed_factor(worker)
                patience = WINDOW_LENGTHS[1] * 2 ** self._watched[worker].recoveries
                if (
                    patience <= KEPT_OBSERVATIONS
                    and factor > 1 + MIN_CHANGE
                    and middle < -math.log(factor) / 2
                ):
                    changed.setdefault(worker, KEPT_OBSERVATIONS)
        # Date each change, measure the new factor, and adopt it.
        for worker, window in changed.items():
            watched = self._watched[worker]
            since, level = _locate_change(watched.values[-window:])
            factor = watched.factor * math.exp(level)
            factor = 1.0 if factor < 1.0 + MIN_CHANGE else factor
            if max(factor / watched.factor, watched.factor / factor) >= 1.0 + MIN_CHANGE:
                self._watched[worker] = replace(
                    watched,
                    factor=factor,
                    values=(),
                    recoveries=watched.recoveries + (factor == 1.0),
                )
                yield SpeedChange(worker, factor, watched.factor, since, self._last + 1 - since)


def _compute_peer_medians(
    seconds: Mapping[Worker, float], unusual: Collection[Worker]
) -> dict[Worker, float]:
    # Workers in `unusual` count only if no other worker is at usual speed.
    values = np.array(list(seconds.values()))
    usual = np.array([worker not in unusual for worker in seconds])
    of_usual, of_all = np.sort(values[usual]), np.sort(values)
    # Without another worker there is no median. One at usual speed must not be compared with
    # itself; a slow one is not among the usual ones anyway.
    medians = np.full(len(values), np.nan)
    if len(of_all) > 1:
        medians = _leave_one_out_medians(of_all, values)
    if len(of_usual) > 1:
        medians[usual] = _leave_one_out_medians(of_usual, values[usual])
    if len(of_usual):
        medians[~usual] = _geometric_median(of_usual)
    return {
        worker: value
        for worker, value in zip(seconds, medians.tolist(), strict=True)
        if not math.isnan(value)
    }


def _locate_change(values: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return the iteration at which observations left 0, and their median since then."""

    # The least sum of deviations, rather than of their squares, tolerates outliers.
    def cost(begin: int) -> float:
        after = [value for _, value in values[begin:]]
        level = statistics.median(after)
        before_deviation = sum(abs(value) for _, value in values[:begin])
        return before_deviation + sum(abs(value - level) for value in after)

    begin = min(range(max(1, len(values) - MIN_OBSERVATIONS + 1)), key=cost)
    return values[begin][0], statistics.median([value for _, value in values[begin:]])


def _estimate_spreads(values: Floats) -> Floats:
    """Return a robust estimate of each row's standard deviation, from successive differences."""
    # The result is the standard deviation of a normal distribution whose successive values differ
    # by as much. A quantile of the differences is not moved by outliers or a change of level.
    ordered = np.sort(np.abs(np.diff(values, axis=1)), axis=1)
    return np.asarray(ordered[:, int(INLIER_SHARE * ordered.shape[1])] / _SPREAD_SCALE)


def _geometric_median(ordered: Floats) -> float:
    # Of an even number it is the geometric mean of the middle two, so that ratios to it are
    # unbiased.
    return math.sqrt(ordered[(len(ordered) - 1) // 2] * ordered[len(ordered) // 2])


def _leave_one_out_medians(ordered: Floats, values: Floats) -> Floats:
    """Return, for each value, the `_geometric_median` of the others in `ordered`."""
    first, second = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
    # What follows the value that is left out moves down by one place.
    left_out = np.searchsorted(ordered, values)
    return np.asarray(
        np.sqrt(ordered[first + (first >= left_out)] * ordered[second + (second >= left_out)])
    )
