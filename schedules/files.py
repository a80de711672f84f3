"""Read files in bounded memory and write them atomically, so that neither a reader nor a crash sees half a file."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def read_at_most(path: Path, limit: int, error: type[ValueError], remark: str = "") -> bytes:
    """Return all bytes of a file of at most `limit` bytes. Pipes and devices are read like files, up to the limit.

    Raises `error` with a one-line message that names the file. If the file is too large, the message ends with
    `remark`.
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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: write a temporary file next to `path`, fsync it, rename it.

    A link is followed, and a pipe or device is written to directly; neither is replaced by a file. Raises OSError, in
    which case the old file remains.
    """
    if path.exists() and not path.is_file():  # resolve() would give no path: "pipe:[1234]" for /dev/stdout
        path.write_bytes(data)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_current_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Return a context that yields a new folder to write to, which replaces `folder` at the end unless the body raises.

    Raises OSError.
    """
    folder = folder.resolve()
    draft, old = (folder.with_name(f".{folder.name}-{os.getpid()}{suffix}") for suffix in ("", "-old"))
    draft.mkdir(parents=True)
    try:
        yield draft
        if folder.is_dir():
            shutil.rmtree(old, ignore_errors=True)  # of a killed process with this number
            folder.rename(old)
        draft.rename(folder)
    except BaseException:
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(draft, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _current_umask() -> int:
    """Return the umask of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
