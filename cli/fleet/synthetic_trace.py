"""Synthetic availability traces: failures and repairs of a fleet, drawn from mean times with a seed.

Failures hit single machines, whole nodes and whole racks, each kind at its own rate. The time between two failures of
one machine, node or rack is Weibull distributed: shape 1 gives a Poisson process, a shape below 1 makes failures
cluster, which is what new clusters show. After a transient failure the machine is back once it has restarted; after
the others it needs a repair or a replacement. Restart and repair times are exponentially distributed.

Machines may also become slow for a while (`FailSlowRates`): at any time each does so at the same rate, for an
exponentially distributed time.
"""

import heapq
import math
from collections.abc import Iterable

import msgspec
import numpy as np

from cli.fleet.availability_trace import AvailabilityTrace, Change, merged


class FailureRates(msgspec.Struct, frozen=True, kw_only=True):
    """How often machines, nodes and racks fail, and how long they are away. Times in hours."""

    machine_mtbf_hours: float
    """Mean time between failures of one machine."""
    shape: float = 1.0
    """Weibull shape of the times between failures; 1 is a Poisson process."""
    repair_hours: float = 4.0
    """Mean time until a machine with a lasting failure is repaired or replaced."""
    transient_share: float = 0.73
    """Share of failures after which a restart brings the machine back (Unicron reports 73 % of errors)."""
    restart_hours: float = 0.1
    """Mean time of such a restart."""
    node_size: int = 1
    """Machines in a node; their places are neighbours."""
    node_mtbf_hours: float = math.inf
    """Mean time between failures of a whole node."""
    rack_size: int = 1
    """Nodes in a rack."""
    rack_mtbf_hours: float = math.inf
    """Mean time between failures of a whole rack."""
    source: str = "given by the user"


class FailSlowRates(msgspec.Struct, frozen=True, kw_only=True):
    """How often a machine becomes slow, for how long, and how slow."""

    mtbf_hours: float
    """Mean time between two times that one machine becomes slow."""
    hours: float
    """Mean time that it stays so."""
    factor: float
    """How many times as long it takes then."""
    source: str = "given by the user"


FAIL_SLOW_DELAY = 1.34
FAIL_SLOW_SHARE = 16 / 27
FAIL_SLOW_HOURS = 24 / 60


def published_fail_slow(machines: int) -> FailSlowRates:
    """Rates at which a job of so many machines that waits for the slowest takes 1.34 times as long.

    Greyhound (Wu et al., USENIX ATC 2025; arXiv 2410.12588), a cluster of more than 10,000 GPUs: 16 of 27 large jobs
    met slow machines or links, for 24 minutes on average, and took 1.34 times as long in the mean. We read the 16 of 27
    as the share p of the time in which some machine of the job is slow. So the factor is 1 + 0.34 / p = 1.57, and each
    of n machines becomes slow every -n d / ln(1 - p) hours, for d = 0.4 hours. Raises ValueError for no machine.
    """
    if machines < 1:
        raise ValueError(f"{machines} machines; expected at least 1")
    return FailSlowRates(
        mtbf_hours=-machines * FAIL_SLOW_HOURS / math.log(1 - FAIL_SLOW_SHARE), hours=FAIL_SLOW_HOURS,
        factor=1 + (FAIL_SLOW_DELAY - 1) / FAIL_SLOW_SHARE,
        source="slow workers: Greyhound (ATC 2025): jobs that wait for the slowest take 1.34 times as long; some "
               "worker is slow 59 % of the time, for 24 minutes each, as 16 of 27 large jobs met some")


GPU_HOURS_LLAMA_3 = 50_700
RSC_FAILURES_PER_1000_NODE_DAYS = 6.5

PRESETS = {
    "llama-3": FailureRates(
        machine_mtbf_hours=GPU_HOURS_LLAMA_3,
        source="Llama 3 (Meta 2024): 16,384 H100, 54 days, 419 unexpected interruptions: one in 50,700 GPU-hours; "
               "73 % transient (Unicron); repair times assumed"),
    "meta-rsc": FailureRates(
        machine_mtbf_hours=8 * 24_000 / (0.75 * RSC_FAILURES_PER_1000_NODE_DAYS), node_size=8,
        node_mtbf_hours=24_000 / (0.25 * RSC_FAILURES_PER_1000_NODE_DAYS),
        source="Meta Research SuperCluster: 2.3 to 6.5 failures per 1,000 node-days of 8 GPUs; the upper end, a "
               "quarter of them taken to be of whole nodes; 73 % transient (Unicron); repair times assumed"),
}
"""Failure rates by name, for machines of one GPU each; `availability_trace.group_gpus` makes workers of several."""


