"""What a process keeps of optimizer states as one of the ranks that it stands for.

Parameters and gradients are those of the layers that compute (`runtime.model.ranks.rank_holding`). As the rank has
them, flat and one after the other, they are here only on their way: gradients from their sum until they have been
stepped by, parameters from a step until those of other workers have come.
"""

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from slipstream.runtime.model.state.holding import Holding
from slipstream.runtime.model.state.parts import Cut
from slipstream.schedules.layers import LayerRange


class RankParts(Holding):
    """The holding of such a rank: `runtime.model.ranks.rank_holding` says when it has what."""

    separate: ClassVar[bool] = True

    def reduce_by(self, ranges: Iterable[LayerRange]) -> None:  # noqa: ARG002  # what is asked for has gradients
        """From now on, there are no gradients."""
        self._gradients, self.shared_gradients = {}, {}
        for parameter in self.parameters().values():
            parameter.grad = None

    def zero_gradients(self) -> None:
        """There are none any more."""
        self.reduce_by(())

    def take_gradients(self, what: LayerRange | str) -> list[Tensor]:
        """Zero gradients, as `summed` names them; there are none until then."""
        if isinstance(what, str):
            found = self.shared_gradients[what] = self._zero_shared_gradients(self._sharing.held_as(what, self.modules))
        else:
            found = self._gradients[what] = self._zero_gradients(what)
        return found

    def flat_parameters(self) -> Iterable[tuple[LayerRange, Tensor, Cut]]:
        """To be gathered: from now on, parameters are here, and those that are kept are right."""
        self.take_parameters()
        self.optimizer.write()
        return super().flat_parameters()

    @property
    def has_parameters(self) -> bool:
        """Whether they are here, if there are any."""
        return self.optimizer.writes or not self.modules

    def take_parameters(self) -> None:
        """Have parameters, whatever they are, if there are none."""
        if self.has_parameters:
            return
        self._flatten_parameters()
        for parameter in self._trained():
            parameter.data = parameter.detach().contiguous()
        self.optimizer.writes = True

    def drop_parameters(self) -> None:
        """Have none any more; their shapes stay."""
        self._flat_parameters = {}
        for parameter in self._trained():
            parameter.data = parameter.detach().new_empty(()).expand(parameter.shape)
        self.optimizer.writes = False

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters().values() if parameter.requires_grad]
