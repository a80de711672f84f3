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
"""Seconds to wait for a lock, held for a moment while a killed node's is removed."""
_TAKEOVER_RECORD = ".running.json"
_LOCK_NAME = ".node-{}.lock"
_TEMPORARY_FILES = ("parameters/.layer-*", ".*.json.????????", f".{LOSSES}.????????", f".{METRICS}.????????",
                    f"{SCHEDULES}/.*.json.????????")
"""Patterns, within the run's folder, of temporary files that killed writers have left."""
_STALE_FILES = ("parameters/layer-*.*", "logs/worker-*.log", "trace.json")
"""Patterns, within the run's folder, of files that even a resumed run writes again."""
_RESULT_FILES = (LOSSES, METRICS, "schedule.json", EVENTS, f"{SCHEDULES}/*.json")


class TakeoverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record in node 0's folder from which another one can continue after its death."""

    epoch: int
    """Epoch of node 0's coordinator (`WorkerSetup.epoch`), lower than that of the next one."""
    coordinator: Rendezvous
    """Address where the run's workers look for another coordinator."""
    first_iteration: int
    read: SamplesRead = NOTHING_READ
    """Samples that runs on other grids have read before (`WorkerSetup.read`)."""
    resume: str | None
    """Folder of the checkpoint from which the run began. None if it began with iteration 0."""
    fork_server: str | None
    """Name by which this machine's workers can be adopted (`adopt_fork_server`), if they can."""
    crashes: CrashTimes = ()
    identity: RunIdentity | None = None
    """What the run trains, and so must its next node 0; None in earlier records."""


_TAKEOVER_DECODER = msgspec.json.Decoder(TakeoverRecord)


class FolderError(ValueError):
    """Error for a folder that this run may not write to. The message is one line."""


@contextlib.contextmanager
def hold_folder_lock(out: Path, node: int) -> Iterator[None]:
    """Hold the lock of a run's folder for one node within the context.

    The folder is created if necessary. The system releases the lock when this process ends. All
    processes that share the folder's file system see the lock if that file system has flock, as NFS
    does. Raises FolderError while another process holds it, and OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = lock_path(out, node)
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            descriptor = _open_locked(path)
            stack.callback(os.close, descriptor)
            stack.callback(path.unlink, missing_ok=True)  # called first, while the lock is still held
        yield


def write_takeover_record(out: Path, left: TakeoverRecord) -> None:
    """Write the record for a takeover, which only this user can read. Raises OSError."""
    write_atomically(out / _TAKEOVER_RECORD, msgspec.json.encode(left), READABLE_BY_OWNER)


def read_takeover_record(out: Path) -> TakeoverRecord | None:
    """Return the record that a dead node 0 left, if it can be read."""
    try:
        return _TAKEOVER_DECODER.decode((out / _TAKEOVER_RECORD).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def remove_takeover_record(out: Path) -> None:
    """Remove any record for a takeover, as no run is left to take over."""
    (out / _TAKEOVER_RECORD).unlink(missing_ok=True)


def read_lock_holder(out: Path) -> str | None:
    """Return the name of node 0's process that has locked the folder. None without a lock file."""
    try:
        return lock_path(out, 0).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def raise_unless_free(out: Path, resume: Checkpoint | None, config: RunConfig, *, force: bool,
                      again: bool = False) -> None:
    """Raise FolderError if a run would overwrite the results of another one in this folder.

    A run that resumes from the newest checkpoint in this folder (`resume`; None: it does not
    resume) may replace the results that are there. The error tells whether a run with `config` can
    resume. `force` says that everything may be removed, `again` that this run repeats one that was
    started with the same folder: then the results of a run that saved neither a checkpoint nor
    parameters may be removed. The folder must be locked. Raises CheckpointError if the newest
    checkpoint in the folder cannot be read.
    """
    if resume is not None and _is_in_folder(resume, out):
        newest = open_latest(out / CHECKPOINTS)
        if newest is not None and newest.iteration > resume.iteration and not force:
            raise FolderError(f"{out / CHECKPOINTS}: holds a checkpoint of iteration {newest.iteration} already; go on "
                              "from that one with --resume, give another --out, or drop it with --force")
    else:
        left = "" if force or (again and not list_saved(out)) else describe_results(out)
        if left:
            raise FolderError(f"{out}: holds the results of another run ({left}): {_suggest_remedy(out, config)}give "
                              "another --out, or delete them with --force")


