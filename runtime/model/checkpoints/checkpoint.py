"""Checkpoints: every layer with its optimizer state in a file of its own, each written by one worker.

A checkpoint is a folder `iteration-N` with a manifest that names all layers and the digests of their files. Layers are
the unit, so that any grid can go on from it. It appears whole or not at all: workers write into `.saving-N`, each adds
a note per layer once the bytes are on the disk, and the worker that finds the notes of all layers renames the folder.
No worker waits for another or is in charge. One that dies while saving leaves a `.saving-N` behind, which is removed
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
from msgspec import Meta
from torch import Tensor

from slipstream.runtime.config import RunConfig
from slipstream.runtime.model.checkpoints.parameters import FULL
from slipstream.runtime.model.layers.hugging_face.configuration import read_config
from slipstream.runtime.model.tensor_codec import TensorError, Written, read_tensors, require_written, write_tensors
from slipstream.schedules.document import DocumentError, DocumentKind
from slipstream.schedules.files import write_atomically

MANIFEST = "manifest.json"
KEEP = 2
READERS = 8
"""Files that are compared at a time: SHA-256 of one takes a core."""
_LATER = {"hugging_face", "options", "torchtitan"}
"""Keys of [model] that older checkpoints lack."""
_COMPLETE = re.compile(r"iteration-(\d{1,18})")
_SAVING = re.compile(r"\.saving-(\d{1,18})")
_TEMPORARY = re.compile(r"\.(layer-\d{4,7}|manifest\.json)[-.]")

T = TypeVar("T")
LayerState = Mapping[str, Tensor]
"""What `part_state.whole` gives."""
Ended = Callable[["CheckpointError | None"], None]


class CheckpointError(DocumentError):
    """A checkpoint that cannot be written, read or used here. The message is one line."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not as they were written. The message is one line."""


class LayerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a layer is, and what its bytes are."""

    layer: Annotated[int, Meta(ge=0, le=2**20)]
    file: Annotated[str, Meta(pattern=r"^layer-[0-9]{4,7}-[0-9a-f]{16}\.safetensors$")]
    bytes: Annotated[int, Meta(ge=0, le=2**62)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checkpoint; also the note that a worker leaves for one layer."""

    format: str = "slipstream-checkpoint"
    version: int = 1
    iteration: Annotated[int, Meta(ge=0, le=2**62)]
    """How many iterations the parameters have seen: the number of the next one to run."""
    identity: dict[str, Any]
    """`identity_of` the job."""
    layers: tuple[LayerFile, ...]
    samples: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """How many samples all iterations have read; None in checkpoints of earlier versions."""


