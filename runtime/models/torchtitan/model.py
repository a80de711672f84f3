"""Build a decoder of torchtitan as a `LayeredModel`: embedding, decoders, norm and head.

Over the ranks of a worker, layers are cut as torchtitan declares it, into DTensors.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torchtitan.distributed import ParallelDims

from slipstream.runtime.config import ConfigError, ModelConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.calling import Batch
from slipstream.runtime.models.cross_entropy import cross_entropy
from slipstream.runtime.models.distributed_tensors import Placements
from slipstream.runtime.models.torchtitan.experts import count_tokens_in_backward
from slipstream.runtime.models.torchtitan.specification import (
    MODEL_KEY,
    build_meta_model,
    needs_masks,
    require_no_experts,
    trainer_config,
)
from slipstream.runtime.models.uninitialized import is_uninitialized
from slipstream.runtime.ranks.shards import replace_tensor
from slipstream.runtime.ranks.worker_group import worker_group
from slipstream.runtime.seeds import GENERATOR_LOCK, derive_seed, seeded
from slipstream.runtime.torch_private import remove_state_hooks


class TorchtitanModel:
    """`LayeredModel` for the model that `[model] torchtitan` names.

    Parameters have the same names as in torchtitan. Raises ConfigError if the model cannot be used.
    """

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._seed, self._dtype, self.device = seed, dtype, device
        with GENERATOR_LOCK:
            self._trainer = trainer_config(config)
            self._sample = build_meta_model(self._trainer, device)
        assert self._trainer.model_spec is not None
        self._config: Any = self._trainer.model_spec.model
        self.layers = len(self._config.layers) + 2
        places = self._trainer.training.seq_len
        if config.context > places:
            raise ConfigError(
                f"model.context is {config.context}; the model of {MODEL_KEY} has {places} "
                "positions"
            )
        folder = config.options.get("checkpoint")
        self._folder = None if folder is None else Path(folder)
        self._kind = type(
            "Layer",
            (_LayerMixin, type(self._sample)),
            {"_masks": _MaskCache() if needs_masks(self._trainer) else None},
        )
        self.shared: tuple[tuple[str, str], ...] = ()
        if self._config.enable_weight_tying:
            # The initial value is that of the head, which the embedding shares.
            self.shared = ((f"{self.layers - 1}.lm_head.weight", "0.tok_embeddings.weight"),)

    def build(self, layer: int) -> nn.Module:
        """Build one layer, initialised by torchtitan or from a checkpoint.

        No checkpoint is read within `building_uninitialized`, or on the meta device. Raises
        IndexError if there is no such layer, and ConfigError if the checkpoint does not fit, or if
        ranks would share a layer of a model with experts.
        """
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model of {self.layers}")
        device = torch.get_default_device()
        with seeded(derive_seed("parameters", self._seed, layer)):
            module: nn.Module = self._build_on_meta(layer)
            if device.type != "meta":
                module.to_empty(device=device)
                with torch.no_grad():
                    module.init_states()  # type: ignore[operator]
                if self._folder is not None and not is_uninitialized():
                    _load_layer(module, self._folder)
            # All ranks have the whole layer now, with equal values, and keep their parts.
            if worker_group() is not None:
                require_no_experts(
                    self._trainer, "tensor_parallel, which its experts are not cut for", "1"
                )
                module = cut_over_ranks(module, self._build_on_meta(layer), device)
            # Hooks would split fused products in the state; the runtime needs each parameter as it
            # is stepped.
            remove_state_hooks(module)
        module.again = functools.partial(self.build, layer)  # type: ignore[assignment]
        return module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy of tokens whose target is not `IGNORED_TARGET`."""
        return cross_entropy(output, target)

    def rename_for_checkpoint(self, layer: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename and split a layer's tensors as in torchtitan's checkpoints."""
        module = self._build_on_meta(layer)
        # torchtitan's hooks rename and split when the state is read.
        for name, parameter in list(module.named_parameters()):
            value = nn.Parameter(state[name], requires_grad=parameter.requires_grad)
            replace_tensor(module, name, value)
        return dict(module.state_dict())

    def _build_on_meta(self, layer: int) -> Any:
        """Build torchtitan's model on the meta device, with only the modules of one layer."""
        module = copy.copy(self._sample)
        first, last, index = layer == 0, layer == self.layers - 1, layer - 1
        with torch.device("meta"):
            decoders = {}
            if not first and not last:
                decoders[str(index)] = self._config.layers[index].build()
            module._modules = {
                "tok_embeddings": self._config.tok_embeddings.build() if first else None,
                "layers": type(self._sample.layers)(decoders),
                "norm": self._config.norm.build() if last else None,
                "lm_head": self._config.lm_head.build() if last else None,
            }
        # The runtime ties shared parameters.
        module.__class__, module.enable_weight_tying = self._kind, False
        for parameter in module.parameters():  # not buffers: rotation buffers are complex
            parameter.data = parameter.data.to(self._dtype)
        module.step_rules = count_tokens_in_backward(module)
        return module.train()


class _LayerMixin(nn.Module):
    """Mixin for torchtitan's decoder that takes positions and masks from the micro-batch."""

    _masks: "_MaskCache | None"
    again: Callable[[], nn.Module]
    """Function that builds the same layer again, on torch's default device."""
    layers: nn.ModuleDict

    @property
    def compiled_part(self) -> nn.Module | None:
        """Decoder layer that is compiled, as in torchtitan; None if there is none."""
        return next(iter(self.layers.values()), None)

    def forward(self, value: Tensor, batch: Batch | None = None) -> Tensor:
        """Apply the layer to tokens or features, of which each rank has all."""
        return as_plain_tensor(self._run_decoder(as_replicated(value, self), batch))

    def __deepcopy__(self, _: object) -> nn.Module:
        with torch.device("meta"):
            return copy_to_twin(self, self.again())

    def _run_decoder(self, value: Tensor, batch: Batch | None) -> Tensor:
        positions = getattr(batch, "positions", None)
        if not self.layers or self._masks is None:
            output: Tensor = super().forward(value, positions=positions)
            return output
        # Without documents, each row is one.
        if positions is None:
            places = torch.arange(value.shape[1], device=value.device)
            positions = places.expand(value.shape[:2])
        masks = self._masks.get_masks(self, positions)
        masked: Tensor = super().forward(value, positions=positions, attention_masks=masks)
        return masked


class _MaskCache:
    """Attention masks of the last micro-batch, which all layers of a worker use."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], Any] | None = None

    def get_masks(self, model: Any, positions: Tensor) -> Any:
        """Return the masks that `model` makes of positions in documents, [B, T]."""
        last = self._last
        if last is not None and last[0]() is positions:
            return last[1]
        with torch.no_grad():
            masks = model.get_attention_masks(positions)
        self._last = weakref.ref(positions), masks
        return masks


def _load_layer(module: nn.Module, folder: Path) -> None:
    # Raises ConfigError if the checkpoint lacks them, or has them in another form.
    state = module.state_dict()
    try:
        load(state, checkpoint_id=folder, no_dist=True)
        module.load_state_dict(state)
    # CheckpointException does not derive from Exception.
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause, _ = next(iter(error.failures.values()))
        raise ConfigError(
            f"{MODEL_KEY}: model.options.checkpoint is {str(folder)!r}, of which "
            f"{next(iter(state), 'nothing')!r} and others of its layer cannot be read: "
            f"{first_line(cause)}; expected a folder step-N that torchtitan has written"
        ) from None


def cut_over_ranks(layer: nn.Module, parts: Any, device: torch.device) -> nn.Module:
    """Cut `parts`, the layer without values, to this rank's part; fill and return it.

    `parts` is on the meta device. The values are from `layer`, which all ranks build alike, so
    nothing is sent. If `device` is the meta device, nothing is filled. Raises torchtitan's error if
    the layer cannot be cut.
    """
    group = worker_group()
    assert group is not None
    mesh = init_device_mesh(
        "cpu" if device.type == "meta" else device.type, (group.size(),), mesh_dim_names=("tp",)
    )
    # torchtitan's declarations cut, over an axis of tensor parallelism alone.
    parts.parallelize(
        ParallelDims(
            dp_replicate=1,
            dp_shard=1,
            cp=1,
            tp=group.size(),
            pp=1,
            ep=1,
            world_size=group.size(),
            spmd_backend="partial_dtensor",
            _single_axis_meshes={"tp": mesh},
        )
    )
    if device.type == "meta":
        return cast(nn.Module, parts)
    parts.to_empty(device=device)
    # Each rank takes its part of the values that it has anyway.
    full_tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    with torch.no_grad():
        for name, part in (*parts.named_parameters(), *parts.named_buffers()):
            source = full_tensors[name]
            if isinstance(part, DTensor):
                source = distribute_tensor(source, mesh, part.placements, src_data_rank=None)
            _local_part(part).copy_(_local_part(source))
    return cast(nn.Module, parts)


def as_replicated(value: Tensor, module: nn.Module) -> Tensor:
    """Return features as a replicated DTensor if `module` is cut, else the same tensor.

    Tokens, which are used as indices, are returned unchanged.
    """
    placed: Placements = getattr(module, "placed", {})
    if not placed or not value.is_floating_point():
        return value
    mesh, _ = next(iter(placed.values()))
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


def as_plain_tensor(tensor: Tensor) -> Tensor:
    """Return a plain tensor; a DTensor is joined from all ranks' parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_to_twin(layer: nn.Module, twin: nn.Module) -> nn.Module:
    """Give `twin`, the same layer on the meta device, the tensors of `layer`; return it."""
    # A deep copy would not do: torchtitan gives each module a forward that is bound to that module.
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        replace_tensor(twin, name, tensor)
    twin.placed, twin.shards = layer.placed, layer.shards
    return twin


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
