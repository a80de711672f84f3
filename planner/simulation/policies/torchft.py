"""torchft (0.2.0) with pipelines in replica groups, which live or die as a whole."""

from collections.abc import Sequence

import msgspec

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.policies.uneven_pipelines import PipelineGroups
from slipstream.planner.simulation.policy import Cause, Phase, Policy, Scenario


class TorchFT(Policy):
    """Policy that drops replica groups that lost a worker, and starts new whole groups."""

    name = "torchft"
    title = "torchft: a replica group that lost a worker is dropped"
    source = "torchft 0.2.0, src/manager.rs: a quorum counts whole replica groups"
    assumptions = (
        "throughput in proportion to whole groups (each continues with its own micro-batches, so "
        "that the global batch shrinks); a failure discards the step; whoever is left of dropped "
        "groups, and newcomers, are restarted as whole groups after the time of a restart, in "
        "which the others go on, and take the state from a peer; steps take no longer than without "
        "torchft, in its favour"
    )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._groups, self._starting = PipelineGroups(), PipelineGroups()
        """Replica groups (lists of machines) that train, and groups that are being restarted."""
        self._ungrouped: list[int] = []
        self._restarted_at = 0.0
        """Time in seconds of the trace at which the restarted groups join."""
        self._join_phase = self.switch

    def _rate_for_groups(self, groups: int) -> float:
        return self.fault_free_rate * groups / self.scenario.pipelines

    def steady_rate(self, failures: int) -> float:
        """Return the samples per second on as many whole groups as the live workers form."""
        return self._rate_for_groups((self.scenario.workers - failures) // self.scenario.stages)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Form whole groups of the machines in `live`; return the phases from the start."""
        self._ungrouped = sorted(live)
        self._groups = PipelineGroups(self._form_whole_groups())
        return self.resume_training(self._rate_for_groups(len(self._groups.groups)))

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:
        """Drop groups that lost a worker, start new whole ones; return the next phases.

        If no group is left that trains, all restart from the checkpoint.
        """
        now, dead = change.seconds, set(change.removed)
        if now >= self._restarted_at:
            self._join_restarted_groups()
        running = len(self._groups.groups)
        self._ungrouped += change.added
        if dead:
            self._remove_dead(dead)
        broken = len(self._groups.groups) < running
        for group in self._form_whole_groups():
            self._starting.add_group(group)
            self._restarted_at = now + self.costs.restart_seconds
        if not self._groups.groups:
            # No group holds the state: all restart from the checkpoint.
            self._join_restarted_groups()
            return self.restart(self._rate_for_groups(len(self._groups.groups)), remaining)
        return self._training_phases(now, broken, remaining)

    def _join_restarted_groups(self) -> None:
        """Move the restarted groups to those that train."""
        for group in self._starting.groups:
            self._groups.add_group(group)
        self._starting = PipelineGroups()

    def _remove_dead(self, gone: set[int]) -> None:
        """Remove dead machines (`gone`), and drop the groups that lost one."""
        for groups in (self._groups, self._starting):
            for group in groups.find_groups(sorted(gone)):
                self._ungrouped += groups.remove_group(group)
        self._ungrouped = [machine for machine in self._ungrouped if machine not in gone]

    def _training_phases(self, now: float, broken: bool, remaining: Sequence[Phase]) -> list[Phase]:
        """Return phases without the starting groups, then with them."""
        running, starting = len(self._groups.groups), len(self._starting.groups)
        rate = self._rate_for_groups(running)
        lost_samples = self.discard_lost_samples(remaining, worker_died=broken)
        # Pauses in progress are finished; a group that has just broken (`broken`) makes all switch.
        stalls = [
            phase
            for phase in remaining[: _find_training_phase(remaining)]
            if phase.cause is not Cause.LOST
        ]
        if broken and not self.needs_checkpoint(remaining):
            stalls = [self.switch]
        phases = self.resume_training(rate, *stalls, lost_samples=lost_samples)
        # Train without the starting groups until these join and load the state from a peer.
        if starting:
            spent = sum(phase.seconds for phase in phases[:-1])
            phases[-1] = phases[-1].with_seconds(max(0.0, self._restarted_at - now - spent))
            phases += [
                self._join_phase,
                self.load,
                self.training_phase(self._rate_for_groups(running + starting)),
            ]
        return phases

    def _form_whole_groups(self) -> list[list[int]]:
        """Return new whole groups, as lists of machines that are in no group."""
        groups: list[list[int]] = []
        stages = self.scenario.stages
        room = self.scenario.pipelines - len(self._groups.groups) - len(self._starting.groups)
        while len(self._ungrouped) >= stages and len(groups) < room:
            groups.append(self._ungrouped[:stages])
            del self._ungrouped[:stages]
        return groups


class FTHSDP(TorchFT):
    """Policy of torchft with the times that the FT-HSDP paper reports for 100,000 GPUs."""

    name = "ft-hsdp"
    title = "FT-HSDP: a replica that failed restarts alone, with a stall of 3 minutes"
    source = (
        "FT-HSDP (arXiv 2602.00277), abstract: stalls of 3 minutes; our reading: no public code"
    )
    assumptions = (
        "as torchft, but all stand still for 3 minutes at each failure, in all: a replica restarts "
        "in 10 minutes, in which the others train, and joins again by a usual switch; replicas are "
        "the job's pipelines"
    )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(
            scenario._replace(
                costs=msgspec.structs.replace(
                    scenario.costs,
                    switch_seconds=scenario.costs.ft_hsdp_stall_seconds,
                    restart_seconds=scenario.costs.ft_hsdp_restart_seconds,
                )
            )
        )
        self._join_phase = Phase(Cause.SWITCH, scenario.costs.switch_seconds)


def _find_training_phase(phases: Sequence[Phase]) -> int:
    """Return the index of the first phase of plain training (`RUN`); 0 without one."""
    return next((index for index, phase in enumerate(phases) if phase.cause is Cause.RUN), 0)
