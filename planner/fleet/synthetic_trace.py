"""Synthetic availability traces: failures and repairs of a fleet, drawn from mean times with a seed.

Failures hit single machines, whole nodes and whole racks, each kind at its own rate. The time between two failures of
one machine, node or rack is Weibull distributed: shape 1 gives a Poisson process, a shape below 1 makes failures
cluster, which is what new clusters show. After a transient failure the machine is back once it has restarted; after
the others it needs a repair or a replacement. Restart and repair times are exponentially distributed.
"""

import heapq
import math
from collections.abc import Iterable

import msgspec
import numpy as np

from planner.fleet.availability_trace import AvailabilityTrace, Change


class FailureRates(msgspec.Struct, frozen=True, kw_only=True):
    """How often machines, nodes and racks fail, and how long they are away. Times in hours."""

    machine_mtbf_hours: float
    """Mean time between failures of one machine (one worker of the job)."""
    shape: float = 1.0
    """Weibull shape of the times between failures; 1 is a Poisson process."""
    repair_hours: float = 4.0
    """Mean time until a machine with a lasting failure is repaired or replaced."""
    transient_share: float = 0.73
    """Share of failures after which a restart brings the machine back (Unicron reports 73 % of errors)."""
    restart_hours: float = 0.1
    """Mean time of such a restart."""
    node_size: int = 1
    """Machines (workers) in a node; their places are neighbours."""
    node_mtbf_hours: float = math.inf
    """Mean time between failures of a whole node."""
    rack_size: int = 1
    """Nodes in a rack."""
    rack_mtbf_hours: float = math.inf
    """Mean time between failures of a whole rack."""
    source: str = "given by the user"


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
"""Failure rates by name, for machines of one GPU each."""


def rates_per_worker(rates: FailureRates, gpus: int) -> FailureRates:
    """The rates for workers of several GPUs, such as tensor-parallel groups. A worker fails when any of its GPUs does.

    Raises ValueError for less than one GPU.
    """
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs a worker; expected at least 1")
    node = max(1, rates.node_size // gpus)
    return msgspec.structs.replace(rates, machine_mtbf_hours=rates.machine_mtbf_hours / gpus, node_size=node)


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
    expected = places * days * 24 / rates.machine_mtbf_hours
    if expected > 5e6:
        raise ValueError(f"about {expected:.2g} failures would have to be drawn; expected at most 5 million")
