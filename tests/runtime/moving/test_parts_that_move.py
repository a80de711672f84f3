"""Parts of layers that move while all train keep their bits."""

import queue
import socket
import threading

import pytest
import torch

from slipstream.runtime.moving.layer_messages import LayerPart, LayerRequest, PartRange, PartStepped
from slipstream.runtime.moving.layer_receiver import FetchRequest, find_layer_sources
from slipstream.runtime.moving.layer_sender import LayerSender
from slipstream.runtime.protocol.to_coordinator import HeldState
from slipstream.runtime.protocol.to_worker import LayerMove
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.part_state import count_elements, trained_parameters
from slipstream.runtime.state.parts import build_partition
from slipstream.schedules.schedule import Worker
from tests.runtime.moving.team import SOON, TARGET, build, empty_store, receiver
from tests.runtime.running import tiny
from tests.runtime.speaking import SECRET, be_asked

LAYER = 1
MEMBERS = [Worker(pipeline, 0) for pipeline in range(3)]
CONFIGS = {
    "adamw": {"shard_optimizer": True},
    "momentum": {
        "shard_optimizer": True,
        "optimizer": "sgd",
        "momentum": 0.9,
        "learning_rate_schedule": "cosine",
    },
    "masters": {"dtype": "bf16", "master_weights": True, "shard_optimizer": True},
    "sums-in-bf16": {"dtype": "bf16", "master_weights": True, "reduce_dtype": "bf16"},
}


class Keeper:
    """A worker that keeps two parts of a layer in three.

    They are its own, and another one's.

    Steps of others do not come.
    """

    def __init__(self, training) -> None:
        self.store = empty_store(training)
        self.optimizer, self.sender = self.store.holding.optimizer, LayerSender("127.0.0.1", SECRET)
        layers = (LAYER, LAYER + 1)
        elements = count_elements(self.store.get_module(LAYER)).cut
        self.store.restore_layers([LAYER], 0)
        self.store.keep_parts(
            {layers: build_partition(elements, MEMBERS, (), sharded=True)}, MEMBERS[0], -1
        )
        self.optimizer = self.store.holding.optimizer
        self.parts = self.optimizer.stored_parts[LAYER]

    def run(self, iteration: int, factor: float = 1.0, take: int = 0) -> None:
        """An iteration, whose gradients differ with each `take`, and are clipped."""
        draw = torch.Generator().manual_seed(1000 * take + iteration)
        for gradient in self.store.holding.flat_gradients():
            gradient.copy_(torch.randn(gradient.shape, generator=draw))
        self.sender.send_state_before_step(iteration, self.store)
        self.optimizer.step(iteration, factor)
        self.sender.queue_step(iteration, self.store)

    def go_back(self, committed: int, order: int) -> None:
        self.optimizer.return_to(committed)
        self.sender.queue_order_begins(order, committed)


@pytest.fixture
def keeper(request):
    keeper = Keeper(tiny(**request.param).training)
    yield keeper
    keeper.sender.close()


def fetch(getting, moves, address, number=1):
    getting.start_fetch(
        FetchRequest(
            number, 1, find_layer_sources(TARGET, moves, ((MEMBERS[0], (address,)),)), follow=True
        )
    )


def until_asked(sender: LayerSender) -> None:
    waiter = threading.Event()
    while not sender.has_requests:
        waiter.wait(0.01)


