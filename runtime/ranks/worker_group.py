"""Group a worker's ranks for its layers, if `[training] tensor_parallel` is above 1.

Layers use this one group for as long as their process lives, and a DeviceMesh of torch can be made
of it. The connection that carries its tensors is rebuilt for each order
(`runtime.replay.group_cache`), and set here with `connect`. Without a connection, collectives
compute results of the right shapes: a gather repeats this rank's tensor, and a sum is that tensor
alone. So the forms of the values between layers can be found in a single process, and an op can be
measured by itself.

When a collective returns, it has ended or is enqueued on the device's stream. Failures raise the
error of the connection's `guard`.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from slipstream.runtime.replay.membership import GroupConnection
from slipstream.runtime.replay.torch_groups import HashStore
from slipstream.runtime.torch_private import without_process_groups

BACKEND_NAME = "slipstream"
"""Name of `WorkerGroup` as a backend of torch.distributed."""


class _FinishedWork(distributed.Work):
    """Result of a collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True


class WorkerGroup(distributed.ProcessGroup):
    """Process group of torch.distributed for the ranks of one worker.

    The group supports `all_reduce`, `all_gather_single`, `reduce_scatter_single`, `broadcast` and
    `barrier`, and what torch builds on these, such as DTensor's redistributions between a shard,
    replicas and partial sums; but no all-to-all. Without a connection, it simulates the other
    ranks. With one, operations raise the error of the connection's guard.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._index, self._size = rank, size
        self._connection: GroupConnection | None = None
        self._lock = threading.Lock()
        self._group_name = BACKEND_NAME

    def connect(self, connection: GroupConnection | None) -> None:
        """Set the connection that carries tensors; None: simulate the other ranks."""
        with self._lock:
            self._connection = connection

    def disconnect(self, connection: GroupConnection) -> None:
        """Remove a connection, unless another one has replaced it.

        Without a connection, the other ranks are simulated.
        """
        # The connection of an order that has ended may be removed after the next one is set.
        with self._lock:
            if self._connection is connection:
                self._connection = None

    def getBackendName(self) -> str:
        """Return the name of the backend in torch.distributed."""
        return BACKEND_NAME

    def getGroupName(self) -> str:
        """Return the name by which compiled code finds the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set the name by which compiled code finds the group; torch.distributed calls this."""
        self._group_name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name by which compiled code finds the group."""
        return self._group_name

    def allreduce(  # type: ignore[override]
        self, tensors: Tensor | Sequence[Tensor], opts: Any = None
    ) -> distributed.Work:
        """Reduce each tensor, in place, over all ranks, by the operation in `opts`.

        If `opts` has none, the operation is the sum.
        """
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            with self._carry_tensors("reducing tensors", [tensor], tensor) as (connection, (out,)):
                if connection is not None:
                    connection.backend.allreduce(
                        [out], opts or distributed.AllreduceOptions()
                    ).wait()
        return _FinishedWork()

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> distributed.Work:
        """Reduce each tensor, in place, over all ranks, by the operation in `opts`.

        If `opts` has none, the operation is the sum.
        """
        return self.allreduce(tensors, _reduce_options(opts))

    def broadcast(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: Any
    ) -> distributed.Work:
        """Copy the tensors of one rank, which `opts` names, to all ranks, in place."""
        for tensor in tensors:
            with self._carry_tensors("sending a tensor to all", [tensor], tensor) as (
                connection,
                (out,),
            ):
                if connection is not None:
                    connection.backend.broadcast([out], opts).wait()
        return _FinishedWork()

    def scatter(self, *_: Any, **__: Any) -> distributed.Work:
        """Raise RuntimeError: all ranks build the same layers, so nothing is scattered."""
        raise RuntimeError(
            "parameters cannot be scattered while layers are built: all ranks build the same, "
            "so give parallelize_module src_data_rank=None"
        )

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,  # noqa: ARG002
    ) -> distributed.Work:
        """Gather the tensors of all ranks, concatenated in `output`."""
        with self._carry_tensors("gathering tensors", [output], input) as (
            connection,
            (out, operand),
        ):
            if connection is None:
                out.view(self._size, -1).copy_(operand.reshape(1, -1).expand(self._size, -1))
            else:
                connection.backend._allgather_base(out.view(-1), operand.view(-1)).wait()
        return _FinishedWork()

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> distributed.Work:
        """Reduce `input` over all ranks, and write this rank's part to `output`.

        The operation is the one in `opts`; None: the sum.
        """
        with self._carry_tensors("reducing and scattering tensors", [output], input) as (
            connection,
            (out, operand),
        ):
            if connection is None:
                out.view(-1).copy_(operand.reshape(self._size, -1)[self._index])
            else:
                connection.backend._reduce_scatter_base(
                    out.view(-1), operand.view(-1), opts or distributed.ReduceScatterOptions()
                ).wait()
        return _FinishedWork()

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> distributed.Work:
        """Call `all_gather_single` for each pair of an output and an input."""
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts)
        return _FinishedWork()

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> distributed.Work:
        """Call `reduce_scatter_single` for each pair of an output and an input."""
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _FinishedWork()

    def barrier(self, opts: Any = None) -> distributed.Work:  # noqa: ARG002
        """Wait until all ranks have called this method."""
        # A sum that no rank gets before all have given their part.
        connection = self._connection
        device = None if connection is None else connection.device
        return self.allreduce(torch.zeros(1, dtype=torch.float32, device=device))

    def all_ready(self, ready: bool) -> bool:
        """Return whether `ready` is true on all ranks, which must call this method together."""
        connection = self._connection
        if connection is None:
            return ready
        # The minimum over all ranks is 1 if all are ready.
        lowest = torch.tensor([float(ready)], dtype=torch.float32, device=connection.device)
        distributed.all_reduce(lowest, distributed.ReduceOp.MIN, self)
        return bool(lowest.item())

    # Names by which compiled code calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    @contextlib.contextmanager
    def _carry_tensors(
        self, what: str, outputs: Sequence[Tensor], input: Tensor
    ) -> Iterator[tuple[GroupConnection | None, list[Tensor]]]:
        """Yield the connection and the tensors to pass to it; then copy results to `outputs`."""
        # The tensors are a list of the outputs, then the input unless it is the first output; they
        # are copies in host memory if the connection needs that. Without a connection, yield None
        # and the tensors themselves. The operation `what` is named in errors.
        connection, tensors = self._connection, [*outputs]
        if input is not outputs[0]:
            tensors.append(input)
        if connection is None:
            yield None, tensors
            return
        with connection.guard(f"{what} among the ranks of this worker"):
            operands = tensors
            if connection.staged:
                operands = [tensor.cpu() for tensor in tensors]
            yield connection, operands
        for output, operand in zip(outputs, operands, strict=False):
            if operand is not output:
                output.copy_(operand)


