"""Layers on their way from worker to worker: a header in JSON, then the tensors; nothing is unpickled."""

import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from runtime.cluster.orders import Move
from runtime.replay.comm import CommunicationError, Epoch, Outgoing
from schedules.schedule import Worker

HEADER_BYTES = 2**24
"""No layer has names for more."""
TAGS = 2**20
"""Tags from here on are of layers; those below, of activations and gradients."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool)}


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a layer: name, dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _Sent:
    """What must live until it has arrived."""

    def __init__(self) -> None:
        self._leaving: list[Outgoing] = []

    def add(self, outgoing: Outgoing) -> None:
        self._leaving.append(outgoing)

    def wait(self) -> None:
        for outgoing in self._leaving:
            outgoing.wait()


def exchange_layers(epoch: Epoch, worker: Worker, moves: Sequence[Move],
                    state_of: Callable[[int], Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Send the layers that others lack, and receive those that `worker` lacks, from all sources at the same time.

    All members of the epoch pass the same moves. Returns the layers received, on the device that computes. Raises
    CommunicationError, also when a header makes no sense.
    """
    sent = _Sent()
    for move in moves:
        if move.source == worker:
            _send(epoch, move, state_of(move.layer), sent)
    mine = [move for move in moves if move.target == worker]
    sizes = [epoch.receive((8,), torch.uint8, move.source, _tag(move, 0)) for move in mine]
    headers = [epoch.receive((_size(size.take()),), torch.uint8, move.source, _tag(move, 1))
               for move, size in zip(mine, sizes, strict=True)]
    entries = [_read_header(header.take()) for header in headers]
    arriving = [[epoch.receive(entry.shape, _DTYPES[entry.dtype], move.source, _tag(move, 2)) for entry in layer]
                for move, layer in zip(mine, entries, strict=True)]
    states = {move.layer: {entry.name: tensor.take() for entry, tensor in zip(layer, tensors, strict=True)}
              for move, layer, tensors in zip(mine, entries, arriving, strict=True)}
    sent.wait()
    return states


def _send(epoch: Epoch, move: Move, state: Mapping[str, Tensor], sent: _Sent) -> None:
    entries = [_Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
               for name, tensor in state.items()]
    header = msgspec.json.encode(entries)
    parts = [(0, _bytes(struct.pack("<q", len(header)), epoch)), (1, _bytes(header, epoch)),
             *((2, tensor) for tensor in state.values())]
    for part, tensor in parts:
        sent.add(epoch.send(tensor, move.target, _tag(move, part)))


def _read_header(data: Tensor) -> list[_Entry]:
    try:
        entries = msgspec.json.decode(bytes(data.cpu().tolist()), type=list[_Entry])
    except msgspec.DecodeError as error:
        raise CommunicationError(f"a peer sent a layer with an unreadable header: {error}") from None
    for entry in entries:
        if entry.dtype not in _DTYPES or any(not 0 <= size < 2**40 for size in entry.shape):
            raise CommunicationError(f"a peer sent a tensor {entry.name!r} of {entry.dtype} {list(entry.shape)}")
    return entries


def _size(data: Tensor) -> int:
    (size,) = struct.unpack("<q", bytes(data.cpu().tolist()))
    if not 0 < size <= HEADER_BYTES:
        raise CommunicationError(f"a peer sent a layer with a header of {size} bytes")
    return int(size)


def _bytes(data: bytes, epoch: Epoch) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=epoch.device)


def _tag(move: Move, part: int) -> int:
    """Tensors of one layer share a tag: under one tag, they arrive in the order in which they were sent."""
    return TAGS + 3 * move.layer + part
