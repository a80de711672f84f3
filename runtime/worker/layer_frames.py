"""What goes from a worker to one that follows it, over a connection of their own: lengths, headers in JSON, tensors.

A layer's state comes first, then the gradients of every step that its source makes, so that the follower can make
the same steps (`runtime.worker.layer_sender`, `runtime.worker.layer_receiver`).
"""

import math
import socket
import struct
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from runtime.model.tensor_labels import MAX_BYTES, Label, labels_of, require_sane

CHUNK_BYTES = 2**20
"""Sent in one call: nobody who reads at all takes as long as a timeout over it."""
_LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """What a peer sent makes no sense. The message is one line."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A follower's wish."""

    layers: tuple[int, ...]


class State(msgspec.Struct, frozen=True, tag=True):
    """A layer with its optimizer's state, as it is before an iteration's step."""

    layer: int
    iteration: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """The gradients by which a layer was stepped in an iteration: summed over the workers, and scaled."""

    layer: int
    iteration: int


class Mark(msgspec.Struct, frozen=True, tag=True):
    """The source has gone back to, or is at, the last committed iteration, as an order begins."""

    order: int
    iteration: int


class Even(msgspec.Struct, frozen=True, tag=True):
    """There is nothing more to tell at this time."""


Subject = Ask | State | Step | Mark | Even


class _Header(msgspec.Struct, frozen=True):
    subject: Subject
    labels: tuple[Label, ...] = ()


def write_frame(connection: socket.socket, subject: Subject, tensors: Mapping[str, Tensor] | None = None,
                sent: Callable[[int], None] = lambda _: None) -> None:
    """Send; tensors of any device. `sent` is called with a number of bytes whenever some have gone. Raises OSError."""
    header = msgspec.json.encode(_Header(subject, labels_of(tensors or {})))
    connection.sendall(_LENGTH.pack(len(header)) + header)
    for tensor in (tensors or {}).values():
        if tensor.numel():
            data = memoryview(_bytes(tensor.detach().cpu().contiguous()))
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start:start + CHUNK_BYTES]
                connection.sendall(chunk)
                sent(len(chunk))


def read_frame(connection: socket.socket) -> tuple[Subject, dict[str, Tensor]]:
    """Wait for the next frame; tensors come to host memory. Raises FrameError, and OSError when the peer is gone."""
    (length,) = _LENGTH.unpack(_read(connection, bytearray(_LENGTH.size)))
    if not 0 < length <= MAX_BYTES:
        raise FrameError(f"a peer sent a header of {length} bytes")
    try:
        header = msgspec.json.decode(_read(connection, bytearray(length)), type=_Header)
        require_sane(header.labels)
    except ValueError as error:
        raise FrameError(f"a peer sent an unreadable header: {error}") from None
    tensors = {}
    for label in header.labels:
        tensor = torch.empty(label.shape, dtype=label.torch_dtype)
        if math.prod(label.shape):
            _read(connection, _bytes(tensor))
        tensors[label.name] = tensor
    return header.subject, tensors


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor of host memory, as it lies there."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _read(connection: socket.socket, room: bytearray | memoryview) -> bytearray | memoryview:
    view, place = memoryview(room), 0
    while place < len(view):
        count = connection.recv_into(view[place:])
        if count == 0:
            raise ConnectionError("the connection was closed")
        place += count
    return room
