"""Draw synthetic availability traces from a failure model with a seed.

They have failures and repairs of a fleet.

The time between two failures of one domain (a GPU, a server, all machines on a switch) is
exponentially distributed, and so are restart and repair times, unless the model says that repairs
are log-normal, or that rates of domains or of periods differ. After a transient failure its
machines return once they have restarted. After other failures they need a repair or a replacement,
for which they may have to wait in a queue.

Machines, or the links of a job, may also become slow for a while: at any time at the same rate, for
an exponentially distributed time.
"""

import heapq
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from slipstream.planner.simulation.availability_trace import AvailabilityTrace, Change
from slipstream.planner.simulation.failure_models import FailureModel, SlowKind

MAX_FAILURES = 5e6
"""Maximum number of failures in a trace."""


def draw_trace(model: FailureModel, places: int, days: float, seed: int = 0) -> AvailabilityTrace:
    """Return a trace of `days` days for `places` GPUs, all alive at first.

    Raises ValueError for more than `MAX_FAILURES` failures.
    """
    _require_drawable(days * 24 / model.mean_hours_to_failure(places))
    random = np.random.default_rng(seed)
    horizon = days * 24.0
    kinds = model.scale_kinds(places)
    rates = _draw_rates(random, model, places)
    ends, passed = _draw_periods(random, model, horizon)
    drawn = [
        _draw_failures(random, -(-places // kind.gpus), kind.mtbf_hours, passed[-1], of_domains)
        for kind, of_domains in zip(kinds, rates, strict=True)
    ]
    hours = np.interp(np.concatenate([times for times, _ in drawn]), passed, ends)
    first = np.concatenate(
        [units * kind.gpus for kind, (_, units) in zip(kinds, drawn, strict=True)]
    )
    which = np.repeat(np.arange(len(kinds)), [len(times) for times, _ in drawn])
    transient_shares = np.array([kind.transient_share for kind in kinds])
    repair_hours = np.array([kind.repair_hours for kind in kinds])
    restart_hours = np.array([kind.restart_hours for kind in kinds])
    lasting = random.random(len(hours)) >= transient_shares[which]
    mean = np.where(lasting, repair_hours[which], restart_hours[which])
    absent = random.exponential(mean)
    for number, kind in enumerate(kinds):
        if kind.repair_median_hours is not None:
            long = lasting & (which == number)
            spread = math.sqrt(2 * math.log(kind.repair_hours / kind.repair_median_hours))
            absent[long] = random.lognormal(
                math.log(kind.repair_median_hours), spread, int(long.sum())
            )
    order = np.argsort(hours, kind="stable")
    if model.repairs_at_once is not None:
        _queue_repairs(hours, absent, order[lasting[order]], model.repairs_at_once)
    sizes = np.array([kind.gpus for kind in kinds])[which]
    failures = zip(
        *(column[order].tolist() for column in (hours, first, sizes, absent)), strict=True
    )
    changes = _build_changes(failures, places, horizon)
    return AvailabilityTrace(
        name=model.name,
        places=places,
        live=tuple(range(places)),
        changes=tuple(changes),
        length_seconds=horizon * 3600,
        notes=(model.source,),
    )


def _draw_rates(
    random: np.random.Generator, model: FailureModel, places: int
) -> Sequence[np.ndarray | None]:
    """Return the relative failure rates of the domains of each kind of failure."""
    if model.rate_shape is None:
        return [None] * len(model.kinds)
    of_size = {
        kind.gpus: random.gamma(model.rate_shape, 1 / model.rate_shape, -(-places // kind.gpus))
        for kind in model.kinds
    }
    return [of_size[kind.gpus] for kind in model.kinds]


def _draw_periods(
    random: np.random.Generator, model: FailureModel, horizon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a failure rate for each period of `FailureModel.period_days`.

    Returns two arrays: 0 and the ends of the periods, in hours of the trace, and the same instants
    on a second clock.

    An hour of the second clock always has as many expected failures as an hour at the usual rate.
    The last period ends at `horizon` hours of the trace.
    """
    if model.period_days is None:
        return np.array([0.0, horizon]), np.array([0.0, horizon])
    ends = np.append(np.arange(0.0, horizon, model.period_days * 24), horizon)
    rates = random.gamma(model.period_shape, 1 / model.period_shape, len(ends) - 1)
    return ends, np.concatenate([[0.0], np.cumsum(rates * np.diff(ends))])


def _queue_repairs(
    hours: np.ndarray, absent: np.ndarray, lasting: np.ndarray, at_once: int
) -> None:
    """Add waits for repairs to `absent`, the hours of absence after each failure."""
    free = [0.0] * at_once
    for index in lasting.tolist():
        begin = max(hours[index], heapq.heappop(free))
        heapq.heappush(free, begin + absent[index])
        absent[index] += begin - hours[index]


def draw_slow_times(
    trace: AvailabilityTrace, kinds: Iterable[SlowKind], seed: int = 0
) -> AvailabilityTrace:
    """Return the trace with slow times of workers and links added.

    They are drawn from these kinds of slowness. Raises ValueError for more than `MAX_FAILURES` slow
    times.
    """
    horizon = trace.length_seconds / 3600
    for number, kind in enumerate(kinds, 1):
        units = 1 if kind.links else trace.places
        between = kind.hours_between(units)
        _require_drawable(units * horizon / between)
        random = np.random.default_rng([seed, number])
        hours, places = _draw_failures(random, units, between, horizon)
        ends = hours + random.exponential(kind.hours, len(hours))
        changes = [*trace.changes, *_build_slow_changes(kind, hours, places, ends, horizon)]
        trace = msgspec.structs.replace(
            trace,
            notes=(*trace.notes, kind.source),
            changes=tuple(sorted(changes, key=lambda change: change.seconds)),
        )
    return trace


def _build_slow_changes(
    kind: SlowKind, hours: np.ndarray, places: np.ndarray, ends: np.ndarray, horizon: float
) -> list[Change]:
    changes, slow_until = [], dict[int, float]()
    for index in np.argsort(hours, kind="stable"):
        begin, place, end = float(hours[index]), int(places[index]), float(ends[index])
        if begin < slow_until.get(place, 0.0):  # already slow
            continue
        slow_until[place] = end
        for at, factor in ((begin, kind.factor), (end, 1.0)):
            if at < horizon:
                changes.append(Change(at * 3600, links=factor) if kind.links else
                               Change(at * 3600, slowed=((place, factor),)))
    return changes


def _draw_failures(random: np.random.Generator, count: int, mtbf_hours: float, horizon: float,
                   rates: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draw the failures of `count` domains up to `horizon` hours."""
    hours, units = [], []
    alive, clock = np.arange(count), np.zeros(count)
    while len(alive):
        clock = clock + random.exponential(mtbf_hours, len(alive)) / (
            1.0 if rates is None else rates[alive]
        )
        alive, clock = alive[clock < horizon], clock[clock < horizon]
        hours.append(clock)
        units.append(alive)
    return np.concatenate(hours), np.concatenate(units)


def _build_changes(
    failures: Iterable[tuple[float, int, int, float]], places: int, horizon: float
) -> list[Change]:
    """Return the changes of a trace of `places` machines that result from failures."""
    down: set[int] = set()
    returns: list[tuple[float, int]] = []
    changes: list[Change] = []

    def return_machines(until: float) -> None:
        while returns and returns[0][0] <= until:
            hour, place = heapq.heappop(returns)
            added = [place]
            while returns and returns[0][0] == hour:
                added.append(heapq.heappop(returns)[1])
            down.difference_update(added)
            changes.append(Change(hour * 3600, added=tuple(sorted(added))))

    for hour, first, size, absent in failures:
        return_machines(hour)
        removed = [place for place in range(first, min(first + size, places)) if place not in down]
        down.update(removed)
        for place in removed:
            heapq.heappush(returns, (hour + absent, place))
        if removed:
            changes.append(Change(hour * 3600, removed=tuple(removed)))
    return_machines(horizon)
    return changes


def _require_drawable(expected: float) -> None:
    if expected > MAX_FAILURES:
        raise ValueError(
            f"the trace would have about {expected:.2g} failures; shorten it to at most "
            f"{MAX_FAILURES / 1e6:g} million"
        )
