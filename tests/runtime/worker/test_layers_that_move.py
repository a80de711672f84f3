"""Layers on their way between workers: the same bits at both ends, whether all wait meanwhile or train on."""

import hashlib
import io
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

import pytest
import torch

from runtime.config import TrainingConfig
from runtime.model.holding import Holding, build_holding
from runtime.model.layers import model_for, parameter_dtype
from runtime.model.optimizer import UndoableOptimizer
from runtime.protocol.authentication import Keys, Tags
from runtime.protocol.to_worker import LayerMove
from runtime.replay.communication import CommunicationError
from runtime.worker import layer_server
from runtime.worker.layer_messages import (
    BLOB_BYTES,
    LayerGradients,
    LayerRequest,
    LayerState,
    MessageError,
    UpToDate,
    pack,
    read_message,
)
from runtime.worker.layer_receiver import LayerFetch, LayerReceiver, ReceiverEvents, senders_for
from runtime.worker.layer_sender import LayerSender
from runtime.worker.layer_server import QUEUE_STATES
from schedules.schedule import Worker
from tests.runtime.running import command_environment, tiny
from tests.runtime.speaking import SECRET, Asking, ask, be_asked

CPU = torch.device("cpu")
LEFT, RIGHT, TARGET = Worker(0, 0), Worker(1, 0), Worker(2, 0)
LAYERS = (0, 3)
SOON = 10.0
KEY = b"of tests"


def keys() -> Keys:
    return Keys(Tags(KEY), Tags(KEY))

CONFIGS = {"adamw": {}, "sgd": {"optimizer": "sgd"}, "momentum": {"optimizer": "sgd", "momentum": 0.9}}


def build(training: TrainingConfig, layers: Iterable[int] = range(*LAYERS), seed: int = 0) -> Holding:
    return build_holding(model_for(tiny().model, seed, parameter_dtype("float64"), CPU), layers, training)


class Member:
    """A worker that holds the layers, with its sender."""

    def __init__(self, training: TrainingConfig, bytes_per_second: float | None = None) -> None:
        self.training, self.holding = training, build(training)
        self.optimizer = self.holding.optimizer
        self.sender = LayerSender("127.0.0.1", SECRET, bytes_per_second)
        self.layer_state, self.layer_gradients = self.optimizer.layer_state, self.optimizer.layer_gradients

    def holds(self, layer: int) -> bool:
        return layer in range(*LAYERS)

    def run(self, iteration: int, take: int = 0) -> None:
        """An iteration, of which nothing is known but its gradients; they differ with each `take`."""
        draw = torch.Generator().manual_seed(1000 * take + iteration)
        for gradient in self.holding.gradients():
            gradient.copy_(torch.randn(gradient.shape, dtype=gradient.dtype, generator=draw))
        self.sender.before_step(iteration, self)
        self.optimizer.step(iteration)
        self.sender.stepped(iteration, self)

    def go_back(self, committed: int, generation: int) -> None:
        if self.optimizer.open_iteration is not None and self.optimizer.open_iteration > committed:
            self.optimizer.undo()
        self.optimizer.commit()
        self.sender.generation_begins(generation, committed)


class Team:
    """Two members, and a worker that gets its layers from both."""

    def __init__(self, training: TrainingConfig, bytes_per_second: float | None = None) -> None:
        self.members = {LEFT: Member(training, bytes_per_second), RIGHT: Member(training, bytes_per_second)}
        self.told: queue.Queue[str] = queue.Queue()
        self.receiver = LayerReceiver(lambda layer: build(training, [layer], seed=1), CPU, SECRET,
                                      Told(self.told))

    def fetch(self, number: int = 1, generation: int = 1, right: tuple[str, int] | None = None, *,
              follow: bool = True) -> None:
        """Have layers 0 and 2 come from the left, 1 from the right."""
        addresses = (LEFT, self.members[LEFT].sender.address), (RIGHT, right or self.members[RIGHT].sender.address)
        moves = (LayerMove(TARGET, LEFT, 0), LayerMove(TARGET, RIGHT, 1), LayerMove(TARGET, LEFT, 2),
                 LayerMove(LEFT, RIGHT, 1))
        self.receiver.begin(LayerFetch(number, generation, senders_for(TARGET, moves, addresses), follow))

    def until_asked(self) -> None:
        waiter = threading.Event()
        for _ in range(round(SOON / 0.01)):
            if all(member.sender.asked for member in self.members.values()):
                return
            waiter.wait(0.01)
        raise AssertionError("nobody has asked")

    def run(self, iteration: int, take: int = 0) -> None:
        for member in self.members.values():
            member.run(iteration, take)

    def go_back(self, committed: int, generation: int) -> None:
        for member in self.members.values():
            member.go_back(committed, generation)

    def give(self, generation: int, committed: int) -> None:
        """All wait, and give what is asked for."""
        for member in self.members.values():
            member.sender.give(generation, committed, 1, member, lambda: None)

    def take(self, generation: int, fetch: int = 1):
        return self.receiver.take(generation, fetch, lambda: None)


