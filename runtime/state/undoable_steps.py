"""Optimizer steps that can be undone bit for bit.

With a staggered optimizer a worker steps before it knows that all others will. Until it knows, it keeps copies of the
parameters and of the optimizer's state from before the step, and undoes the step by copying them back. Computing the
step backwards (as in Zero Bubble, Qi et al., ICLR 2024) needs no copies but is not exact in floating point, so a worker
that undid a step would drift from its peers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.models.step_rules import StepRule
from slipstream.runtime.object_reference import is_reference, load_reference
from slipstream.runtime.state.learning_rate import is_scheduled, rate_factor
from slipstream.runtime.state.parameter_groups import OptimizerGroups
from slipstream.runtime.state.version import Version
from slipstream.runtime.torch_private import copy_tensors

OptimizerFactory = Callable[[OptimizerGroups, TrainingConfig], torch.optim.Optimizer]


def _build_adamw(groups: OptimizerGroups, config: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon,
                             amsgrad=config.amsgrad, maximize=config.maximize, fused=True)


def _build_sgd(groups: OptimizerGroups, config: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, dampening=config.dampening,
                           nesterov=config.nesterov, maximize=config.maximize, fused=True)


def _build_muon(groups: OptimizerGroups, config: TrainingConfig) -> torch.optim.Optimizer:
    from slipstream.runtime.state.muon import Muon

    return Muon(groups, config, _build_adamw)


_build_muon.whole_parameters = True  # type: ignore[attr-defined]
OPTIMIZERS: dict[str, OptimizerFactory] = {"adamw": _build_adamw, "sgd": _build_sgd, "muon": _build_muon}
"""Factories of optimizers by the value of `[training] optimizer`.

A user's own factory is named `module:function` there. Its optimizer remembers only tensors, in its `state`. It must
update each element of a parameter from that element's gradient and state alone, unless the function has a true
attribute `whole_parameters`.
"""


def optimizer_factory(config: TrainingConfig) -> OptimizerFactory:
    """Return the function that builds the optimizer that `config` names, from parameter groups and `config`.

    Raises ConfigError if there is none of that name, or if the optimizer needs whole parameters, but optimizer state is
    sharded or parameters are divided among the ranks of a worker.
    """
    name = config.optimizer
    if name not in OPTIMIZERS and not is_reference(name):
        raise ConfigError(f"training.optimizer is {name!r}; expected one of {', '.join(map(repr, OPTIMIZERS))}, or "
                          "'module:function'")
    factory: OptimizerFactory = OPTIMIZERS[name] if name in OPTIMIZERS else load_reference("training.optimizer", name)
    if getattr(factory, "whole_parameters", False):
        for wrong, what, expected in ((config.shard_optimizer, "shard_optimizer true", "false"),
                                      (config.tensor_parallel > 1, f"tensor_parallel {config.tensor_parallel}", "1")):
            if wrong:
                raise ConfigError(f"training.optimizer is {name!r}, which needs whole parameters, and training.{what}, "
                                  f"which cuts them; expected {expected}, or another optimizer")
    return factory


class OptimizerSteps:
    """Base class of optimizers that step the tensors in parameter groups by their `.grad`, with the learning rate of
    each iteration. Subclasses decide when to step."""

    def __init__(self, groups: OptimizerGroups, config: TrainingConfig) -> None:
        self._config = config
        self._rules: dict[nn.Parameter, StepRule] = {
            parameter: group["rule"] for group in groups if "rule" in group for parameter in group["params"]}
        """Step rule of each parameter that a rule of its layer steps, and not the optimizer."""
        self._optimizer = optimizer_factory(config)([group for group in groups if "rule" not in group], config)
        self._rates = self._scheduled_rates()
        self.states: Any = self._optimizer.state
        """State that the optimizer keeps of each stepped tensor, by the tensor."""

    def _stepped_parameters(self) -> Sequence[nn.Parameter]:
        """Return all stepped tensors, each once: those of the optimizer, and those of step rules (a layer's own update
        functions)."""
        return [*(parameter for group in self._optimizer.param_groups for parameter in group["params"]), *self._rules]

    @torch.no_grad()
    def _apply_update(self) -> None:
        """Step all tensors that have a gradient, by the optimizer or by their step rule (a layer's own update
        function)."""
        self._optimizer.step()
        for parameter, rule in self._rules.items():
            if parameter.grad is not None:
                rule(parameter, parameter.grad)

    def state_tensors(self, stepped: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer's tensors for a parameter, by slot (its key for them, such as "exp_avg").

        The result is empty before the parameter's first step.
        """
        return {slot: value for slot, value in self.states.get(stepped, {}).items() if isinstance(value, Tensor)}

    def _state_bytes(self) -> int:
        """Return the memory of the optimizer's tensors for all parameters, in bytes."""
        return sum(value.nbytes for stepped in self._stepped_parameters()
                   for value in self.state_tensors(stepped).values())

    def _set_rates(self, iteration: int) -> None:
        """Set the learning rates of all parameter groups to those of an iteration."""
        for group, rate in self._rates:
            group["lr"] = rate * rate_factor(self._config, iteration)

    def _scheduled_rates(self) -> list[tuple[dict[str, Any], float]]:
        """Return each parameter group with its learning rate before scheduling; empty if learning rates are constant.

        Raises ConfigError if the groups of a user's optimizer have no learning rate that could be set.
        """
        if not is_scheduled(self._config):
            return []
        groups = self._optimizer.param_groups
        if not all("lr" in group for group in groups):
            raise ConfigError(f"training.optimizer is {self._config.optimizer!r}, whose groups have no 'lr' for "
                              "training.learning_rate_schedule to set")
        return [(group, group["lr"]) for group in groups]

    def _slot_device(self, slot: str, parameter: nn.Parameter) -> torch.device:
        """Return the device of the optimizer's tensor `slot`, such as "step", of a parameter.

        It is the parameter's device, but the CPU for step counters of unfused kernels.
        """
        options = self._optimizer.defaults
        with_parameter = slot != "step" or options.get("fused") or options.get("capturable")
        return parameter.device if with_parameter else torch.device("cpu")


