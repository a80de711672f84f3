"""Executors that plan on many machines: MPI processes, or the workers of a Dask cluster.

Both need optional packages, imported at first use. They pickle what they send: anyone who can reach a Dask scheduler
can run code on all of its machines.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

CONNECT_SECONDS = 30


class ExecutorError(ValueError):
    """Error for an executor that cannot be provided. The message is one line."""


@contextmanager
def open_executor(name: str | None) -> Iterator[Executor | None]:
    """Return a context with the executor named "mpi" or "dask://HOST:PORT"; None means processes of this machine.

    Raises ExecutorError if it is unknown or not available.
    """
    if name is None:
        yield None
    elif name == "mpi":
        with _open_mpi() as executor:
            yield executor
    elif name.startswith("dask://"):
        with _open_dask("tcp" + name.removeprefix("dask")) as executor:
            yield executor
    else:
        raise ExecutorError(f"{name!r} is not an executor; expected mpi or dask://HOST:PORT")


@contextmanager
def _open_mpi() -> Iterator[Executor]:
    try:
        from mpi4py.futures import MPIPoolExecutor
    except ModuleNotFoundError as error:
        raise ExecutorError(f"mpi needs the package {error.name}: pip install -e '.[mpi]'") from None
    except (ImportError, RuntimeError) as error:  # the package is there, and no MPI is
        raise ExecutorError(f"mpi needs an MPI library, such as Open MPI: {error}") from None
    with MPIPoolExecutor() as executor:
        yield executor


@contextmanager
def _open_dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ExecutorError(f"dask needs the package {error.name}: pip install -e '.[dask]'") from None
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise ExecutorError(f"no Dask scheduler answers at {address}: {error}") from None
    with client, client.get_executor(pure=False) as executor:
        yield executor
