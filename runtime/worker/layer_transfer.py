"""Layers on their way from worker to worker within an epoch: a header in JSON, then the tensors."""

import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from runtime.model.tensor_labels import MAX_BYTES, Label, labels_of, require_sane
from runtime.protocol.to_worker import Move
from runtime.replay.communication import CommunicationError, Communicator, Outgoing
from schedules.schedule import Worker

TAGS = 2**20
"""Tags from here on are of layers; those below, of activations and gradients."""


def exchange_layers(epoch: Communicator, worker: Worker, moves: Sequence[Move],
                    state_of: Callable[[int], Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Send the layers that others lack, and receive those that `worker` lacks, from all sources at the same time.

    All members of the epoch pass the same moves. Returns the layers received, on the device that computes. Raises
    CommunicationError, also when a header makes no sense.
    """
    leaving = [outgoing for move in moves if move.source == worker
               for outgoing in _send(epoch, move, state_of(move.layer))]
    mine = [move for move in moves if move.target == worker]
    sizes = [epoch.receive((8,), torch.uint8, move.source, _tag(move, 0)) for move in mine]
    headers = [epoch.receive((_size(size.take()),), torch.uint8, move.source, _tag(move, 1))
               for move, size in zip(mine, sizes, strict=True)]
    labels = [_read_header(header.take()) for header in headers]
    arriving = [[epoch.receive(label.shape, label.torch_dtype, move.source, _tag(move, 2)) for label in layer]
                for move, layer in zip(mine, labels, strict=True)]
    states = {move.layer: {label.name: tensor.take() for label, tensor in zip(layer, tensors, strict=True)}
              for move, layer, tensors in zip(mine, labels, arriving, strict=True)}
    for outgoing in leaving:
        outgoing.wait()
    return states


def _send(epoch: Communicator, move: Move, state: Mapping[str, Tensor]) -> list[Outgoing]:
    """What must live until it has arrived."""
    header = msgspec.json.encode(labels_of(state))
    parts = [(0, _bytes(struct.pack("<q", len(header)), epoch)), (1, _bytes(header, epoch)),
             *((2, tensor) for tensor in state.values())]
    return [epoch.send(tensor, move.target, _tag(move, part)) for part, tensor in parts]


def _read_header(data: Tensor) -> tuple[Label, ...]:
    try:
        labels = msgspec.json.decode(bytes(data.cpu().tolist()), type=tuple[Label, ...])
        require_sane(labels)
    except msgspec.DecodeError as error:
        raise CommunicationError(f"a peer sent a layer with an unreadable header: {error}") from None
    except ValueError as error:
        raise CommunicationError(str(error)) from None
    return labels


def _size(data: Tensor) -> int:
    (size,) = struct.unpack("<q", bytes(data.cpu().tolist()))
    if not 0 < size <= MAX_BYTES:
        raise CommunicationError(f"a peer sent a layer with a header of {size} bytes")
    return int(size)


def _bytes(data: bytes, epoch: Communicator) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=epoch.device)


def _tag(move: Move, part: int) -> int:
    """Tensors of one layer share a tag: under one tag, they arrive in the order in which they were sent."""
    return TAGS + 3 * move.layer + part
