"""Sources and a follower in one process: the same bits at both ends, however often a step is undone."""

import queue
import socket
import struct
import threading

import pytest
import torch
from runtime.protocol.orders import Fetch, Move, Train
from runtime.protocol.reports import Followed, Unfollowed

from runtime.config import TrainingConfig
from runtime.model.layers import model_for, parameter_dtype
from runtime.model.optimizer import StageOptimizer, build_optimizer
from runtime.model.stage import Stage
from runtime.protocol.failure_injection import Injector
from runtime.protocol.rendezvous import host_store
from runtime.replay.communication import CommunicationError
from runtime.worker.layer_frames import Ask, Even, FrameError, State, Step, read_frame, write_frame
from runtime.worker.layer_receiver import Follower
from runtime.worker.layer_sender import QUEUE_STATES, Source
from schedules.schedule import Worker
from tests.runtime.running import tiny

CPU = torch.device("cpu")
LEFT, RIGHT, COMER = Worker(0, 0), Worker(1, 0), Worker(2, 0)
LAYERS = (0, 3)
SOON = 10.0
CONFIGS = {"adamw": {}, "sgd": {"optimizer": "sgd"}, "momentum": {"optimizer": "sgd", "momentum": 0.9}}


def build(training: TrainingConfig, seed: int = 0) -> tuple[Stage, StageOptimizer]:
    config = tiny()
    model = model_for(config.model, seed, parameter_dtype("float64"), CPU)
    stage = Stage(0, LAYERS, model, first=True, last=False, loss_scale=1.0, config=config)
    return stage, build_optimizer(stage.modules, training)


class Member:
    """A worker that holds the stage, with its source."""

    def __init__(self, training: TrainingConfig, bytes_per_second: float | None = None) -> None:
        self.stage, self.optimizer = build(training)
        self.source = Source("127.0.0.1", bytes_per_second)
        self.layer_state, self.layer_gradients = self.optimizer.layer_state, self.optimizer.layer_gradients

    def holds(self, layer: int) -> bool:
        return layer in range(*LAYERS)

    def run(self, iteration: int, take: int = 0) -> None:
        """An iteration, of which nothing is known but its gradients; they differ with each `take`."""
        draw = torch.Generator().manual_seed(1000 * take + iteration)
        for gradient in self.stage.gradients():
            gradient.copy_(torch.randn(gradient.shape, dtype=gradient.dtype, generator=draw))
        self.source.before_step(iteration, self)
        self.optimizer.step(iteration)
        self.source.stepped(iteration, self)

    def go_back(self, committed: int, order: int) -> None:
        if self.optimizer.open_iteration is not None and self.optimizer.open_iteration > committed:
            self.optimizer.undo()
        self.optimizer.commit()
        self.source.ordered(order, committed)


class Team:
    """Two members and one who comes."""

    def __init__(self, training: TrainingConfig, bytes_per_second: float | None = None) -> None:
        self.members = {LEFT: Member(training, bytes_per_second), RIGHT: Member(training, bytes_per_second)}
        self.told: queue.Queue = queue.Queue()
        self.store, _ = host_store()
        self.follower = Follower(COMER, lambda _: build(training, seed=1), self.told.put,
                                 Injector((), COMER, self.store), training, CPU)

    def fetch(self, number: int = 1, order: int = 1, right: tuple[str, int] | None = None) -> None:
        """Have layers 0 and 2 come from the left, 1 from the right."""
        addresses = (LEFT, self.members[LEFT].source.address), (RIGHT, right or self.members[RIGHT].source.address)
        self.follower.begin(Fetch(
            number=number, order=order, moves=(Move(COMER, LEFT, 0), Move(COMER, RIGHT, 1), Move(COMER, LEFT, 2)),
            needs=((COMER, (0,)),), addresses=addresses))

    def until_asked(self) -> None:
        waiter = threading.Event()
        for _ in range(round(SOON / 0.01)):
            if all(member.source.asked for member in self.members.values()):
                return
            waiter.wait(0.01)
        raise AssertionError("nobody has asked")

    def run(self, iteration: int, take: int = 0) -> None:
        for member in self.members.values():
            member.run(iteration, take)

    def go_back(self, committed: int, order: int) -> None:
        for member in self.members.values():
            member.go_back(committed, order)

    def take(self, order: int, fetch: int = 1):
        return self.follower.take(Train(number=order, first_iteration=0, schedule=b"{}", fetch=fetch), lambda: None)


@pytest.fixture
def team(request):
    team = Team(tiny(**getattr(request, "param", {})).training)
    yield team
    team.follower.begin(Fetch(number=99, order=1))
    for member in team.members.values():
        member.source.close()


@pytest.mark.parametrize("team", CONFIGS.values(), ids=CONFIGS, indirect=True)
@pytest.mark.parametrize("committed", [4, 5])
def test_the_follower_ends_with_the_same_bits(team, committed):
    """An order ends in the middle, and an iteration is run again; the last order may come one step too late."""
    for iteration in range(2):
        team.run(iteration)
    team.fetch()
    team.until_asked()
    team.members[LEFT].run(2)
    team.members[RIGHT].run(2)
    team.run(3)
    team.go_back(2, order=2)
    for iteration in (3, 4, 5):
        team.run(iteration, take=1)
    assert team.told.get(timeout=SOON) == Followed(COMER, 1)
    team.go_back(committed, order=3)
    ((index, fetched),) = team.take(3).items()
    assert index == 0 and fetched.layers == {0, 1, 2}
    member = team.members[LEFT]
    for iteration in range(committed + 1, committed + 3):
        compare(fetched.optimizer, member.optimizer)
        member.run(iteration, take=2)
        for mine, theirs in zip(fetched.stage.gradients(), member.stage.gradients(), strict=True):
            assert not mine.any() or iteration > committed + 1
            mine.copy_(theirs)
        fetched.optimizer.step(iteration)
    compare(fetched.optimizer, member.optimizer)
    fetched.optimizer.undo()


