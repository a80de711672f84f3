"""Speaks to the coordinator and to layer senders.

It does so as workers do, and as those do who are none.
"""

import asyncio
import hashlib
import socket
from pathlib import Path

from slipstream.planner.job.file import Job
from slipstream.runtime.config import RunConfig
from slipstream.runtime.moving.layer_messages import encode_message, read_message
from slipstream.runtime.node_agent import NodeJob
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol.authentication import (
    GREETING_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    Challenge,
    ChallengeAnswer,
    ConnectionKeys,
    Secret,
    authenticate_connection,
)
from slipstream.runtime.protocol.channel import FrameParser, encode_frame
from slipstream.runtime.protocol.setup import CommonSettings, WorkerResilience
from slipstream.schedules.schedule import Worker

SECRET = Secret(b"the secret of tests has 32 bytes")
COMMON = CommonSettings(
    iterations=4,
    traced=0,
    nodes=1,
    transport="gloo",
    device="cpu",
    cuts=(0, 4),
    columns=((0, 1, 2, 3),),
    forms=(),
    resilience=WorkerResilience(
        heartbeat_timeout_seconds=0.5, checkpoint_every=None, verify_every=0
    ),
)
"""What all processes of a run of three workers are told.

Each holds all layers.
"""


class Talk:
    """A connection to the coordinator, in an event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: ConnectionKeys
    ) -> None:
        self.reader, self.writer, self.keys = reader, writer, keys
        self.frames = FrameParser(keys.receiving)

    def say(self, *messages) -> None:
        for message in messages:
            self.writer.write(encode_frame(message).with_tag(self.keys.sending))

    def say_body(self, body: bytes) -> None:
        """With the tag that belongs to it, whatever it is."""
        self.writer.write(framed(body, self.keys))


def framed(body: bytes, keys: ConnectionKeys) -> bytes:
    return (
        len(body).to_bytes(4, "little")
        + body
        + keys.sending.compute_next(hashlib.sha256(body).digest())
    )


async def talk(address, *first, secret: Secret = SECRET) -> Talk:
    """Connect, shake hands, and say the first messages."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    answer = ChallengeAnswer(secret, "control", await reader.readexactly(GREETING_BYTES))
    writer.write(answer.hello)
    spoken = Talk(reader, writer, answer.keys)
    spoken.say(*first)
    answer.verify_proof(await reader.readexactly(TAG_BYTES))
    return spoken


async def until(condition) -> None:
    """Wait for a condition; whoever calls sees to an end."""
    while not condition():
        await asyncio.sleep(0.005)


class Asking:
    """A connection between a layer sender and one who asks, at either end."""

    def __init__(self, connection: socket.socket, keys: ConnectionKeys) -> None:
        self.connection, self.keys = connection, keys
        self._raw = connection.makefile("rb", buffering=0)

    def send(self, message, tensors=None) -> None:
        for piece in encode_message(self.keys.sending, message, tensors):
            self.connection.sendall(piece)

    def receive(self):
        """The next message, and nothing of those behind it."""
        return read_message(self, self.keys.receiving)

    def read(self, size: int, /) -> bytes:
        data = b""
        while len(data) < size and (more := self._raw.read(size - len(data))):
            data += more
        return data

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()
        self.connection.close()


def ask(address: tuple[str, int], seconds: float, secret: Secret = SECRET) -> Asking:
    """Connect to a layer sender, and shake hands."""
    connection = socket.create_connection(address, seconds)
    keys = authenticate_connection(connection, secret, "layers", lambda _: b"")
    connection.settimeout(seconds)
    return Asking(connection, keys)


def be_asked(connection: socket.socket, purpose="layers", secret: Secret = SECRET) -> Asking:
    """The accepting end, as a layer sender or the coordinator."""
    challenge = Challenge(secret, purpose)
    connection.sendall(challenge.greeting)
    hello = b""
    while len(hello) < HELLO_BYTES:
        hello += connection.recv(HELLO_BYTES - len(hello))
    proof, keys = challenge.verify_hello(hello)
    connection.sendall(proof)
    return Asking(connection, keys)


def own_job(job: Job, config: RunConfig, out: Path, **more) -> NodeJob:
    """What a node that is not node 0 has on its own disk."""
    workers = [
        Worker(pipeline, column)
        for pipeline in range(job.pipelines)
        for column in range(job.stages)
    ]
    return NodeJob(
        settings=NodeSettings(config=config, secret=SECRET, out=str(out), **more), workers=workers
    )
