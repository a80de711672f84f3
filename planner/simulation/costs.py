"""State what a policy's reactions to failures cost.

Seconds to restart, to reconfigure and to load parameters.

Figures of other systems are published measurements, by model size. Between two sizes they are
interpolated over the logarithm of the number of parameters; outside the range the nearest one is
used. Sources: [O] Oobleck (SOSP 2023), its paper and its simulator; [B] Bamboo (NSDI 2023); [R]
ReCycle (SOSP 2024), points digitised from its talk.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

RESTART_SECONDS = {350e6: 80.0, 2.7e9: 515.0, 6.7e9: 701.0}
"""Seconds to restart a job from a checkpoint, by parameters [O]. 76-83 s for small models."""
CHECKPOINT_SECONDS = {350e6: 14.0, 2.7e9: 50.0, 6.7e9: 120.0}
"""Seconds to write a checkpoint, by number of parameters; 11-16 s for small models [O]."""
OOBLECK_SECONDS = {350e6: 3.0, 2.7e9: 6.0, 6.7e9: 10.0}
"""Seconds for Oobleck to form pipelines and copy layers, by parameters [O]."""
BAMBOO_SECONDS = {350e6: 12.5, 6.7e9: 450.0}
"""Seconds for Bamboo to form new pipelines.

5 to 20 s for small models in its simulator [B], 450 s for 6.7B [O]. Oobleck's simulator has 76 s
for BERT-large; with that, its pauses alone would cost a tenth of the published trace.
"""

BYTES_PER_SECOND = 10e9
"""Bandwidth of a link: the published cluster's 80 Gb/s [R]."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of policies' reactions to failures, in seconds.

    They are to restart, to switch, to load layers or to write a checkpoint. For Bamboo, also the
    share of 1F1B's throughput that it has without faults, and the largest share of stages that it
    runs on predecessors of dead workers. Equal actions of policies cost the same.
    """

    parameters: float
    """Number of parameters of the model."""
    switch_seconds: float = 1.0
    """Time from a worker's death until all workers run the next schedule.

    Also the time to add a worker. Slipstream's runtime takes less on CPUs over gloo
    (`benchmarks.recovery`); NCCL groups take longer to form, hence a second.
    """
    load_seconds: float
    """Time to fetch the parameters and optimizer state of one stage from a peer."""
    restart_seconds: float
    checkpoint_seconds: float
    oobleck_seconds: float
    bamboo_seconds: float
    bamboo_fatal_seconds: float = 30.0
    """Time of the rendezvous after a failure that Bamboo's redundancy does not cover [B]."""
    bamboo_fault_free_share: float = 13.41 / 20.55
    """Throughput of Bamboo, of redundant forwards, as a share of 1F1B. Measured, 350M [R]."""
    bamboo_max_covered_share: float = 0.05
    """Largest share of stages run for dead workers before Bamboo forms pipelines [B]."""
    ft_hsdp_stall_seconds: float = 180.0
    """Pause of all replicas at a failure: 3 minutes (FT-HSDP, arXiv 2602.00277, abstract)."""
    ft_hsdp_restart_seconds: float = 600.0
    """Time for a replica to restart: 10 minutes, as synchronous training there (abstract)."""
    plan_seconds: float = 0.0
    """Seconds from a failure until there is a plan with layers moved. 0 if a table has the plan."""


def costs_for(parameters: float = 6.7e9, stages: int = 4) -> Costs:
    """Return the `Costs` for a model of this many parameters.

    It is divided into `stages` stages, on which the loading of a stage depends. Loading a stage
    sends 14 bytes per parameter over one link: the weight in two bytes, a float32 master copy and
    two Adam states, without the gradient.
    """
    return Costs(parameters=parameters, load_seconds=14 * parameters / stages / BYTES_PER_SECOND,
                 restart_seconds=interpolate_by_size(RESTART_SECONDS, parameters),
                 checkpoint_seconds=interpolate_by_size(CHECKPOINT_SECONDS, parameters),
                 oobleck_seconds=interpolate_by_size(OOBLECK_SECONDS, parameters),
                 bamboo_seconds=interpolate_by_size(BAMBOO_SECONDS, parameters))


def interpolate_by_size(points: Mapping[float, float], parameters: float) -> float:
    """Return the value for a model of this many parameters, interpolated in `points`.

    The mapping `points` has values by numbers of parameters. Between two points the value is linear
    in the logarithm of the number; outside, it is that of the nearest point.
    """
    sizes = sorted(points)
    values = [points[size] for size in sizes]
    return float(np.interp(math.log(parameters), list(map(math.log, sizes)), values))
