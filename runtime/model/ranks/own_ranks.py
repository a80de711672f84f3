"""Own ranks: what a process that stands for several ranks of its worker has, as each of these ranks would have it.

A worker that has lost a rank may go on as fewer processes (`[training] degraded_ranks`). Its layers are then cut over
these only, so that each process has the shards of some neighbouring ranks in one. To other workers it is all of these
ranks: it passes, reduces and hands on layers as each of them would, and no other worker has to know.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.model.layers.shards import Shards, shard_of
from slipstream.runtime.model.passed import Form, TensorForm, TupleForm, Value, packed, rebuilt, tensors_of, unpacked


def joined_state(states: Sequence[Mapping[str, Tensor]], shards: Shards) -> dict[str, Tensor]:
    """A layer's state from that of each of these ranks. What all have alike is the first one's."""
    return {key: tensor if (shard := shard_of(key, tensor, shards)) is None
            else shard.joined(torch.stack([state[key] for state in states])) for key, tensor in states[0].items()}


class RankForms(NamedTuple):
    """What passes between layers at each of the ranks that a process stands for."""

    forms: Sequence[Form]
    ranks: int = 1


def carriers(value: Value, whole: Form, at_rank: Form, ranks: int) -> list[Tensor]:
    """What to send to so many ranks of another worker. `whole` is the value's form, `at_rank` that at a rank."""
    if ranks == 1:
        return [packed(value)]
    cut = [[tensor] * ranks if dim is None else list(tensor.chunk(ranks, dim))
           for tensor, dim in zip(tensors_of(value), cut_dims(whole, at_rank, ranks), strict=True)]
    return [packed(rebuilt(value, [by_rank[rank].contiguous() for by_rank in cut])) for rank in range(ranks)]


def carried(found: Sequence[Tensor], whole: Form, at_rank: Form) -> Value:
    """The value of what has come from each rank of another worker."""
    values = [unpacked(carrier, at_rank) for carrier in found]
    if len(values) == 1:
        return values[0]
    by_rank = zip(*map(tensors_of, values), strict=True)
    return rebuilt(values[0], [one[0] if dim is None else torch.cat(one, dim)
                               for one, dim in zip(by_rank, cut_dims(whole, at_rank, len(values)), strict=True)])


def cut_dims(whole: Form, at_rank: Form, ranks: int) -> list[int | None]:
    """The dimension along which each tensor of a value is cut over so many ranks; None where all have it whole.

    Raises ValueError where what they have does not make the whole.
    """
    found = []
    for one, other in zip(_tensor_forms(whole), _tensor_forms(at_rank), strict=True):
        differing = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if len(set(sizes)) > 1]
        if one.dtype != other.dtype or any(one.shape[dim] != ranks * other.shape[dim] for dim in differing) \
                or len(differing) > 1:
            raise ValueError(f"{list(other.shape)} is no equal part of {list(one.shape)}")
        found.append(differing[0] if differing else None)
    return found


def _tensor_forms(form: Form) -> Sequence[TensorForm]:
    return form.tensors if isinstance(form, TupleForm) else [form]
