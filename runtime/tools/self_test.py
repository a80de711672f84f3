"""Test that two processes of this machine can connect as workers, and exchange tensors."""

import time

import msgspec
import torch

from slipstream.runtime.processes.child_processes import ChildError, ChildProcesses
from slipstream.runtime.protocol.network_interfaces import configure_interface
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.schedules.schedule import Worker

WORKERS = (Worker(0, 0), Worker(1, 0))
LAYERS = (0, 1)
TENSOR_ELEMENTS = 2**18
"""Float32 elements of the tensor that goes back and forth: 1 MiB."""
ROUNDS = 8


class SelfTestError(RuntimeError):
    """Raised, with one line, if two processes cannot connect or receive wrong numbers."""


class SelfTestResult(msgspec.Struct, frozen=True):
    """Seconds to connect two processes, and mean seconds to send 1 MiB one way."""

    meeting_seconds: float
    transfer_seconds: float


class _MeetingTask(msgspec.Struct, frozen=True):
    worker: Worker
    rendezvous: Rendezvous


_TASK = msgspec.json.Decoder(_MeetingTask)
_RESULT = msgspec.json.Decoder(SelfTestResult)


class SelfTest(ChildProcesses):
    """Test that two processes can exchange tensors over gloo, which starts at once.

    `close` ends the processes. Raises RendezvousError if no port can be opened, and ChildError if a
    process cannot be started.
    """

    def __init__(self) -> None:
        self._store, opened = host_store()
        tasks = [_MeetingTask(worker, opened) for worker in WORKERS]
        super().__init__("slipstream.runtime.tools.self_test:run_test_process", tasks)

    def wait(self, timeout: float) -> SelfTestResult:
        """Wait for both processes, and return the times that the second one measured.

        Raises SelfTestError if a process fails, or after `timeout` seconds.
        """
        try:
            return _RESULT.decode(self.collect_results(timeout)[1])
        except ChildError as error:
            raise SelfTestError(str(error)) from None
        except TimeoutError:
            raise SelfTestError(
                f"two processes did not connect and exchange a tensor within {timeout:.0f} s"
            ) from None


def _exchange_tensors(task: _MeetingTask) -> SelfTestResult:
    """Exchange a tensor with the other process for several rounds; return the times."""
    # The first worker sends a tensor, and the second sends it back with 1 added. Raises
    # SelfTestError if the numbers are wrong.
    start = time.perf_counter()
    store = connect_store(task.rendezvous)
    membership = Membership(1, {worker: rank for rank, worker in enumerate(WORKERS)}, task.worker)
    session = GenerationSession(
        membership, links=GroupCache("gloo"), device=torch.device("cpu"), store=store
    )
    session.connect({LAYERS: WORKERS})
    connected = time.perf_counter()
    (peer,) = (worker for worker in WORKERS if worker != task.worker)
    tensor = torch.arange(TENSOR_ELEMENTS, dtype=torch.float32)
    # Back and forth, so that a wrong number in any round is seen at the end.
    for _ in range(ROUNDS):
        if task.worker == WORKERS[0]:
            session.send(tensor, peer, 1).wait()
            tensor = session.receive((TENSOR_ELEMENTS,), torch.float32, peer, 1).wait_for_tensor()
        else:
            tensor = (
                session.receive((TENSOR_ELEMENTS,), torch.float32, peer, 1).wait_for_tensor() + 1
            )
            session.send(tensor, peer, 1).wait()
    seconds = (time.perf_counter() - connected) / (2 * ROUNDS)
    # Each round trip has added 1, and the sum of both is twice that.
    session.sum_over_sharers(LAYERS, [tensor])
    if not torch.equal(tensor, 2 * (torch.arange(TENSOR_ELEMENTS, dtype=torch.float32) + ROUNDS)):
        raise SelfTestError("gloo returned other numbers than were sent")
    session.wait_for_all()
    session.close()
    return SelfTestResult(connected - start, seconds)


def run_test_process(data: bytes) -> bytes:
    """Run one process of a self-test: decode its task, and return the encoded result."""
    task = _TASK.decode(data)
    configure_interface(task.rendezvous)
    return msgspec.json.encode(_exchange_tensors(task))