_DOCUMENT = DocumentKind(name="checkpoint", format="slipstream-checkpoint", version=1, content=Manifest, bulk=(),
                         max_bytes=2**28, error=CheckpointError, damaged=DamagedError)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk, its manifest read and checked."""

    path: Path
    manifest: Manifest
    is_verified: bool = False
    """Whether `require_whole` has read it."""

    @property
    def iteration(self) -> int:
        """The next iteration to run."""
        return self.manifest.iteration


def identity_of(config: RunConfig, layers: int) -> dict[str, Any]:
    """What a job must share with a checkpoint to go on from it: the model, and what its state means.

    The grid, the text, the learning rate and whatever else may change from one run to the next are not part of it.
    """
    training, model = config.training, msgspec.to_builtins(config.model)
    if config.model.hugging_face is not None:
        model["hugging_face"] = read_config(config.model)  # wherever it lies
    if config.model.torchtitan is not None:  # its command line, which also says how long to train
        model["options"] = {key: value for key, value in config.model.options.items() if key != "arguments"}
    return {"layers": layers,
            **{f"model.{name}": value for name, value in model.items() if value or name not in _LATER},
            "training.optimizer": training.optimizer, "training.seed": training.seed,
            "parameters": "float64" if training.dtype == "float64" else "float32",
            **({"training.amsgrad": True} if training.amsgrad else {}),  # earlier versions did not name it
            **({"training.parameter_groups": [[group.parameters, group.optimizer] for group in
                                              training.parameter_groups]} if training.optimizer == "muon" else {})}


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """What tells the identity of a checkpoint from that of a job, in words; None: nothing does."""
    for name in sorted({*theirs, *ours}):
        their, our = theirs.get(name), ours.get(name)
        if isinstance(their, dict) and isinstance(our, dict):
            inside = difference({f"{name}.{key}": value for key, value in their.items()},
                                {f"{name}.{key}": value for key, value in our.items()})
            if inside is not None:
                return inside
        elif their != our:
            return f"its {name} is {theirs.get(name)!r}, here it is {ours.get(name)!r}"
    return None


class Saving:
    """A checkpoint being written by this worker, in a thread of its own."""

    def __init__(self, folder: Path, iteration: int, layers: Mapping[int, LayerState],
                 identity: Mapping[str, Any], samples: int | None, ended: Ended) -> None:
        self._error: CheckpointError | None = None
        self._ended = ended
        self._thread = threading.Thread(target=self._run, args=(folder, iteration, layers, identity, samples),
                                        daemon=True)
        self._thread.start()

    def done(self, seconds: float = 0.0) -> bool:
        """Whether `wait` returns at once, so many seconds from now at the latest."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this worker's layers are on the disk. Raises CheckpointError when they cannot be written."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, folder: Path, iteration: int, layers: Mapping[int, LayerState], identity: Mapping[str, Any],
             samples: int | None) -> None:
        try:
            _write(folder, Manifest(iteration=iteration, identity=dict(identity), layers=(), samples=samples), layers)
        except CheckpointError as error:
            self._error = error
        except OSError as error:
            place = folder if error.errno in FULL else error.filename or folder  # alike for all workers
            self._error = CheckpointError(f"{place}: checkpoint of iteration {iteration} cannot be "
                                          f"written: {error.strerror or error}; earlier ones are untouched")
        self._ended(self._error)


def save(folder: Path, iteration: int, layers: Mapping[int, LayerState], identity: Mapping[str, Any],
         samples: int | None = None, ended: Ended = lambda _: None) -> Saving:
    """Start to write this worker's share of a checkpoint; training goes on.

    The tensors must not change meanwhile. Each layer of the model must be saved by some worker, and should be by one
    only. `iteration` counts the iterations done, `samples` what they have read. Errors come with `Saving.wait`. `ended`
    is called from a thread when this share is on the disk, with None, or has failed, with the error.
    """
    return Saving(folder, iteration, layers, identity, samples, ended)


