"""The folder of a run: one run writes there at a time, and none over the results of another."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.events import EVENTS, LOSSES, METRICS, SCHEDULES
from slipstream.runtime.model.checkpoints.checkpoint import (
    Checkpoint,
    difference,
    drop_newer,
    identity_of,
    latest,
    tidy,
)
from slipstream.runtime.model.microbatch import FROM_THE_START, SamplesRead
from slipstream.runtime.processes.faults import Crashes
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.files import write_atomically

CHECKPOINTS = "checkpoints"
LOCK_SECONDS = 0.2
"""How long to wait for a lock: what a killed node has left is held for a moment while it is removed."""
_BEHIND = ".running.json"
_LOCK = ".node-{}.lock"
_TEMPORARY = ("parameters/.layer-*", ".*.json.????????", f".{LOSSES}.????????", f".{METRICS}.????????",
              f"{SCHEDULES}/.*.json.????????")
"""Files of writers that were killed."""
_STALE = ("parameters/layer-*.*", "logs/worker-*.log", "trace.json")
"""What a run makes anew, also when it goes on."""
_RESULTS = (LOSSES, METRICS, "schedule.json", EVENTS, f"{SCHEDULES}/*.json")


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """What node 0 leaves in its folder while a run takes place, for a node 0 that is started after it has died."""

    epoch: int
    """Of its coordinator (`runtime.protocol.setup.Setup`)."""
    coordinator: Rendezvous
    """Where its workers look for another one."""
    first_iteration: int
    read: SamplesRead = FROM_THE_START
    """What runs on other grids have read before (`Setup.read`)."""
    resume: str | None
    """Folder of the checkpoint that the run began from."""
    fork_server: str | None
    """The name by which its workers on this machine are adopted (`runtime.processes.fork_server.adopt`)."""
    crashes: Crashes = ()


_LEFT_BEHIND = msgspec.json.Decoder(LeftBehind)


class FolderError(ValueError):
    """A folder that this run may not write to. The message is one line."""


@contextlib.contextmanager
def locked(out: Path, node: int) -> Iterator[None]:
    """Make the folder, and hold it for one node of a run. The system lets go of it when this process ends in any way.

    All that share the folder's file system see the lock, where that has flock, as NFS does. Raises FolderError while
    another process holds it, and OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = lock_of(out, node)
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            descriptor = _lock(path)
            stack.callback(os.close, descriptor)
            stack.callback(path.unlink, missing_ok=True)  # first, while it is held
        yield


def leave_behind(out: Path, left: LeftBehind) -> None:
    """Note what a new node 0 needs; only this user can read it. Raises OSError."""
    write_atomically(out / _BEHIND, msgspec.json.encode(left))


def left_behind(out: Path) -> LeftBehind | None:
    """What a node 0 has left that has died; None: none has, or its run has ended."""
    try:
        return _LEFT_BEHIND.decode((out / _BEHIND).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def forget_left_behind(out: Path) -> None:
    """The run ends, or nobody of the last one lives."""
    (out / _BEHIND).unlink(missing_ok=True)


def holder(out: Path) -> str | None:
    """Which process of node 0 holds a folder, as its lock says; None: none does, or not this folder."""
    try:
        return lock_of(out, 0).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def require_free(out: Path, resume: Checkpoint | None, config: RunConfig, *, force: bool, again: bool = False) -> None:
    """Raises FolderError where a run would write over the results of another, and CheckpointError.

    What a run leaves that goes on from `resume`, a checkpoint in this folder, is its own. With `force`, all may go;
    with `again`, what nothing was saved of. The folder must be locked.
    """
    if resume is not None and _is_own(resume, out):
        newest = latest(out / CHECKPOINTS)
        if newest is not None and newest.iteration > resume.iteration and not force:
            raise FolderError(f"{out / CHECKPOINTS}: holds a checkpoint of iteration {newest.iteration} already; go on "
                              "from that one with --resume, give another --out, or drop it with --force")
    else:
        found = "" if force or (again and not saved(out)) else results(out)
        if found:
            raise FolderError(f"{out}: holds the results of another run ({found}): {_way_on(out, config)}give another "
                              "--out, or start anew with --force")


def claim(out: Path, resume: Checkpoint | None, config: RunConfig, *, force: bool, again: bool = False) -> None:
    """Make the folder this run's: `require_free`, and remove what must go, and what killed writers have left.

    The folder must be locked. Raises FolderError, CheckpointError and OSError.
    """
    require_free(out, resume, config, force=force, again=again)
    if resume is not None and _is_own(resume, out):
        drop_newer(out / CHECKPOINTS, resume.iteration)
    else:
        drop_newer(out / CHECKPOINTS, -1)
        _remove(out, *_RESULTS)
    _remove(out, *_STALE)
    clean_up(out)


def clean_up(out: Path) -> None:
    """Remove what killed writers have left, and locks of killed nodes. All of this run must have ended, and the folder
    be locked.
    """
    for path in out.glob(_LOCK.format("*")):
        remove_lock(path)
    _remove(out, *_TEMPORARY)
    tidy(out / CHECKPOINTS)


def clear_parameters(out: Path) -> None:
    """Remove the parameters that an earlier run has left."""
    _remove(out, _STALE[0])


def results(out: Path) -> str:
    """What a run has left in a folder, in words; empty where there is nothing that anybody could miss."""
    done = iterations_done(out)
    return ", ".join(([f"{done} iterations"] if done else []) + saved(out))


def iterations_done(out: Path) -> int:
    """How many iterations a run has left the losses of."""
    with contextlib.suppress(OSError):
        return (out / LOSSES).read_bytes().count(b"\n")
    return 0


def saved(out: Path) -> list[str]:
    """What a run has left in a folder that others can go on from, or use."""
    newest = latest(out / CHECKPOINTS)
    return ([] if newest is None else [f"a checkpoint of iteration {newest.iteration}"]) \
        + (["parameters"] if any(out.glob("parameters/layer-*.safetensors")) else [])


def _is_own(checkpoint: Checkpoint, out: Path) -> bool:
    return checkpoint.path.resolve().parent == (out / CHECKPOINTS).resolve()


def _way_on(out: Path, config: RunConfig) -> str:
    """What a job can do with the checkpoint there, as the beginning of a list of what to do."""
    newest = latest(out / CHECKPOINTS)
    if newest is None:
        return ""
    differs = difference(newest.manifest.identity, identity_of(config, len(newest.manifest.layers)))
    return f"its checkpoint is of another job ({differs}); " if differs else \
        f"go on from its checkpoint with --resume {out}, "


def _remove(out: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)


def lock_of(out: Path, node: int) -> Path:
    """The lock file of a node."""
    return out / _LOCK.format(node)


def remove_lock(path: Path | str) -> None:
    """Remove a lock file that nobody holds: its last holder was killed."""
    path = Path(path)
    with contextlib.suppress(FolderError, OSError):
        if sys.platform != "win32" and path.exists():
            descriptor = _lock(path)
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _lock(path: Path) -> int:
    """An open descriptor of the lock file, locked; it names the process that holds it."""
    import fcntl

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(LOCK_SECONDS / 10)
                continue
            raise FolderError(f"{path.parent}: {holder} is writing there; wait for its end, or give another --out"
                              ) from None
        except OSError:  # a file system without locks
            return descriptor
        if _is_there(path, descriptor):
            break
        os.close(descriptor)  # its last holder has removed it since it was opened
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _is_there(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
