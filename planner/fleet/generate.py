"""Synthetic traces: failures and repairs of a fleet from mean times, with a seed.

Machines fail one by one, in nodes and in racks, each kind of failure at its own rate. Times between failures of one
thing are exponential (shape 1: failures in a Poisson process) or Weibull; a shape below 1 makes failures cluster, as
they do on young clusters. A share of failures is transient: the machine is back after a restart; the others wait for a
repair, or a replacement. Repair times are exponential about their mean.
"""

import heapq
import math

import msgspec
import numpy as np

from planner.fleet.availability import Change, Trace


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Failure rates of a fleet. Times in hours."""

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
    """Machines (workers) in a node, next to each other."""
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
    "llama-3": Failures(
        machine_mtbf_hours=GPU_HOURS_LLAMA_3,
        source="Llama 3 (Meta 2024): 16,384 H100, 54 days, 419 unexpected interruptions: one in 50,700 GPU-hours; "
               "73 % transient (Unicron); repair times assumed"),
    "meta-rsc": Failures(
        machine_mtbf_hours=8 * 24_000 / (0.75 * RSC_FAILURES_PER_1000_NODE_DAYS), node_size=8,
        node_mtbf_hours=24_000 / (0.25 * RSC_FAILURES_PER_1000_NODE_DAYS),
        source="Meta Research SuperCluster: 2.3 to 6.5 failures per 1,000 node-days of 8 GPUs; the upper end, a "
               "quarter of them taken to be of whole nodes; 73 % transient (Unicron); repair times assumed"),
}
"""Failure rates by name, for machines of one GPU each."""


def for_workers_of(failures: Failures, gpus: int) -> Failures:
    """The rates of workers of several GPUs each, such as tensor-parallel groups: one fails when any GPU does."""
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs a worker; expected at least 1")
    node = max(1, failures.node_size // gpus)
    return msgspec.structs.replace(failures, machine_mtbf_hours=failures.machine_mtbf_hours / gpus, node_size=node)


def generate(failures: Failures, places: int, days: float, seed: int = 0, name: str = "synthetic") -> Trace:
    """A trace of `places` machines, all alive at the beginning. Raises ValueError for values that make no sense."""
    _require(failures, places, days)
    random = np.random.default_rng(seed)
    horizon = days * 24.0
    hits = [_hits(random, places, 1, failures.machine_mtbf_hours, failures.shape, horizon)]
    nodes = -(-places // failures.node_size)
    if failures.node_mtbf_hours < math.inf:
        hits.append(_hits(random, nodes, failures.node_size, failures.node_mtbf_hours, failures.shape, horizon))
    if failures.rack_mtbf_hours < math.inf:
        size = failures.rack_size * failures.node_size
        hits.append(_hits(random, -(-places // size), size, failures.rack_mtbf_hours, failures.shape, horizon))
    times = np.concatenate([hour for hour, _, _ in hits])
    firsts = np.concatenate([first for _, first, _ in hits])
    sizes = np.concatenate([np.full(len(hour), size) for hour, _, size in hits])
    transient = random.random(len(times)) < failures.transient_share
    absent = random.exponential(np.where(transient, failures.restart_hours, failures.repair_hours))
    order = np.argsort(times, kind="stable")
    rows = zip(*(column[order].tolist() for column in (times, firsts, sizes, absent)), strict=True)
    changes = _merge(rows, places, horizon)
    return Trace(name=name, places=places, live=tuple(range(places)), changes=tuple(changes),
                 length_seconds=horizon * 3600, notes=(failures.source,))


def _hits(random: np.random.Generator, count: int, size: int, mtbf: float, shape: float, horizon: float) -> \
        tuple[np.ndarray, np.ndarray, int]:
    """(hours, first place hit, places hit) of all failures of `count` things of one kind."""
    scale = mtbf / math.gamma(1 + 1 / shape)
    hours, things = [], []
    alive, clock = np.arange(count), np.zeros(count)
    while len(alive):
        clock = clock + scale * random.weibull(shape, len(alive))
        alive, clock = alive[clock < horizon], clock[clock < horizon]
        hours.append(clock)
        things.append(alive)
    return np.concatenate(hours), np.concatenate(things) * size, size


def _merge(rows: "zip[tuple[float, int, int, float]]", places: int, horizon: float) -> list[Change]:
    """Failures in order of time, with the returns in between; a failure of what is down already changes nothing."""
    down: dict[int, float] = {}
    returns: list[tuple[float, int]] = []
    changes: list[Change] = []

    def bring_back(until: float) -> None:
        while returns and returns[0][0] <= until:
            hour, place = heapq.heappop(returns)
            together = [place]
            while returns and returns[0][0] == hour:
                together.append(heapq.heappop(returns)[1])
            for one in together:
                del down[one]
            changes.append(Change(hour * 3600, added=tuple(sorted(together))))

    for hour, first, size, absent in rows:
        bring_back(hour)
        hit = [place for place in range(first, min(first + size, places)) if place not in down]
        for place in hit:
            down[place] = hour + absent
            heapq.heappush(returns, (hour + absent, place))
        if hit:
            changes.append(Change(hour * 3600, removed=tuple(hit)))
    bring_back(horizon)
    return changes


def _require(failures: Failures, places: int, days: float) -> None:
    if places < 1 or not 0 < days < math.inf:
        raise ValueError(f"a trace of {places} machines over {days:g} days; expected at least one, and some time")
    for name in ("machine_mtbf_hours", "node_mtbf_hours", "rack_mtbf_hours", "shape", "repair_hours", "restart_hours"):
        if not getattr(failures, name) > 0:
            raise ValueError(f"{name} is {getattr(failures, name):g}; expected more than 0")
    if not 0 <= failures.transient_share <= 1:
        raise ValueError(f"transient_share is {failures.transient_share:g}; expected 0 to 1")
    for name in ("node_size", "rack_size"):
        if getattr(failures, name) < 1:
            raise ValueError(f"{name} is {getattr(failures, name)}; expected at least 1")
    expected = places * days * 24 / failures.machine_mtbf_hours
    if expected > 5e6:
        raise ValueError(f"about {expected:.2g} failures would have to be drawn; expected at most 5 million")
