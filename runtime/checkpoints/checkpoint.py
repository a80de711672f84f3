"""Write checkpoints: one file a layer, with its optimizer state, by one of its holders.

A checkpoint is a folder `iteration-N` with a manifest that lists all layers and the digests of
their files, so that a run on any grid can resume from it. It appears completely or not at all:
workers write a draft, `.saving-N-ORDER`, and each adds a note for a layer when its bytes are on the
disk. When iteration N is committed, all copies of this state have been compared: any worker that
has heard of it, and finds the notes of all layers, renames the draft. No worker waits for another,
and none is in charge. Drafts of different orders never mix; one that a dead worker left is removed
when the next checkpoint is complete. All workers must see the same folder.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from torch import Tensor

from slipstream.runtime.checkpoints.parameters import DISK_FULL
from slipstream.runtime.config import RunConfig
from slipstream.runtime.models.hugging_face.configuration import read_config
from slipstream.runtime.run_identity import RunIdentity
from slipstream.runtime.tensor_codec import (
    FileDigest,
    TensorError,
    read_tensors,
    verify_file,
    write_tensors,
)
from slipstream.schedules.document import DocumentError, DocumentKind
from slipstream.schedules.files import write_atomically

MANIFEST = "manifest.json"
KEPT_CHECKPOINTS = 2
"""Number of complete checkpoints that are kept."""
KEPT_DRAFTS = 3
"""Drafts that are kept: one being written, and those of iterations not yet committed."""
READER_THREADS = 8
"""Number of files that are verified concurrently: SHA-256 of one file occupies one core."""
_NEWER_KEYS = {"hugging_face", "options", "torchtitan"}
"""Keys of [model] that checkpoints of earlier versions lack."""
_COMPLETE = re.compile(r"iteration-(\d{1,18})")
_DRAFT = re.compile(r"\.saving-(\d{1,18})(?:-(\d{1,18}))?")
_TEMPORARY = re.compile(r"\.(layer-\d{4,7}|manifest\.json)[-.]")

T = TypeVar("T")
StreamState = dict[str, Any]
"""State of data that are read in order, as plain values of JSON."""
LayerState = Mapping[str, Tensor]
"""Tensors of a layer's whole state by name, as `part_state.assemble_state` returns them."""
OnEnded = Callable[["CheckpointError | None"], None]
"""Function called at the end of a save: with None after success, else the error."""


class CheckpointError(DocumentError):
    """Error, in one line, for a checkpoint that cannot be written, read or used here."""


class DamagedError(CheckpointError):
    """Error, in one line, for a checkpoint whose files differ from what was written."""


class LayerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File with the state of one layer: layer, name, length in bytes and SHA-256."""

    layer: Annotated[int, Meta(ge=0, le=2**20)]
    file: Annotated[str, Meta(pattern=r"^layer-[0-9]{4,7}-[0-9a-f]{16}\.safetensors$")]
    bytes: Annotated[int, Meta(ge=0, le=2**62)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of manifest.json, and of the JSON note on each layer saved in a draft."""

    format: str = "slipstream-checkpoint"
    version: int = 1
    iteration: Annotated[int, Meta(ge=0, le=2**62)]
    """Number of iterations that the parameters have been trained for, and of the next one."""
    identity: dict[str, Any]
    """Description of the job's model and state, as `identity_of` returns it."""
    layers: tuple[LayerFile, ...]
    samples: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """Samples that all iterations have read; None: not recorded, as in earlier versions."""
    run: RunIdentity | None = None
    """What the run trained; None: not recorded, as in earlier versions."""
    data: StreamState | UnsetType = UNSET
    """State of data that are read in order, before `iteration`. Absent if there is none."""


