"""What is assumed of torchtitan beyond its public names.

Written for torchtitan 0.3.0. Replaced by: a pipelining function of torchtitan that is told which stages a rank has, and
dimensions that tell being in a pipeline from having a mesh over it.
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
    """Dimensions of one worker of a pipeline.

    All meshes are inside the worker, so there is none named `pp`. Nevertheless torchtitan is told that
    there are pipelines: it then asks for stages, and FSDP keeps what it has gathered.
    """

    workers: int = 1
    """Number of workers of all pipelines, by which rates are divided."""

    @property
    def pp_enabled(self) -> bool:
        """True: the model is in stages."""
        return True

    @property
    def non_data_parallel_size(self) -> int:
        """Number of devices by which the tokens that a device reads are divided: all of its batch rank."""
        return int(self.cp * self.tp * self.workers)


def split_model(model: nn.Module, stages: Iterable[int], count: int, parallelism: Any, layers: int) -> list[nn.Module]:
    """Return some of the stages of a model, as torchtitan splits it into `count`.

    Raises ValueError if the settings name parts of a model for another number of stages.
    """
    parts = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(
        count, layers, parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers)
    if len(parts) != count:
        raise ValueError(f"parallelism.module_fqns_per_model_part has {len(parts)} parts; expected {count}, one for "
                         "each stage of the plan")
    return [_split_module(model, parts[stage]) for stage in stages]


def pass_local_tensors(module: nn.Module, dims: ParallelDims, *, sequence_parallel: bool, is_first: bool,
                       is_last: bool) -> None:
    """Let a stage under tensor parallelism take and return this rank's part of a tensor.

    Between torchtitan's layers the rank has a part of the sequence, or all of it without sequence
    parallelism. The last stage returns whole logits. Nothing is done for torchtitan's `spmd_types`, in which all
    tensors are plain.
    """
    if not dims.tp_enabled or dims.spmd_backend != "partial_dtensor":
        return
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
    """Return the numbers of tokens that each expert of a stage has had since the last step, a tensor a layer.

    torchtitan's optimizer sums them over the ranks of the worker, moves the experts' biases by them, and sets them to
    0.
    """
    return [local(buffer) for name, buffer in module.named_buffers() if name.endswith("tokens_per_expert_E")]
