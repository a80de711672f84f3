"""Reads files in bounded memory, and writes them atomically: neither a reader nor a crash sees half a file."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def read_at_most(path: Path, limit: int, error: type[ValueError], remark: str = "") -> bytes:
    """All bytes of a file of at most `limit` bytes. Pipes and devices are read like files, up to the limit.

    Raises `error` with one line that names the file. `remark` is added to the line for a file that is too large.
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
    """Write to a temporary file beside `path`, fsync, rename. Raises OSError, and then leaves what was there.

    A link is followed, and a pipe or a device is written to: neither is replaced by a file.
    """
    if path.exists() and not path.is_file():  # of which the real name may be no path: "pipe:[1234]" of /dev/stdout
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
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder beside `folder` to write to; it takes its place when all is written, else nothing has happened.

    Raises OSError.
    """
    draft = folder.with_name(f".{folder.name}-{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        yield draft
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