class Told(ReceiverEvents):
    def __init__(self, told: queue.Queue[str]) -> None:
        self._told = told

    def up_to_date(self, fetch: LayerFetch) -> None:
        self._told.put(f"up to date {fetch.number}")

    def failed(self, fetch: LayerFetch) -> None:
        self._told.put(f"failed {fetch.number}")


@pytest.fixture
def team(request):
    team = Team(tiny(**getattr(request, "param", {})).training)
    yield team
    team.receiver.begin(LayerFetch(99, 1, {}, True))
    for member in team.members.values():
        member.sender.close()


def while_all_wait(team: Team, committed: int) -> None:
    """An iteration is undone; then nobody steps until the layers have moved."""
    for iteration in range(6):
        team.run(iteration)
    team.go_back(committed, generation=3)
    team.fetch(0, 3, follow=False)
    team.give(3, committed)


def while_all_train(team: Team, committed: int) -> None:
    """A generation ends in the middle, and an iteration runs again; the last generation may come one step too late."""
    for iteration in range(2):
        team.run(iteration)
    team.fetch(0, 1)
    team.until_asked()
    team.members[LEFT].run(2)
    team.members[RIGHT].run(2)
    team.run(3)
    team.go_back(2, generation=2)
    for iteration in (3, 4, 5):
        team.run(iteration, take=1)
    assert team.told.get(timeout=SOON) == "up to date 0"
    team.go_back(committed, generation=3)


@pytest.mark.parametrize("team", CONFIGS.values(), ids=CONFIGS, indirect=True)
@pytest.mark.parametrize("committed", [4, 5])
@pytest.mark.parametrize("move", [while_all_wait, while_all_train])
def test_layers_that_have_moved_are_the_same_bits_and_stay_so(team, move, committed):
    """What every way of moving layers promises."""
    move(team, committed)
    layers = team.take(3, fetch=0)
    assert layers.keys() == {0, 1, 2} and team.told.empty()
    fetched = build(team.members[LEFT].training, ())
    fetched.change(layers, layers.values())
    member = team.members[LEFT]
    for iteration in range(committed + 1, committed + 3):
        compare(fetched.optimizer, member.optimizer)
        member.run(iteration, take=2)
        for mine, theirs in zip(fetched.gradients(), member.holding.gradients(), strict=True):
            assert not mine.any() or iteration > committed + 1
            mine.copy_(theirs)
        fetched.optimizer.step(iteration)
    compare(fetched.optimizer, member.optimizer)
    fetched.optimizer.undo()


def compare(one: UndoableOptimizer, other: UndoableOptimizer) -> None:
    for layer in range(*LAYERS):
        mine, theirs = one.layer_state(layer), other.layer_state(layer)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name


def test_what_is_fetched_for_one_generation_is_not_taken_in_another(team):
    team.fetch()
    team.until_asked()
    team.run(0)
    assert team.told.get(timeout=SOON) == "up to date 1"
    assert team.take(1, fetch=0) == {}  # the generation during which it is fetched
    team.fetch(number=2, generation=2)  # heard before generation 2 begins
    team.go_back(0, generation=2)
    assert team.take(2, fetch=1).keys() == {0, 1, 2}
    assert team.take(3, fetch=0) == {}


def test_a_sender_that_goes_is_told_once(team):
    team.fetch()
    team.until_asked()
    team.run(0)
    assert team.told.get(timeout=SOON) == "up to date 1"
    team.members[RIGHT].sender.close()
    assert team.told.get(timeout=SOON) == "failed 1"
    with pytest.raises(CommunicationError, match=r"fetching layers from worker 1\.0 failed: the connection was closed"):
        team.take(2)
    assert team.told.empty()


def test_a_state_in_the_middle_of_a_step_ends_a_fetch(team):
    """Whatever goes wrong in a receiver's thread is told."""
    member = team.members[RIGHT]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        team.fetch(right=("127.0.0.1", listener.getsockname()[1]))
        with be_asked(listener.accept()[0]) as connection:
            connection.receive()
            connection.send(LayerGradients(1, 0), member.layer_gradients(1))
            connection.send(LayerState(1, 0), member.layer_state(1))
            assert team.told.get(timeout=SOON) == "failed 1"


