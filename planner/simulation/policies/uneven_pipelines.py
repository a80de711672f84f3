"""Machines in unequal pipelines, layers divided by speed, and layers that are left."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from slipstream.planner.simulation.policies.oobleck_templates import Template


class PipelineGroups:
    """Lists of machines, one for each pipeline or replica, and each machine's list."""

    def __init__(self, lists: Iterable[list[int]] = ()) -> None:
        self.groups = list(lists)
        self.group_of = {machine: group for group in self.groups for machine in group}

    def add_machine(self, machine: int, group: list[int]) -> None:
        """Add a machine to one of the lists. The machine must be in no list yet."""
        group.append(machine)
        self.group_of[machine] = group

    def add_group(self, group: list[int]) -> None:
        """Add a pipeline or replica, as a list of machines that are in no other."""
        self.groups.append(group)
        self.group_of |= dict.fromkeys(group, group)

    def remove_group(self, group: list[int]) -> list[int]:
        """Remove a pipeline or replica; return its machines, which are then in no list."""
        del self.groups[next(index for index, other in enumerate(self.groups) if other is group)]
        for machine in group:
            del self.group_of[machine]
        return group

    def find_groups(self, machines: Iterable[int]) -> list[list[int]]:
        """Return the pipelines or replicas that have any of these machines, each once."""
        groups_by_id = {
            id(group): group
            for machine in machines
            if (group := self.group_of.get(machine)) is not None
        }
        return list(groups_by_id.values())

    def remove_machines(self, machines: Iterable[int]) -> bool:
        """Remove these machines from their lists, and return whether any was in one."""
        grouped = [machine for machine in machines if machine in self.group_of]
        for machine in grouped:
            self.group_of.pop(machine).remove(machine)
        return bool(grouped)


@lru_cache(maxsize=65536)
def divide_by_speed(layers: tuple[float, ...], factors: tuple[float, ...]) -> Template:
    """Divide layers over nodes so that the slowest stage is fastest, and return the times.

    The argument `layers` has the seconds of each layer, and `factors` the slowdown factor of each
    node, in order of layers. If c_i is the time of stage i, n micro-batches take the sum of all c_i
    plus n - 1 times the longest. A node may be left without layers. Raises ValueError if there are
    no nodes.
    """
    if not factors:
        raise ValueError("a pipeline of no nodes")
    prefix = [0.0, *accumulate(layers)]
    # Bisect for the least time in which every node can take consecutive layers.
    low, high = 0.0, prefix[-1] * min(factors)
    for _ in range(50):
        middle = (low + high) / 2
        if _fill_stages_within(prefix, factors, middle) is None:
            low = middle
        else:
            high = middle
    stages = _fill_stages_within(prefix, factors, high * (1 + 1e-9)) or [prefix[-1] * min(factors)]
    return Template(step=max(stages), fill=sum(stages) - max(stages))


def _fill_stages_within(
    prefix: Sequence[float], factors: Sequence[float], seconds: float
) -> list[float] | None:
    """Return each node's seconds if all fill up to `seconds`; None if layers are left."""
    position, stages = 0, []
    # Each node takes as many layers as it has time for.
    for factor in factors:
        end = position
        while end + 1 < len(prefix) and (prefix[end + 1] - prefix[position]) * factor <= seconds:
            end += 1
        stages.append((prefix[end] - prefix[position]) * factor)
        position = end
    return stages if position == len(prefix) - 1 else None


def has_all_layers(pipelines: Sequence[Sequence[int]], gone: Collection[int]) -> bool:
    """Return whether the machines of `pipelines` that are not in `gone` hold every layer.

    Of n machines in a pipeline, machine k is assumed to hold the k-th of n equal parts of the
    layers.
    """
    gone = set(gone)
    if any(nodes and gone.isdisjoint(nodes) for nodes in pipelines):
        return True
    # The live parts of all pipelines, in order of layers, must leave no gap.
    parts = sorted(
        (index / len(nodes), (index + 1) / len(nodes))
        for nodes in pipelines
        for index, machine in enumerate(nodes)
        if machine not in gone
    )
    reached = 0.0
    for first, end in parts:
        if first > reached + 1e-9:
            return False
        reached = max(reached, end)
    return reached > 1 - 1e-9
