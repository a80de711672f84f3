"""A model's parameters on disk: one file a layer, `parameters/layer-NNNN.pt`, read without unpickling code."""

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from schedules.files import write_atomically


def layer_path(out: Path, layer: int) -> Path:
    """Where a run's folder keeps a layer."""
    return out / "parameters" / f"layer-{layer:04d}.pt"


def save_layer(out: Path, layer: int, state: Mapping[str, Tensor]) -> None:
    """Write a layer's state, whole or not at all. Raises OSError."""
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in state.items()}, buffer)
    write_atomically(layer_path(out, layer), buffer.getvalue())


def load_layer(out: Path, layer: int) -> dict[str, Tensor]:
    """Read a layer's state, on the CPU. Raises OSError."""
    state: dict[str, Tensor] = torch.load(layer_path(out, layer), map_location="cpu", weights_only=True)
    return state


def load_parameters(out: Path) -> dict[str, Tensor]:
    """All layers that a run's folder holds, by `layer.name`. Raises OSError."""
    return {f"{layer}.{name}": tensor
            for layer in sorted(int(path.stem.removeprefix("layer-")) for path in (out / "parameters").glob("*.pt"))
            for name, tensor in load_layer(out, layer).items()}
