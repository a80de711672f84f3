"""Machines in pipelines: which one has which, layers cut by their speed, and who holds them when some are gone."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from slipstream.cli.fleet.policies.oobleck_templates import Template


class PipelineGroups:
    """Lists of machines (pipelines, replicas), and the list of each machine.

    So a change costs by the machines that it concerns, and not by those of the job.
    """

    def __init__(self, lists: Iterable[list[int]] = ()) -> None:
        self.all = list(lists)
        self.of = {machine: one for one in self.all for machine in one}

    def put(self, machine: int, group: list[int]) -> None:
        """The machine, which is in no list, is in this one."""
        group.append(machine)
        self.of[machine] = group

    def add(self, group: list[int]) -> None:
        """One list more."""
        self.all.append(group)
        self.of |= dict.fromkeys(group, group)

    def drop(self, group: list[int]) -> list[int]:
        """The list is none any more: its machines."""
        del self.all[next(index for index, one in enumerate(self.all) if one is group)]
        for machine in group:
            del self.of[machine]
        return group

    def holding(self, machines: Iterable[int]) -> list[list[int]]:
        """The lists that hold any of these, each once."""
        found = {id(group): group for machine in machines if (group := self.of.get(machine)) is not None}
        return list(found.values())

    def remove(self, machines: Iterable[int]) -> bool:
        """Take these out of their lists: whether any was in one."""
        found = [machine for machine in machines if machine in self.of]
        for machine in found:
            self.of.pop(machine).remove(machine)
        return bool(found)


@lru_cache(maxsize=65536)
def cut_by_speed(layers: tuple[float, ...], factors: tuple[float, ...]) -> Template:
    """The contiguous cut of layers (seconds each) over nodes in this order whose slowest stage takes least.

    A node with factor f takes f times as long. With c_i the time of stage i, n micro-batches take the sum of all c_i
    and n - 1 times the longest. A node may be left without layers. Raises ValueError for no nodes.
    """
    if not factors:
        raise ValueError("a pipeline of no nodes")
    prefix = [0.0, *accumulate(layers)]
    low, high = 0.0, prefix[-1] * min(factors)
    for _ in range(50):
        middle = (low + high) / 2
        if _stages_within(prefix, factors, middle) is None:
            low = middle
        else:
            high = middle
    stages = _stages_within(prefix, factors, high * (1 + 1e-9)) or [prefix[-1] * min(factors)]
    return Template(step=max(stages), fill=sum(stages) - max(stages))


def _stages_within(prefix: Sequence[float], factors: Sequence[float], seconds: float) -> list[float] | None:
    """Seconds of each stage where every node in turn takes as many layers as fit; None where some are left over."""
    position, stages = 0, []
    for factor in factors:
        end = position
        while end + 1 < len(prefix) and (prefix[end + 1] - prefix[position]) * factor <= seconds:
            end += 1
        stages.append((prefix[end] - prefix[position]) * factor)
        position = end
    return stages if position == len(prefix) - 1 else None


def all_layers_held(pipelines: Sequence[Sequence[int]], gone: Collection[int]) -> bool:
    """Whether the machines that are left hold every layer, where node k of n holds about the k-th n-th of them."""
    gone = set(gone)
    if any(nodes and gone.isdisjoint(nodes) for nodes in pipelines):
        return True
    parts = sorted((index / len(nodes), (index + 1) / len(nodes)) for nodes in pipelines
                   for index, machine in enumerate(nodes) if machine not in gone)
    reached = 0.0
    for first, end in parts:
        if first > reached + 1e-9:
            return False
        reached = max(reached, end)
    return reached > 1 - 1e-9