def _reduce_options(options: Any) -> Any:
    """Return the options of one all-reduce from those of a coalesced one."""
    single = distributed.AllreduceOptions()
    if options is not None:
        single.reduceOp = options.reduceOp
    return single


class _ThreadGroup(threading.local):
    """Process group of the calling thread if it simulates a rank; None in other threads."""

    group: WorkerGroup | None = None


_THREAD_GROUP = _ThreadGroup()
_PROCESS_GROUPS: list[WorkerGroup] = []
"""Group of which this process is a rank; empty if its worker has only one."""


def worker_group() -> WorkerGroup | None:
    """Return the process group of this worker's ranks; None if it is one process.

    In a thread that simulates a rank (`simulating_rank`), it is that rank's group.
    """
    return _THREAD_GROUP.group or (_PROCESS_GROUPS[-1] if _PROCESS_GROUPS else None)


def is_first_rank() -> bool:
    """Return whether this process is the first, or only, rank of its worker.

    The first rank reports for all.
    """
    group = worker_group()
    return group is None or group.rank() == 0


def enter_group(rank: int, size: int) -> WorkerGroup | None:
    """Make this process a rank of a worker of `size` ranks, until it ends.

    Returns the group of these ranks, which also becomes torch.distributed's default one; None for
    size 1.
    """
    if size == 1:
        return None
    group = WorkerGroup(rank, size)
    _PROCESS_GROUPS.append(group)
    _set_default_group(rank, size)
    return group


@contextlib.contextmanager
def simulating_rank(size: int, rank: int = 0) -> Iterator[None]:
    """Let this thread simulate one of `size` ranks, to find what that rank would hold.

    A default group of torch.distributed that is not a worker's is replaced meanwhile, in the whole
    process.
    """
    if size == 1:
        yield
        return
    # Only this thread simulates: others of the process may train meanwhile.
    before, _THREAD_GROUP.group = _THREAD_GROUP.group, WorkerGroup(rank, size)
    # A group that the program itself has as default is hidden meanwhile.
    try:
        if distributed.is_initialized() and distributed.get_backend() == BACKEND_NAME:
            yield
        else:
            with without_process_groups():
                _set_default_group(rank, size)
                yield
    finally:
        _THREAD_GROUP.group = before


def _set_default_group(rank: int, size: int) -> None:
    """Make a group of `size` ranks, of which this is `rank`, torch.distributed's default."""
    if BACKEND_NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(
            BACKEND_NAME, lambda *_: worker_group(), devices=["cpu", "cuda"]
        )
    distributed.init_process_group(BACKEND_NAME, rank=rank, world_size=size, store=HashStore())