class UndoableSteps(OptimizerSteps):
    """Optimizer whose last step can be undone bit for bit.

    An iteration's step is *open* from `step` until it is committed or undone. At most one step is open: stepping an
    iteration commits the step before, because no worker steps an iteration until all have stepped the one before it.
    So, if c is the last committed iteration of the run, each survivor recovers with `return_to(c)`. Parameters and
    their state are then bit for bit those after iteration c.
    """

    def __init__(self, groups: OptimizerGroups, config: TrainingConfig) -> None:
        super().__init__(groups, config)
        self._saved: list[tuple[Tensor, Tensor]] = []
        """Live tensors, each with its copy from before the last step that was not skipped."""
        self._slots: dict[nn.Parameter, dict[str, Any] | None] = {}
        """Optimizer's state of each saved parameter before the last step, with the live tensors; None if it had no
        state. Empty if the last step was skipped, so that `undo` restores nothing."""
        self.open_iteration: int | None = None
        """Iteration whose step can be undone; None if no step is open."""
        self.version = Version(-1)
        """Version of the parameters and of their state."""

    def step(self, iteration: int, factor: float | None = 1.0) -> None:
        """Make an iteration's step, with gradients times `factor`; it can be undone from now on.

        Afterwards `.grad` holds the scaled gradients. Parameters with a step rule (a layer's own update function, in
        place of the optimizer) are stepped by unscaled gradients. If `factor` is None, parameters stay as they are, and
        the iteration counts as stepped. Raises VersionError unless the parameters are those after the iteration before.
        """
        self.version.require(iteration - 1, "what is to be stepped")
        self.open_iteration, self.version = iteration, Version(iteration, whole=False)
        self._slots = {}
        if factor is not None:
            self._set_rates(iteration)
            self._make_step(factor)
        self.version = Version(iteration)

    def _make_step(self, factor: float) -> None:
        """Save copies by which the step can be undone, scale the gradients, and step."""
        self._save_copies(self._stepped_parameters())
        if factor != 1.0:
            for parameter in self._stepped_parameters():
                if parameter.grad is not None and parameter not in self._rules:
                    parameter.grad.mul_(factor)
        self._apply_update()

    def undo(self) -> None:
        """Undo the last step, which must not be permanent (`commit`): restore parameters and state bit for bit;
        gradients stay as they are."""
        assert self.open_iteration is not None, "no step is open"
        after = self.open_iteration - 1
        self.version = Version(after, whole=False)
        if self._slots:
            with torch.no_grad():
                copy_tensors([copy for _, copy in self._saved], [live for live, _ in self._saved])
        for parameter, before in self._slots.items():
            if before is not None:
                self.states[parameter] = dict(before)
            elif parameter in self.states:
                del self.states[parameter]
        self.open_iteration, self.version = None, Version(after)

    def return_to(self, committed: int) -> None:
        """Return to the state after iteration `committed`: undo the last step if its iteration is later, else make it
        permanent (it can no longer be undone).

        Raises VersionError if the parameters are then not those after that iteration.
        """
        if self.open_iteration is not None and self.open_iteration > committed:
            self.undo()
        self.commit()
        if self._optimizer.param_groups and self._stepped_parameters():
            self.version.require(committed, "what this worker keeps")

    def commit(self) -> None:
        """Make the last step permanent: it can no longer be undone. The memory of the copies is kept for the next
        step."""
        self.open_iteration = None

    def undo_bytes(self) -> int:
        """Return the memory, in bytes, of the copies by which the last step can be undone."""
        return sum(copy.nbytes for _, copy in self._saved)

    def _save_copies(self, stepped: Sequence[nn.Parameter]) -> None:
        """Copy the parameters that are about to be stepped, and their optimizer state, for `undo`; memory of earlier
        copies is used again."""
        spare, self._saved = {id(pair[0]): pair for pair in self._saved}, []
        live: list[Tensor] = [*stepped]
        for parameter in stepped:
            slots = self.states.get(parameter)
            self._slots[parameter] = None if slots is None else dict(slots)
            live += [value for value in (slots or {}).values() if isinstance(value, Tensor)]
        saved = [spare[id(tensor)] if id(tensor) in spare else (tensor, torch.empty_like(tensor)) for tensor in live]
        with torch.no_grad():
            copy_tensors(live, [copy for _, copy in saved])
        self._saved = saved
