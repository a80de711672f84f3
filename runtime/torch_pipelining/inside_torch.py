"""Torch's own pipeline stage and runtime, with what re-routed rows need.

All private names of torch.distributed.pipelining and of FSDP that are used are here.

Overridden is what takes a stage to be on one rank that runs all micro-batches of one pipeline: the
other end of a transfer follows from the micro-batch, too; a stage runs some of the micro-batches; a
tensor stays on a rank only if the row has no transfer for it; losses are kept by micro-batch.
Tensors are carried by `GenerationSession` instead of a group of torch.distributed. Written for
torch 2.13; docs/neighbours.md says what differs from 2.11 to 2.14.
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
    lambda _: not isinstance(sys.exc_info()[1], CommunicationError))
MAX_TENSORS = 64
"""Largest number of tensors between two stages."""


class RoutedStage(PipelineStage):
    """A stage whose peers follow from the micro-batch."""

    def __init__(self, module: nn.Module, stage: int, place: Place, device: torch.device) -> None:
        self.place = place
        self._cells = frozenset(place.routes.rows[place.worker])
        self._arriving: dict[tuple[str, int], list[IncomingTensor | Tensor | None]] = {}
        self._leaving: list[OutgoingTensor] = []
        self.forms_before: tuple[Form, ...] | None = None
        self.forms_after: tuple[Form, ...] = ()
        self._build(module, stage, device)

    def set_forms(self, before: tuple[Form, ...], after: tuple[Form, ...]) -> None:
        """Set the tensors that pass before and behind the stage, by which torch infers nothing."""
        self.forms_before, self.forms_after = before, after
        self._build(self.submod, self.stage_index, self.device,
                    _examples(before, gradients=not self.is_first), _examples(after))

    def _build(self, module: nn.Module, stage: int, device: torch.device,
               before: tuple[Tensor, ...] | None = None,
               after: tuple[Tensor, ...] | None = None) -> None:
        """Let torch build its stage; nothing passes through its group."""
        stages = self.place.routes.stages
        most = max(stages, distributed.get_world_size())  # torch refuses more ranks than stages
        super().__init__(module, stage, most, device, input_args=before, output_args=after)
        self.num_stages, self.group_rank, self.group_size = stages, 0, 1

    def wait_for_sends(self) -> None:
        """Wait until all that was sent may be freed."""
        while self._leaving:
            with self.place.mates.deferring_errors():
                self._leaving.pop().wait()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to receive; return nothing for torch to do."""
        return self._receive("F", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to send; return nothing for torch to do."""
        return self._send("F", fwd_chunk_id, self.fwd_cache[fwd_chunk_id][0])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to receive; return nothing for torch to do."""
        return self._receive("B", bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """Start to send; return nothing for torch to do."""
        return self._send("B", bwd_chunk_id, self.bwd_cache.pop(bwd_chunk_id))

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient; leave it where the row sends it to another worker."""
        if Cell(self.stage_index, "SEND_B", mb_index) in self._cells:
            return self.bwd_cache[mb_index]
        return super().get_local_bwd_output(mb_index)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take an activation of this worker, unless the row sends it to another one."""
        if Cell(self.stage_index - 1, "SEND_F", mb_index) not in self._cells:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take a gradient of this worker, unless the row sends it to another one."""
        if Cell(self.stage_index + 1, "SEND_B", mb_index) not in self._cells:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """Run F when its input has arrived.

        Torch does not wait where this worker has the stage before.
        """
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
        """Run I or B when its gradient has arrived."""
        infos = self.grad_recv_info[bwd_chunk_id]
        self._fill(infos, "B", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **how)
        _empty(infos)

    def _receive(self, letter: str, microbatch: int) -> list[distributed.P2POp]:
        """Start to receive an activation (F) or a gradient (B) of a micro-batch."""
        step, forms = (-1, self.forms_before or ()) if letter == "F" else (1, self.forms_after)
        peer = self.stage_index + step
        source = self.place.routes.worker_with(peer, f"SEND_{letter}", microbatch)
        arriving: list[IncomingTensor | Tensor | None] = []
        for at, (shape, dtype, has_gradient) in enumerate(forms):
            tag = self._tag(self.stage_index, letter, microbatch, at)
            arriving.append(None)
            if letter == "F" or has_gradient:
                with self.place.mates.deferring_errors():
                    arriving[at] = self.place.session.receive(shape, dtype, source, tag)
                if arriving[at] is None:
                    arriving[at] = torch.zeros(shape, dtype=dtype, device=self.device)
        self._arriving[letter, microbatch] = arriving
        return []

    def _send(self, letter: str, microbatch: int,
              tensors: Sequence[Tensor | None]) -> list[distributed.P2POp]:
        """Start to send the activation or gradient of a micro-batch, as its receiver expects it."""
        step, forms = (1, self.forms_after) if letter == "F" else (-1, self.forms_before or ())
        peer = self.stage_index + step
        target = self.place.routes.worker_with(peer, f"RECV_{letter}", microbatch)
        for at, (form, tensor) in enumerate(zip(forms, tensors, strict=True)):
            shape, dtype, has_gradient = form
            if letter == "B" and not has_gradient:
                continue
            made = torch.zeros(shape, dtype=dtype, device=self.device) if tensor is None else tensor
            if made.shape != shape or made.dtype != dtype:
                raise ValueError(f"stage {self.stage_index} made a tensor of {tuple(made.shape)}, "
                                 f"{made.dtype}, for micro-batch {microbatch}; expected {shape}, "
                                 f"{dtype}, as for the first micro-batch")
            tag = self._tag(peer, letter, microbatch, at)
            with self.place.mates.deferring_errors():
                self._leaving.append(self.place.session.send(made, target, tag))
        return []

    def _fill(self, infos: Sequence[Any], letter: str, microbatch: int) -> None:
        for info, tensor in zip(infos, self._arriving.pop((letter, microbatch), ()), strict=False):
            info.buffer = self._await(tensor) if isinstance(tensor, IncomingTensor) else tensor

    def _await(self, tensor: IncomingTensor) -> Tensor:
        """Return a tensor that has arrived, or zeros after an error that is deferred."""
        arrived: Tensor | None = None
        with self.place.mates.deferring_errors():
            arrived = tensor.wait_for_tensor()
        return torch.zeros_like(tensor.payload, device=self.device) if arrived is None else arrived

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **how: Any) -> Any:
        """Prepare one micro-batch, whose entries then serve all.

        Torch would allocate buffers for those of all pipelines.
        """
        made = super()._prepare_forward_infra(1, *args, **how)
        self.args_recv_info = self._for_all(self.args_recv_info[0], num_microbatches)
        return made

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **how: Any) -> Any:
        made = super()._prepare_backward_infra(1, *args, **how)
        self.chunks = num_microbatches
        self.grad_recv_info = self._for_all(self.grad_recv_info[0], num_microbatches)
        return made

    def _get_init_p2p_neighbors_ops(self) -> list[distributed.P2POp]:
        """Return nothing: torch 2.11 asks for it, later versions do not."""
        return []

    def _for_all(self, infos: Sequence[Any], count: int) -> dict[int, Any]:
        _empty(infos)
        return {number: tuple(map(copy, infos)) for number in range(count)}

    def _tag(self, stage: int, letter: str, microbatch: int, at: int) -> int:
        """Return the tag of a tensor, by its receiver."""
        number = (microbatch * self.num_stages + stage) * 2 + (letter == "B")
        return number * MAX_TENSORS + at


class RoutedRuntime(_PipelineScheduleRuntime):
    """Torch's runtime with the row of one worker."""

    def __init__(self, stages: Sequence[RoutedStage], row: Sequence[Cell], microbatches: int,
                 loss: Loss, reduce: Callable[[RoutedStage], None]) -> None:
        super().__init__([*stages], microbatches, loss_fn=loss)
        actions = [_Action.from_str(str(cell)) for cell in row]
        gathered = [stage.stage_index for stage in stages if isinstance(stage.submod, FSDPModule)]
        self.pipeline_order_with_comms = {self.rank: [
            *(_Action.from_str(f"{stage}UNSHARD") for stage in gathered), *actions,
            *(_Action.from_str(f"{stage}RESHARD") for stage in gathered)]}
        self.loss_of: dict[int, Tensor] = {}
        self._by_index = {stage.stage_index: stage for stage in stages}
        self.register_custom_function(_Action.from_str("0REDUCE_GRAD").computation_type,
                                      lambda action, _: reduce(self._by_index[action.stage_index]))

    def run(self, args: list[tuple[Any, ...]], kwargs: list[dict[str, Any]],
            targets: list[Any]) -> None:
        """Run all cells of the row once."""
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

    def _maybe_compute_loss(self, stage: RoutedStage, output: Any, target_mbs: Any, mb_index: int,
                            *_: Any) -> None:
        if stage.is_last:
            self.loss_of[mb_index] = self._compute_loss(output, target_mbs[mb_index])

    def _maybe_get_loss(self, stage: RoutedStage, mb_index: int) -> Tensor | None:
        return self.loss_of[mb_index] if stage.is_last else None

    def _update_losses(self, *_: Any) -> None:
        """Do nothing: losses are read from `loss_of`."""


def finish_shards(stage: RoutedStage) -> None:
    """Sum the gradients over the shards inside the worker, as FSDP does after the last backward."""
    PipelineStage.perform_reduce_grad(stage, 1)


def reset_shards(module: nn.Module) -> None:
    """Drop what FSDP keeps of an iteration that failed; gradients that are complete stay."""
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
    """Return whether FSDP drops what any part of a module has gathered after its forward."""
    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    return any(group._reshard_after_forward for part in parts for group in _shard_groups(part))


def _shard_groups(module: FSDPModule) -> Iterator[Any]:
    state = module._get_fsdp_state()
    single = getattr(state, "_fsdp_param_group", None)  # torch 2.11 has no lists of them
    yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [single])


def _examples(forms: Sequence[Form], *, gradients: bool = True) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=has_gradient and gradients)
        for shape, dtype, has_gradient in forms)


def _empty(infos: Sequence[Any]) -> None:
    for info in infos:
        info.buffer = None