@pytest.mark.parametrize(("message", "tensors", "reason"), [
    (LayerState(7, 0), {}, "it sent layer 7, for which it was not asked"),
    (LayerState(1, 0), {"model.x": torch.zeros(1)}, "layer 1 has nothing named|is missing|is unknown"),
    (LayerGradients(1, 0), {"x": torch.zeros(1)}, "it sent gradients of layer 1 that do not fit"),
    (LayerRequest((1,)), {}, "it asks, where it was asked"),
])
def test_nonsense_ends_a_fetch(message, tensors, reason, team, capfd):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        team.fetch(right=("127.0.0.1", listener.getsockname()[1]))
        with be_asked(listener.accept()[0]) as connection:
            assert connection.receive()[0] == LayerRequest((1,))
            connection.send(message, tensors)
            assert team.told.get(timeout=SOON) == "failed 1"
    with pytest.raises(CommunicationError, match=reason):
        team.take(2)


HEADER = b'[{"type":"UpToDate"},1]'


def tagged(length: str, body: bytes, tags: Tags) -> bytes:
    return struct.pack(length, len(body)) + body + tags.next(hashlib.sha256(body).digest())


def header(body: bytes) -> Callable[[Tags], bytes]:
    return lambda tags: tagged("<I", body, tags)


def blob(body: bytes) -> Callable[[Tags], bytes]:
    return lambda tags: tagged("<I", HEADER, tags) + tagged("<Q", body, tags)


@pytest.mark.parametrize(("sent", "error", "reason"), [
    (lambda _: struct.pack("<I", 2**31), MessageError, "a header of 2147483648 bytes"),
    (lambda _: struct.pack("<I", 0), MessageError, "a header of 0 bytes"),
    (lambda _: tagged("<I", HEADER, Tags(b"another key")), MessageError, "a message was changed on its way"),
    (lambda tags: tagged("<I", HEADER, tags) + tagged("<Q", b"changed", Tags(KEY)), MessageError, "changed on its way"),
    (header(b"nope"), MessageError, "an unreadable header: .*malformed"),
    (header(b"[" * 10_000), MessageError, "an unreadable header"),
    (header(b'[{"type":"UpToDate"},-1e99]'), MessageError, "an unreadable header"),
    (lambda tags: header(HEADER)(tags) + struct.pack("<Q", 2**63), MessageError, f"tensors of {2**63} bytes"),
    (blob(b"pickled!!"), MessageError, "sent no tensors: "),
    (lambda tags: blob(b"shortened")(tags)[:-1], ConnectionError, "closed"),
    (lambda _: struct.pack("<I", 100) + b"{", ConnectionError, "closed"),
    (lambda _: b"", ConnectionError, "closed"),
])
def test_bytes_that_are_no_message(sent, error, reason):
    one, other = socket.socketpair()
    with one, Asking(other, keys()) as reading:
        one.sendall(sent(Tags(KEY)))
        one.close()
        with pytest.raises(error, match=reason) as caught:
            reading.receive()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_messages_carry_any_tensor():
    whole = torch.arange(BLOB_BYTES // 4 + 1, dtype=torch.float32)
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(), "b": torch.zeros(0, 3),
               "c": torch.tensor(7), "d": torch.ones(3, dtype=torch.bool), "large": whole, "tied": whole,
               "part": whole[3:5], "e": torch.tensor(1.0, dtype=torch.bfloat16)}
    one, other = socket.socketpair()
    with Asking(one, keys()) as sending, Asking(other, keys()) as reading:
        threading.Thread(target=sending.send, args=(UpToDate(), tensors), daemon=True).start()
        message, arrived = reading.receive()
    assert message == UpToDate() and arrived.keys() == tensors.keys()
    assert all(torch.equal(arrived[name], tensor) and arrived[name].dtype == tensor.dtype
               and arrived[name].shape == tensor.shape for name, tensor in tensors.items())