def draw_trace(rates: FailureRates, places: int, days: float, seed: int = 0,
               name: str = "synthetic") -> AvailabilityTrace:
    """Draw a trace of `places` machines, all alive at the beginning. Raises ValueError for values out of range."""
    _validate(rates, places, days)
    random = np.random.default_rng(seed)
    horizon = days * 24.0
    kinds = [(rates.node_size, rates.node_mtbf_hours), (rates.rack_size * rates.node_size, rates.rack_mtbf_hours)]
    drawn = [_draw_failures(random, -(-places // size), size, mtbf, rates.shape, horizon)
             for size, mtbf in [(1, rates.machine_mtbf_hours), *(kind for kind in kinds if kind[1] < math.inf)]]
    hours, firsts, sizes = (np.concatenate(column) for column in zip(*drawn, strict=True))
    transient = random.random(len(hours)) < rates.transient_share
    absent = random.exponential(np.where(transient, rates.restart_hours, rates.repair_hours))
    order = np.argsort(hours, kind="stable")
    failures = zip(*(column[order].tolist() for column in (hours, firsts, sizes, absent)), strict=True)
    changes = _with_returns(failures, places, horizon)
    return AvailabilityTrace(name=name, places=places, live=tuple(range(places)), changes=tuple(changes),
                             length_seconds=horizon * 3600, notes=(rates.source,))


def draw_slow_workers(trace: AvailabilityTrace, rates: FailSlowRates, seed: int = 0) -> AvailabilityTrace:
    """The trace with machines that become slow for a while, and recover. Raises ValueError for values out of range."""
    for name in ("mtbf_hours", "hours"):
        if not 0 < getattr(rates, name) < math.inf:
            raise ValueError(f"{name} is {getattr(rates, name):g}; expected more than 0")
    if not 1 <= rates.factor < math.inf:
        raise ValueError(f"factor is {rates.factor:g}; expected at least 1")
    horizon = trace.length_seconds / 3600
    _require_few(trace.places * horizon / rates.mtbf_hours)
    random = np.random.default_rng([seed, 1])
    hours, places, _ = _draw_failures(random, trace.places, 1, rates.mtbf_hours, 1.0, horizon)
    ends = hours + random.exponential(rates.hours, len(hours))
    slow_until = np.zeros(trace.places)
    changes = []
    for index in np.argsort(hours, kind="stable"):
        begin, place, end = float(hours[index]), int(places[index]), float(ends[index])
        if begin >= slow_until[place]:  # else it is slow already
            slow_until[place] = end
            changes.append(Change(begin * 3600, slowed=((place, rates.factor),)))
            if end < horizon:
                changes.append(Change(end * 3600, slowed=((place, 1.0),)))
    return merged(msgspec.structs.replace(trace, notes=(*trace.notes, rates.source)), changes)


def _draw_failures(random: np.random.Generator, count: int, size: int, mtbf: float, shape: float, horizon: float) -> \
        tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hours, first places, numbers of places) of the failures of `count` units, each of `size` neighbouring places."""
    scale = mtbf / math.gamma(1 + 1 / shape)
    hours, units = [], []
    alive, clock = np.arange(count), np.zeros(count)
    while len(alive):
        clock = clock + scale * random.weibull(shape, len(alive))
        alive, clock = alive[clock < horizon], clock[clock < horizon]
        hours.append(clock)
        units.append(alive)
    times = np.concatenate(hours)
    return times, np.concatenate(units) * size, np.full(len(times), size)


def _with_returns(failures: Iterable[tuple[float, int, int, float]], places: int, horizon: float) -> list[Change]:
    """The changes that failures (hour, first place, places, hours absent) make, with the returns of machines between.

    A failure does nothing to a place that has no machine at that time.
    """
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


def _validate(rates: FailureRates, places: int, days: float) -> None:
    if places < 1 or not 0 < days < math.inf:
        raise ValueError(f"a trace of {places} machines over {days:g} days; expected at least one, and some time")
    for name in ("machine_mtbf_hours", "node_mtbf_hours", "rack_mtbf_hours", "shape", "repair_hours", "restart_hours"):
        if not getattr(rates, name) > 0:
            raise ValueError(f"{name} is {getattr(rates, name):g}; expected more than 0")
    if not 0 <= rates.transient_share <= 1:
        raise ValueError(f"transient_share is {rates.transient_share:g}; expected 0 to 1")
    for name in ("node_size", "rack_size"):
        if getattr(rates, name) < 1:
            raise ValueError(f"{name} is {getattr(rates, name)}; expected at least 1")
    _require_few(places * days * 24 / rates.machine_mtbf_hours)


def _require_few(expected: float) -> None:
    if expected > 5e6:
        raise ValueError(f"about {expected:.2g} failures would have to be drawn; expected at most 5 million")
