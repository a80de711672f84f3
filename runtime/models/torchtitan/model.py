"""Build a decoder of torchtitan as a `LayeredModel`: embedding, decoders, norm and head. Over the
ranks of a worker, layers are cut by torchtitan's own declarations, as DTensors."""

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
    """Model that `[model] torchtitan` names, a `LayeredModel`. Parameters have the same names as in
    torchtitan. Raises ConfigError if the model cannot be used."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed, self._dtype, self.device = seed, dtype, device
        with GENERATOR_LOCK:
            self._trainer = trainer_config(config)
            self._sample = build_meta_model(self._trainer, device)
        assert self._trainer.model_spec is not None
        self._config: Any = self._trainer.model_spec.model
        self.layers = len(self._config.layers) + 2
        places = self._trainer.training.seq_len
        if config.context > places:
            raise ConfigError(f"model.context is {config.context}; the model of {MODEL_KEY} has {places} positions")
        folder = config.options.get("checkpoint")
        self._folder = None if folder is None else Path(folder)
        self._kind = type("Layer", (_LayerMixin, type(self._sample)), {
            "_masks": _MaskCache() if needs_masks(self._trainer) else None})
        # The initial value is that of the head, which the embedding shares.
        self.shared = ((f"{self.layers - 1}.lm_head.weight", "0.tok_embeddings.weight"),) \
            if self._config.enable_weight_tying else ()

    def build(self, layer: int) -> nn.Module:
        """Build one layer, initialised by torchtitan or from a checkpoint.

        Raises IndexError if the model has no such layer, and ConfigError if the checkpoint does not
        fit or the layer cannot be cut over the ranks.
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
            if worker_group() is not None:
                require_no_experts(self._trainer, "tensor_parallel, which its experts are not cut for", "1")
                module = cut_over_ranks(module, self._build_on_meta(layer), device)
            # Hooks would split fused products in the state; the runtime needs each parameter as it is stepped.
            remove_state_hooks(module)
        module.again = functools.partial(self.build, layer)  # type: ignore[assignment]
        return module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy of tokens whose target is not `IGNORED_TARGET`."""
        return cross_entropy(output, target)

    def rename_for_checkpoint(self, layer: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's parameters by torchtitan's names; `state` has them by the layer's."""
        module = self._build_on_meta(layer)
        for name, parameter in list(module.named_parameters()):
            replace_tensor(module, name, nn.Parameter(state[name], requires_grad=parameter.requires_grad))
        return dict(module.state_dict())

    def _build_on_meta(self, layer: int) -> Any:
        """Build torchtitan's model on the meta device, with only the modules of one layer."""
        module = copy.copy(self._sample)
        first, last, index = layer == 0, layer == self.layers - 1, layer - 1
        with torch.device("meta"):
            module._modules = {
                "tok_embeddings": self._config.tok_embeddings.build() if first else None,
                "layers": type(self._sample.layers)({} if first or last else {
                    str(index): self._config.layers[index].build()}),
                "norm": self._config.norm.build() if last else None,
                "lm_head": self._config.lm_head.build() if last else None}
        module.__class__, module.enable_weight_tying = self._kind, False  # the runtime ties shared parameters
        for parameter in module.parameters():  # not buffers: rotation buffers are complex
            parameter.data = parameter.data.to(self._dtype)
        module.step_rules = count_tokens_in_backward(module)
        return module.train()


class _LayerMixin(nn.Module):
    """Mixin for torchtitan's decoder that takes positions and masks from the micro-batch."""

    _masks: "_MaskCache | None"
    again: Callable[[], nn.Module]
    """Function that builds the same layer on the meta device."""
    layers: nn.ModuleDict

    @property
    def compiled_part(self) -> nn.Module | None:
        """Decoder layer that is compiled, as in torchtitan; None if there is none."""
        return next(iter(self.layers.values()), None)

    def forward(self, given: Tensor, batch: Batch | None = None) -> Tensor:
        """Apply the layer to tokens or features. Both they and the result are whole on all
        ranks."""
        return as_plain_tensor(self._run_decoder(as_replicated(given, self), batch))

    def __deepcopy__(self, _: object) -> nn.Module:
        with torch.device("meta"):
            return copy_to_twin(self, self.again())

    def _run_decoder(self, given: Tensor, batch: Batch | None) -> Tensor:
        """Run torchtitan's decoder with the micro-batch's positions and, if needed, masks."""
        positions = getattr(batch, "positions", None)
        if not self.layers or self._masks is None:
            output: Tensor = super().forward(given, positions=positions)
        else:
            if positions is None:
                positions = torch.arange(given.shape[1], device=given.device).expand(given.shape[:2])
            output = super().forward(given, positions=positions,
                                     attention_masks=self._masks.get_masks(self, positions))
        return output


