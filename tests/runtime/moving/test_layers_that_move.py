"""Layers on their way between workers keep their bits.

All wait meanwhile or train on.
"""

import socket
import threading
from functools import partial

import pytest
import torch

from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.moving.layer_messages import LayerPart, LayerRequest, PartRange, PartStepped
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.held_layers import build_holding, build_layer
from tests.runtime.moving.team import LAYERS, LEFT, RIGHT, SOON, Team, empty_store, hold, whole
from tests.runtime.running import tiny
from tests.runtime.speaking import be_asked

CONFIGS = {
    "adamw": {},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
}


def while_all_wait(team: Team, committed: int) -> None:
    """An iteration is undone; then nobody steps until the layers have moved."""
    for iteration in range(6):
        team.run(iteration)
    team.go_back(committed, order=3)
    team.fetch(0, 3, follow=False)
    team.give(3, committed)


def while_all_train(team: Team, committed: int) -> None:
    """An order ends in the middle, and an iteration runs again.

    The last order may come one step too late.
    """
    for iteration in range(2):
        team.run(iteration)
    team.fetch(0, 1)
    team.until_asked()
    team.members[LEFT].run(2)
    team.members[RIGHT].run(2)
    team.run(3)
    team.go_back(2, order=2)
    for iteration in (3, 4, 5):
        team.run(iteration, take=1)
    assert team.told.get(timeout=SOON) == "up to date 0"
    team.go_back(committed, order=3)


@pytest.mark.parametrize("team", CONFIGS.values(), ids=CONFIGS, indirect=True)
@pytest.mark.parametrize("committed", [4, 5])
@pytest.mark.parametrize("move", [while_all_wait, while_all_train])
def test_layers_that_have_moved_are_the_same_bits_and_stay_so(team, move, committed):
    """What every way of moving layers promises."""
    move(team, committed)
    parts, member = team.take(3, fetch=0), team.members[LEFT]
    assert {part.layer for part in parts} == {0, 1, 2} and team.told.empty()
    store = empty_store(member.training, seed=1)
    store.add_received(parts)
    assert store.list_held_state().layers == (LAYERS,) and not store.holding.modules
    fetched = hold(store, committed).holding
    for iteration in range(committed + 1, committed + 3):
        compare(store, member.store, iteration - 1)
        member.run(iteration, take=2)
        for mine, theirs in zip(
            fetched.flat_gradients(), member.holding.flat_gradients(), strict=True
        ):
            assert not mine.any() or iteration > committed + 1
            mine.copy_(theirs)
        fetched.optimizer.step(iteration)
    compare(store, member.store, committed + 2)
    fetched.optimizer.undo()


def compare(store: LayerStore, other: LayerStore, after: int) -> None:
    for layer in range(*LAYERS):
        mine, theirs = (
            store.get_part_state(whole(layer), after),
            other.get_part_state(whole(layer), after),
        )
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name


def test_what_is_fetched_for_one_order_is_not_taken_in_another(team):
    team.fetch()
    team.until_asked()
    team.run(0)
    assert team.told.get(timeout=SOON) == "up to date 1"
    assert team.take(1, fetch=0) == []  # the order during which it is fetched
    team.fetch(number=2, order=2)  # heard before order 2 begins
    team.go_back(0, order=2)
    assert {part.layer for part in team.take(2, fetch=1)} == {0, 1, 2}
    assert team.take(3, fetch=0) == []


def test_a_sender_that_goes_is_told_once(team):
    team.fetch()
    team.until_asked()
    team.run(0)
    assert team.told.get(timeout=SOON) == "up to date 1"
    team.members[RIGHT].sender.close()
    assert team.told.get(timeout=SOON) == "failed 1"
    with pytest.raises(
        CommunicationError,
        match=r"fetching layers from worker 1\.0 failed: the connection was closed",
    ):
        team.take(2)
    assert team.told.empty()


def test_a_fetch_that_fails_leaves_no_connection_of_another_for_the_same_order(team):
    def refuse() -> None:
        raise CommunicationError("the order is over")

    before = set(threading.enumerate())
    team.fetch(number=1, order=1)
    team.fetch(number=0, order=2, follow=False)
    fetching = {
        thread for thread in threading.enumerate() if thread.name.startswith("layers from")
    } - before
    team.until_asked()
    with pytest.raises(CommunicationError, match="the order is over"):
        team.receiver.take_parts(2, 1, refuse)
    for thread in fetching:
        thread.join(SOON / len(fetching))
    assert len(fetching) == 4 and not any(thread.is_alive() for thread in fetching)


@pytest.mark.parametrize(
    ("message", "tensors", "reason"),
    [
        (
            LayerPart(PartRange(7, 0, 1, True), 0),
            {},
            "it sent a part of layer 7 that was not requested",
        ),
        (
            LayerPart(whole(1), 0),
            {"model.x": torch.zeros(1)},
            "a part of layer 1 has no elements of",
        ),
        (
            PartStepped(whole(1), 0),
            {"x": torch.zeros(1)},
            "it has stepped a part of layer 1 that it has not sent",
        ),
        (LayerRequest((whole(1),)), {}, "it sent a request instead of an answer"),
    ],
)
def test_nonsense_ends_a_fetch(message, tensors, reason, team, capfd):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        team.fetch(right=("127.0.0.1", listener.getsockname()[1]))
        with be_asked(listener.accept()[0]) as connection:
            assert connection.receive()[0] == LayerRequest((whole(1),))
            connection.send(message, tensors)
            assert team.told.get(timeout=SOON) == "failed 1"
    with pytest.raises(CommunicationError, match=reason):
        team.take(2)


def test_a_layer_that_is_fetched_takes_nothing_of_the_device_before_it_is_held():
    """Its worker trains meanwhile, and plans have no room for it there."""
    device, training = torch.device("meta"), tiny().training  # any that is not the host
    model = build_model(tiny().model, 0, torch.float64, device)
    store = LayerStore(
        partial(build_layer, model, config=training),
        lambda *_: {},
        build_holding(model, (), training),
        device,
    )
    store.prebuild_layers([1])
    assert {
        (parameter.device.type, parameter.grad) for parameter in store.get_module(1).parameters()
    } == {("cpu", None)}
