"""Checkpointer: when a worker writes checkpoints, and of which layers."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from slipstream.runtime.model.checkpoints.checkpoint import CheckpointError, Saving, drop_newer, identity_of, save
from slipstream.runtime.model.layers.sharing import NOTHING_SHARED, Sharing
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol.setup import Setup
from slipstream.runtime.protocol.to_coordinator import Note, Saved
from slipstream.runtime.protocol.to_worker import Finish
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.schedules.schedule import Worker

Copying = Callable[[], Mapping[int, Mapping[str, Tensor]]]
"""Gives copies of whole layers."""


class Checkpointer:
    """Saves what is committed, every few iterations and at the end. One worker does so for each layer.

    A checkpoint that cannot be written ends no training: the coordinator is told the reason, and the earlier ones stay.
    """

    def __init__(self, setup: Setup, settings: NodeSettings, layers: int, worker: Worker,
                 tell: Callable[[Note | Saved], None], sharing: Sharing = NOTHING_SHARED) -> None:
        self._folder = None if setup.checkpoint_every == 0 else Path(settings.out) / CHECKPOINTS
        self._every = setup.checkpoint_every
        self._first = setup.first_iteration
        self._identity = identity_of(settings.config, layers)
        self._sharing = sharing
        self._worker = worker
        self._tell = tell
        self._saving: Saving | None = None

    def due(self, iteration: int, asked: int | None) -> bool:
        """Whether the state before an iteration is to be saved; `asked` is the one of this order that node 0 chose."""
        if self._every is None:
            return iteration == asked
        return self._folder is not None and self._every > 0 and iteration > self._first \
            and iteration % self._every == 0

    def save(self, iteration: int, copied: Copying) -> None:
        """Begin to save layers as they are before an iteration; returns once they are copied."""
        if self._folder is None:
            return
        began = time.monotonic()
        self._wait()
        own = {layer: self._sharing.without_copies(layer, state) for layer, state in copied().items()}
        if own:
            self._saving = save(self._folder, iteration, own, self._identity,
                                partial(self._ended, iteration, time.monotonic() - began))

    def go_back(self, iteration: int) -> None:
        """All go back to an iteration, as nobody could read what was saved of later ones: that is saved anew."""
        if self._folder is not None:
            drop_newer(self._folder, iteration)

    def save_last(self, order: Finish, copied: Copying) -> None:
        """Save, to the end, the layers that an order gives to this worker."""
        self.save(order.first_iteration, copied)
        self._wait()

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            with suppress(CheckpointError):  # which has been told
                saving.wait()

    def _ended(self, iteration: int, held_up: float, error: CheckpointError | None) -> None:
        """In the thread that has written, or has failed to: what it has computed, training has lost at most."""
        if error is not None:
            self._tell(Note(self._worker, str(error)))
        assert self._folder is not None
        self._tell(Saved(self._worker, iteration, held_up + time.thread_time(),
                         (self._folder / f"iteration-{iteration}").is_dir()))
