"""The optimizers of the ranks that one process stands for, where workers keep parts of optimizer states, as one."""

from collections.abc import Sequence

from slipstream.runtime.model.state.part_optimizer import PartOptimizer


class RankOptimizers:
    """Has all of them do the same, one after the other; see `PartOptimizer`."""

    def __init__(self, by_rank: Sequence[PartOptimizer]) -> None:
        self._by_rank = by_rank

    def squares(self) -> dict[int, float]:
        """Of all of them together."""
        found = [one.squares() for one in self._by_rank]
        return {layer: sum(one[layer] for one in found) for layer in found[0]}

    def step(self, iteration: int, factor: float = 1.0) -> None:
        """Undoable from now on."""
        for one in self._by_rank:
            one.step(iteration, factor)

    def undo(self) -> None:
        """Put what is kept back to before the open step."""
        for one in self._by_rank:
            one.undo()

    def go_back(self, committed: int) -> None:
        """Undo the open step where it is of a later iteration than the last committed one; else it is final."""
        for one in self._by_rank:
            one.go_back(committed)

    def commit(self) -> None:
        """The open step, if there is one, is final."""
        for one in self._by_rank:
            one.commit()