def test_no_more_than_a_blob_lies_in_memory_twice():
    tensors = {str(number): torch.zeros(BLOB_BYTES // 8) for number in range(8)}
    read = []

    class Watched(io.BytesIO):
        def read(self, size=-1, /):
            read.append(size)
            return super().read(size)

    read_message(Watched(b"".join(pack(Tags(KEY), UpToDate(), tensors))), Tags(KEY))
    assert sum(read) > 4 * BLOB_BYTES and max(read) < 1.1 * BLOB_BYTES


def test_several_threads_may_be_the_first_to_read_a_message():
    """msgspec crashes where two threads are the first to decode a type: the module decodes each itself, at import."""
    program = (
        "import io, threading\n"
        "from runtime.protocol.authentication import Tags\n"
        "from runtime.worker.layer_messages import LayerState, pack, read_message\n"
        "data, start = b''.join(pack(Tags(b'key'), LayerState(1, 2))), threading.Barrier(8)\n"
        "def read():\n"
        "    start.wait()\n"
        "    assert read_message(io.BytesIO(data), Tags(b'key')) == (LayerState(1, 2), {})\n"
        "threads = [threading.Thread(target=read) for _ in range(8)]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, env=command_environment())
    assert done.returncode == 0 and not done.stderr


def test_who_gives_layers_away_waits_until_they_have_gone(team):
    """Else its next step would change what is being sent."""
    member, returned = team.members[LEFT], threading.Event()

    def give() -> None:
        member.sender.give(2, 0, 1, member, lambda: None)
        returned.set()

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    assert not returned.wait(0.05), "nobody has asked"
    with ask(member.sender.address, SOON) as stale, \
            ask(member.sender.address, SOON) as asking:
        stale.send(LayerRequest((0,), 1))
        assert not returned.wait(0.05), "what was asked for an earlier generation does not count"
        asking.send(LayerRequest((0,), 2))
        assert asking.receive()[0] == LayerState(0, 1)
        thread.join(SOON)
        assert returned.is_set()


def test_waiting_for_those_who_are_to_be_given_layers_can_be_called_off(team):
    def refuse() -> None:
        raise CommunicationError("it is over")

    with pytest.raises(CommunicationError, match="it is over"):
        team.members[LEFT].sender.give(2, 0, 1, team.members[LEFT], refuse)
    team.fetch(0, 2, follow=False)
    with pytest.raises(CommunicationError, match="it is over"):
        team.receiver.take(2, 0, refuse)


def test_one_thread_serves_all(team):
    before = set(threading.enumerate())
    connections = [ask(team.members[LEFT].sender.address, SOON) for _ in range(5)]
    for connection in connections:
        connection.send(LayerRequest((0, 1)))
    team.members[LEFT].run(0)
    assert set(threading.enumerate()) <= before, "a thread was started; those of other tests may end meanwhile"
    for connection in connections:
        connection.connection.close()


def test_a_layer_that_cannot_be_sent_ends_its_connection_and_no_other(team, monkeypatch):
    def asking():
        connection = ask(team.members[LEFT].sender.address, SOON)
        connection.send(LayerRequest((0,)))
        while not team.members[LEFT].sender.asked:
            threading.Event().wait(0.01)
        return connection

    with monkeypatch.context() as broken, asking() as connection:
        broken.setattr(layer_server, "pack", lambda *_: 1 / 0)
        team.members[LEFT].run(0)
        with pytest.raises(OSError):
            connection.receive()
    with asking() as connection:
        team.members[LEFT].run(1)
        assert connection.receive()[0] == LayerState(0, 1)


def test_training_waits_where_too_much_is_queued_until_nothing_is(team):
    """As for one whose connection carries less than training makes; not for one that is gone."""
    member, waited = team.members[LEFT], []
    with ask(member.sender.address, SOON) as slow:
        slow.send(LayerRequest((0,)))
        while not member.sender.asked:
            threading.Event().wait(0.01)
        iteration = 0
        member.run(0)
        member.sender.wait_for_room(lambda: waited.append("never"))
        while not full(member.sender):
            assert iteration < 10_000, "nothing is bounded"
            iteration += 1
            member.run(iteration)
        assert iteration + 1 >= QUEUE_STATES and not waited  # before the first step, AdamW has no state
        reader = threading.Thread(target=lambda: [slow.receive() for _ in range(iteration + 2)], daemon=True)

        def read() -> None:
            if not waited:
                reader.start()
            waited.append("a while")

        member.sender.wait_for_room(read)
        assert waited and not full(member.sender)
        reader.join(SOON)


def full(sender: LayerSender) -> bool:
    """Whether training would wait."""
    def refuse() -> None:
        raise TimeoutError

    try:
        sender.wait_for_room(refuse)
    except TimeoutError:
        return True
    return False


def test_one_that_asks_for_what_is_not_held_is_refused(team):
    with ask(team.members[LEFT].sender.address, SOON) as connection:
        connection.send(LayerRequest((7,)))
        while not team.members[LEFT].sender.asked:
            threading.Event().wait(0.01)
        team.members[LEFT].run(0)
        with pytest.raises(OSError):
            connection.receive()
