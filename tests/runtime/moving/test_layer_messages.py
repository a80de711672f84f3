"""Messages between layer senders and receivers: any tensor, and bytes that are no message."""

import hashlib
import io
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from slipstream.runtime.moving.layer_messages import (
    BLOB_BYTES,
    MessageError,
    UpToDate,
    encode_message,
    read_message,
)
from slipstream.runtime.protocol.authentication import ConnectionKeys, TagSequence
from tests.runtime.running import command_environment
from tests.runtime.speaking import Asking

KEY = b"of tests"
HEADER = b'[{"type":"UpToDate"},1]'


def keys() -> ConnectionKeys:
    return ConnectionKeys(TagSequence(KEY), TagSequence(KEY))


def tagged(length: str, body: bytes, tags: TagSequence) -> bytes:
    return struct.pack(length, len(body)) + body + tags.compute_next(hashlib.sha256(body).digest())


def header(body: bytes) -> Callable[[TagSequence], bytes]:
    return lambda tags: tagged("<I", body, tags)


def blob(body: bytes) -> Callable[[TagSequence], bytes]:
    return lambda tags: tagged("<I", HEADER, tags) + struct.pack("<Q", len(body)) + body


@pytest.mark.parametrize(
    ("sent", "error", "reason"),
    [
        (lambda _: struct.pack("<I", 2**31), MessageError, "a header of 2147483648 bytes"),
        (lambda _: struct.pack("<I", 0), MessageError, "a header of 0 bytes"),
        (
            lambda _: tagged("<I", HEADER, TagSequence(b"another key")),
            MessageError,
            "a message was changed on its way",
        ),
        (
            lambda tags: (
                tagged("<I", HEADER[:-2] + b"0]", tags)[:-32]
                + tagged("<I", HEADER, TagSequence(KEY))[-32:]
            ),
            MessageError,
            "changed on its way",
        ),
        (header(b"nope"), MessageError, "an unreadable header: .*malformed"),
        (header(b"[" * 10_000), MessageError, "an unreadable header"),
        (header(b'[{"type":"UpToDate"},-1e99]'), MessageError, "an unreadable header"),
        (
            lambda tags: header(HEADER)(tags) + struct.pack("<Q", 2**63),
            MessageError,
            f"tensors of {2**63} bytes",
        ),
        (blob(b"pickled!!"), MessageError, "sent no tensors: "),
        (lambda tags: blob(b"shortened")(tags)[:-1], ConnectionError, "closed"),
        (lambda _: struct.pack("<I", 100) + b"{", ConnectionError, "closed"),
        (lambda _: b"", ConnectionError, "closed"),
    ],
)
def test_bytes_that_are_no_message(sent, error, reason):
    sender, other = socket.socketpair()
    with sender, Asking(other, keys()) as reading:
        sender.sendall(sent(TagSequence(KEY)))
        sender.close()
        with pytest.raises(error, match=reason) as caught:
            reading.receive()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_messages_carry_any_tensor():
    whole = torch.arange(BLOB_BYTES // 4 + 1, dtype=torch.float32)
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "b": torch.zeros(0, 3),
        "c": torch.tensor(7),
        "d": torch.ones(3, dtype=torch.bool),
        "large": whole,
        "tied": whole,
        "part": whole[3:5],
        "e": torch.tensor(1.0, dtype=torch.bfloat16),
    }
    sender, other = socket.socketpair()
    with Asking(sender, keys()) as sending, Asking(other, keys()) as reading:
        threading.Thread(target=sending.send, args=(UpToDate(), tensors), daemon=True).start()
        message, arrived = reading.receive()
    assert message == UpToDate() and arrived.keys() == tensors.keys()
    assert all(
        torch.equal(arrived[name], tensor)
        and arrived[name].dtype == tensor.dtype
        and arrived[name].shape == tensor.shape
        for name, tensor in tensors.items()
    )


def test_no_more_than_a_blob_lies_in_memory_twice():
    tensors = {str(number): torch.zeros(BLOB_BYTES // 8) for number in range(8)}
    read = []

    class Watched(io.BytesIO):
        def read(self, size=-1, /):
            read.append(size)
            return super().read(size)

    read_message(
        Watched(b"".join(encode_message(TagSequence(KEY), UpToDate(), tensors))), TagSequence(KEY)
    )
    assert sum(read) > 4 * BLOB_BYTES and max(read) < 1.1 * BLOB_BYTES


def test_several_threads_may_be_the_first_to_read_a_message():
    # msgspec crashes where two threads are the first to decode a type: the module decodes each
    # itself, at import.
    program = (
        "import io, threading\n"
        "from slipstream.runtime.protocol.authentication import TagSequence\n"
        "from slipstream.runtime.moving.layer_messages import OrderBegins, encode_message, "
        "read_message\n"
        "data, start = b''.join(encode_message(TagSequence(b'key'), OrderBegins(1, 2))), "
        "threading.Barrier(8)\n"
        "def read():\n"
        "    start.wait()\n"
        "    assert read_message(io.BytesIO(data), TagSequence(b'key')) == (OrderBegins(1, 2), "
        "{})\n"
        "threads = [threading.Thread(target=read) for _ in range(8)]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=240, env=command_environment()
    )
    assert done.returncode == 0 and not done.stderr
