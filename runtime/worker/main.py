"""Run one worker's process: it joins the run, and follows the coordinator until it may leave."""

import faulthandler
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch

from slipstream.runtime.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import ConfigError, ModelConfig, RunConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.processes.process_title import name_process
from slipstream.runtime.processes.worker_start import WorkerSpec, format_process_name
from slipstream.runtime.protocol import to_worker
from slipstream.runtime.protocol.channel import Channel
from slipstream.runtime.protocol.coordinator_link import Connect, CoordinatorLink
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_coordinator import JoinWorker, WorkerFailed
from slipstream.runtime.protocol.to_worker import ToWorker
from slipstream.runtime.replay.transport import set_own_nccl_host
from slipstream.runtime.state.held_layers import build_holding
from slipstream.runtime.worker.device_memory import NoRoomError
from slipstream.runtime.worker.main_thread import MainThread
from slipstream.schedules.tables.relabel import preload_solver

CONNECT_SECONDS = 60.0
RETRY_SECONDS = 0.2
_SPEC = msgspec.json.Decoder(WorkerSpec)


def main(task: bytes) -> int:
    """Run the worker that `task`, a `WorkerSpec` in JSON, describes; return the exit status. Errors are reported to the
    coordinator."""
    spec = _SPEC.decode(task)
    name_process(f"worker {format_process_name(spec.worker, spec.rank)}", "/".join(Path(spec.settings.out).parts[-2:]))
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # writes the stacks of a hanging worker to its log
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    if spec.settings.config.training.share_devices:
        set_own_nccl_host(f"{spec.worker}:{spec.rank}")
    try:
        def connect(hello: msgspec.Struct, seconds: float) -> Channel[ToWorker]:
            return Channel(spec.coordinator, spec.settings.secret, hello, to_worker.decode, seconds)

        channel, setup = _join_run(spec, connect)
        link = CoordinatorLink(channel, setup, connect)
        try:
            return MainThread(spec, link).serve()
        except RendezvousError:
            raise
        except Exception as error:
            traceback.print_exc()
            link.send(WorkerFailed(spec.worker, f"{type(error).__name__}: {first_line(error)}",
                                   everywhere=isinstance(error, ConfigError | NoRoomError | CheckpointError)))
        finally:
            link.close()
    except RendezvousError as error:
        # Without node 0 there is no coordinator to report to.
        print(first_line(error), file=sys.stderr)
    return 1


def _join_run(spec: WorkerSpec, connect: Connect[ToWorker]) -> tuple[Channel[ToWorker], WorkerSetup]:
    """Connect to node 0 by calling `connect`, and return the connection and node 0's answer. Raises RendezvousError. If
    node 0 dies before it has answered, this tries again, to reach another node 0."""
    deadline = time.monotonic() + spec.settings.coordinator_timeout_seconds
    while True:
        channel = connect(JoinWorker(spec.worker, rank=spec.rank), CONNECT_SECONDS)
        try:
            return channel, channel.read_first(WorkerSetup)
        except RendezvousError:
            channel.close()
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def import_slow_modules() -> None:
    """Trigger slow imports once, before workers are forked.

    At first use, torch and the code that orders transfers import many modules.
    """
    preload_solver()
    config = RunConfig(model=ModelConfig(blocks=1, width=2, heads=1, context=2))
    model = build_model(config.model, 0, torch.float32, torch.device("cpu"))
    holding = build_holding(model, range(model.layers), config.training)
    SliceRunner((0, model.layers), holding.modules, model, loss_scale=1.0, config=config)
