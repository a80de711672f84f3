"""Description of a run, as the launcher of node 0 passes it to the coordinator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.runtime.coordinator.decisions.effects import PreparedSchedule
from slipstream.runtime.coordinator.decisions.failover import EMPTY_JOURNAL, Journal, RejoiningPhase
from slipstream.runtime.coordinator.decisions.part_moves import PartitionPlanner
from slipstream.runtime.coordinator.decisions.rebalancing import MoveCost
from slipstream.runtime.coordinator.decisions.run_state import RunFacts, RunRules
from slipstream.runtime.coordinator.run_options import RunRequest
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.run_folder import TakeoverRecord
from slipstream.schedules.schedule import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """All that a coordinator knows of its run at the start."""

    request: RunRequest
    setup: WorkerSetup
    """Settings sent to each worker before its first order; some fields differ by worker."""
    facts: RunFacts
    forget_orders: Callable[[int], None] = lambda _: None
    """Function that removes the connection data of all orders before the given one."""
    layer_bytes: Sequence[int] = ()
    """Bytes to send if a layer moves, by layer: parameters, buffers and optimizer state."""
    behind: TakeoverRecord | None = None
    """Record of the coordinator that died and is replaced; None if this one replaces none."""
    losses: Sequence[float] | None = None
    """Losses of the iterations that the earlier coordinator committed; None: not known."""
    journal: Journal = EMPTY_JOURNAL
    """Summary of the events that the earlier coordinator wrote."""
    gone: Sequence[Worker] = ()
    """Workers that died together with the earlier coordinator."""

    @property
    def secret(self) -> Secret:
        """Secret that all processes of the run share, by which they authenticate each other."""
        secret = self.request.options.secret
        assert secret is not None
        return secret

    @property
    def failure_domains(self) -> FailureDomains:
        """Sets of workers that fail together, such as those of one machine."""
        return FailureDomains(self.setup.common.failure_domains)

    def build_rules(self, first: PreparedSchedule) -> RunRules:
        """Return the constants of all decisions in a run that begins with the schedule `first`."""
        first_iteration, common = self.setup.first_iteration, self.setup.common
        resilience = self.request.resilience
        # Without rules for rebalancing, no layer moves to a better schedule.
        move_cost, mtbf_seconds = None, None
        if resilience.settling is not None:
            move_cost = MoveCost(self.layer_bytes, common.resilience.fetch_bytes_per_second)
            mtbf_seconds = resilience.settling.mtbf_seconds
        # A run that resumes at or after its last iteration has no iterations left.
        return RunRules(
            first=first,
            iterations=range(first_iteration, max(first_iteration, common.iterations)),
            move_cost=move_cost,
            mtbf_seconds=mtbf_seconds,
            automatic_checkpoints=common.resilience.checkpoint_every is None,
            plans_for_speeds=resilience.at_speeds is not None,
            domains=self.failure_domains,
            partition=PartitionPlanner(
                self.facts.elements,
                Placement(common.cuts),
                common.failure_domains,
                self.request.config.training.shard_optimizer,
            ),
            facts=self.facts,
        )

    def build_rejoining_phase(self, at: float) -> RejoiningPhase | None:
        """Return the phase, begun `at`, that finds a dead coordinator's workers, or None."""
        if self.behind is None:
            return None
        return RejoiningPhase(
            losses=self.losses,
            first=self.setup.first_iteration,
            gone=frozenset(self.gone),
            began=at,
            expected=frozenset(self.request.schedule.members),
            grid=frozenset(self.request.schedule.grid.workers()),
        )
