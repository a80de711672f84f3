"""Decide when a worker writes checkpoints, write them, and read those to restore."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import UnsetType
from torch import Tensor

from slipstream.runtime.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    PendingSave,
    StreamState,
    find_complete,
    identity_of,
    is_complete,
    load_layers,
    open_checkpoint,
    remove_newer,
    start_saving,
)
from slipstream.runtime.models.sharing import Sharing
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_coordinator import CheckpointSaved, Note
from slipstream.runtime.protocol.to_worker import Finish
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.runtime.run_identity import RunIdentity
from slipstream.schedules.schedule import Worker

_POLL_SECONDS = 0.05
ReadDataState = Callable[[int], StreamState | None]
"""Function that returns the state of data before an iteration; None if unknown.

Only data that are read in order have a state.
"""
CopyLayers = Callable[[], Mapping[int, Mapping[str, Tensor]]]
"""Function that returns copies of whole layers' states, by layer and name of the tensor."""


class Checkpointer:
    """Writer and reader of a worker's checkpoints.

    Committed state is saved every few iterations and at the end, each layer by one worker. What can
    be read are the checkpoints in the folder of the run, and the one that the run began from. A
    checkpoint that cannot be written does not end training: the reason is reported to the
    coordinator by `tell`.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        settings: NodeSettings,
        layers: int,
        worker: Worker,
        tell: Callable[[Note | CheckpointSaved], None],
        sharing: Sharing,
        run: RunIdentity | None = None,
        data_state: ReadDataState = lambda _: None,
    ) -> None:
        self._folder = Path(settings.out) / CHECKPOINTS
        self._resume = None if settings.resume is None else Path(settings.resume)
        self._every = setup.common.resilience.checkpoint_every
        self._first = setup.first_iteration
        self._read, self._samples = (
            setup.read,
            settings.config.training.batch * sum(setup.common.microbatches),
        )
        self._identity = identity_of(settings.config, layers)
        self._run = run
        self._data_state = data_state
        self._sharing = sharing
        self._worker = worker
        self._tell = tell
        self._saving: PendingSave | None = None
        # Saves of iterations that were not known to be committed when they were started.
        self._drafts: list[PendingSave] = []
        # For the drafts: messages and orders are handled in different threads.
        self._lock = threading.Lock()
        self._order = 0
        self._damaged: set[int] = set()

    def begin_order(self, order: int, first_iteration: int) -> None:
        """Begin an order: let drafts of committed iterations become checkpoints; drop the others.

        All iterations before `first_iteration` are committed.
        """
        self.allow_committed(first_iteration - 1)
        with self._lock:
            drafts, self._drafts, self._order = self._drafts, [], order
        for draft in drafts:
            draft.drop()

    def allow_committed(self, iteration: int) -> None:
        """Let drafts up to `iteration`, which is committed, become checkpoints."""
        with self._lock:
            committed = [draft for draft in self._drafts if draft.iteration <= iteration]
            self._drafts = [draft for draft in self._drafts if draft.iteration > iteration]
        for draft in committed:
            draft.allow()

    def is_due(self, iteration: int, asked: int | None) -> bool:
        """Return whether to save the state before `iteration`.

        If the user has set an interval, states are saved at its multiples after the run's first
        iteration, and never if it is 0. Without an interval, the state before iteration `asked` is
        saved, which node 0 has chosen; None: it has chosen none.
        """
        if self._every is None:
            return iteration == asked
        return self._every > 0 and iteration > self._first and iteration % self._every == 0

    def save(
        self, iteration: int, copy_layers: CopyLayers, require: Callable[[], None] = lambda: None
    ) -> None:
        """Start to save the layers that `copy_layers` returns, as they are before `iteration`.

        Returns when the previous save has been written and these layers have been copied. While
        waiting for the disk, `require` is called repeatedly, and may raise; so may `copy_layers`.
        Nothing is done if the run saves no checkpoints.
        """
        if self._every == 0:
            return
        # One save at a time: a slow disk holds up training instead of filling memory with copies.
        start = time.monotonic()
        while self._saving is not None and not self._saving.is_done(_POLL_SECONDS):
            require()
        # A parameter that several layers share is saved once.
        states = {
            layer: self._sharing.without_copies(layer, state)
            for layer, state in copy_layers().items()
        }
        # The save becomes a checkpoint once the coordinator says that its iteration is committed.
        if states:
            self._saving = start_saving(
                self._folder,
                iteration,
                states,
                self._identity,
                self._read.count_before(iteration, self._samples),
                partial(self._report_saved, iteration, time.monotonic() - start),
                self._run,
                order=self._order,
                allowed=False,
                data=self._data_state(iteration),
            )
            with self._lock:
                self._drafts = [*self._drafts, self._saving]

    def save_last(self, order: Finish, copy_layers: CopyLayers) -> None:
        """Save the layers that `copy_layers` returns, at the end of training, to a draft.

        Returns when the draft has been written, or cannot be, which is reported and not raised.
        `publish_last` makes the draft a checkpoint.
        """
        self.save(order.first_iteration, copy_layers)
        if self._saving is not None:
            with suppress(CheckpointError):  # the error has already been reported
                self._saving.wait()

    def publish_last(self, iteration: int) -> None:
        """Let the draft of `save_last` become a checkpoint; wait until this worker is done."""
        self.allow_committed(iteration)
        if self._saving is not None:
            with suppress(CheckpointError):  # the error has already been reported
                self._saving.wait()

    def drop_later(self, iteration: int) -> None:
        """Remove the run's checkpoints after `iteration`, to which all workers return.

        Nothing is removed if the run saves no checkpoints.
        """
        # These iterations will be saved again.
        self._damaged = {damaged for damaged in self._damaged if damaged <= iteration}
        if self._every != 0:
            remove_newer(self._folder, iteration)

    def list_iterations(self) -> tuple[int, ...]:
        """Return the iterations of checkpoints not found damaged, in ascending order.

        The run's first iteration is among them if it is 0 or its checkpoint can be read.
        """
        iterations = {number for number in find_complete(self._folder) if number >= self._first}
        # Layers of iteration 0 are built, and need no checkpoint.
        if self._first == 0 or self._open_initial_checkpoint() is not None:
            iterations.add(self._first)
        return tuple(sorted(iterations - self._damaged))

    def find_data_state(self, iteration: int) -> tuple[int, StreamState] | None:
        """Return the latest saved state of data that are read in order, and its iteration.

        The state is from a checkpoint of `iteration` or before; the result is None if none has one.
        """
        # The checkpoint that the run began from counts, unless the run has one of its own.
        paths = {
            number: path
            for number, path in find_complete(self._folder).items()
            if self._first <= number <= iteration
        }
        if self._resume is not None:
            paths.setdefault(self._first, self._resume)
        for number in sorted(paths, reverse=True):
            with suppress(CheckpointError):  # removed meanwhile, or damaged: an earlier one will do
                manifest = open_checkpoint(paths[number], self._identity).manifest
                if (
                    manifest.iteration == number
                    and not isinstance(manifest.data, UnsetType)
                    and self._has_same_data(manifest.run)
                ):
                    return number, manifest.data
        return None

    def _has_same_data(self, run: RunIdentity | None) -> bool:
        # A place in other data says nothing; checkpoints of earlier versions do not name theirs.
        return (
            run is None
            or self._run is None
            or run.data.get("training data") == self._run.data.get("training data")
        )

    def load(self, iteration: int, layers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Return the saved states of layers before an iteration, by layer and tensor name.

        The result is empty for iteration 0. Raises CheckpointError if the states cannot be read;
        the iteration is then no longer in `list_iterations`.
        """
        try:
            if iteration == 0:
                return {}
            # The run's own checkpoint of its first iteration may be missing: it is the one resumed.
            path = self._folder / f"iteration-{iteration}"
            begins_from = self._open_initial_checkpoint() if iteration == self._first else None
            checkpoint = begins_from or open_checkpoint(path, self._identity)
            return {
                layer: self._sharing.with_copies(
                    layer, state, lambda first: load_layers(checkpoint, [first])[first]
                )
                for layer, state in load_layers(checkpoint, layers).items()
            }
        except CheckpointError:
            self._damaged.add(iteration)
            raise

    def _open_initial_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that the run began from; None if there is none to read."""
        if self._resume is None:
            return None
        try:
            checkpoint = open_checkpoint(self._resume, self._identity)
        except CheckpointError:
            return None
        return checkpoint if checkpoint.iteration == self._first else None

    def _report_saved(self, iteration: int, held_up: float, error: CheckpointError | None) -> None:
        # Called in the thread that wrote, and once more when the draft may have become the
        # checkpoint. The seconds are the most that training can have lost: the wait of `held_up`
        # seconds, and the CPU time of that thread.
        if error is not None:
            self._tell(Note(self._worker, str(error)))
        self._tell(
            CheckpointSaved(
                self._worker,
                iteration,
                held_up + time.thread_time(),
                is_complete(self._folder / f"iteration-{iteration}"),
            )
        )
