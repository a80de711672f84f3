"""Two members of an order, and a worker that gets layers from both.

The members have layer senders.
"""

import queue
import threading
from collections.abc import Iterable
from functools import partial

import torch

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.moving.layer_messages import PartRange
from slipstream.runtime.moving.layer_receiver import (
    FetchRequest,
    LayerReceiver,
    ReceiverCallbacks,
    find_layer_sources,
)
from slipstream.runtime.moving.layer_sender import LayerSender
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.moving.received_part import SteppedPart
from slipstream.runtime.protocol.to_worker import LayerMove
from slipstream.runtime.state.held_layers import HeldLayers, build_holding
from slipstream.runtime.state.part_state import count_elements
from slipstream.runtime.state.parts import build_partition
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker
from tests.runtime.running import tiny
from tests.runtime.speaking import SECRET

CPU = torch.device("cpu")
LEFT = Worker(0, 0)
RIGHT = Worker(1, 0)
TARGET = Worker(2, 0)
LAYERS = (0, 3)
SOON = 60.0


def build(
    training: TrainingConfig, layers: Iterable[int] = range(*LAYERS), seed: int = 0
) -> HeldLayers:
    return build_holding(
        build_model(tiny().model, seed, parameter_dtype(training), CPU), layers, training
    )


def empty_store(training: TrainingConfig, seed: int = 0) -> LayerStore:
    return LayerStore(
        lambda layer, filled: build(training, [layer], seed).modules[layer],
        lambda *_: {},
        build(training, []),
        CPU,
    )


def hold(store: LayerStore, after: int = -1, layers: LayerRange = LAYERS) -> LayerStore:
    """Have a store hold layers whole, with what it has received of them."""
    if after == -1:
        store.restore_layers(range(*layers), 0)
    total = sum(store.count_elements(layer).cut for layer in range(*layers))
    store.keep_parts({layers: build_partition(total, [LEFT], (), sharded=False)}, LEFT, after)
    return store


def whole(layer: int) -> PartRange:
    """The name of a layer of these."""
    return PartRange(
        layer, 0, count_elements(build(tiny().training, [layer]).modules[layer]).cut, state=True
    )


class Member:
    """A worker that holds the layers, with its sender."""

    def __init__(self, training: TrainingConfig, bytes_per_second: float | None = None) -> None:
        self.training, self.store = training, hold(empty_store(training))
        self.holding, self.optimizer = self.store.holding, self.store.holding.optimizer
        self.sender = LayerSender("127.0.0.1", SECRET, bytes_per_second)

    def run(self, iteration: int, take: int = 0) -> None:
        """Run an iteration, of which nothing is known but its gradients.

        They differ with each `take`.
        """
        draw = torch.Generator().manual_seed(1000 * take + iteration)
        for gradient in self.holding.flat_gradients():
            gradient.copy_(torch.randn(gradient.shape, dtype=gradient.dtype, generator=draw))
        self.sender.send_state_before_step(iteration, self.store)
        self.optimizer.step(iteration)
        self.sender.queue_step(iteration, self.store)

    def go_back(self, committed: int, order: int) -> None:
        if self.optimizer.open_iteration is not None and self.optimizer.open_iteration > committed:
            self.optimizer.undo()
        self.optimizer.commit()
        self.sender.queue_order_begins(order, committed)


class Team:
    """Two members, and a worker that gets its layers from both."""

    def __init__(self, training: TrainingConfig, bytes_per_second: float | None = None) -> None:
        self.members = {
            LEFT: Member(training, bytes_per_second),
            RIGHT: Member(training, bytes_per_second),
        }
        self.told: queue.Queue[str] = queue.Queue()
        self.receiver = receiver(training, self.told)

    def fetch(
        self,
        number: int = 1,
        order: int = 1,
        right: tuple[str, int] | None = None,
        *,
        follow: bool = True,
    ) -> None:
        """Have layers 0 and 2 come from the left, 1 from the right."""
        left, right = self.members[LEFT].sender.address, right or self.members[RIGHT].sender.address
        addresses = (LEFT, (left,)), (RIGHT, (right,))
        moves = [
            LayerMove(target, source, layer, 0, whole(layer).stop)
            for target, source, layer in (
                (TARGET, LEFT, 0),
                (TARGET, RIGHT, 1),
                (TARGET, LEFT, 2),
                (LEFT, RIGHT, 1),
            )
        ]
        self.receiver.start_fetch(
            FetchRequest(number, order, find_layer_sources(TARGET, moves, addresses), follow)
        )

    def until_asked(self) -> None:
        waiter = threading.Event()
        for _ in range(round(SOON / 0.01)):
            if all(member.sender.has_requests for member in self.members.values()):
                return
            waiter.wait(0.01)
        raise AssertionError("nobody has asked")

    def run(self, iteration: int, take: int = 0) -> None:
        for member in self.members.values():
            member.run(iteration, take)

    def go_back(self, committed: int, order: int) -> None:
        for member in self.members.values():
            member.go_back(committed, order)

    def give(self, order: int, committed: int) -> None:
        """All wait, and give what is asked for."""
        for member in self.members.values():
            member.sender.send_to_waiting(order, committed, 1, member.store, lambda: None)

    def take(self, order: int, fetch: int = 1):
        return self.receiver.take_parts(order, fetch, lambda: None)


def receiver(training: TrainingConfig, outcomes: "queue.Queue[str]") -> LayerReceiver:
    return LayerReceiver(
        lambda layer: build(training, [layer], seed=1).modules[layer],
        partial(SteppedPart, config=training, device=CPU),
        CPU,
        SECRET,
        Told(outcomes),
    )


class Told(ReceiverCallbacks):
    def __init__(self, outcomes: queue.Queue[str]) -> None:
        self._told = outcomes

    def on_up_to_date(self, fetch: FetchRequest) -> None:
        self._told.put(f"up to date {fetch.number}")

    def on_fetch_failed(self, fetch: FetchRequest, reason: str, *, unreachable: bool) -> None:
        self._told.put(f"failed {fetch.number}")
