"""Objects that a worker keeps from order to order, and those of one order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slipstream.runtime.computing.rehearsal import Rehearsal
from slipstream.runtime.config import RunConfig
from slipstream.runtime.data.data import Data
from slipstream.runtime.data.dealt_samples import DealtSamples
from slipstream.runtime.models.layered_model import LayeredModel
from slipstream.runtime.models.sharing import Sharing
from slipstream.runtime.moving.layer_receiver import LayerReceiver
from slipstream.runtime.moving.layer_sender import LayerSender
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.coordinator_link import CoordinatorLink
from slipstream.runtime.protocol.node_reports import ReportSender
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_worker import ToWorker, Train
from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.layer_values import Form
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.torch_groups import TCPStore
from slipstream.runtime.run_identity import NO_IDENTITY, RunIdentity
from slipstream.runtime.worker.activity import Activity
from slipstream.runtime.worker.checkpointer import Checkpointer
from slipstream.runtime.worker.device_memory import DeviceMemory
from slipstream.runtime.worker.injector import Injector
from slipstream.schedules.program import WorkerProgram
from slipstream.schedules.schedule import Schedule, Worker

WorkerLink = CoordinatorLink[ToWorker, WorkerSetup]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Objects that a worker keeps from order to order."""

    worker: Worker
    group: WorkerGroup | None
    """Group of the worker's processes, if it has several."""
    channel: WorkerLink
    reporter: ReportSender
    store: TCPStore
    """Store by which process groups find each other."""
    links: GroupCache
    """Process groups that live from order to order."""
    setup: WorkerSetup
    config: RunConfig
    """Configuration from this node's own job file."""
    out: str
    """Folder of the run."""
    device: torch.device
    model: LayeredModel
    sharing: Sharing
    placement: Placement
    corpus: Data
    validation: Data | None
    identity: RunIdentity = NO_IDENTITY
    """What this worker trains, as it was when the worker was started."""
    forms: Sequence[Form]
    """Forms (shapes and dtypes), on this rank, of the input of each layer of the schedules, then of the last one's
    output."""
    rehearsal: Rehearsal = field(default_factory=Rehearsal)
    """Record of the layers whose ops have been run once."""
    layer_store: LayerStore
    memory: DeviceMemory
    injector: Injector
    checkpointer: Checkpointer
    layer_sender: LayerSender
    layer_receiver: LayerReceiver

    @property
    def rank(self) -> int:
        """Rank of this process within the worker."""
        return 0 if self.group is None else self.group.rank()

    def list_lasting_sockets(self) -> Sockets:
        """Return the sockets that outlive an order: those over which layers are sent or received."""
        return self.layer_sender.list_sockets() | self.layer_receiver.list_sockets()


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderContext:
    """Objects for carrying out one order to train on this worker: its program, connections and samples."""

    context: WorkerContext
    order: Train
    program: WorkerProgram
    whole: Schedule | None
    """Whole schedule with all workers, if data are dealt or evaluated by it."""
    session: GenerationSession
    activity: Activity
    samples: DealtSamples
    """Samples that each micro-batch of the schedule consists of, which dealing may change."""

    @property
    def worker(self) -> Worker:
        """Worker of this process."""
        return self.context.worker
