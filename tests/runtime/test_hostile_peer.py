"""docs/threat-model.md, tried on a real run.

A peer can reach its ports, with and without the run's secret.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.runtime.coordinator.connections import server
from slipstream.runtime.coordinator.decisions import transition
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.moving.layer_messages import LayerRequest, encode_message
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.stop_signals import RunStopped
from slipstream.runtime.protocol.authentication import (
    GREETING_BYTES,
    HELLO_BYTES,
    PROTOCOL_VERSION,
    SECRET_VARIABLE,
    TAG_BYTES,
    Challenge,
    ChallengeAnswer,
    Secret,
    authenticate_connection,
)
from slipstream.runtime.protocol.channel import encode_frame
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_coordinator import (
    FetchFailed,
    Finished,
    Heartbeat,
    HeldState,
    Injected,
    IterationReport,
    JoinNode,
    JoinWorker,
    Note,
    Paused,
    StepValidated,
)
from slipstream.runtime.protocol.to_worker import EndOrder, Finish, Leave, StepFactor
from slipstream.runtime.run_folder import read_takeover_record
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import GRACE_SECONDS, TIMEOUT_SECONDS, assert_same_so_far
from tests.runtime.launchers import Launcher
from tests.runtime.running import free_port, log_of, losses_in, schedule_for, tiny
from tests.runtime.speaking import COMMON, SECRET, be_asked, framed
from tests.runtime.test_node_0_restart import LEAD, assert_right, killed

JOB = grid(2, 2, 2, more="optimizer = 1")
CONFIG = tiny(iterations=100_000)
ABSENT = Worker(1, 1)
OTHER = Secret(b"another secret, of a former run?")
SOON = 60.0
AFTERWARDS = 20
"""Iterations."""
Address = tuple[str, int]


class Victim:
    """A run, and a thread that attacks it while it trains.

    `said` are the lines of node 0.
    """

    def __init__(self, fork_server: ForkServer, out: Path, monkeypatch) -> None:
        self._fork_server, self._out = fork_server, out
        self.said: list[str] = []
        self.control: Address = ("", 0)
        self.layers: dict[Worker, Address] = {}
        self.errors: list[BaseException] = []
        ready = transition._handle_ready

        def watch(step, report) -> None:
            self.layers[report.worker] = report.addresses[0]
            ready(step, report)

        monkeypatch.setattr(transition, "_handle_ready", watch)

    def suffer(self, attack: Callable[["Victim"], None], secret: Secret | None = SECRET):
        """Its numbers are those of one process, and nobody was lost.

        It is ended some time after the attack is over.
        """
        thread, iterations_left = (
            threading.Thread(target=self._attack, args=(attack,)),
            [AFTERWARDS],
        )

        def begin(iteration: int, _: float) -> None:
            if iteration == 1:
                thread.start()
            elif iteration > 1 and not thread.is_alive():
                iterations_left[0] -= 1
                if iterations_left[0] == 0:
                    os.kill(os.getpid(), signal.SIGTERM)

        def announce(opened) -> None:
            self.control = opened.host, opened.port

        recoveries = []

        def tell(news: object) -> None:
            self.said.append(str(news))
            recoveries.extend([news] if isinstance(news, Recovery) else [])

        with pytest.raises(RunStopped):
            run(
                schedule_for(JOB, [str(ABSENT)]),
                CONFIG,
                out=self._out,
                progress=begin,
                fork_server=self._fork_server,
                resilience=Resilience(
                    checkpoint_every=None, heartbeat_timeout_seconds=TIMEOUT_SECONDS
                ),
                options=RunOptions(
                    announce=announce, secret=secret, grace_seconds=GRACE_SECONDS, notify=tell
                ),
            )
        thread.join(SOON)
        assert not thread.is_alive() and not self.errors, self.errors
        assert not recoveries
        assert_same_so_far(self._out, JOB, CONFIG)

    def _attack(self, attack: Callable[["Victim"], None]) -> None:
        try:
            attack(self)
        except BaseException as error:
            self.errors.append(error)

    @property
    def pids(self) -> list[int]:
        return [self._fork_server._process.pid, *self._fork_server.pids.values()]


@pytest.fixture
def victim(fork_server, tmp_path, monkeypatch):
    return Victim(fork_server, tmp_path, monkeypatch)


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, SOON)


def all_of(connection: socket.socket) -> bytes:
    """What the other end sends until it ends the connection.

    Raises TimeoutError where it does not.
    """
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(2**16):
            data += more
    return data


def answer_to(address: Address, data: bytes) -> bytes:
    with connect(address) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return all_of(connection)


def is_greeting(data: bytes) -> bool:
    """Whether this is all that a stranger hears: a greeting, or nothing."""
    return data == b"" or (data.startswith(PROTOCOL_VERSION) and len(data) == GREETING_BYTES)


def recorded(address: Address, purpose="control") -> bytes:
    """What one who knows the secret says to a greeting.

    One who listens hears it.
    """
    with connect(address) as connection:
        greeting = connection.recv(GREETING_BYTES, socket.MSG_WAITALL)
        answer = ChallengeAnswer(SECRET, purpose, greeting)
        first = (
            encode_frame(JoinWorker(ABSENT)).with_tag(answer.keys.sending)
            if purpose == "control"
            else b"".join(encode_message(answer.keys.sending, LayerRequest((0,))))
        )
        return answer.hello + first


def test_who_does_not_know_the_secret_hears_a_greeting_and_changes_nothing(victim, monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 600.0)  # the idle ones stay until all is done

    def attack(victim: Victim) -> None:
        layers = victim.layers[Worker(0, 0)]
        idle = [connect(victim.control) for _ in range(100)]
        for address, purpose in ((victim.control, "control"), (layers, "layers")):
            other = "layers" if purpose == "control" else "control"
            for data in (
                b"GET / HTTP/1.1\r\nHost: there\r\nUser-Agent: a browser that means no harm\r\n"
                b"\r\n",
                bytes(10**7),
                recorded(address, purpose),
                recorded(address, other),
            ):
                assert is_greeting(answer_to(address, data))
            with (
                connect(address) as connection,
                pytest.raises(Exception, match="its secret differs"),
            ):
                authenticate_connection(
                    connection,
                    OTHER,
                    purpose,
                    lambda tags: encode_frame(JoinNode(1)).with_tag(tags),
                )
        # Each hears what the other says.
        with connect(victim.control) as mirror, connect(victim.control) as other:
            greeting = mirror.recv(GREETING_BYTES, socket.MSG_WAITALL)
            other.recv(GREETING_BYTES, socket.MSG_WAITALL)
            other.sendall(greeting[len(PROTOCOL_VERSION) :] + bytes(TAG_BYTES))
            assert all_of(other) == b""
        half = connect(victim.control)
        half.sendall(b"a part of a hello")
        many = [connect(layers) for _ in range(100)]
        assert is_greeting(all_of(many[0])), "there are more than may be"
        victim.open = [*idle, half, *many]

    victim.suffer(attack)
    lines = [line for line in victim.said if "was cut off" in line]
    assert (
        5
        <= sum("it does not know the secret of this run" in line for line in lines)
        <= len(lines)
        <= 12
    )
    assert "it does not know the secret of this run" in log_of(victim._out)
    assert "connections sent no request" in log_of(victim._out)  # 100 of 64 that may


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"\xff" * 10**6,
        b'{"type":"IterationReport","worker":[1,1],"order":1,"iteration":"3"}',
        b'{"type":"Ready","worker":[1,1],"corpus":3,"address":["",1]}',
        b"[" * 10**6,
    ],
)
def test_a_peer_with_the_secret_that_makes_no_sense_ends_its_own_connection(body, victim):
    def attack(victim: Victim) -> None:
        with connect(victim.control) as connection:
            keys = authenticate_connection(
                connection, SECRET, "control", encode_frame(JoinWorker(ABSENT)).with_tag
            )
            with contextlib.suppress(ConnectionError):
                connection.sendall(framed(body, keys))
            all_of(connection)

    victim.suffer(attack)
    (line,) = [line for line in victim.said if "was cut off" in line]
    assert (
        line.startswith(f"worker {ABSENT} at 127.0.0.1:") and len(line) < 300 and "\n" not in line
    )


def test_a_peer_with_the_secret_that_says_what_cannot_be_ends_its_own_connection(victim):
    wrong = [
        IterationReport(ABSENT, 1, 10**9, 0.0, 0.1),
        StepValidated(1, StepFactor(10**9, None)),
        Paused(ABSENT, 1, HeldState(((0, 99),)), None, None),
        Paused(ABSENT, 1, HeldState(parts=((99, 0, 1),)), None, None),
        Paused(ABSENT, 1, HeldState(((0, 1),)), StepFactor(-7, 1.0), None),
        Injected(ABSENT, 10**6, 0.0),
    ]
    harmless = [
        Finished(ABSENT, 1, {"weight": "x"}),
        FetchFailed(ABSENT, 9),
        Heartbeat(),
        IterationReport(ABSENT, 9, 3, 0.0, 0.1),
        Note(ABSENT, "\x1b[2Jall is lost\n" + "x" * 10**5),
    ]

    def attack(victim: Victim) -> None:
        for message in wrong:
            with connect(victim.control) as connection:
                keys = authenticate_connection(
                    connection, SECRET, "control", encode_frame(JoinWorker(ABSENT)).with_tag
                )
                connection.sendall(
                    b"".join(
                        encode_frame(message_).with_tag(keys.sending)
                        for message_ in (*harmless, message)
                    )
                )
                all_of(connection)

    victim.suffer(attack)
    lines = [line for line in victim.said if "was cut off" in line]
    assert len(lines) == len(wrong)
    notes = [line for line in victim.said if "all is lost" in line]
    assert len(notes) == 1 and all(note.isprintable() and len(note) <= 1000 for note in notes)


def test_the_set_up_that_a_worker_is_sent_names_no_code_no_path_and_no_secret(victim):
    heard: list[bytes] = []

    def attack(victim: Victim) -> None:
        with connect(victim.control) as connection:
            authenticate_connection(
                connection, SECRET, "control", encode_frame(JoinWorker(ABSENT)).with_tag
            )
            heard.append(connection.recv(2**16))

    victim.suffer(attack)
    length = int.from_bytes(heard[0][:4], "little")
    setup = json.loads(heard[0][4 : 4 + length])
    assert setup.pop("type") == "WorkerSetup"
    keys = setup.keys() | setup["common"].keys()
    assert not keys & {"config", "model", "training", "out", "resume", "checkpoints", "secret"}
    assert str(victim._out) not in heard[0].decode(errors="replace")


@pytest.mark.slow
def test_the_secret_is_in_no_command_line_and_in_no_environment(tmp_path, monkeypatch):
    text = "a secret that is given by hand"
    monkeypatch.setenv(SECRET_VARIABLE, text)
    seen: list[bytes] = []

    def attack(victim: Victim) -> None:
        for pid in victim.pids:
            for what in ("cmdline", "environ"):
                seen.append(Path(f"/proc/{pid}/{what}").read_bytes())

    with ForkServer() as fork_server:
        Victim(fork_server, tmp_path, monkeypatch).suffer(attack, secret=SECRET)
    assert len(seen) >= 8 and any(seen)
    for hidden in (text.encode(), SECRET, SECRET.hex().encode()):
        assert not any(hidden in text_ for text_ in seen)


def test_a_worker_that_is_killed_while_strangers_knock_is_survived_all_the_same(victim):
    # Nothing of what they do holds up what has to be done: the run ends with one line, at once.

    def attack(victim: Victim) -> None:
        victim.open = [connect(victim.control) for _ in range(50)]
        os.kill(victim._fork_server.pids["0.1"], signal.SIGKILL)

    with pytest.raises(Exception, match=r"worker 0\.1 was killed by SIGKILL"):
        victim.suffer(attack)


class Impostor:
    """Answers in the place of a coordinator that has died.

    Each answer is wrong in another way.
    """

    def __init__(self, address: Address, epoch: int) -> None:
        self.listener = socket.create_server(address)
        self.listener.settimeout(SOON)
        self.epoch = epoch
        self.open: list[socket.socket] = []

    def __enter__(self) -> "Impostor":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (*self.open, self.listener):
            connection.close()

    def play(self) -> None:
        """Each trick with some worker, which ends the connection, or is left waiting."""
        for trick in (
            self.babble,
            self.say_nothing,
            self.know_another_secret,
            self.repeat_what_was_said,
            self.hang_up,
            self.be_the_last_one,
            self.be_an_earlier_one,
            self.give_orders_first,
        ):
            connection, _ = self.listener.accept()
            connection.settimeout(SOON)
            self.open.append(connection)
            if trick(connection) is not False:
                all_of(connection)

    def babble(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n" + bytes(1000))

    def say_nothing(self, _: socket.socket) -> bool:
        return False

    def know_another_secret(self, connection: socket.socket) -> None:
        challenge = Challenge(OTHER, "control")
        connection.sendall(challenge.greeting)
        connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        connection.sendall(bytes(TAG_BYTES))

    def repeat_what_was_said(self, connection: socket.socket) -> None:
        """By a coordinator that had the secret, to another connection."""
        challenge = Challenge(SECRET, "control")
        proof, keys = challenge.verify_hello(
            ChallengeAnswer(SECRET, "control", challenge.greeting).hello
        )
        connection.sendall(challenge.greeting)
        connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        connection.sendall(proof + encode_frame(self.setup(self.epoch + 1)).with_tag(keys.sending))

    def hang_up(self, connection: socket.socket) -> bool:
        be_asked(connection, "control")
        connection.close()
        return False

    def be_the_last_one(self, connection: socket.socket) -> None:
        self.answer(connection, self.setup(self.epoch))

    def be_an_earlier_one(self, connection: socket.socket) -> None:
        self.answer(connection, self.setup(1))

    def give_orders_first(self, connection: socket.socket) -> None:
        self.answer(
            connection, EndOrder(1), Finish(order=99, first_iteration=1, writers=()), Leave()
        )

    def answer(self, connection: socket.socket, *messages) -> None:
        keys = be_asked(connection, "control").keys
        connection.sendall(
            b"".join(encode_frame(message).with_tag(keys.sending) for message in messages)
        )

    def setup(self, epoch: int) -> WorkerSetup:
        return WorkerSetup(
            epoch=epoch, first_iteration=0, common=COMMON, store=Rendezvous("127.0.0.1", 1)
        )


def test_who_answers_in_the_place_of_a_dead_node_0_is_not_followed_and_the_next_node_0_is(tmp_path):
    """An impostor in a dead node 0's place is not followed, the next is.

    Who repeats to that one what a worker has said to the one before is not heard.
    """
    out, log = tmp_path / "out", tmp_path / "log"
    words = (out, 0, 1, "training@5", "", 240, "with the secret")
    first = Launcher(LEAD, out, free_port(), *words[2:], log=log)
    killed(first, log)
    behind = read_takeover_record(out)
    assert behind is not None
    address = behind.coordinator.host, behind.coordinator.port
    with Impostor(address, behind.epoch) as impostor:
        said = Challenge(SECRET, "control").greeting
        impostor.play()
        before = losses_in(out)
    second, heard = Launcher(LEAD, *words[:3], "", *words[4:], log=log), []
    hello = ChallengeAnswer(SECRET, "control", said)
    while second.poll() is None:
        with contextlib.suppress(OSError):
            heard.append(
                answer_to(
                    address,
                    hello.hello
                    + encode_frame(JoinWorker(Worker(0, 0))).with_tag(hello.keys.sending),
                )
            )
        time.sleep(0.005)
    log_text = log.read_text()
    assert (
        second.poll() == 0
        and "node 0 continues with the 4 workers" in log_text
        and "Traceback" not in log_text
    ), log_text
    assert (
        heard
        and all(map(is_greeting, heard))
        and "it does not know the secret of this run" in log_text
    )
    assert losses_in(out)[: len(before)] == before and "Traceback" not in log_of(out)
    assert_right(out)
