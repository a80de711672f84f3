"""Lock a run's folder for one run, and decide which files a run may replace."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slipstream.runtime.checkpoints.checkpoint import (
    Checkpoint,
    describe_difference,
    identity_of,
    open_latest,
    remove_leftovers,
    remove_newer,
)
from slipstream.runtime.config import RunConfig
from slipstream.runtime.events import EVENTS, LOSSES, METRICS, SCHEDULES
from slipstream.runtime.processes.restart_policy import CrashTimes
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.replay.microbatch import NOTHING_READ, SamplesRead
from slipstream.runtime.run_identity import RunIdentity
from slipstream.schedules.files import READABLE_BY_OWNER, write_atomically

CHECKPOINTS = "checkpoints"
LOCK_TIMEOUT_SECONDS = 0.2
"""Seconds to wait for a lock: that of a killed process ends after a moment."""
_TAKEOVER_RECORD = ".running.json"
_LOCK_NAME = ".node-{}.lock"
_TEMPORARY_FILES = (
    "parameters/.layer-*",
    ".*.json.????????",
    f".{LOSSES}.????????",
    f".{METRICS}.????????",
    f"{SCHEDULES}/.*.json.????????",
)
"""Patterns, within the run's folder, of temporary files that killed writers have left."""
_STALE_FILES = ("parameters/layer-*.*", "logs/worker-*.log", "trace.json")
"""Patterns, within the run's folder, of files that even a resumed run writes again."""
_RESULT_FILES = (LOSSES, METRICS, "schedule.json", EVENTS, f"{SCHEDULES}/*.json")


class TakeoverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record in a run's folder from which another node 0 can continue the run."""

    epoch: int
    """Epoch of node 0's coordinator (`WorkerSetup.epoch`); the next coordinator's is higher."""
    coordinator: Rendezvous
    """Address where the run's workers look for another coordinator."""
    first_iteration: int
    read: SamplesRead = NOTHING_READ
    """Samples that earlier runs, perhaps on other grids, have read (`WorkerSetup.read`)."""
    resume: str | None
    """Folder of the checkpoint from which the run began; None for iteration 0."""
    fork_server: str | None
    """Name by which `adopt_fork_server` adopts this machine's workers; None if it cannot."""
    crashes: CrashTimes = ()
    """Crashes of workers so far, which count for the limit on restarts."""
    identity: RunIdentity | None = None
    """Identity of the run, which a new node 0 must share; None in earlier records."""


_TAKEOVER_DECODER = msgspec.json.Decoder(TakeoverRecord)


class FolderError(ValueError):
    """Error for a folder that this run may not write to. The message is one line."""


@contextlib.contextmanager
def hold_folder_lock(out: Path, node: int) -> Iterator[None]:
    """Hold the lock of a run's folder for one node within the context.

    The folder is created if necessary, and the lock file removed at the end. Raises FolderError if
    another process holds the lock for `LOCK_TIMEOUT_SECONDS`, and OSError. On Windows, and on file
    systems without locks, nothing is locked.
    """
    # The lock is flock's, so that it ends with this process, and counts on all machines that share
    # the file system, such as NFS.
    out.mkdir(parents=True, exist_ok=True)
    path = lock_path(out, node)
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            descriptor = _open_locked(path)
            stack.callback(os.close, descriptor)
            # Called first, while the lock is still held.
            stack.callback(path.unlink, missing_ok=True)
        yield


def write_takeover_record(out: Path, record: TakeoverRecord) -> None:
    """Write a takeover record, which only this user can read. Raises OSError."""
    write_atomically(out / _TAKEOVER_RECORD, msgspec.json.encode(record), READABLE_BY_OWNER)