class _MaskCache:
    """Attention masks of the last micro-batch, which the layers of a worker share."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], Any] | None = None

    def get_masks(self, model: Any, positions: Tensor) -> Any:
        """Return the masks that `model` makes of positions [B, T], which restart in documents."""
        last = self._last
        if last is not None and last[0]() is positions:
            return last[1]
        with torch.no_grad():
            masks = model.get_attention_masks(positions)
        self._last = weakref.ref(positions), masks
        return masks


def _load_layer(module: nn.Module, folder: Path) -> None:
    """Load a layer's parameters from a checkpoint that torchtitan has written."""
    # Raises ConfigError if the checkpoint lacks them, or has them in another form.
    state = module.state_dict()
    try:
        load(state, checkpoint_id=folder, no_dist=True)
        module.load_state_dict(state)
    except (Exception, CheckpointException) as error:  # CheckpointException does not derive from Exception
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ConfigError(f"{MODEL_KEY}: model.options.checkpoint is {str(folder)!r}, of which "
                          f"{next(iter(state), 'nothing')!r} and others of its layer cannot be read: "
                          f"{first_line(cause)}; expected a folder step-N that torchtitan has written") from None


def cut_over_ranks(layer: nn.Module, parts: Any, device: torch.device) -> nn.Module:
    """Return this rank's part of a layer: `parts`, the layer on meta, cut and filled.

    All ranks build the same `layer`, from which it is filled, so nothing is sent. If `device` is
    the meta device, nothing is filled. Raises ConfigError if the layer cannot be cut.
    """
    group = worker_group()
    assert group is not None
    mesh = init_device_mesh("cpu" if device.type == "meta" else device.type, (group.size(),), mesh_dim_names=("tp",))
    parts.parallelize(ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=group.size(), pp=1, ep=1,
                                   world_size=group.size(), spmd_backend="partial_dtensor",
                                   _single_axis_meshes={"tp": mesh}))
    if device.type == "meta":
        return cast(nn.Module, parts)
    parts.to_empty(device=device)
    full_tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    with torch.no_grad():
        for name, part in (*parts.named_parameters(), *parts.named_buffers()):
            _local_part(part).copy_(_local_part(distribute_tensor(full_tensors[name], mesh, part.placements,
                                                                  src_data_rank=None)
                                                if isinstance(part, DTensor) else full_tensors[name]))
    return cast(nn.Module, parts)


def as_replicated(given: Tensor, module: nn.Module) -> Tensor:
    """Wrap features that are equal on all ranks in a DTensor, if `module` is cut."""
    placed: Placements = getattr(module, "placed", {})
    if not placed or not given.is_floating_point():
        return given
    mesh, _ = next(iter(placed.values()))
    return DTensor.from_local(given, mesh, [Replicate()], run_check=False)


def as_plain_tensor(found: Tensor) -> Tensor:
    """Return a DTensor as a plain tensor, whole on all ranks. A plain one as it is."""
    if not isinstance(found, DTensor):
        return found
    return found.full_tensor()


def copy_to_twin(layer: nn.Module, twin: nn.Module) -> nn.Module:
    """Give `twin`, the same layer on the meta device, a layer's parameters and buffers.

    Returns the twin. A deep copy would not do: torchtitan gives each module a forward that is bound
    to that module, not to its copy.
    """
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        replace_tensor(twin, name, tensor)
    twin.placed, twin.shards = layer.placed, layer.shards
    return twin


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
