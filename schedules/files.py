"""Read files in bounded memory, and write them atomically: never half a file."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def read_at_most(path: Path, limit: int, error: type[ValueError], remark: str = "") -> bytes:
    """Return all bytes of a file, pipe or device, at most `limit`.

    Raises `error`, with one line that names the file, if it is unreadable or larger. In the latter
    case the line ends with `remark`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    except ValueError as problem:  # a NUL in the name
        raise error(f"{str(path)!r}: cannot be read: {problem}") from None
    if len(data) > limit:
        raise error(f"{path}: more than {limit} bytes{remark}")
    return data


READABLE_BY_ALL = 0o666
"""Permissions of a file that all may read; the process's umask takes some away."""
READABLE_BY_OWNER = 0o600
"""Permissions of a file that its owner alone may read; the umask takes some away."""
_SUFFIX_BYTES = 4


def write_atomically(path: Path, data: bytes, mode: int = READABLE_BY_ALL) -> None:
    """Write a file atomically, so that nobody ever sees half of it.

    A temporary file next to it is written, synced to disk, and renamed. Missing parent folders are
    created. The file gets the permissions `mode`, less those that the process's umask takes away. A
    link is followed, and a pipe or device is written to directly; neither is replaced by a file.
    Raises OSError, in which case the old file remains.
    """
    # resolve() would give no path: "pipe:[1234]" for /dev/stdout
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    # The system applies the umask; to read it, it would have to be changed for a moment, also for
    # other threads.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_SUFFIX_BYTES)}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Return a context whose value is a new folder, which replaces `folder` at its end.

    If the body raises, `folder` stays as it is. Raises OSError.
    """
    folder = folder.resolve()
    draft = folder.with_name(f".{folder.name}-{os.getpid()}")
    old = folder.with_name(f".{folder.name}-{os.getpid()}-old")
    draft.mkdir(parents=True)
    try:
        yield draft
        # A folder that is not empty cannot be renamed onto, so it is moved away for a moment.
        if folder.is_dir():
            shutil.rmtree(old, ignore_errors=True)  # of a killed process with this number
            folder.rename(old)
        draft.rename(folder)
    except BaseException:
        # The new folder could not be put in place of the old one, which is moved back.
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(draft, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
