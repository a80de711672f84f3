"""Use torchtitan where its public names do not reach.

Written for torchtitan 0.3.0. Replaced by: a pipelining function of torchtitan that is told which
stages a rank has, and dimensions by which a rank can be in a pipeline without a mesh over it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _split_module

from slipstream.runtime.torch_pipelining.state import local


@dataclass
class WorkerDims(ParallelDims):
    """Parallel dimensions of one worker, in torchtitan's form.

    All meshes are inside the worker, so there is none named `pp`. Nevertheless torchtitan is told
    that there are pipelines: it then asks for stages, and FSDP keeps what it has gathered.
    """

    workers: int = 1
    """Number of workers of all pipelines, by which torchtitan's rates are divided."""

    @property
    def pp_enabled(self) -> bool:
        """True: the model is divided into stages."""
        return True

    @property
    def non_data_parallel_size(self) -> int:
        """Number by which torchtitan divides rates: `cp` times `tp` times `workers`."""
        return int(self.cp * self.tp * self.workers)


def split_model(
    model: nn.Module, stages: Iterable[int], count: int, parallelism: Any, layers: int
) -> list[nn.Module]:
    """Return the modules of `stages` of a model that torchtitan splits into `count` stages.

    The model has `layers` layers, and `parallelism` is torchtitan's configuration of that name.
    Raises ValueError if `parallelism` names the parts of another number of stages.
    """
    # Parts that the user names, or torchtitan's even division.
    parts = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(
        count,
        layers,
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    if len(parts) != count:
        raise ValueError(
            f"parallelism.module_fqns_per_model_part has {len(parts)} parts; expected {count}, "
            "one for each stage of the plan"
        )
    return [_split_module(model, parts[stage]) for stage in stages]


def pass_local_tensors(
    module: nn.Module, dims: ParallelDims, *, sequence_parallel: bool, is_first: bool, is_last: bool
) -> None:
    """Let a stage under tensor parallelism take and return plain tensors of this rank.

    The tensors have the rank's part of the sequence, or all of it without sequence parallelism; the
    last stage returns whole logits. Does nothing without tensor parallelism, or for torchtitan's
    `spmd_types`, in which all tensors are plain.
    """
    if not dims.tp_enabled or dims.spmd_backend != "partial_dtensor":
        return
    # Placements of tensors between stages, and after the last one. Dimension 1 is the sequence.
    mesh, between = dims.get_mesh("tp"), [Shard(1) if sequence_parallel else Replicate()]
    after = [Replicate()] if is_last else between

    def wrap(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return DTensor.from_local(args[0], mesh, between, run_check=False), *args[1:]

    def unwrap(_: nn.Module, __: object, output: Any) -> Any:
        return output.redistribute(placements=after).to_local()

    if not is_first:
        module.register_forward_pre_hook(wrap)
    module.register_forward_hook(unwrap)


def expert_counts(module: nn.Module) -> list[Tensor]:
    """Return the buffers of each layer's numbers of tokens by expert since the last step."""
    # torchtitan's optimizer sums the numbers over the ranks of the worker, moves the biases of
    # experts by them, and sets them to 0.
    return [
        local(buffer)
        for name, buffer in module.named_buffers()
        if name.endswith("tokens_per_expert_E")
    ]