def compare(one: StageOptimizer, other: StageOptimizer) -> None:
    for layer in range(*LAYERS):
        mine, theirs = one.layer_state(layer), other.layer_state(layer)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name


def test_what_is_fetched_for_one_order_is_not_taken_in_another(team):
    team.fetch()
    team.until_asked()
    team.run(0)
    assert team.told.get(timeout=SOON) == Followed(COMER, 1)
    assert team.take(1, fetch=0) == {}  # the order during which it is fetched
    team.fetch(number=2, order=2)  # heard before order 2 is
    team.go_back(0, order=2)
    assert team.take(2, fetch=1).keys() == {0}
    assert team.take(3, fetch=0) == {}


def test_a_source_that_goes_is_told_once(team):
    team.fetch()
    team.until_asked()
    team.run(0)
    assert team.told.get(timeout=SOON) == Followed(COMER, 1)
    team.members[RIGHT].source.close()
    assert team.told.get(timeout=SOON) == Unfollowed(COMER, 1)
    with pytest.raises(CommunicationError, match=r"fetching layers from worker 1\.0 failed: the connection was closed"):
        team.take(2)
    assert team.told.empty()


@pytest.mark.parametrize(("subject", "tensors", "message"), [
    (State(7, 0), {}, "it sent layer 7, for which it was not asked"),
    (State(1, 0), {"model.x": torch.zeros(1)}, "layer 1 has nothing named|is missing|is unknown"),
    (Step(1, 0), {"x": torch.zeros(1)}, "it sent gradients of layer 1 that do not fit"),
    (Ask((1,)), {}, "it asks, where it was asked"),
])
def test_nonsense_ends_a_fetch(subject, tensors, message, team, capfd):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        team.fetch(right=("127.0.0.1", listener.getsockname()[1]))
        connection, _ = listener.accept()
        with connection:
            assert read_frame(connection)[0] == Ask((1,))
            write_frame(connection, subject, tensors)
            assert team.told.get(timeout=SOON) == Unfollowed(COMER, 1)
    with pytest.raises(CommunicationError, match=message):
        team.take(2)


@pytest.mark.parametrize(("sent", "error", "message"), [
    (struct.pack("<I", 2**31), FrameError, "a header of 2147483648 bytes"),
    (struct.pack("<I", 4) + b"nope", FrameError, "an unreadable header: .*malformed"),
    (struct.pack("<I", 100) + b"{", ConnectionError, "closed"),
    (b"", ConnectionError, "closed"),
])
def test_frames_that_cannot_be_read(sent, error, message):
    one, other = socket.socketpair()
    with one, other:
        one.sendall(sent)
        one.close()
        with pytest.raises(error, match=message):
            read_frame(other)


def test_frames_carry_any_tensor():
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(), "b": torch.zeros(0, 3),
               "c": torch.tensor(7), "d": torch.ones(3, dtype=torch.bool)}
    one, other = socket.socketpair()
    with one, other:
        threading.Thread(target=write_frame, args=(one, Even(), tensors), daemon=True).start()
        subject, arrived = read_frame(other)
    assert subject == Even() and arrived.keys() == tensors.keys()
    assert all(torch.equal(arrived[name], tensor) and arrived[name].dtype == tensor.dtype
               for name, tensor in tensors.items())


def test_training_waits_where_too_much_is_queued_until_nothing_is(team):
    """As for one whose connection carries less than training makes; not for one that is gone."""
    member, waited = team.members[LEFT], []
    with socket.create_connection(member.source.address, SOON) as slow:
        write_frame(slow, Ask((0,)))
        while not member.source.asked:
            threading.Event().wait(0.01)
        iteration = 0
        member.run(0)
        member.source.wait_for_room(lambda: waited.append("never"))
        while not full(member.source):
            assert iteration < 10_000, "nothing is bounded"
            iteration += 1
            member.run(iteration)
        assert iteration + 1 >= QUEUE_STATES and not waited  # before the first step, AdamW has no state
        reader = threading.Thread(target=lambda: [read_frame(slow) for _ in range(iteration + 2)], daemon=True)

        def read() -> None:
            if not waited:
                reader.start()
            waited.append("a while")

        member.source.wait_for_room(read)
        assert waited and not full(member.source)
        reader.join(SOON)


def full(source: Source) -> bool:
    """Whether training would wait."""
    def refuse() -> None:
        raise TimeoutError

    try:
        source.wait_for_room(refuse)
    except TimeoutError:
        return True
    return False


def test_one_that_asks_for_what_is_not_held_is_refused(team):
    with socket.create_connection(team.members[LEFT].source.address, SOON) as connection:
        write_frame(connection, Ask((7,)))
        while not team.members[LEFT].source.asked:
            threading.Event().wait(0.01)
        team.members[LEFT].run(0)
        with pytest.raises(OSError):
            read_frame(connection)
