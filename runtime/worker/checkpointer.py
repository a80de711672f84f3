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
"""Function that returns the state of ordered data before an iteration. None if it is not known."""
CopyLayers = Callable[[], Mapping[int, Mapping[str, Tensor]]]
"""Function that returns copies of whole layers' states, by layer and name of the tensor."""


class Checkpointer:
    """Writer and reader of a worker's checkpoints.

    It saves committed state every few iterations and at the end; each layer is saved by one worker.
    It reads the checkpoints in the folder of the run, and the one that the run began from. A
    checkpoint that cannot be written does not end training: the reason is reported to the
    coordinator, and the earlier checkpoints stay.
    """

    def __init__(self, setup: WorkerSetup, settings: NodeSettings, layers: int, worker: Worker,
                 tell: Callable[[Note | CheckpointSaved], None], sharing: Sharing,
                 run: RunIdentity | None = None, data_state: ReadDataState = lambda _: None) -> None:
        self._folder = Path(settings.out) / CHECKPOINTS
        self._resume = None if settings.resume is None else Path(settings.resume)
        self._every = setup.common.resilience.checkpoint_every
        self._first = setup.first_iteration
        self._read, self._samples = setup.read, settings.config.training.batch * sum(setup.common.microbatches)
        self._identity = identity_of(settings.config, layers)
        self._run = run
        self._data_state = data_state
        self._sharing = sharing
        self._worker = worker
        self._tell = tell
        self._saving: PendingSave | None = None
        """Save that was started last."""
        self._drafts: list[PendingSave] = []
        """Saves of iterations that were not known to be committed when they were started."""
        self._lock = threading.Lock()
        """Lock for the drafts: messages and orders are handled in different threads."""
        self._order = 0
        self._damaged: set[int] = set()

    def begin_order(self, order: int, first_iteration: int) -> None:
        """Begin an order before whose `first_iteration` all is committed; drop other drafts."""
        self.allow_committed(first_iteration - 1)
        with self._lock:
            drafts, self._drafts, self._order = self._drafts, [], order
        for draft in drafts:
            draft.drop()

    def allow_committed(self, iteration: int) -> None:
        """Let drafts become checkpoints up to `iteration`, which is committed."""
        with self._lock:
            committed = [draft for draft in self._drafts if draft.iteration <= iteration]
            self._drafts = [draft for draft in self._drafts if draft.iteration > iteration]
        for draft in committed:
            draft.allow()

    def is_due(self, iteration: int, asked: int | None) -> bool:
        """Return whether to save the state before an iteration, by the configured interval. Without
        one, it is saved before iteration `asked`, which node 0 has requested (None: none yet)."""
        if self._every is None:
            return iteration == asked
        return self._every > 0 and iteration > self._first and iteration % self._every == 0

    def save(self, iteration: int, copied: CopyLayers, require: Callable[[], None] = lambda: None) -> None:
        """Start to save the layers that `copied` returns, as they are before an iteration.

        Returns when the previous save has been written and these layers have been copied. `require`
        is called during the wait for the disk, and may end it by raising.
        """
        if self._every == 0:
            return
        began = time.monotonic()
        while self._saving is not None and not self._saving.is_done(_POLL_SECONDS):
            require()
        own = {layer: self._sharing.without_copies(layer, state) for layer, state in copied().items()}
        if own:
            self._saving = start_saving(self._folder, iteration, own, self._identity,
                                        self._read.count_before(iteration, self._samples),
                                        partial(self._report_saved, iteration, time.monotonic() - began),
                                        self._run, order=self._order, allowed=False,
                                        data=self._data_state(iteration))
            with self._lock:
                self._drafts = [*self._drafts, self._saving]

    def save_last(self, order: Finish, copied: CopyLayers) -> None:
        """Save the layers that `copied` returns to a draft, as `order` ends training."""
        self.save(order.first_iteration, copied)
        if self._saving is not None:
            with suppress(CheckpointError):  # the error has already been reported
                self._saving.wait()

    def publish_last(self, iteration: int) -> None:
        """Let the draft of the last state become a checkpoint, and wait for that."""
        self.allow_committed(iteration)
        if self._saving is not None:
            with suppress(CheckpointError):  # the error has already been reported
                self._saving.wait()

    def drop_later(self, iteration: int) -> None:
        """Remove checkpoints after `iteration`, to which all return; they will be saved again."""
        self._damaged = {damaged for damaged in self._damaged if damaged <= iteration}
        if self._every != 0:
            remove_newer(self._folder, iteration)

    def list_iterations(self) -> tuple[int, ...]:
        """Return the iterations that this worker can return to, by their complete checkpoints.
        Whether these can be read is not known until then."""
        found = {self._first} if self._first == 0 or self._open_initial_checkpoint() is not None else set()
        found |= {iteration for iteration in find_complete(self._folder) if iteration >= self._first}
        return tuple(sorted(found - self._damaged))

    def find_data_state(self, iteration: int) -> tuple[int, StreamState] | None:
        """Return the latest saved state of the data up to an iteration, with that one's. Returns
        None if there is none."""
        found = {number: path for number, path in find_complete(self._folder).items()
                 if self._first <= number <= iteration}
        if self._resume is not None:
            found.setdefault(self._first, self._resume)
        for number in sorted(found, reverse=True):
            with suppress(CheckpointError):  # removed meanwhile, or damaged: an earlier one will do
                manifest = open_checkpoint(found[number], self._identity).manifest
                if manifest.iteration == number and not isinstance(manifest.data, UnsetType) \
                        and self._has_same_data(manifest.run):
                    return number, manifest.data
        return None

    def _has_same_data(self, run: RunIdentity | None) -> bool:
        """Return whether a checkpoint's run read the same training data, as far as known."""
        return run is None or self._run is None or run.data.get("training data") == self._run.data.get("training data")

    def load(self, iteration: int, layers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Return the states of some layers before an iteration, by layer and tensor.

        Empty for iteration 0, whose layers must be built instead. Raises CheckpointError; the
        iteration is then no longer among `list_iterations`.
        """
        try:
            if iteration == 0:
                return {}
            path = self._folder / f"iteration-{iteration}"
            begins_from = self._open_initial_checkpoint() if iteration == self._first else None
            checkpoint = begins_from or open_checkpoint(path, self._identity)
            return {layer: self._sharing.with_copies(layer, state,
                                                     lambda first: load_layers(checkpoint, [first])[first])
                    for layer, state in load_layers(checkpoint, layers).items()}
        except CheckpointError:
            self._damaged.add(iteration)
            raise

    def _open_initial_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that the run began from, if it can still be read."""
        if self._resume is None:
            return None
        try:
            checkpoint = open_checkpoint(self._resume, self._identity)
        except CheckpointError:
            return None
        return checkpoint if checkpoint.iteration == self._first else None

    def _report_saved(self, iteration: int, held_up: float, error: CheckpointError | None) -> None:
        """Report that saving has ended, with `error` if it failed."""
        # Called in the thread that wrote, and once more when the draft may have become the
        # checkpoint. The seconds are the most that training can have lost: the wait of `held_up`
        # seconds, and the CPU time of that thread.
        if error is not None:
            self._tell(Note(self._worker, str(error)))
        self._tell(CheckpointSaved(self._worker, iteration, held_up + time.thread_time(),
                                   is_complete(self._folder / f"iteration-{iteration}")))
