"""Encode messages between workers when layers move: a JSON header, then safetensors.

The tensors come in pieces of some MB, called blobs. The header has its length before it and its tag
behind it (`runtime.protocol.authentication`): nothing of it is used before the tag has been
checked. Tensors have no tags, like those that are sent in training: docs/threat-model.md.

A worker that needs layers, or parts of them, sends a `LayerRequest` to a worker that holds them,
which answers with a `LayerPart` for each. While training continues, the sender also sends a
`PartStepped` for each of its steps, so that the receiver can make the same steps
(`runtime.moving.layer_sender`, `runtime.moving.layer_receiver`).
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from typing import Annotated

import msgspec
from msgspec import Meta
from torch import Tensor

from slipstream.runtime.protocol.authentication import TAG_BYTES, AuthenticationError, TagSequence
from slipstream.runtime.tensor_codec import TensorError, decode_tensors, encode_tensors
from slipstream.schedules.schedule import Worker

MAX_HEADER_BYTES = 2**16
MAX_BLOB_BYTES = 2**36
"""Largest size of a blob, and so of a tensor, that is accepted."""
BLOB_BYTES = 2**24
"""Size up to which small tensors share a blob, because reading copies a blob."""
_HEADER_LENGTH = struct.Struct("<I")
_BLOB_LENGTH = struct.Struct("<Q")

_Number = Annotated[int, Meta(ge=-1, le=2**62)]
_Layer = Annotated[int, Meta(ge=0, le=2**20)]
_Elements = Annotated[int, Meta(ge=0, le=2**62)]


class MessageError(ValueError):
    """Error, in one line, for an invalid message of a peer."""


class PartRange(msgspec.Struct, frozen=True, array_like=True):
    """Elements from `start` to before `stop` of a layer, in the order of its parameters."""

    layer: _Layer
    start: _Elements
    stop: _Elements
    state: bool
    """True if the optimizer's state is included, False for parameters alone."""


class LayerRequest(msgspec.Struct, frozen=True, tag=True):
    """Request for parts of layers: the first and only message of a receiver."""

    parts: Annotated[tuple[PartRange, ...], Meta(max_length=2**16)]
    order: _Number | None = None
    """Order for which all workers wait. None: they train, and later steps are sent as well."""
    receiver: Worker | None = None
    """Worker that requests the parts; None: unknown."""


class LayerPart(msgspec.Struct, frozen=True, tag=True):
    """Message with a part of a layer, as it is before the step of `iteration`."""

    part: PartRange
    iteration: _Number


class PartStepped(msgspec.Struct, frozen=True, tag=True):
    """Message with the gradients by which a part was stepped in `iteration`.

    A part without optimizer state comes with its parameters after the step instead.
    """

    part: PartRange
    iteration: _Number


class OrderBegins(msgspec.Struct, frozen=True, tag=True):
    """Message that `order` begins, after the last committed iteration, `iteration`."""

    order: _Number
    iteration: _Number


class UpToDate(msgspec.Struct, frozen=True, tag=True):
    """Message that all messages which the sender had queued have been sent."""


Message = LayerRequest | LayerPart | PartStepped | OrderBegins | UpToDate


class _Header(msgspec.Struct, frozen=True, array_like=True):
    message: Message
    blobs: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Number of pieces of safetensors that follow, each with its length before it."""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Header)
# msgspec crashes if two threads are the first to decode a type at the same moment, so each type is
# decoded once here.
for _message in (
    LayerRequest((PartRange(0, 0, 0, True),)),
    LayerPart(PartRange(0, 0, 0, True), 0),
    PartStepped(PartRange(0, 0, 0, True), 0),
    OrderBegins(0, 0),
    UpToDate(),
):
    _DECODER.decode(_ENCODER.encode(_Header(_message)))


def encode_message(
    tags: TagSequence, message: Message, tensors: Mapping[str, Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a message in buffers: header, next tag of `tags`, tensors.

    The tensors may be on any device. A buffer may be a tensor's own memory, which must not change
    until it is sent.
    """
    batches = _group_tensors(tensors or {})
    header = _ENCODER.encode(_Header(message, len(batches)))
    tag = tags.compute_next(hashlib.sha256(header).digest())
    yield _HEADER_LENGTH.pack(len(header)) + header + tag
    for batch in batches:
        pieces = encode_tensors(batch)
        yield _BLOB_LENGTH.pack(sum(map(len, pieces)))
        yield from pieces


def read_message(stream: BufferedIOBase, tags: TagSequence) -> tuple[Message, dict[str, Tensor]]:
    """Return the next message, and its tensors by name, in host memory.

    The message must have the next one of `tags`, those of the sender's direction of the connection.
    Raises MessageError for an invalid message, and OSError when the sender is gone.
    """
    # Nothing of the header is used before its length and its tag have been checked.
    (length,) = _HEADER_LENGTH.unpack(_read_exactly(stream, _HEADER_LENGTH.size))
    length = _check_length(length, MAX_HEADER_BYTES, "a header")
    header = _decode_header(_read_tagged(stream, length, tags))
    tensors: dict[str, Tensor] = {}
    for _ in range(header.blobs):
        (length,) = _BLOB_LENGTH.unpack(_read_exactly(stream, _BLOB_LENGTH.size))
        blob = _read_exactly(stream, _check_length(length, MAX_BLOB_BYTES, "tensors"))
        try:
            tensors |= decode_tensors(blob)
        except TensorError as error:
            raise MessageError(f"a peer sent {error}") from None
    return header.message, tensors


def _decode_header(data: bytes) -> _Header:
    try:
        return _DECODER.decode(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a peer sent an unreadable header: {error}") from None


def _check_length(length: int, maximum: int, what: str) -> int:
    if not 0 < length <= maximum:
        raise MessageError(f"a peer sent {what} of {length} bytes; expected 1 to {maximum}")
    return length


def _read_tagged(stream: BufferedIOBase, size: int, tags: TagSequence) -> bytes:
    data = _read_exactly(stream, size)
    tag = _read_exactly(stream, TAG_BYTES)
    try:
        tags.verify_next(tag, hashlib.sha256(data).digest())
    except AuthenticationError as error:
        raise MessageError(str(error)) from None
    return data


def _read_exactly(stream: BufferedIOBase, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ConnectionError("the connection was closed")
    return data


def _group_tensors(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    # A large tensor has a blob of its own, which is sent without a copy.
    batches: list[dict[str, Tensor]] = []
    size = BLOB_BYTES
    for name, tensor in tensors.items():
        if size + tensor.nbytes > BLOB_BYTES:
            batches.append({})
            size = 0
        batches[-1][name] = tensor
        size += tensor.nbytes
    return batches