def read_takeover_record(out: Path) -> TakeoverRecord | None:
    """Return the takeover record of a folder; None if it is missing or unreadable."""
    try:
        return _TAKEOVER_DECODER.decode((out / _TAKEOVER_RECORD).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def remove_takeover_record(out: Path) -> None:
    """Remove any takeover record, as no run is left to take over. Raises OSError."""
    (out / _TAKEOVER_RECORD).unlink(missing_ok=True)


def read_lock_holder(out: Path) -> str | None:
    """Return the text of node 0's lock file, which names a process; None if unreadable."""
    try:
        return lock_path(out, 0).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def raise_unless_free(
    out: Path, resume: Checkpoint | None, config: RunConfig, *, force: bool, again: bool = False
) -> None:
    """Raise FolderError if a run would overwrite another run's results, or its own newer ones.

    The folder must be locked. Raises CheckpointError if its newest checkpoint cannot be read.

    Parameters
    ----------
    resume
        Checkpoint from which the run resumes; if it is the newest one in this folder, the run may
        replace the results that are there. None: the run does not resume.
    config
        Settings of the run; the error says whether the run could resume here.
    force
        True if everything may be removed.
    again
        True if the run repeats an earlier one in the same folder, whose results may be removed if
        they have neither a checkpoint nor parameters.
    """
    # A run that resumes from this folder continues its results, but must not drop newer ones.
    if resume is not None and _is_in_folder(resume, out):
        newest = open_latest(out / CHECKPOINTS)
        if newest is not None and newest.iteration > resume.iteration and not force:
            raise FolderError(
                f"{out / CHECKPOINTS}: holds a checkpoint of iteration {newest.iteration} already; "
                "go on from that one with --resume, give another --out, or drop it with --force"
            )
    elif not force and not (again and not list_saved(out)):
        results = describe_results(out)
        if results:
            raise FolderError(
                f"{out}: holds the results of another run ({results}): "
                f"{_suggest_remedy(out, config)}give another --out, or delete them with --force"
            )


def claim_folder(
    out: Path, resume: Checkpoint | None, config: RunConfig, *, force: bool, again: bool = False
) -> None:
    """Prepare the folder for this run, by removing old results and leftovers.

    Calls `raise_unless_free` first, which explains the arguments. The folder must be locked. Raises
    FolderError, CheckpointError and OSError.
    """
    raise_unless_free(out, resume, config, force=force, again=again)
    # Checkpoints of later iterations would not fit what this run computes.
    if resume is not None and _is_in_folder(resume, out):
        remove_newer(out / CHECKPOINTS, resume.iteration)
    else:
        remove_newer(out / CHECKPOINTS, -1)
        _remove_matching(out, *_RESULT_FILES)
    _remove_matching(out, *_STALE_FILES)
    clean_up_folder(out)


def clean_up_folder(out: Path) -> None:
    """Remove locks and temporary files of killed processes from an ended run's folder.

    Unfinished checkpoints go, too. The folder must be locked. Raises OSError.
    """
    for path in out.glob(_LOCK_NAME.format("*")):
        remove_lock(path)
    _remove_matching(out, *_TEMPORARY_FILES)
    remove_leftovers(out / CHECKPOINTS)


def clear_parameters(out: Path) -> None:
    """Remove the files of parameters that an earlier run has left. Raises OSError."""
    _remove_matching(out, _STALE_FILES[0])


def describe_results(out: Path) -> str:
    """Return a text that lists what a run left in the folder; empty if nothing.

    Raises CheckpointError if its newest checkpoint cannot be read.
    """
    iterations = count_iterations_done(out)
    results = list_saved(out)
    return ", ".join([f"{iterations} iterations", *results] if iterations else results)


def count_iterations_done(out: Path) -> int:
    """Return the number of iterations in the folder's `losses.jsonl`; 0 without one."""
    with contextlib.suppress(OSError):
        return (out / LOSSES).read_bytes().count(b"\n")
    return 0


def list_saved(out: Path) -> list[str]:
    """Return what the folder holds, as phrases: its newest checkpoint, and parameters.

    Raises CheckpointError if that checkpoint cannot be read.
    """
    newest, saved = open_latest(out / CHECKPOINTS), []
    if newest is not None:
        saved.append(f"a checkpoint of iteration {newest.iteration}")
    if any(out.glob("parameters/layer-*.safetensors")):
        saved.append("parameters")
    return saved


def _is_in_folder(checkpoint: Checkpoint, out: Path) -> bool:
    return checkpoint.path.resolve().parent == (out / CHECKPOINTS).resolve()


def _suggest_remedy(out: Path, config: RunConfig) -> str:
    # If the checkpoint is of this job, resuming from it is most likely what was meant.
    newest = open_latest(out / CHECKPOINTS)
    if newest is None:
        return ""
    difference = describe_difference(
        newest.manifest.identity, identity_of(config, len(newest.manifest.layers))
    )
    if difference:
        return f"its checkpoint is of another job ({difference}); "
    return f"go on from its checkpoint with --resume {out}, "


def _remove_matching(out: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)


def lock_path(out: Path, node: int) -> Path:
    """Return the path of a node's lock file."""
    return out / _LOCK_NAME.format(node)


def remove_lock(path: Path | str) -> None:
    """Remove a killed process's lock file; do nothing on errors, or while it is held."""
    # Removed while it is locked, or another process could lock it just before.
    path = Path(path)
    with contextlib.suppress(FolderError, OSError):
        if sys.platform != "win32" and path.exists():
            descriptor = _open_locked(path)
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _open_locked(path: Path) -> int:
    """Open and lock a lock file, write this process's name there; return the descriptor."""
    # Raises FolderError after `LOCK_TIMEOUT_SECONDS`. Windows has no fcntl.
    import fcntl

    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (
                os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
            )
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(LOCK_TIMEOUT_SECONDS / 10)
                continue
            raise FolderError(
                f"{path.parent}: {holder} is writing there; wait until it ends, or give another "
                "--out"
            ) from None
        except OSError:  # a file system without locks
            return descriptor
        if _is_same_file(path, descriptor):
            break
        os.close(descriptor)  # its last holder has removed it since it was opened
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _is_same_file(path: Path, descriptor: int) -> bool:
    # A lock on a file that was removed excludes nobody: the next process creates another file.
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
