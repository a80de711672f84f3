"""Digests of sets of tensors: a short text that is equal for equal parameters."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def parameter_digest(parameters: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes, independent of the order of the mapping."""
    return combined_digest({name: tensor_digest(name, tensor) for name, tensor in parameters.items()})


def tensor_digest(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 over one parameter's name, dtype, shape and bytes."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return the `parameter_digest` of parameters from the `tensor_digest` of each, by name, so that no process needs
    to hold all of them."""
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()
