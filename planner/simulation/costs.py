"""State the seconds of policies' reactions: to restart, to reconfigure, to load parameters.

Figures of other systems are published measurements, by model size; between two sizes they are
interpolated over the logarithm of the number of parameters. Sources: [O] Oobleck (SOSP 2023), its
paper and its simulator; [B] Bamboo (NSDI 2023); [R] ReCycle (SOSP 2024), points digitised from its
talk; [F] FT-HSDP (arXiv 2602.00277), its abstract.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

RESTART_SECONDS = {350e6: 80.0, 2.7e9: 515.0, 6.7e9: 701.0}
"""Seconds to restart from a checkpoint, by number of parameters. 76-83 s for small models [O]."""
CHECKPOINT_SECONDS = {350e6: 14.0, 2.7e9: 50.0, 6.7e9: 120.0}
"""Seconds to write a checkpoint, by number of parameters; 11-16 s for small models [O]."""
OOBLECK_SECONDS = {350e6: 3.0, 2.7e9: 6.0, 6.7e9: 10.0}
"""Seconds for Oobleck to form pipelines and copy layers, by number of parameters [O]."""
# 5 to 20 s for small models in its simulator [B], 450 s for 6.7B [O]. Oobleck's simulator has 76 s
# for BERT-large; with that, its pauses alone would cost a tenth of the published trace.
BAMBOO_SECONDS = {350e6: 12.5, 6.7e9: 450.0}
"""Seconds for Bamboo to form new pipelines, by number of parameters: small [B], large [O]."""

BYTES_PER_SECOND = 10e9
"""Bandwidth of a link: the published cluster's 80 Gb/s [R]."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that each reaction to a failure takes, the same for all policies."""

    parameters: float
    """Number of parameters of the model."""
    # Slipstream's runtime takes less on CPUs over gloo (`benchmarks.recovery`); NCCL groups take
    # longer to form, hence a second.
    switch_seconds: float = 1.0
    """Time from a worker's death, or arrival, until all workers run the next schedule."""
    load_seconds: float
    """Time to fetch the parameters and optimizer state of one stage from a peer."""
    restart_seconds: float
    checkpoint_seconds: float
    oobleck_seconds: float
    bamboo_seconds: float
    bamboo_fatal_seconds: float = 30.0
    """Additional seconds of Bamboo's pause if a dead worker's predecessor is dead, too [B]."""
    bamboo_fault_free_share: float = 13.41 / 20.55
    """Bamboo's throughput without failures, as a share of 1F1B's. Measured on a 350M model [R]."""
    bamboo_max_covered_share: float = 0.05
    """Share of stages covered since pipelines formed above which new pipelines form [B]."""
    ft_hsdp_stall_seconds: float = 180.0
    """Seconds for which a failure stops all replicas: 3 minutes [F]."""
    ft_hsdp_restart_seconds: float = 600.0
    """Seconds for a replica to restart: 10 minutes, as a restart of synchronous training [F]."""
    plan_seconds: float = 0.0
    """Seconds from a failure to a plan with layers moved. 0 if a table has the plan."""


def costs_for(parameters: float = 6.7e9, stages: int = 4) -> Costs:
    """Return the `Costs` for a model of this many parameters in `stages` stages."""
    return Costs(
        parameters=parameters,
        # 14 bytes a parameter over one link: weight (2), float32 master copy and two Adam states.
        load_seconds=14 * parameters / stages / BYTES_PER_SECOND,
        restart_seconds=interpolate_by_size(RESTART_SECONDS, parameters),
        checkpoint_seconds=interpolate_by_size(CHECKPOINT_SECONDS, parameters),
        oobleck_seconds=interpolate_by_size(OOBLECK_SECONDS, parameters),
        bamboo_seconds=interpolate_by_size(BAMBOO_SECONDS, parameters),
    )


def interpolate_by_size(points: Mapping[float, float], parameters: float) -> float:
    """Return the value for a model of this many parameters, interpolated in `points`.

    The mapping `points` has values by number of parameters. Between two points the value is linear
    in the logarithm of the number; outside, the nearest point's value holds.
    """
    sizes = sorted(points)
    values = [points[size] for size in sizes]
    return float(np.interp(math.log(parameters), list(map(math.log, sizes)), values))
