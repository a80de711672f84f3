"""The ranks of a worker that is a group of processes, with `[training] tensor_parallel`: one process group for layers.

Layers keep this one group for as long as their process lives (a DeviceMesh of torch's can be made of it), whereas what
carries tensors is made anew for each order (`runtime.replay.links`), and put in here with `connect`. While
nothing is, this rank stands for all: collectives give the shapes of the real ones, as if each rank had what this one
has. So the forms of what passes between layers are found without any process, and an op is measured by itself.

Collectives are over, or on the device's stream, when they return. What fails raises the `guard`'s error.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from slipstream.runtime.torch_private import HashStore, without_process_groups

NAME = "slipstream"
"""Of the backend, for torch.distributed."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What carries the tensors of an order."""

    backend: Any
    """One of torch.distributed, for these ranks: calls are passed on to it."""
    guard: Callable[[str], AbstractContextManager[None]]
    """Made with what is done, and entered for each collective: turns errors into those of the caller."""
    device: torch.device
    """Where this rank computes."""
    staged: bool
    """Whether its tensors pass through the host's memory."""


class _Done(distributed.Work):
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


class WorkerGroup(distributed.ProcessGroup):
    """A torch.distributed process group of the ranks of one worker: `all_reduce`, `all_gather_single`,
    `reduce_scatter_single`, `broadcast` and `barrier`, and what torch makes of these, such as DTensor's redistributions
    between shards, replicas and partial sums.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._index, self._size = rank, size
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._group_name = NAME

    def connect(self, connection: Connection | None) -> None:
        """From now on, tensors go this way; None: this rank stands for all."""
        with self._lock:
            self._connection = connection

    def disconnect(self, connection: Connection) -> None:
        """Unless they go another way by now, from now on this rank stands for all."""
        with self._lock:
            if self._connection is connection:
                self._connection = None

    def getBackendName(self) -> str:
        """As torch.distributed knows it."""
        return NAME

    def getGroupName(self) -> str:
        """By which compiled code finds it."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Called by torch.distributed."""
        self._group_name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """By which compiled code finds it."""
        return self._group_name

    def allreduce(self, tensors: Tensor | Sequence[Tensor],  # type: ignore[override]
                  opts: Any = None) -> distributed.Work:
        """Reduce each tensor in place."""
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            with self._carried("reducing tensors", [tensor], tensor) as (connection, (out,)):
                if connection is not None:
                    connection.backend.allreduce([out], opts or distributed.AllreduceOptions()).wait()
        return _Done()

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> distributed.Work:
        """Reduce each tensor in place."""
        return self.allreduce(tensors, _reduce_options(opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> distributed.Work:  # type: ignore[override]
        """Send one rank's tensors to all."""
        for tensor in tensors:
            with self._carried("sending a tensor to all", [tensor], tensor) as (connection, (out,)):
                if connection is not None:
                    connection.backend.broadcast([out], opts).wait()
        return _Done()

    def scatter(self, *_: Any, **__: Any) -> distributed.Work:
        """Layers are built by all ranks alike, and before these are connected."""
        raise RuntimeError("parameters cannot be scattered while layers are built: all ranks build the same, so give "
                           "parallelize_module src_data_rank=None")

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> distributed.Work:  # noqa: ARG002
        """Gather the tensors of all ranks, one after the other in `output`."""
        with self._carried("gathering tensors", [output], input) as (connection, (out, given)):
            if connection is None:
                out.view(self._size, -1).copy_(given.reshape(1, -1).expand(self._size, -1))
            else:
                connection.backend._allgather_base(out.view(-1), given.view(-1)).wait()
        return _Done()

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> distributed.Work:
        """Reduce what is in `input`, and give each rank its part of that."""
        with self._carried("reducing and scattering tensors", [output], input) as (connection, (out, given)):
            if connection is None:
                out.view(-1).copy_(given.reshape(self._size, -1)[self._index])
            else:
                connection.backend._reduce_scatter_base(
                    out.view(-1), given.view(-1), opts or distributed.ReduceScatterOptions()).wait()
        return _Done()

    def allgather_into_tensor_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                                        opts: Any = None) -> distributed.Work:
        """`all_gather_single`, several times."""
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts)
        return _Done()

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                                        opts: Any = None) -> distributed.Work:
        """`reduce_scatter_single`, several times."""
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _Done()

    def barrier(self, opts: Any = None) -> distributed.Work:  # noqa: ARG002
        """Wait until all ranks are here."""
        connection = self._connection
        return self.allreduce(torch.zeros(
            1, dtype=torch.float32, device=None if connection is None else connection.device))

    def all_ready(self, ready: bool) -> bool:
        """Whether this is so at all ranks, which must ask together."""
        connection = self._connection
        if connection is None:
            return ready
        found = torch.tensor([float(ready)], dtype=torch.float32, device=connection.device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN, self)
        return bool(found.item())

    # As compiled code calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    @contextlib.contextmanager
    def _carried(self, what: str, outputs: Sequence[Tensor], input: Tensor
                 ) -> Iterator[tuple[Connection | None, list[Tensor]]]:
        """The connection, and outputs and input as it carries them; at the end, the outputs are as they should be."""
        connection, given = self._connection, [*outputs, *([] if input is outputs[0] else [input])]
        if connection is None:
            yield None, given
            return
        with connection.guard(f"{what} among the ranks of this worker"):
            carried = [tensor.cpu() for tensor in given] if connection.staged else given
            yield connection, carried
        for output, arrived in zip(outputs, carried, strict=False):
            if arrived is not output:
                output.copy_(arrived)


def _reduce_options(options: Any) -> Any:
    """Those of one of several reductions that were asked for together."""
    single = distributed.AllreduceOptions()
    if options is not None:
        single.reduceOp = options.reduceOp
    return single


class _Present(threading.local):
    """The group that a thread stands in for."""

    group: WorkerGroup | None = None


_PRESENT = _Present()
_OWN: list[WorkerGroup] = []
"""That of this process, where it has one."""


def worker_group() -> WorkerGroup | None:
    """The ranks of this worker, for collectives in layers; None where a worker is one process."""
    return _PRESENT.group or (_OWN[-1] if _OWN else None)


def first_rank() -> bool:
    """Whether this process speaks for its worker in what all ranks have alike."""
    group = worker_group()
    return group is None or group.rank() == 0


def enter_group(rank: int, size: int) -> WorkerGroup | None:
    """This process is one of the ranks of a worker, for good; the group is torch.distributed's default one, too."""
    if size == 1:
        return None
    group = WorkerGroup(rank, size)
    _OWN.append(group)
    _make_default(rank, size)
    return group


@contextlib.contextmanager
def standing_in(size: int, rank: int = 0) -> Iterator[None]:
    """In here, this thread stands for one of so many ranks, to find out what that would hold and pass.

    A process group that the program has by itself is not torch.distributed's default one meanwhile.
    """
    if size == 1:
        yield
        return
    before, _PRESENT.group = _PRESENT.group, WorkerGroup(rank, size)
    try:
        if distributed.is_initialized() and distributed.get_backend() == NAME:
            yield
        else:
            with without_process_groups():
                _make_default(rank, size)
                yield
    finally:
        _PRESENT.group = before


def _make_default(rank: int, size: int) -> None:
    """The present group becomes torch.distributed's default one."""
    if NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, lambda *_: worker_group(), devices=["cpu", "cuda"])
    distributed.init_process_group(NAME, rank=rank, world_size=size, store=HashStore())
