"""Extend torch's own pipeline stage and runtime by what re-routed schedules need.

All private names of torch.distributed.pipelining and of FSDP that are used are here.

Torch assumes that a stage is on one rank, which runs all micro-batches of one pipeline. What is
overridden: the other end of a transfer depends on the micro-batch as well; a stage runs only some
micro-batches; a tensor stays on a rank only if the worker's row of cells has no transfer for it;
losses are kept by micro-batch. Tensors are carried by `GenerationSession` instead of a group of
torch.distributed. Written for torch 2.13; docs/neighbours.md says what differs from 2.11 to 2.14.
Replaced by: torch's own classes, once a stage may run some of the micro-batches and asks for its
peers by micro-batch, and a call of FSDP that drops what it keeps of an iteration.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from slipstream.runtime.replay.transfers import CommunicationError, IncomingTensor, OutgoingTensor
from slipstream.runtime.torch_pipelining.place import Form, Place
from slipstream.schedules.rows import Cell

Loss = Callable[..., Tensor]
logging.getLogger(_PipelineScheduleRuntime.__module__).addFilter(  # torch prints the row otherwise
    lambda _: not isinstance(sys.exc_info()[1], CommunicationError)
)
MAX_TENSORS = 64
"""Largest number of tensors that pass between two stages for a micro-batch."""


class RoutedStage(PipelineStage):
    """Torch's stage, except that each micro-batch may come from and go to another worker."""

    def __init__(self, module: nn.Module, stage: int, place: Place, device: torch.device) -> None:
        self.place = place
        self._cells = frozenset(place.routes.rows[place.worker])
        self._arriving: dict[tuple[str, int], list[IncomingTensor | Tensor | None]] = {}
        self._leaving: list[OutgoingTensor] = []
        self.forms_before: tuple[Form, ...] | None = None
        self.forms_after: tuple[Form, ...] = ()
        self._build(module, stage, device)

    def set_forms(self, before: tuple[Form, ...], after: tuple[Form, ...]) -> None:
        """Set the forms of the tensors before and behind the stage, which torch would infer."""
        self.forms_before, self.forms_after = before, after
        self._build(
            self.submod,
            self.stage_index,
            self.device,
            _examples(before, gradients=not self.is_first),
            _examples(after),
        )

    def _build(
        self,
        module: nn.Module,
        stage: int,
        device: torch.device,
        before: tuple[Tensor, ...] | None = None,
        after: tuple[Tensor, ...] | None = None,
    ) -> None:
        """Let torch build its stage, as the only one of a process group."""
        stages = self.place.routes.stages
        # Torch refuses more ranks than stages.
        count = max(stages, distributed.get_world_size())
        super().__init__(module, stage, count, device, input_args=before, output_args=after)
        self.num_stages, self.group_rank, self.group_size = stages, 0, 1

    def wait_for_sends(self) -> None:
        """Wait until sent tensors may be reused, with errors as in `Mates.deferring_errors`."""
        while self._leaving:
            with self.place.mates.deferring_errors():
                self._leaving.pop().wait()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to receive the input of F; return no operation for torch to run."""
        return self._receive("F", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to send the output of F; return no operation for torch to run.

        Raises ValueError if a tensor has another form than for the first micro-batch.
        """
        return self._send("F", fwd_chunk_id, self.fwd_cache[fwd_chunk_id][0])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to receive the gradient of the output; return no operation for torch to run."""
        return self._receive("B", bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to send the gradient of the input; return no operation for torch to run.

        Raises ValueError if a tensor has another form than for the first micro-batch.
        """
        return self._send("B", bwd_chunk_id, self.bwd_cache.pop(bwd_chunk_id))

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient of the stage's input, for the stage before on this worker."""
        # If another worker gets it, it stays stored until `get_bwd_send_ops`.
        if Cell(self.stage_index, "SEND_B", mb_index) in self._cells:
            return self.bwd_cache[mb_index]
        return super().get_local_bwd_output(mb_index)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take a micro-batch's activation from the stage before, if it stays on this worker."""
        if Cell(self.stage_index - 1, "SEND_F", mb_index) not in self._cells:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradient that the next stage computed here, unless it goes to another worker."""
        if Cell(self.stage_index + 1, "SEND_B", mb_index) not in self._cells:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """Run F of a micro-batch once its input has arrived."""
        # Torch does not wait where this worker has the stage before.
        infos = self.args_recv_info[fwd_chunk_id]
        self._fill(infos, "F", fwd_chunk_id)
        if not self.is_first:  # torch 2.11 would do so with buffers of its own alone
            for info, (_, _, has_gradient) in zip(infos, self.forms_before or (), strict=True):
                assert info.buffer is not None  # it has arrived
                info.buffer.requires_grad_(has_gradient)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **how)
        _empty(infos)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **how: Any) -> None:
        """Run I or B of a micro-batch once the gradient of its output has arrived."""
        infos = self.grad_recv_info[bwd_chunk_id]
        self._fill(infos, "B", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **how)
        _empty(infos)

    def _receive(self, letter: str, microbatch: int) -> list[distributed.P2POp]:
        step, forms = (-1, self.forms_before or ()) if letter == "F" else (1, self.forms_after)
        peer = self.stage_index + step
        source = self.place.routes.worker_with(peer, f"SEND_{letter}", microbatch)
        arriving: list[IncomingTensor | Tensor | None] = []
        for at, (shape, dtype, has_gradient) in enumerate(forms):
            tag = self._tag(self.stage_index, letter, microbatch, at)
            # After a deferred error all goes on, on zeros.
            arriving.append(None)
            if letter == "F" or has_gradient:
                with self.place.mates.deferring_errors():
                    arriving[at] = self.place.session.receive(shape, dtype, source, tag)
                if arriving[at] is None:
                    arriving[at] = torch.zeros(shape, dtype=dtype, device=self.device)
        self._arriving[letter, microbatch] = arriving
        return []

    def _send(
        self, letter: str, microbatch: int, tensors: Sequence[Tensor | None]
    ) -> list[distributed.P2POp]:
        step, forms = (1, self.forms_after) if letter == "F" else (-1, self.forms_before or ())
        peer = self.stage_index + step
        target = self.place.routes.worker_with(peer, f"RECV_{letter}", microbatch)
        for at, (form, tensor) in enumerate(zip(forms, tensors, strict=True)):
            shape, dtype, has_gradient = form
            if letter == "B" and not has_gradient:
                continue
            if tensor is None:
                tensor = torch.zeros(shape, dtype=dtype, device=self.device)
            # The receiver allocates by the form.
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"stage {self.stage_index} made a tensor of {tuple(tensor.shape)}, "
                    f"{tensor.dtype}, for micro-batch {microbatch}; expected {shape}, "
                    f"{dtype}, as for the first micro-batch"
                )
            tag = self._tag(peer, letter, microbatch, at)
            with self.place.mates.deferring_errors():
                self._leaving.append(self.place.session.send(tensor, target, tag))
        return []

    def _fill(self, infos: Sequence[Any], letter: str, microbatch: int) -> None:
        for info, tensor in zip(infos, self._arriving.pop((letter, microbatch), ()), strict=False):
            info.buffer = self._await(tensor) if isinstance(tensor, IncomingTensor) else tensor

    def _await(self, tensor: IncomingTensor) -> Tensor:
        """Return a tensor once it has arrived; zeros after an error, which is raised later."""
        arrived: Tensor | None = None
        with self.place.mates.deferring_errors():
            arrived = tensor.wait_for_tensor()
        return torch.zeros_like(tensor.payload, device=self.device) if arrived is None else arrived

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **how: Any) -> Any:
        """Let torch prepare to receive one micro-batch, and copy its `args_recv_info` for all."""
        # Torch would allocate buffers for the micro-batches of all pipelines.
        outputs = super()._prepare_forward_infra(1, *args, **how)
        self.args_recv_info = self._for_all(self.args_recv_info[0], num_microbatches)
        return outputs

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **how: Any) -> Any:
        gradients = super()._prepare_backward_infra(1, *args, **how)
        self.chunks = num_microbatches
        self.grad_recv_info = self._for_all(self.grad_recv_info[0], num_microbatches)
        return gradients

    def _get_init_p2p_neighbors_ops(self) -> list[distributed.P2POp]:
        """Return no operations; torch 2.11 asks for them, later versions do not."""
        return []

    def _for_all(self, infos: Sequence[Any], count: int) -> dict[int, Any]:
        _empty(infos)
        return {number: tuple(map(copy, infos)) for number in range(count)}

    def _tag(self, stage: int, letter: str, microbatch: int, at: int) -> int:
        """Return the tag of tensor number `at` that `stage` receives, for F or B (`letter`)."""
        number = (microbatch * self.num_stages + stage) * 2 + (letter == "B")
        return number * MAX_TENSORS + at


class RoutedRuntime(_PipelineScheduleRuntime):
    """Torch's runtime of a pipeline, given the cells of one worker (`row`) to run.

    `reduce` is called for each cell by which a stage's gradients are summed.
    """

    def __init__(
        self,
        stages: Sequence[RoutedStage],
        row: Sequence[Cell],
        microbatches: int,
        loss: Loss,
        reduce: Callable[[RoutedStage], None],
    ) -> None:
        super().__init__([*stages], microbatches, loss_fn=loss)
        actions = [_Action.from_str(str(cell)) for cell in row]
        # Gathered once an iteration, before all ops, and dropped after them.
        sharded = [stage.stage_index for stage in stages if isinstance(stage.submod, FSDPModule)]
        gathers = [_Action.from_str(f"{stage}UNSHARD") for stage in sharded]
        drops = [_Action.from_str(f"{stage}RESHARD") for stage in sharded]
        self.pipeline_order_with_comms = {self.rank: [*gathers, *actions, *drops]}
        self.loss_of: dict[int, Tensor] = {}
        self._by_index = {stage.stage_index: stage for stage in stages}
        self.register_custom_function(
            _Action.from_str("0REDUCE_GRAD").computation_type,
            lambda action, _: reduce(self._by_index[action.stage_index]),
        )

    def run(
        self, args: list[tuple[Any, ...]], kwargs: list[dict[str, Any]], targets: list[Any]
    ) -> None:
        """Run all cells of this worker once, in order; the lists have all micro-batches."""
        # An iteration that failed may have left values.
        for stage in self._by_index.values():
            stage.has_backward = True
            stage.fwd_cache.clear()
            stage.output_chunks.clear()
        for pending in (self.loss_of, self.fwd_recv_ops, self.bwd_recv_ops):
            pending.clear()
        self._step_microbatches(args, kwargs, targets, return_outputs=False)
        for stage in self._by_index.values():
            stage.wait_for_sends()

    def _warmup_p2p(self, stages: list[Any], *_: Any, **__: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    def _maybe_compute_loss(
        self, stage: RoutedStage, output: Any, target_mbs: Any, mb_index: int, *_: Any
    ) -> None:
        if stage.is_last:
            self.loss_of[mb_index] = self._compute_loss(output, target_mbs[mb_index])

    def _maybe_get_loss(self, stage: RoutedStage, mb_index: int) -> Tensor | None:
        return self.loss_of[mb_index] if stage.is_last else None

    def _update_losses(self, *_: Any) -> None:
        """Do nothing: losses are read from `loss_of`."""


def finish_shards(stage: RoutedStage) -> None:
    """Sum a stage's gradients over the ranks of this worker, if FSDP shards the stage."""
    PipelineStage.perform_reduce_grad(stage, 1)


def reset_shards(module: nn.Module) -> None:
    """Drop what FSDP keeps of a failed iteration, except gradients that are already reduced."""
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        if state._is_root is None:
            continue  # it has run no forward yet, and then has no streams either
        state._comm_ctx.post_forward_order.clear()
        for group in _shard_groups(part):
            group._training_state = type(group._training_state).IDLE
            group.finalize_backward()
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        part.reshard()


def reshards_after_forward(module: nn.Module) -> bool:
    """Return whether FSDP drops gathered parameters of any part of a module after F."""
    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    return any(group._reshard_after_forward for part in parts for group in _shard_groups(part))


def _shard_groups(module: FSDPModule) -> Iterator[Any]:
    state = module._get_fsdp_state()
    single = getattr(state, "_fsdp_param_group", None)  # torch 2.11 has no lists of them
    yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [single])


def _examples(forms: Sequence[Form], *, gradients: bool = True) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=has_gradient and gradients)
        for shape, dtype, has_gradient in forms
    )


def _empty(infos: Sequence[Any]) -> None:
    for info in infos:
        info.buffer = None
