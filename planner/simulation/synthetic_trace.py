"""Draw synthetic availability traces of a fleet from a failure model with a seed.

The time between two failures of one domain (a GPU, a server, all machines on a switch) is
exponentially distributed, and so are restart and repair times, unless the model says that repairs
are log-normal, or that rates of domains or of periods differ. After a transient failure its
machines return once they have restarted. After others they need a repair or a replacement, for
which they may wait in a queue.

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
"""Maximum expected number of failures in a trace."""


def draw_trace(model: FailureModel, places: int, days: float, seed: int = 0) -> AvailabilityTrace:
    """Return a trace of `days` days for `places` GPUs, drawn with `seed`.

    All GPUs are alive at first. Raises ValueError if more than `MAX_FAILURES` failures are
    expected.
    """
    _require_drawable(days * 24 / model.mean_hours_to_failure(places))
    random = np.random.default_rng(seed)
    horizon = days * 24.0
    # When and where domains fail. Failures are drawn on a clock on which the rate is constant, and
    # then put on the clock of the trace.
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
    # How long each failure takes its machines away: a restart, or a repair.
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
    # Repairs wait for each other in order of failure.
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
    """Draw, by kind of failure, the relative failure rates of its domains; None: all equal."""
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
    """Return the edges of periods in hours, and on a clock of even failures."""
    if model.period_days is None:
        return np.array([0.0, horizon]), np.array([0.0, horizon])
    # A usual hour has as many expected failures as an hour at the usual rate.
    ends = np.append(np.arange(0.0, horizon, model.period_days * 24), horizon)
    rates = random.gamma(model.period_shape, 1 / model.period_shape, len(ends) - 1)
    return ends, np.concatenate([[0.0], np.cumsum(rates * np.diff(ends))])


def _queue_repairs(
    hours: np.ndarray, absent: np.ndarray, lasting: np.ndarray, at_once: int
) -> None:
    """Add to `absent` the hours that failures wait for one of `at_once` repairers."""
    # `lasting` has the indices of the failures that need a repair, in order of time; `free` has the
    # times at which the repairers are free again.
    free = [0.0] * at_once
    for index in lasting.tolist():
        begin = max(hours[index], heapq.heappop(free))
        heapq.heappush(free, begin + absent[index])
        absent[index] += begin - hours[index]


def draw_slow_times(
    trace: AvailabilityTrace, kinds: Iterable[SlowKind], seed: int = 0
) -> AvailabilityTrace:
    """Return a copy of the trace with slow times of these kinds, drawn with `seed`.

    Raises ValueError if more than `MAX_FAILURES` slow times of one kind are expected.
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
                changes.append(
                    Change(at * 3600, links=factor)
                    if kind.links
                    else Change(at * 3600, slowed=((place, factor),))
                )
    return changes


def _draw_failures(
    random: np.random.Generator,
    count: int,
    mtbf_hours: float,
    horizon: float,
    rates: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw failures of `count` domains up to `horizon`; return their hours and domains.

    The horizon is in hours, too. A domain's mean time between failures is `mtbf_hours`, divided by
    its number in `rates` (None: 1).
    """
    hours, units = [], []
    # Each round draws the next failure of every domain whose last one was before the horizon.
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
    """Return changes by failures, each (hour, first place, number of places, hours away)."""
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

    # A domain that fails takes down those of its machines that are not down already.
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
