"""Oobleck (SOSP 2023): pipelines of several lengths, from templates that are planned in advance."""

from collections import Counter
from collections.abc import Sequence

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.policies.oobleck_templates import shortest_iteration_by_length
from slipstream.planner.simulation.policies.uneven_pipelines import PipelineGroups, has_all_layers
from slipstream.planner.simulation.policy import Cause, Phase, Policy, Scenario


class Oobleck(Policy):
    """Policy in which pipelines shrink, take nodes from others or merge at a failure."""

    name = "oobleck"
    title = "Oobleck: pipelines of several lengths"
    source = (
        "Oobleck (SOSP 2023), section 4; artifact SymbioticLab/Oobleck: csrc/planning, "
        "planning/instantiator.py, execution/engine.py; branch sosp23-artifact: tools/simulator"
    )
    assumptions = (
        "starts as the job's grid, its stages cut into layers; a pipeline needs at least half the "
        "nodes it starts with; the batch is split for the shortest iteration; who joins waits for "
        "the next failure; a failure loses half an iteration and the published reconfiguration "
        "time; layers that no live node holds come from a checkpoint"
    )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._pipelines = PipelineGroups()
        self._idle: list[int] = []
        self._min_nodes = -(-scenario.stages // 2)
        """Smallest number of nodes (machines) of a pipeline: half of its stages, rounded up."""

    def steady_rate(self, failures: int) -> float:
        """Return the samples per second with this many failures, in the better of two placements.

        Failures are spread over all pipelines, or are in as few as possible.
        """
        pipelines, stages = self.scenario.pipelines, self.scenario.stages
        if not failures:
            return self.fault_free_rate
        rates = []
        for divide in (spread_sizes, stacked_sizes):
            sizes = divide(pipelines, stages, failures)
            if all(size == 0 or size >= self._min_nodes for size in sizes):
                rates.append(self.rate(sizes))
        return max(rates)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Form pipelines of the job's length, the last possibly shorter; return the first phases.

        Machines in `live` that are left over join these pipelines.
        """
        self._idle = sorted(live)
        self._pipelines = PipelineGroups()
        self._instantiate_pipelines()
        return self.resume_training(self._current_rate())

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Form new pipelines if one lost a machine or the job waits; return phases.

        Machines that are added while none dies wait, idle, until one does, unless the job waits. If
        no live machine holds some layer, the job restarts from the checkpoint.
        """
        dead, pipelines = set(change.removed), self._pipelines
        died = not dead.isdisjoint(pipelines.group_of)
        self._idle = [machine for machine in (*self._idle, *change.added) if machine not in dead]
        if not died and remaining[0].cause is not Cause.WAIT:
            return remaining
        layers_lost = not has_all_layers(pipelines.groups, dead)
        pipelines.remove_machines(dead)
        self._instantiate_pipelines()
        return self.resume_after_change(
            self._current_rate(),
            remaining,
            Phase(Cause.SWITCH, self.costs.oobleck_seconds),
            worker_died=died,
            state_lost=layers_lost,
        )

    def _instantiate_pipelines(self) -> None:
        """Put idle machines into old and new pipelines, and mend those that are too short."""
        idle, self._idle = self._idle, []
        groups, pipelines = self._pipelines, self._pipelines.groups
        for nodes in [nodes for nodes in pipelines if not nodes]:
            groups.remove_group(nodes)
        # Idle nodes first lengthen pipelines that lost some, then form new ones.
        for nodes in sorted(pipelines, key=len):
            while idle and len(nodes) < self.scenario.stages:
                groups.add_machine(idle.pop(), nodes)
        while len(idle) >= self._min_nodes and len(pipelines) < self.scenario.pipelines:
            groups.add_group(idle[: self.scenario.stages])
            del idle[: self.scenario.stages]
        # Templates exist only from half the length on (section 4 of the paper).
        self._fix_short_pipelines()
        if not pipelines:
            self._idle = idle
            return
        for machine in idle:
            groups.add_machine(machine, min(pipelines, key=len))

    def _fix_short_pipelines(self) -> None:
        """Lengthen pipelines that are too short by nodes of others, or merge them into others."""
        groups, pipelines = self._pipelines, self._pipelines.groups
        for nodes in sorted(
            [nodes for nodes in pipelines if len(nodes) < self._min_nodes], key=len
        ):
            # Borrow nodes of pipelines that can spare some.
            while (
                len(nodes) < self._min_nodes
                and len(largest := max(pipelines, key=len)) > self._min_nodes
            ):
                groups.add_machine(largest.pop(), nodes)
            if len(nodes) < self._min_nodes:
                # None can spare any: the pipeline is merged into others.
                for machine in groups.remove_group(nodes):
                    if pipelines:
                        groups.add_machine(machine, min(pipelines, key=len))
                    else:
                        self._idle.append(machine)

    def _current_rate(self) -> float:
        return self.rate(list(map(len, self._pipelines.groups)))

    def rate(self, sizes: Sequence[int]) -> float:
        """Return the samples per second of pipelines with these numbers of nodes; 0 without any."""
        lengths = tuple(sorted(size for size in sizes if size))
        return self.throughputs.compute_once(
            (self.name, lengths), lambda: self._compute_rate(lengths)
        )

    def _compute_rate(self, lengths: tuple[int, ...]) -> float:
        counts = Counter(lengths)
        if not counts:
            return 0.0
        layers = self.throughputs.loads.layer_seconds
        microbatches = sum(self.throughputs.job.microbatches)
        whole = shortest_iteration_by_length(
            layers, ((self.scenario.stages, self.scenario.pipelines),), microbatches
        )
        now = shortest_iteration_by_length(layers, tuple(sorted(counts.items())), microbatches)
        return self.throughputs.scale_by_formula(whole, now)


def spread_sizes(pipelines: int, stages: int, failures: int) -> list[int]:
    """Return each pipeline's number of nodes, at first `stages`, after failures spread evenly."""
    return [
        stages - failures // pipelines - (index < failures % pipelines)
        for index in range(pipelines)
    ]


def stacked_sizes(pipelines: int, stages: int, failures: int) -> list[int]:
    """Return the number of nodes of each pipeline left if failures remove whole ones.

    Each pipeline has `stages` nodes at first. The live nodes of the last pipeline removed join
    others.
    """
    removed, remainder = divmod(failures, stages)
    sizes = [stages] * (pipelines - removed - (remainder > 0))
    for index in range(stages - remainder if remainder else 0):
        if sizes:
            sizes[index % len(sizes)] += 1
    return sizes