def claim_folder(out: Path, resume: Checkpoint | None, config: RunConfig, *, force: bool, again: bool = False) -> None:
    """Prepare the folder for this run, by removing old results and leftovers.

    Calls `raise_unless_free` first, which explains the arguments. The folder must be locked. Raises
    FolderError, CheckpointError and OSError.
    """
    raise_unless_free(out, resume, config, force=force, again=again)
    if resume is not None and _is_in_folder(resume, out):
        remove_newer(out / CHECKPOINTS, resume.iteration)
    else:
        remove_newer(out / CHECKPOINTS, -1)
        _remove_matching(out, *_RESULT_FILES)
    _remove_matching(out, *_STALE_FILES)
    clean_up_folder(out)


def clean_up_folder(out: Path) -> None:
    """Remove the temporary files and locks that killed processes have left in the folder. All
    processes of this run must have ended, and the folder must be locked."""
    for path in out.glob(_LOCK_NAME.format("*")):
        remove_lock(path)
    _remove_matching(out, *_TEMPORARY_FILES)
    remove_leftovers(out / CHECKPOINTS)


def clear_parameters(out: Path) -> None:
    """Remove the files of parameters that an earlier run has left in the folder."""
    _remove_matching(out, _STALE_FILES[0])


def describe_results(out: Path) -> str:
    """Return a text on what a run has left in the folder; empty if nothing. It lists the iterations
    done, the newest checkpoint, and parameters."""
    done = count_iterations_done(out)
    return ", ".join(([f"{done} iterations"] if done else []) + list_saved(out))


def count_iterations_done(out: Path) -> int:
    """Return the number of iterations in the folder's `losses.jsonl`; 0 without one."""
    with contextlib.suppress(OSError):
        return (out / LOSSES).read_bytes().count(b"\n")
    return 0


def list_saved(out: Path) -> list[str]:
    """Return what the folder holds, as phrases: its newest checkpoint, and parameters."""
    newest = open_latest(out / CHECKPOINTS)
    return ([] if newest is None else [f"a checkpoint of iteration {newest.iteration}"]) \
        + (["parameters"] if any(out.glob("parameters/layer-*.safetensors")) else [])


def _is_in_folder(checkpoint: Checkpoint, out: Path) -> bool:
    return checkpoint.path.resolve().parent == (out / CHECKPOINTS).resolve()


def _suggest_remedy(out: Path, config: RunConfig) -> str:
    """Return the advice to resume from the folder's checkpoint, or why `config` cannot."""
    newest = open_latest(out / CHECKPOINTS)
    if newest is None:
        return ""
    differs = describe_difference(newest.manifest.identity, identity_of(config, len(newest.manifest.layers)))
    return f"its checkpoint is of another job ({differs}); " if differs else \
        f"go on from its checkpoint with --resume {out}, "


def _remove_matching(out: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)


def lock_path(out: Path, node: int) -> Path:
    """Return the path of a node's lock file."""
    return out / _LOCK_NAME.format(node)


def remove_lock(path: Path | str) -> None:
    """Remove the lock file of a killed process. Does nothing if a process holds the lock."""
    path = Path(path)
    with contextlib.suppress(FolderError, OSError):
        if sys.platform != "win32" and path.exists():
            descriptor = _open_locked(path)
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _open_locked(path: Path) -> int:
    """Open and lock a lock file, with this process's name in it; return the descriptor."""
    # Raises FolderError if another process holds the lock for longer than `LOCK_TIMEOUT_SECONDS`.
    import fcntl

    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(LOCK_TIMEOUT_SECONDS / 10)
                continue
            raise FolderError(f"{path.parent}: {holder} is writing there; wait until it ends, or give another --out"
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
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