def latest(folder: Path, identity: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """Open the newest complete checkpoint; None where there is none.

    Raises CheckpointError when it cannot be read, or is not of a job with this `identity`.
    """
    while found := complete(folder):
        newest = found[max(found)]
        try:
            return open_checkpoint(newest, identity)
        except CheckpointError:
            if is_complete(newest):
                raise
    return None


def complete(folder: Path) -> dict[int, Path]:
    """The complete checkpoints by their iterations."""
    return _numbered(folder, _COMPLETE)


def is_complete(path: Path) -> bool:
    """Say whether a folder is a checkpoint. It may have been removed, for newer ones, since it was found."""
    return (path / MANIFEST).exists()


def reopened(found: Checkpoint) -> Checkpoint:
    """A checkpoint that was found before, or, where newer ones have replaced it since, the newest of those.

    Raises CheckpointError where none is there.
    """
    if not is_complete(found.path) and (newest := latest(found.path.parent)) is not None:
        return newest
    open_checkpoint(found.path)
    return found


def open_checkpoint(path: Path, identity: Mapping[str, Any] | None = None) -> Checkpoint:
    """The checkpoint in a folder. Raises CheckpointError as `latest` does."""
    source = path / MANIFEST
    manifest = _DOCUMENT.decode(_DOCUMENT.read_bytes(source), str(source))
    if [one.layer for one in manifest.layers] != list(range(len(manifest.layers))) \
            or manifest.identity.get("layers") != len(manifest.layers):
        raise DamagedError(f"{source}: does not name each layer of the model once; it is damaged")
    checkpoint = Checkpoint(path, manifest)
    if identity is not None:
        require_job(checkpoint, identity)
    return checkpoint


def require_job(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless a checkpoint is of a job with this `identity`."""
    _require_same(checkpoint.path / MANIFEST, checkpoint.manifest.identity, identity)


def require_whole(checkpoint: Checkpoint) -> Checkpoint:
    """Read all files of a checkpoint, several at a time, and compare them with the manifest, once.

    Raises DamagedError, which names the first file that differs, and CheckpointError where one cannot be read.
    """
    if checkpoint.is_verified:
        return checkpoint
    with ThreadPoolExecutor(READERS) as readers:
        for _ in readers.map(partial(_verify, checkpoint), checkpoint.manifest.layers):
            pass
    return replace(checkpoint, is_verified=True)


def newest_whole(folder: Path) -> tuple[Checkpoint | None, dict[Path, DamagedError]]:
    """Find the newest checkpoint that is whole; None where there is none. Also gives the newer ones, all damaged.

    Raises CheckpointError where one cannot be read for another reason.
    """
    damaged = dict[Path, DamagedError]()
    while left := [path for _, path in sorted(complete(folder).items()) if path not in damaged]:
        try:
            return require_whole(open_checkpoint(left[-1])), damaged
        except CheckpointError as error:
            if not is_complete(left[-1]):
                continue
            if not isinstance(error, DamagedError):
                raise
            damaged[left[-1]] = error
    return None, damaged


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no run takes or removes it; its new path. Raises OSError."""
    for number in itertools.count():
        aside = path.with_name(f"damaged-{path.name}" + (f"-{number}" if number else ""))
        if not aside.exists():
            return path.rename(aside)
    raise AssertionError


def load(checkpoint: Checkpoint, layers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """The states of some layers, on the CPU, for `part_state.as_parts`. Raises CheckpointError."""
    return {layer: _load(checkpoint, layer) for layer in layers}


def tidy(folder: Path) -> None:
    """Remove what killed writers have left: checkpoints half written or half removed, and temporary files in others.

    No writer may be alive.
    """
    for pattern in (_SAVING, _COMPLETE):
        for path in _named(folder, pattern).values():
            if pattern is _SAVING or not is_complete(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                _drop_unnamed(path)


def drop_newer(folder: Path, iteration: int) -> None:
    """Remove the checkpoints of later iterations."""
    for number, path in _numbered(folder, _COMPLETE).items():
        if number > iteration:
            _remove(path)


def _load(checkpoint: Checkpoint, layer: int) -> dict[str, Tensor]:
    if not 0 <= layer < len(checkpoint.manifest.layers):
        raise CheckpointError(f"{checkpoint.path}: has {len(checkpoint.manifest.layers)} layers, and no layer {layer}")
    return _read(checkpoint, checkpoint.manifest.layers[layer], read_tensors)


def _verify(checkpoint: Checkpoint, file: LayerFile) -> None:
    _read(checkpoint, file, require_written)


def _read(checkpoint: Checkpoint, file: LayerFile, read: Callable[[Path, Written], T]) -> T:
    path = checkpoint.path / file.file
    try:
        return read(path, Written(file.bytes, file.sha256))
    except TensorError as error:
        raise DamagedError(str(error)) from None
    except OSError as error:
        kind = DamagedError if error.errno in (errno.ENOENT, errno.EIO) else CheckpointError
        raise kind(f"{path}: cannot be read: {error.strerror}") from None


def _write(folder: Path, manifest: Manifest, layers: Mapping[int, LayerState]) -> None:
    """Write some layers of a checkpoint; `manifest` names none yet."""
    iteration, identity = manifest.iteration, manifest.identity
    if (folder / f"iteration-{iteration}").exists():
        open_checkpoint(folder / f"iteration-{iteration}", identity)
        return
    saving = folder / f".saving-{iteration}"
    saving.mkdir(parents=True, exist_ok=True)
    unfinished = _numbered(folder, _SAVING)
    for number in sorted(unfinished)[:-KEEP]:  # as where not all nodes see the same folder: none is ever complete
        shutil.rmtree(unfinished[number], ignore_errors=True)
    written: list[Path] = []
    try:
        for layer, state in layers.items():
            note = saving / f"layer-{layer:04d}.json"
            draft = saving / f".layer-{layer:04d}-{os.getpid()}"
            done = write_tensors(draft, state)
            # Named by its digest: a layer saved anew, after a failure, never changes a file that a note speaks of.
            path = saving / f"layer-{layer:04d}-{done.sha256[:16]}.safetensors"
            draft.replace(path)
            _sync(saving)
            written += [path, note]
            one = msgspec.structs.replace(manifest, layers=(LayerFile(layer, path.name, *done),))
            write_atomically(note, msgspec.json.encode(one))
        _complete(folder, saving, manifest)
    except BaseException:
        # Room on a full disk is worth more than half a checkpoint, unless another worker has just completed it.
        for path in written:
            path.unlink(missing_ok=True)
        if not (folder / f"iteration-{iteration}").exists():
            raise


def _complete(folder: Path, saving: Path, manifest: Manifest) -> None:
    """Make it a checkpoint, once all layers are there. Several workers may be here at a time: one of them does it."""
    files: list[LayerFile] = []
    for layer in range(manifest.identity["layers"]):
        note = saving / f"layer-{layer:04d}.json"
        if not note.exists():
            return
        one = _DOCUMENT.decode(_DOCUMENT.read_bytes(note), str(note))
        _require_same(note, one.identity, manifest.identity)
        files += one.layers
    whole = msgspec.structs.replace(manifest, layers=tuple(files))
    write_atomically(saving / MANIFEST, msgspec.json.encode(whole))
    _sync(saving)
    complete = folder / f"iteration-{manifest.iteration}"
    saving.rename(complete)
    _sync(folder)
    _drop_unnamed(complete)
    _sweep(folder, manifest.iteration)


def _sweep(folder: Path, iteration: int) -> None:
    """Remove what an older save left unfinished, and complete checkpoints beyond the newest few."""
    complete = _numbered(folder, _COMPLETE)
    old = [path for number, path in _numbered(folder, _SAVING).items() if number <= iteration]
    for path in (*old, *(complete[number] for number in sorted(complete)[:-KEEP])):
        _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / MANIFEST).unlink(missing_ok=True)  # first: without it, what is left is no checkpoint
    shutil.rmtree(path, ignore_errors=True)


def _drop_unnamed(path: Path) -> None:
    """Remove from a complete checkpoint the files of layers that were saved anew, and temporary ones.

    A worker that is still writing one of them finds that the checkpoint is complete.
    """
    with contextlib.suppress(CheckpointError, OSError):
        named = {one.file for one in open_checkpoint(path).manifest.layers}
        for file in path.iterdir():
            if _TEMPORARY.match(file.name) or (file.suffix == ".safetensors" and file.name not in named):
                file.unlink(missing_ok=True)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    return {number: path for number, path in _named(folder, pattern).items()
            if pattern is _SAVING or is_complete(path)}


def _named(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match:
                found[int(match[1])] = path
    return found


def _require_same(source: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    differs = difference(theirs, ours)
    if differs is not None:
        raise CheckpointError(f"{source}: of another job: {differs}")


def _sync(folder: Path) -> None:
    """Have the folder's entries on the disk, where the system can do that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
