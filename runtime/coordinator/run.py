"""What the coordinator is given: the run as its launcher has set it up."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.decisions.failover import Rejoining
from slipstream.runtime.coordinator.decisions.journal import NO_JOURNAL, Journal
from slipstream.runtime.coordinator.decisions.part_moves import Partition
from slipstream.runtime.coordinator.decisions.questions import Prepared
from slipstream.runtime.coordinator.decisions.run_state import Rules
from slipstream.runtime.coordinator.decisions.settling import Cost
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.model.state.parts import Elements
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.setup import Setup
from slipstream.runtime.replay.placement import Placement
from slipstream.runtime.run_folder import LeftBehind
from slipstream.runtime.run_options import Resilience, RunOptions
from slipstream.schedules.schedule import Schedule, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    schedule: Schedule
    setup: Setup
    shares: Sequence[Sequence[Worker]]
    """The workers of each node that are there from the start."""
    out: Path
    config: RunConfig
    secret: Secret
    """What all who take part know."""
    resilience: Resilience = Resilience()
    options: RunOptions = RunOptions()
    forget_orders: Callable[[int], None] = lambda _: None
    """Called in a thread, once an order has committed an iteration: nobody connects for those before it any more."""
    layer_bytes: Sequence[int] = ()
    """What is sent of each layer of the model."""
    shared_layers: Sequence[Collection[int]] = ()
    """The layers of the model that have a parameter together, group by group (`runtime.model.layers.sharing`)."""
    whole_schedules: bool = False
    """Whether workers deal or evaluate data by the whole of each schedule."""
    elements: Sequence[Elements]
    """Of each layer of the model: how many are trained."""
    behind: LeftBehind | None = None
    """Where another coordinator has died: its workers are looked for."""
    losses: Sequence[float] | None = None
    """Those that it has committed; None: they are not known."""
    journal: Journal = NO_JOURNAL
    """What its events tell."""
    gone: Sequence[Worker] = ()
    """Workers that have died with it."""

    @property
    def domains(self) -> FailureDomains:
        """Which workers fail together."""
        return FailureDomains(self.setup.failure_domains)

    def rules(self, prepared: Callable[[Schedule], Prepared]) -> Rules:
        """What stays the same, with what a schedule is in an order."""
        setup, resilience = self.setup, self.resilience
        return Rules(
            first=self.schedule, prepared=prepared,
            iterations=range(setup.first_iteration, max(setup.first_iteration, setup.iterations)),
            settles=None if resilience.settling is None else Cost(self.layer_bytes, setup.fetch_bytes_per_second),
            mtbf_seconds=None if resilience.settling is None else resilience.settling.mtbf_seconds,
            automatic_checkpoints=setup.checkpoint_every is None, plans_for_speeds=resilience.at_speeds is not None,
            domains=self.domains,
            partition=Partition(self.elements, Placement(setup.cuts), setup.failure_domains,
                                self.config.training.shard_optimizer),
            whole_schedules=self.whole_schedules)

    def rejoining(self, at: float) -> Rejoining | None:
        """The phase that begins at a time by time.monotonic where another coordinator has died."""
        return None if self.behind is None else Rejoining(
            losses=self.losses, first=self.setup.first_iteration, gone=frozenset(self.gone), began=at,
            expected=frozenset(self.schedule.members), grid=frozenset(self.schedule.grid.workers()))
