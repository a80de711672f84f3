"""What a worker keeps from order to order, and what one order needs besides."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slipstream.runtime.config import RunConfig
from slipstream.runtime.model.computing.rehearsal import Rehearsal
from slipstream.runtime.model.data.data import Data
from slipstream.runtime.model.layers.layered_model import LayeredModel
from slipstream.runtime.model.layers.sharing import Sharing
from slipstream.runtime.model.layers.worker_group import WorkerGroup
from slipstream.runtime.model.passed import Form
from slipstream.runtime.protocol.coordinator_link import CoordinatorLink
from slipstream.runtime.protocol.failure_injection import Injector
from slipstream.runtime.protocol.node_reports import Reporter
from slipstream.runtime.protocol.setup import Setup
from slipstream.runtime.protocol.to_worker import ToWorker, Train
from slipstream.runtime.replay.dealt_samples import DealtSamples
from slipstream.runtime.replay.links import Links
from slipstream.runtime.replay.placement import Placement
from slipstream.runtime.replay.session import Session
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.torch_private import TCPStore
from slipstream.runtime.worker.activity import Activity
from slipstream.runtime.worker.checkpointer import Checkpointer
from slipstream.runtime.worker.device_memory import DeviceMemory
from slipstream.runtime.worker.layer_receiver import LayerReceiver
from slipstream.runtime.worker.layer_sender import LayerSender
from slipstream.runtime.worker.layer_store import LayerStore
from slipstream.schedules.parts import Part
from slipstream.schedules.schedule import Schedule, Worker

WorkerLink = CoordinatorLink[ToWorker, Setup]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker keeps from order to order."""

    worker: Worker
    group: WorkerGroup | None
    """The processes of this worker, where it is several."""
    channel: WorkerLink
    reporter: Reporter
    store: TCPStore
    """Where process groups find each other."""
    links: Links
    """Those that live from order to order."""
    setup: Setup
    config: RunConfig
    """Of this node's own job file."""
    out: str
    """The run's folder."""
    device: torch.device
    model: LayeredModel
    sharing: Sharing
    placement: Placement
    corpus: Data
    validation: Data | None
    forms: Sequence[Form]
    """Of what passes at each of the placement's cuts, as this process has it."""
    rehearsal: Rehearsal = field(default_factory=Rehearsal)
    """For which layers all kinds of ops have been run."""
    layer_store: LayerStore
    memory: DeviceMemory
    injector: Injector
    checkpointer: Checkpointer
    layer_sender: LayerSender
    layer_receiver: LayerReceiver

    @property
    def rank(self) -> int:
        """Which of the worker's processes this is."""
        return 0 if self.group is None else self.group.rank()

    def lasting_sockets(self) -> Sockets:
        """Those that outlive an order."""
        return self.layer_sender.sockets() | self.layer_receiver.sockets()


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderContext:
    """What the parts of a generation share."""

    context: WorkerContext
    order: Train
    schedule: Part
    whole: Schedule | None
    """The same with all workers, where data are dealt or evaluated."""
    session: Session
    activity: Activity
    samples: DealtSamples
    """What the names of the schedule stand for."""

    @property
    def worker(self) -> Worker:
        """Whose part in the order this is."""
        return self.context.worker
