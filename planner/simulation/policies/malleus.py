"""Malleus (SIGMOD 2025, arXiv 2410.13333) and ResiHP (arXiv 2605.06374): work by speed.

Malleus estimates how slow each GPU is, and plans anew which GPUs form a stage, how many layers each
stage of each pipeline has, and how many micro-batches each pipeline; parameters migrate while the
job runs. ResiHP adapts in three steps: a tensor-parallel group continues with its remaining ranks,
layers are divided anew within its pipeline, then micro-batches over pipelines. Its first step is
nonuniform tensor parallelism (Arfeen et al., arXiv 2504.06095): a group that lost ranks computes at
the share of those it has.

In these formulas both are the same: every pipeline has a division of its own, by the speeds of its
nodes, and 1F1B; an iteration ends when the slowest pipeline does (`shortest_iteration`). They
differ in what a group that lost GPUs can do. Assumed, in their favour: memory is no limit;
detection and planning take no time; a change costs half an iteration if a worker died, a switch,
and the time to load one stage, in which all wait; newcomers join at once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.policies.oobleck_templates import Template, shortest_iteration
from slipstream.planner.simulation.policies.uneven_pipelines import (
    PipelineGroups,
    divide_by_speed,
    has_all_layers,
)
from slipstream.planner.simulation.policy import Phase, Policy, Scenario

_ASSUMPTIONS = (
    "1F1B on pipelines that are each cut by the speed of their nodes, and share the batch by "
    "theirs; as many pipelines as the job has, of nearly equal length; memory is no limit; a "
    "change costs a switch and the loading of a stage, a death also half an iteration; layers that "
    "no live node holds come from a checkpoint"
)

Pipelines = Mapping[tuple[float, ...], int]
"""Number of pipelines whose machines have the given slowdown factors, sorted ascending."""


class Malleus(Policy):
    """Policy that divides layers in each pipeline, and micro-batches over pipelines, by speed."""

    name = "malleus"
    title = "Malleus: layers and micro-batches by the speed of each worker"
    source = "Malleus (SIGMOD 2025, arXiv 2410.13333), sections 4 and 5; our reading: formula level"
    assumptions = (
        _ASSUMPTIONS
        + "; a tensor-parallel group that lost GPUs continues with the next smaller power of two"
    )
    balances_speeds = True

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._pipelines = PipelineGroups([] for _ in range(scenario.pipelines))
        self._layers = self.throughputs.loads.layer_seconds
        self._fault_free_seconds = self._iteration_seconds(
            Counter({(1.0,) * scenario.stages: scenario.pipelines})
        )

    @staticmethod
    def alive_gpus(alive: int, whole: int) -> int:
        """Return the number of GPUs that a worker uses if `alive` of `whole` are alive.

        If some are lost, it uses the largest power of two that is at most `alive`; 0 if none is
        alive.
        """
        return alive if alive in (0, whole) else 1 << (alive.bit_length() - 1)

    def steady_rate(self, failures: int) -> float:
        """Return the samples per second with this many failures, spread evenly over pipelines."""
        live, count = self.scenario.workers - failures, self.scenario.pipelines
        sizes = [live // count + (index < live % count) for index in range(count)]
        return self._rate_for_pipelines(Counter((1.0,) * size for size in sizes if size))

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Distribute the machines in `live` evenly over pipelines; return the first phases."""
        self._place_machines(live)
        return self.resume_training(self._current_rate())

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Divide layers and micro-batches over the live machines, and return the next phases.

        If no live machine holds some layer, or the job waits or is restarting, it restarts from the
        checkpoint.
        """
        dead = set(change.removed)
        state_lost = not has_all_layers(self._pipelines.groups, dead)
        self._pipelines.remove_machines(dead)
        self._place_machines(change.added)
        return self.resume_after_change(
            self._current_rate(),
            remaining,
            self.switch,
            self.load,
            worker_died=bool(dead),
            state_lost=state_lost,
        )

    def _place_machines(self, machines: Sequence[int]) -> None:
        """Add machines to the shortest pipelines, and balance lengths."""
        groups, pipelines = self._pipelines, self._pipelines.groups
        for machine in machines:
            groups.add_machine(machine, min(pipelines, key=len))
        while (
            len(longest := max(pipelines, key=len)) > len(shortest := min(pipelines, key=len)) + 1
        ):
            groups.add_machine(longest.pop(), shortest)

    def _current_rate(self) -> float:
        lengths = Counter(map(len, self._pipelines.groups))
        # Equal pipelines are counted, not listed, so that the key is small and repeats.
        slow: Counter[tuple[float, ...]] = Counter()
        for nodes in self._pipelines.find_groups(self.slow):
            slow[tuple(sorted(self.slow.get(machine, 1.0) for machine in nodes))] += 1
            lengths[len(nodes)] -= 1
        pipelines = (
            Counter(
                {(1.0,) * length: count for length, count in lengths.items() if length and count}
            )
            + slow
        )
        key = Malleus.name, frozenset(pipelines.items())
        return self.throughputs.compute_once(key, lambda: self._rate_for_pipelines(pipelines))

    def _rate_for_pipelines(self, pipelines: Pipelines) -> float:
        """Return the samples per second of `pipelines`; 0 if it is empty."""
        if not pipelines:
            return 0.0
        return self.throughputs.scale_by_formula(
            self._fault_free_seconds, self._iteration_seconds(pipelines)
        )

    def _iteration_seconds(self, pipelines: Pipelines) -> float:
        """Return the seconds of an iteration on `pipelines`, with layers divided by speed."""
        # Pipelines with equal factors have the same template.
        cuts: Counter[Template] = Counter()
        for factors, count in pipelines.items():
            cuts[divide_by_speed(self._layers, factors)] += count
        return shortest_iteration(cuts, sum(self.throughputs.job.microbatches))


class ResiHP(Malleus):
    """Malleus with tensor-parallel groups that continue with all of their remaining GPUs."""

    name = "resihp"
    title = "ResiHP: nonuniform tensor parallelism, then layers and micro-batches by speed"
    source = (
        "ResiHP (arXiv 2605.06374); nonuniform tensor parallelism: arXiv 2504.06095; our reading: "
        "no public code"
    )
    assumptions = (
        _ASSUMPTIONS
        + "; a tensor-parallel group that lost GPUs continues with the others, in proportion"
    )

    @staticmethod
    def alive_gpus(alive: int, whole: int) -> int:  # noqa: ARG004
        """Return the number of GPUs that a worker uses: all `alive` of its `whole` number."""
        return alive
