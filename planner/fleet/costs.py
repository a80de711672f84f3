"""What failures cost a policy besides workers: seconds to restart, to reconfigure, to load parameters.

Peers' figures are published measurements, by model size; between sizes they are interpolated in proportion to the
logarithm of the parameters, beyond them the nearest counts. Sources: [O] Oobleck (SOSP 2023), its paper and its
simulator; [B] Bamboo (NSDI 2023); [R] ReCycle (SOSP 2024), points digitised from its talk.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import msgspec

RESTART_SECONDS = {350e6: 80.0, 2.7e9: 515.0, 6.7e9: 701.0}
"""Of a whole job from a checkpoint: 76-83 s for small models [O]."""
CHECKPOINT_SECONDS = {350e6: 14.0, 2.7e9: 50.0, 6.7e9: 120.0}
"""To write one: 11-16 s for small models [O]."""
OOBLECK_SECONDS = {350e6: 3.0, 2.7e9: 6.0, 6.7e9: 10.0}
"""Oobleck instantiates new pipelines and copies missing layers [O]."""
BAMBOO_SECONDS = {340e6: 76.0, 6.7e9: 450.0}
"""Bamboo forms new pipelines [O]."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, and a few shares; the same for all policies where they do the same thing."""

    parameters: float
    """Of the model; the figures below follow from it unless given."""
    switch_seconds: float = 1.0
    """From a worker's death to the first op by the next schedule, or for taking one in. `benchmarks.recovery`
    measures less in Slipstream's runtime, on CPUs over gloo; NCCL groups take longer to form, hence a second."""
    load_seconds: float
    """To fetch the parameters and optimizer state of one stage from a peer."""
    restart_seconds: float
    checkpoint_seconds: float
    oobleck_seconds: float
    bamboo_seconds: float
    bamboo_fatal_seconds: float = 30.0
    """Rendezvous after a failure that Bamboo's redundancy does not cover [B]."""
    bamboo_doubled: float = 1.5
    """A step takes so many times as long while a worker carries two stages [B]."""
    bamboo_whole: float = 13.41 / 20.55
    """Throughput of Bamboo, with its redundant forwards, over plain 1F1B's, no worker down: measured, 350M [R]."""
    bamboo_carried: float = 0.05
    """Share of workers that carry two stages beyond which Bamboo forms new pipelines [B]."""
    spare_share: float = 0.05
    """Share of the machines kept as hot spares, in whole pipelines; at least one."""
    spare_seconds: float = 180.0
    """To put a hot spare in the place of a dead worker: "within minutes"."""


def costs_for(parameters: float = 6.7e9, stages: int = 4, *, network_bytes_per_second: float = 10e9) -> Costs:
    """Costs of a model of this size in so many stages.

    Loading a stage: parameters in two bytes, gradients apart, a float32 master copy and two Adam states, 14 bytes each,
    over one link (the default is the published cluster's 80 Gb/s). Raises ValueError for values that make no sense.
    """
    if not (math.isfinite(parameters) and parameters > 0 and stages > 0 and network_bytes_per_second > 0):
        raise ValueError(f"{parameters:g} parameters in {stages} stages over {network_bytes_per_second:g} bytes/s; "
                         "expected more than 0 of each")
    return Costs(parameters=parameters, load_seconds=14 * parameters / stages / network_bytes_per_second,
                 restart_seconds=interpolated(RESTART_SECONDS, parameters),
                 checkpoint_seconds=interpolated(CHECKPOINT_SECONDS, parameters),
                 oobleck_seconds=interpolated(OOBLECK_SECONDS, parameters),
                 bamboo_seconds=interpolated(BAMBOO_SECONDS, parameters))


def interpolated(points: Mapping[float, float], parameters: float) -> float:
    """The figure for this many parameters, between published ones linear in the logarithm of the size."""
    sizes = sorted(points)
    size = min(max(parameters, sizes[0]), sizes[-1])
    for low, high in pairwise(sizes):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return points[low] + share * (points[high] - points[low])
    return points[sizes[-1]]
