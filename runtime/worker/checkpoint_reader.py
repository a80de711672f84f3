"""Checkpoint reader: the states that a worker can take its layers from without any other worker."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from slipstream.runtime.model.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    complete,
    identity_of,
    load,
    open_checkpoint,
)
from slipstream.runtime.model.layers.sharing import NOTHING_SHARED, Sharing
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.run_folder import CHECKPOINTS


class CheckpointReader:
    """Reads the checkpoints in the folder of the run, and the one that it began from.

    Parameters
    ----------
    first
        The iteration where the run began.
    layers
        How many the model has.
    """

    def __init__(self, first: int, settings: NodeSettings, layers: int, sharing: Sharing = NOTHING_SHARED) -> None:
        self._sharing = sharing
        self._first = first
        self._resume = None if settings.resume is None else Path(settings.resume)
        self._folder = Path(settings.out) / CHECKPOINTS
        self._identity = identity_of(settings.config, layers)
        self._damaged: set[int] = set()

    def iterations(self) -> tuple[int, ...]:
        """Those that this worker can go back to: their states are complete, as far as can be seen without reading them.
        """
        found = {self._first} if self._first == 0 or self._begins_from() is not None else set()
        found |= {iteration for iteration in complete(self._folder) if iteration >= self._first}
        return tuple(sorted(found - self._damaged))

    def go_back(self, iteration: int) -> None:
        """All go back to an iteration: checkpoints of later ones are written anew."""
        self._damaged = {one for one in self._damaged if one <= iteration}

    def load(self, iteration: int, layers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """The states of some layers before an iteration; nothing where layers are as they are built.

        Raises CheckpointError; the iteration is then no longer among `iterations`.
        """
        try:
            if iteration == 0:
                return {}
            path = self._folder / f"iteration-{iteration}"
            begins_from = self._begins_from() if iteration == self._first else None
            checkpoint = begins_from or open_checkpoint(path, self._identity)
            return {layer: self._sharing.with_copies(layer, state, lambda first: load(checkpoint, [first])[first])
                    for layer, state in load(checkpoint, layers).items()}
        except CheckpointError:
            self._damaged.add(iteration)
            raise

    def _begins_from(self) -> Checkpoint | None:
        """The checkpoint that the run began from, as long as it is there: newer ones may have replaced it."""
        if self._resume is None:
            return None
        try:
            found = open_checkpoint(self._resume, self._identity)
        except CheckpointError:
            return None
        return found if found.iteration == self._first else None
