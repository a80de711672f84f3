"""Description of a run, as the launcher of node 0 passes it to the coordinator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.runtime.coordinator.decisions.effects import PreparedSchedule
from slipstream.runtime.coordinator.decisions.failover import EMPTY_JOURNAL, Journal, RejoiningPhase
from slipstream.runtime.coordinator.decisions.part_moves import PartitionPlanner
from slipstream.runtime.coordinator.decisions.run_state import RunFacts, RunRules
from slipstream.runtime.coordinator.decisions.settling import MoveCost
from slipstream.runtime.coordinator.run_options import RunRequest
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.run_folder import TakeoverRecord
from slipstream.schedules.schedule import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Constants of one run for the coordinator. They are what was asked for, what follows from it,
    and what an earlier coordinator has left."""

    request: RunRequest
    setup: WorkerSetup
    """Message that workers get before their first order, but for what differs by worker."""
    facts: RunFacts
    forget_orders: Callable[[int], None] = lambda _: None
    """Function that removes the connection data of orders before the given one. Called in a thread
    once that order has committed an iteration, after which no worker connects for an earlier
    one."""
    layer_bytes: Sequence[int] = ()
    """Bytes of parameters, buffers and optimizer state of each layer, sent when it moves."""
    behind: TakeoverRecord | None = None
    """Record left by a coordinator that died, whose workers are looked for, if any."""
    losses: Sequence[float] | None = None
    """Losses that the coordinator before this one committed; None if they are not known."""
    journal: Journal = EMPTY_JOURNAL
    """Summary of the events that the coordinator before this one wrote."""
    gone: Sequence[Worker] = ()
    """Workers that died together with the coordinator before this one."""

    @property
    def secret(self) -> Secret:
        """Secret that all processes of the run share, by which they authenticate each other."""
        secret = self.request.options.secret
        assert secret is not None
        return secret

    @property
    def failure_domains(self) -> FailureDomains:
        """Failure domains of the run: groups of workers that fail together."""
        return FailureDomains(self.setup.common.failure_domains)

    def build_rules(self, first: PreparedSchedule) -> RunRules:
        """Return the settings and functions that decisions use and that never change. `first` is
        the schedule of this run, with the forms in which orders send it."""
        first_iteration, common, resilience = self.setup.first_iteration, self.setup.common, self.request.resilience
        return RunRules(
            first=first,
            iterations=range(first_iteration, max(first_iteration, common.iterations)),
            settles=None if resilience.settling is None else MoveCost(
                self.layer_bytes, common.resilience.fetch_bytes_per_second),
            mtbf_seconds=None if resilience.settling is None else resilience.settling.mtbf_seconds,
            automatic_checkpoints=common.resilience.checkpoint_every is None,
            plans_for_speeds=resilience.at_speeds is not None, domains=self.failure_domains,
            partition=PartitionPlanner(self.facts.elements, Placement(common.cuts), common.failure_domains,
                                       self.request.config.training.shard_optimizer),
            facts=self.facts)

    def build_rejoining_phase(self, at: float) -> RejoiningPhase | None:
        """Return the phase that looks for a dead coordinator's workers from time `at` on. `at` is a
        time of `time.monotonic`. Returns None if no coordinator has died."""
        return None if self.behind is None else RejoiningPhase(
            losses=self.losses, first=self.setup.first_iteration, gone=frozenset(self.gone), began=at,
            expected=frozenset(self.request.schedule.members),
            grid=frozenset(self.request.schedule.grid.workers()))