_DOCUMENT = DocumentKind(
    name="checkpoint",
    format="slipstream-checkpoint",
    version=1,
    content=Manifest,
    bulk=(),
    max_bytes=2**28,
    error=CheckpointError,
    damaged=DamagedError,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Complete checkpoint on disk whose manifest has been read and checked."""

    path: Path
    manifest: Manifest
    is_verified: bool = False
    """True if `verify_checkpoint` has compared all files with the manifest."""

    @property
    def iteration(self) -> int:
        """Number of the iteration with which a run from this checkpoint begins."""
        return self.manifest.iteration


def identity_of(config: RunConfig, layers: int) -> dict[str, Any]:
    """Return the properties that a job must share with a checkpoint to resume from it.

    They describe the model, which has `layers` layers, and the format of its state; the grid, the
    data and the learning rate may differ. Raises ConfigError if the config.json of `[model]
    hugging_face` cannot be read.
    """
    training, model = config.training, msgspec.to_builtins(config.model)
    if config.model.hugging_face is not None:
        model["hugging_face"] = read_config(config.model)  # compared by content, not by path
    if config.model.torchtitan is not None:  # the command line also sets the length
        model["options"] = {
            key: value for key, value in config.model.options.items() if key != "arguments"
        }
    identity: dict[str, Any] = {"layers": layers}
    for name, value in model.items():
        if value or name not in _NEWER_KEYS:
            identity[f"model.{name}"] = value
    # The optimizer's state can be used by the same kind of optimizer only.
    identity["training.optimizer"] = training.optimizer
    identity["training.seed"] = training.seed
    identity["parameters"] = "float64" if training.dtype == "float64" else "float32"
    # Checkpoints of earlier versions have no such keys.
    if training.amsgrad:
        identity["training.amsgrad"] = True
    if training.optimizer == "muon":
        identity["training.parameter_groups"] = [
            [group.parameters, group.optimizer] for group in training.parameter_groups
        ]
    return identity


def describe_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return a clause that names the first difference of two identities; None if equal.

    `theirs` is that of something to be used here, such as a checkpoint; `ours` is this job's.
    """
    for name in sorted({*theirs, *ours}):
        their, our = theirs.get(name), ours.get(name)
        # Of two tables, name the key that differs, not the whole tables.
        if isinstance(their, dict) and isinstance(our, dict):
            their_table = {f"{name}.{key}": value for key, value in their.items()}
            our_table = {f"{name}.{key}": value for key, value in our.items()}
            difference = describe_difference(their_table, our_table)
            if difference is not None:
                return difference
        elif their != our:
            return f"its {name} is {theirs.get(name)!r}, here it is {ours.get(name)!r}"
    return None


class PendingSave:
    """Writing of this worker's layers to a draft, in a thread that starts at once.

    `start_saving` creates it. The draft becomes the checkpoint when `allow` has been called, and
    all layers are written.
    """

    def __init__(
        self,
        folder: Path,
        draft: Path,
        layers: Mapping[int, LayerState],
        manifest: Manifest,
        ended: OnEnded,
        *,
        allowed: bool,
    ) -> None:
        self.iteration = manifest.iteration
        self._folder, self._draft, self._manifest = folder, draft, manifest
        self._error: CheckpointError | None = None
        self._ended = ended
        self._allowed = allowed
        self._written = False
        self._dropped = False
        self._state_lock = threading.Lock()
        """Lock held while the draft becomes the checkpoint, or while that is decided."""
        self._thread = _start_thread(self._run, self._write, layers)
        """Thread that was started last."""
        # Others wait for it at any time, so that it is stored only once it runs.

    def is_done(self, seconds: float = 0.0) -> bool:
        """Return whether this worker's write has ended, after waiting at most `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this worker's layers are on the disk. Raises CheckpointError on failure."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def allow(self) -> None:
        """Let the draft become the checkpoint, now that its iteration is committed."""
        with self._state_lock:
            if self._allowed or self._dropped:
                return
            self._allowed = True
            # Otherwise the writing thread completes the checkpoint when it is done.
            if self._written and self._error is None:
                self._thread = _start_thread(self._run, self._complete)

    def drop(self) -> None:
        """Prevent the draft from becoming the checkpoint, unless it has, and start to remove it."""
        with self._state_lock:
            self._dropped = True
        # The disk may not answer, and no order waits for it.
        self._thread = _start_thread(self._remove, self._thread)

    def _write(self, layers: Mapping[int, LayerState]) -> None:
        _write_layers(self._folder, self._draft, self._manifest, layers, lambda: self._dropped)
        with self._state_lock:
            self._written = True
            allowed = self._allowed
        if allowed:
            self._complete()

    def _complete(self) -> None:
        with self._state_lock:
            if not self._dropped:
                _complete_if_all_saved(self._folder, self._draft, self._manifest)

    def _remove(self, writer: threading.Thread) -> None:
        writer.join()
        shutil.rmtree(self._draft, ignore_errors=True)

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except CheckpointError as error:
            self._error = error
        except OSError as error:
            # The place is the same on all workers if the disk is full.
            place = self._folder if error.errno in DISK_FULL else error.filename or self._folder
            self._error = CheckpointError(
                f"{place}: checkpoint of iteration {self.iteration} cannot be "
                f"written: {error.strerror or error}; earlier ones are untouched"
            )
        if not self._dropped:
            self._ended(self._error)


def _start_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def start_saving(
    folder: Path,
    iteration: int,
    layers: Mapping[int, LayerState],
    identity: Mapping[str, Any],
    samples: int | None = None,
    ended: OnEnded = lambda _: None,
    run: RunIdentity | None = None,
    *,
    order: int = 0,
    allowed: bool = True,
    data: StreamState | None = None,
) -> PendingSave:
    """Start to write this worker's layers of a checkpoint; return a handle to wait for.

    The tensors must not change until the writing has ended. Each layer of the model must be saved
    by at least one worker, and should be saved by only one. If the checkpoint is complete already,
    nothing is written. Errors are raised by `PendingSave.wait`.

    Parameters
    ----------
    iteration
        Number of completed iterations.
    identity
        Result of `identity_of`.
    samples
        Number of samples that these iterations have read; None: not recorded.
    ended
        Function that is called in a thread: with None when the layers are on the disk, or with the
        error; and again when a draft that was allowed later may have become the checkpoint. It is
        not called after `PendingSave.drop`.
    run
        What the run trains.
    order
        Number of the order during which the draft is written, a part of its name.
    allowed
        False for a draft that waits for `PendingSave.allow`.
    data
        State of data that are read in order; None: this worker does not know it.
    """
    manifest = Manifest(
        iteration=iteration,
        identity=dict(identity),
        layers=(),
        samples=samples,
        run=run,
        data=UNSET if data is None else data,
    )
    return PendingSave(
        folder, folder / f".saving-{iteration}-{order}", layers, manifest, ended, allowed=allowed
    )


def open_latest(folder: Path, identity: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """Open the newest complete checkpoint in `folder`; return None if there is none.

    Raises CheckpointError if that checkpoint cannot be read, or belongs to a job with another
    `identity` than this one (`identity_of`; None: any job).
    """
    while checkpoints := find_complete(folder):
        newest = checkpoints[max(checkpoints)]
        try:
            return open_checkpoint(newest, identity)
        except CheckpointError:
            # A running job may have removed it meanwhile; then the next newest counts.
            if is_complete(newest):
                raise
    return None


def find_complete(folder: Path) -> dict[int, Path]:
    """Return the folders of the complete checkpoints, by their numbers of iterations."""
    return {
        number: path
        for number, path in _list_matching(folder, _COMPLETE).items()
        if is_complete(path)
    }


def is_complete(path: Path) -> bool:
    """Return whether the folder `path` exists and is a complete checkpoint."""
    return (path / MANIFEST).exists()


def reopen_or_latest(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint if it is still complete, else the newest in its folder.

    Raises CheckpointError if that one cannot be read, or if the folder has none.
    """
    path = checkpoint.path
    if not is_complete(path) and (newest := open_latest(path.parent)) is not None:
        return newest
    open_checkpoint(path)
    return checkpoint


def open_checkpoint(path: Path, identity: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open the checkpoint in the folder `path` and check its manifest, but not its files.

    Raises CheckpointError if the manifest cannot be read, is damaged, or belongs to a job with
    another `identity` than this one (None: any job).
    """
    source = path / MANIFEST
    manifest = _DOCUMENT.decode(_DOCUMENT.read_bytes(source), str(source))
    # A valid document may still be the note on one layer, or list layers of another model.
    count = len(manifest.layers)
    numbers = [file.layer for file in manifest.layers]
    if numbers != list(range(count)) or manifest.identity.get("layers") != count:
        raise DamagedError(f"{source}: does not name each layer of the model once; it is damaged")
    checkpoint = Checkpoint(path, manifest)
    if identity is not None:
        require_job(checkpoint, identity)
    return checkpoint


def require_job(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a checkpoint belongs to a job with this `identity`."""
    _require_same_job(checkpoint.path / MANIFEST, checkpoint.manifest.identity, identity)


def verify_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Compare all files of a checkpoint with its manifest; return it marked as verified.

    A checkpoint that is marked already is not read again. Raises DamagedError, which names the
    first file that differs, is missing or has an I/O error, and CheckpointError if a file cannot be
    read for another reason.
    """
    if checkpoint.is_verified:
        return checkpoint
    with ThreadPoolExecutor(READER_THREADS) as readers:
        for _ in readers.map(partial(_verify_layer, checkpoint), checkpoint.manifest.layers):
            pass
    return replace(checkpoint, is_verified=True)


def find_newest_undamaged(folder: Path) -> tuple[Checkpoint | None, dict[Path, DamagedError]]:
    """Return the newest undamaged checkpoint, and the damage of newer ones by folder.

    The checkpoint has been verified (`verify_checkpoint`); it is None if all are damaged or there
    is none. Raises CheckpointError if a checkpoint cannot be read for a reason other than damage.
    """
    damaged = dict[Path, DamagedError]()
    # The folder is listed anew each time: a run may write, remove or replace checkpoints meanwhile.
    while candidates := [
        path for _, path in sorted(find_complete(folder).items()) if path not in damaged
    ]:
        newest, opened = candidates[-1], None
        try:
            opened = open_checkpoint(newest)
            return verify_checkpoint(opened), damaged
        except CheckpointError as error:
            # What a run has removed or replaced meanwhile is no damage: look again.
            if not is_complete(newest) or _has_changed(newest, opened):
                continue
            if not isinstance(error, DamagedError):
                raise
            damaged[newest] = error
    return None, damaged


def _has_changed(path: Path, opened: Checkpoint | None) -> bool:
    with contextlib.suppress(CheckpointError):
        return opened is not None and open_checkpoint(path).manifest != opened.manifest
    return False


def report_damaged(
    damaged: Mapping[Path, DamagedError],
    whole: Checkpoint | None,
    say: Callable[[str], object],
    *,
    rename: bool,
) -> None:
    """Report damaged checkpoints by `say`, and that training continues from `whole`.

    With `rename`, they get new names first, so that no run uses them. Raises OSError.
    """
    for path, error in damaged.items():
        kept = _rename_damaged(path) if rename else path
        say(f"{error}; it is kept as {kept}, and training continues from {whole and whole.path}")


def _rename_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint so that no run uses it; return its new path."""
    for number in itertools.count():
        aside = path.with_name(f"damaged-{path.name}" + (f"-{number}" if number else ""))
        if not aside.exists():
            return path.rename(aside)
    raise AssertionError


def load_layers(checkpoint: Checkpoint, layers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of some layers of a checkpoint, on the CPU, by layer.

    Raises CheckpointError if the checkpoint has no such layer, or a file is missing, damaged or
    unreadable.
    """
    return {layer: _load_layer(checkpoint, layer) for layer in layers}


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished checkpoints and temporary files of killed processes from a folder.

    To be called only while no process writes a checkpoint there. What cannot be removed is left.
    """
    for _, path in _list_drafts(folder):
        shutil.rmtree(path, ignore_errors=True)
    for path in _list_matching(folder, _COMPLETE).values():
        if is_complete(path):
            _remove_unlisted_files(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_newer(folder: Path, iteration: int) -> None:
    """Remove complete checkpoints of later iterations, as far as they can be removed."""
    for number, path in find_complete(folder).items():
        if number > iteration:
            _remove_checkpoint(path)


def _load_layer(checkpoint: Checkpoint, layer: int) -> dict[str, Tensor]:
    if not 0 <= layer < len(checkpoint.manifest.layers):
        raise CheckpointError(
            f"{checkpoint.path}: has {len(checkpoint.manifest.layers)} layers, and no layer {layer}"
        )
    return _read_file(checkpoint, checkpoint.manifest.layers[layer], read_tensors)


def _verify_layer(checkpoint: Checkpoint, file: LayerFile) -> None:
    _read_file(checkpoint, file, verify_file)


def _read_file(checkpoint: Checkpoint, file: LayerFile, read: Callable[[Path, FileDigest], T]) -> T:
    path = checkpoint.path / file.file
    try:
        return read(path, FileDigest(file.bytes, file.sha256))
    except TensorError as error:
        raise DamagedError(str(error)) from None
    except OSError as error:
        kind = DamagedError if error.errno in (errno.ENOENT, errno.EIO) else CheckpointError
        raise kind(f"{path}: cannot be read: {error.strerror}") from None


def _write_layers(
    folder: Path,
    draft: Path,
    manifest: Manifest,
    layers: Mapping[int, LayerState],
    is_dropped: Callable[[], bool],
) -> None:
    # A run that repeats an iteration keeps the checkpoint, unless it is another job's.
    complete = folder / f"iteration-{manifest.iteration}"
    if is_complete(complete):
        open_checkpoint(complete, manifest.identity)
        return
    # A folder without a manifest is what a killed process was removing. No worker completes this
    # checkpoint meanwhile, as layers of this one are missing in the draft.
    shutil.rmtree(complete, ignore_errors=True)
    draft.mkdir(parents=True, exist_ok=True)
    # Bound the number of drafts: none is ever completed if nodes do not share the folder.
    for _, path in _list_drafts(folder)[:-KEPT_DRAFTS]:
        if path != draft:
            shutil.rmtree(path, ignore_errors=True)
    # Next to the file of each layer, a note is written: the manifest with this layer alone. The
    # state of the data, which may be long, is in the note of the first layer only.
    written: list[Path] = []
    data = manifest.data
    try:
        for layer, state in layers.items():
            if is_dropped():
                return
            note = draft / f"layer-{layer:04d}.json"
            temporary = draft / f".layer-{layer:04d}-{os.getpid()}"
            file = write_tensors(temporary, state)
            # With the digest in its name, a layer saved again after a failure never changes a file
            # that a note lists.
            path = draft / f"layer-{layer:04d}-{file.sha256[:16]}.safetensors"
            temporary.replace(path)
            _sync_folder(draft)
            written += [path, note]
            files = (LayerFile(layer, path.name, *file),)
            content = msgspec.structs.replace(manifest, layers=files, data=data)
            write_atomically(note, msgspec.json.encode(content))
            data = UNSET
    except BaseException:
        # Free the space on a full disk, unless another worker has just completed this checkpoint.
        for path in written:
            path.unlink(missing_ok=True)
        if not is_dropped() and not is_complete(complete):
            raise


def _complete_if_all_saved(folder: Path, draft: Path, manifest: Manifest) -> None:
    # Several workers may try concurrently.
    complete = folder / f"iteration-{manifest.iteration}"
    try:
        # The layers of the notes, if there is one for each, make up the manifest.
        files: list[LayerFile] = []
        stream = manifest.data
        for layer in range(manifest.identity["layers"]):
            note = draft / f"layer-{layer:04d}.json"
            if not note.exists():
                return
            content = _DOCUMENT.decode(_DOCUMENT.read_bytes(note), str(note))
            _require_same_job(note, content.identity, manifest.identity)
            files += content.layers
            # Only some of the writers read data.
            stream = content.data if stream is UNSET else stream
        # A folder is complete once it has a manifest and this name.
        whole = msgspec.structs.replace(manifest, layers=tuple(files), data=stream)
        write_atomically(draft / MANIFEST, msgspec.json.encode(whole))
        _sync_folder(draft)
        draft.rename(complete)
    except (CheckpointError, OSError):
        if not is_complete(complete):
            raise
        return  # another worker has just completed it
    # Only the worker that renamed the draft comes here, and cleans up.
    _sync_folder(folder)
    _remove_unlisted_files(complete)
    _remove_outdated(folder, manifest.iteration)


def _remove_outdated(folder: Path, iteration: int) -> None:
    complete = find_complete(folder)
    outdated = [path for number, path in _list_drafts(folder) if number <= iteration]
    outdated += [complete[number] for number in sorted(complete)[:-KEPT_CHECKPOINTS]]
    for path in outdated:
        _remove_checkpoint(path)


def _remove_checkpoint(path: Path) -> None:
    with contextlib.suppress(OSError):
        # First: a folder without a manifest is not a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _remove_unlisted_files(path: Path) -> None:
    """Remove what a complete checkpoint does not list: layers saved twice, temporary files."""
    # A worker that is still writing such a file ignores its loss, because the checkpoint is
    # complete.
    with contextlib.suppress(CheckpointError, OSError):
        names = {layer_file.file for layer_file in open_checkpoint(path).manifest.layers}
        for file in path.iterdir():
            is_unlisted = file.suffix == ".safetensors" and file.name not in names
            if is_unlisted or _TEMPORARY.match(file.name):
                file.unlink(missing_ok=True)


def _list_drafts(folder: Path) -> list[tuple[int, Path]]:
    # With their iterations; those of later orders come last, since these are kept.
    drafts = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = _DRAFT.fullmatch(path.name)
            if match:
                drafts.append((int(match[2] or 0), int(match[1]), path))
    return [(iteration, path) for _, iteration, path in sorted(drafts)]


def _list_matching(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the paths in `folder` whose names match, by the number in the name."""
    paths = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match:
                paths[int(match[1])] = path
    return paths


def _require_same_job(source: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    differs = describe_difference(theirs, ours)
    if differs is not None:
        raise CheckpointError(f"{source}: of another job: {differs}")


def _sync_folder(folder: Path) -> None:
    """Flush the folder's directory entries to the disk, if the system supports that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