@pytest.mark.parametrize("keeper", CONFIGS.values(), ids=CONFIGS, indirect=True)
@pytest.mark.parametrize("committed", [3, 4])
def test_parts_that_are_followed_are_the_same_bits(keeper, committed, request):
    # They have the optimizer's state, or parameters alone; the last step is undone at both ends, or
    # at none.
    outcomes = queue.Queue()
    getting = receiver(tiny(**request.node.callspec.params["keeper"]).training, outcomes)
    whole_part, some = keeper.parts[0], (keeper.parts[0][0] + 1, keeper.parts[0][1] - 1)
    moves = [
        LayerMove(TARGET, MEMBERS[0], LAYER, *span, state=state)
        for span, state in ((whole_part, True), (some, False))
    ]
    keeper.run(0)
    fetch(getting, moves, keeper.sender.address)
    until_asked(keeper.sender)
    for iteration, factor in ((1, 1.0), (2, 0.3), (3, 1.0)):
        keeper.run(iteration, factor)
    keeper.go_back(2, order=1)
    keeper.run(3, 0.7, take=1)
    keeper.run(4)
    assert outcomes.get(timeout=SOON) == "up to date 1"
    keeper.go_back(committed, order=2)
    parts = getting.take_parts(2, 1, lambda: None)
    found = {part.state: part for part in parts}
    assert found.keys() == {True, False}
    for state, span in ((True, whole_part), (False, some)):
        theirs = keeper.store.get_part_state(PartRange(LAYER, *span, state), committed)
        assert found[state][:3] == (LAYER, *span) and found[state].tensors.keys() == theirs.keys()
        assert any(key.startswith("optimizer.") for key in theirs) == state
        for name, tensor in theirs.items():
            assert torch.equal(found[state].tensors[name], tensor), name


@pytest.mark.parametrize("keeper", [CONFIGS["adamw"]], indirect=True)
def test_what_has_come_is_given_on_before_it_is_taken_into_use(keeper):
    # A worker dies while parts change hands: who does not hear that all have theirs keeps both.
    training = tiny(shard_optimizer=True).training
    keeper.run(0)
    keeper.go_back(0, 1)
    (part, ward), store = keeper.parts, empty_store(training)
    store.restore_layers([LAYER], 0)
    store.add_received(
        [
            keeper.optimizer.part_state(LAYER, part),
            keeper.optimizer.part_state(LAYER, ward, state=False),
        ]
    )
    assert store.list_held_state().parts == ((LAYER, *part),)
    half = PartRange(LAYER, part[0] + 1, part[1] - 1, True)
    assert store.has_part(half) and not store.has_part(PartRange(LAYER, *ward, True))
    ours, theirs = store.get_part_state(half, 0), keeper.store.get_part_state(half, 0)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[key], theirs[key]) for key in theirs
    )
    store.add_received(keeper.optimizer.stored_states())
    store.keep_parts(
        {(LAYER, LAYER + 1): keeper.store.holding.cuts[LAYER, LAYER + 1]}, MEMBERS[0], 0
    )
    assert store.list_held_state() == HeldState(
        ((LAYER, LAYER + 1),), keeper.store.list_held_state().parts, 0
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [LayerPart(PartRange(LAYER, 0, 9, True), 0)],
            "it sent a part of layer 1 that was not requested",
        ),
        (
            [PartStepped(PartRange(LAYER, 0, 8, True), 0)],
            "it has stepped a part of layer 1 that it has not sent",
        ),
        (
            [
                LayerPart(PartRange(LAYER, 0, 8, True), 0),
                PartStepped(PartRange(LAYER, 0, 8, True), 0),
            ],
            "gradients of a part of layer 1 do not fit",
        ),
    ],
)
def test_nonsense_ends_a_fetch(messages, reason, capfd):
    outcomes = queue.Queue()
    training = tiny(shard_optimizer=True).training
    getting, layer = receiver(training, outcomes), build(training).modules[LAYER]
    name, parameter = next(iter(trained_parameters(layer).items()))
    move = LayerMove(TARGET, MEMBERS[0], LAYER, 0, 8, state=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fetch(getting, [move], listener.getsockname())
        with be_asked(listener.accept()[0]) as connection:
            assert connection.receive()[0] == LayerRequest((PartRange(LAYER, 0, 8, True),))
            for message in messages:
                connection.send(message, {f"model.{name}": parameter.detach().view(-1)[:8]})
            assert outcomes.get(timeout=SOON) == "failed 1"
    with pytest.raises(CommunicationError, match=reason):
        getting.take_parts(2, 1, lambda: None)
