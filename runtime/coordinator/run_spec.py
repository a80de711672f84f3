"""Description of a run, as the launcher of node 0 passes it to the coordinator."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.decisions.effects import PreparedSchedule
from slipstream.runtime.coordinator.decisions.failover import EMPTY_JOURNAL, Journal, RejoiningPhase
from slipstream.runtime.coordinator.decisions.part_moves import PartitionPlanner
from slipstream.runtime.coordinator.decisions.run_state import RunRules
from slipstream.runtime.coordinator.decisions.settling import MoveCost
from slipstream.runtime.coordinator.run_options import Resilience, RunOptions
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.run_folder import TakeoverRecord
from slipstream.runtime.run_identity import NO_IDENTITY, RunIdentity
from slipstream.runtime.state.parts import ElementCounts
from slipstream.schedules.schedule import Schedule, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Constants of one run for the coordinator: first schedule, configuration, options, and what an earlier coordinator
    has left."""

    schedule: Schedule
    setup: WorkerSetup
    shares: Sequence[Sequence[Worker]]
    """Workers of each node that are started with the run."""
    out: Path
    config: RunConfig
    secret: Secret
    """Secret that all processes of the run share, by which they authenticate each other."""
    resilience: Resilience = Resilience()
    options: RunOptions = RunOptions()
    forget_orders: Callable[[int], None] = lambda _: None
    """Function that removes the connection data of all orders before the given one; called in a thread when that order
    has committed an iteration, after which no worker connects for an earlier one."""
    layer_bytes: Sequence[int] = ()
    """Bytes of parameters, buffers and optimizer state of each layer of the model, which are sent when the layer
    moves."""
    shared_layers: Sequence[Collection[int]] = ()
    """Groups of layers of the model that share a parameter (`runtime.models.sharing`)."""
    whole_schedules: bool = False
    """True if each worker needs all of every schedule, not only its own share, to deal samples or to evaluate."""
    elements: Sequence[ElementCounts]
    """Number of trained elements of each layer of the model, on each rank of a worker."""
    behind: TakeoverRecord | None = None
    """Record left by a coordinator that died, whose workers are looked for; None if there is none."""
    losses: Sequence[float] | None = None
    """Losses that the coordinator before this one committed; None if they are not known."""
    journal: Journal = EMPTY_JOURNAL
    """Summary of the events that the coordinator before this one wrote."""
    gone: Sequence[Worker] = ()
    """Workers that died together with the coordinator before this one."""
    identity: RunIdentity = NO_IDENTITY
    """What the run trains. Workers with another identity are refused."""

    @property
    def failure_domains(self) -> FailureDomains:
        """Failure domains of the run: groups of workers that fail together."""
        return FailureDomains(self.setup.failure_domains)

    def build_rules(self, first: PreparedSchedule) -> RunRules:
        """Return the settings and functions (`RunRules`) that the coordinator's decisions use and that stay the same
        during the run.

        The argument `first` is the schedule of this run, with the forms in which orders send it.
        """
        setup, resilience = self.setup, self.resilience
        return RunRules(
            first=first,
            iterations=range(setup.first_iteration, max(setup.first_iteration, setup.iterations)),
            settles=None if resilience.settling is None else MoveCost(self.layer_bytes, setup.fetch_bytes_per_second),
            mtbf_seconds=None if resilience.settling is None else resilience.settling.mtbf_seconds,
            automatic_checkpoints=setup.checkpoint_every is None, plans_for_speeds=resilience.at_speeds is not None,
            domains=self.failure_domains,
            partition=PartitionPlanner(self.elements, Placement(setup.cuts), setup.failure_domains,
                                       self.config.training.shard_optimizer),
            whole_schedules=self.whole_schedules, identity=self.identity)

    def build_rejoining_phase(self, at: float) -> RejoiningPhase | None:
        """Return the phase in which a dead coordinator's workers are looked for, beginning at time `at`
        (`time.monotonic`); None if no coordinator has died."""
        return None if self.behind is None else RejoiningPhase(
            losses=self.losses, first=self.setup.first_iteration, gone=frozenset(self.gone), began=at,
            expected=frozenset(self.schedule.members), grid=frozenset(self.schedule.grid.workers()))
