"""Make optimizer steps that can be undone bit for bit, with the built-in optimizers.

With a staggered optimizer a worker steps before it knows that all others will. Until it knows, it
keeps copies of the parameters and of the optimizer's state from before the step, and undoes the
step by copying them back. Computing the step backwards (as in Zero Bubble, Qi et al., ICLR 2024)
needs no copies but is not exact in floating point, so a worker that undid a step would drift from
its peers.

Muon (Jordan et al., 2024) steps along the gradients' momentum, whose matrices are made orthogonal.
In bfloat16 the result is bit for bit that of `torch.optim.Muon`, which supports neither float32 nor
stacks of matrices, as those of experts. Embeddings, heads and vectors are stepped by AdamW.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.runtime.config import ConfigError, MuonConfig, TrainingConfig
from slipstream.runtime.models.step_rules import StepRule
from slipstream.runtime.object_reference import is_reference, load_reference
from slipstream.runtime.state.parameter_groups import OptimizerGroups
from slipstream.runtime.state.parts import Version
from slipstream.runtime.state.step_factors import is_scheduled, rate_factor
from slipstream.runtime.torch_private import copy_tensors


class Muon(torch.optim.Optimizer):
    """Optimizer that steps groups with a true key "muon" by Muon, the others by AdamW."""

    def __init__(
        self,
        groups: OptimizerGroups,
        config: TrainingConfig,
        adamw: Callable[[OptimizerGroups, TrainingConfig], torch.optim.Optimizer],
    ) -> None:
        self._options, self._maximize = config.muon, config.maximize
        # Both share groups and state, so that code that sets rates or stores state sees a single
        # optimizer.
        self._adamw = adamw([group for group in groups if not group.get("muon")], config)
        super().__init__(groups, {**self._adamw.defaults, "muon": False})
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step all parameters that have a gradient; a `closure` other than None is refused."""
        assert closure is None
        self._adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = -parameter.grad if self._maximize else parameter.grad
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        # Nesterov's momentum looks ahead along the average.
        update = gradient.lerp(average, momentum) if self._options.nesterov else average
        # Weight decay is decoupled from the gradient, as in AdamW.
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(
            orthogonalize(update, self._options),
            alpha=-group["lr"] * _rate_scale(parameter.shape, self._options),
        )


def orthogonalize(matrices: Tensor, options: MuonConfig) -> Tensor:
    """Return about the nearest semi-orthogonal matrices [..., M, N], in `options.dtype`."""
    # A polynomial of odd powers brings all singular values near 1.
    a, b, c = options.coefficients
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32, copy=True)
    x = x.mT if tall else x
    # The norm of each matrix equals that of torch.optim.Muon to the bit, unlike a sum over two
    # dimensions of a stack.
    norms = torch.stack([matrix.norm() for matrix in x.reshape(-1, *x.shape[-2:])]).reshape(
        *x.shape[:-2], 1, 1
    )
    x = x / norms.clamp(min=options.epsilon)
    # Newton-Schulz iterations of degree five (Jordan et al., 2024).
    for _ in range(options.steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _rate_scale(shape: torch.Size, options: MuonConfig) -> float:
    rows, columns = shape[-2:]
    if options.adjust == "match_rms_adamw":
        # Updates as large as those of AdamW (Liu et al., arXiv 2502.16982).
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


OptimizerFactory = Callable[[OptimizerGroups, TrainingConfig], torch.optim.Optimizer]


def _build_adamw(groups: OptimizerGroups, config: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        amsgrad=config.amsgrad,
        maximize=config.maximize,
        fused=True,
    )


def _build_sgd(groups: OptimizerGroups, config: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups,
        lr=config.learning_rate,
        momentum=config.momentum,
        dampening=config.dampening,
        nesterov=config.nesterov,
        maximize=config.maximize,
        fused=True,
    )


def _build_muon(groups: OptimizerGroups, config: TrainingConfig) -> torch.optim.Optimizer:
    return Muon(groups, config, _build_adamw)


_build_muon.whole_parameters = True  # type: ignore[attr-defined]
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": _build_adamw,
    "sgd": _build_sgd,
    "muon": _build_muon,
}
"""Factories of optimizers by the value of `[training] optimizer`.

A user's own factory is named `module:function` there. Its optimizer remembers only tensors, in its
`state`, and updates each element from that element's gradient and state alone, unless the factory
has a true attribute `whole_parameters`.
"""


def optimizer_factory(config: TrainingConfig) -> OptimizerFactory:
    """Return the function that builds an optimizer from parameter groups and `config`.

    Raises ConfigError if no optimizer has the configured name, if a user's own cannot be loaded, or
    if it needs whole parameters but the configuration cuts them.
    """
    name = config.optimizer
    if name not in OPTIMIZERS and not is_reference(name):
        raise ConfigError(
            f"training.optimizer is {name!r}; expected one of "
            f"{', '.join(map(repr, OPTIMIZERS))}, or 'module:function'"
        )
    factory: OptimizerFactory = (
        OPTIMIZERS[name] if name in OPTIMIZERS else load_reference("training.optimizer", name)
    )
    # Sharding and ranks cut parameters, so that no process has a whole matrix.
    if getattr(factory, "whole_parameters", False):
        for wrong, what, expected in (
            (config.shard_optimizer, "shard_optimizer true", "false"),
            (config.tensor_parallel > 1, f"tensor_parallel {config.tensor_parallel}", "1"),
        ):
            if wrong:
                raise ConfigError(
                    f"training.optimizer is {name!r}, which needs whole parameters, and "
                    f"training.{what}, which cuts them; expected {expected}, or another optimizer"
                )
    return factory


class OptimizerSteps:
    """Base class of optimizers that step the tensors in parameter groups by their `.grad`.

    Raises ConfigError as `optimizer_factory` does, and if the learning rate changes but a group has
    no option `lr`.
    """

    def __init__(self, groups: OptimizerGroups, config: TrainingConfig) -> None:
        self._config = config
        self._rules: dict[nn.Parameter, StepRule] = {
            parameter: group["rule"]
            for group in groups
            if "rule" in group
            for parameter in group["params"]
        }
        """Step rule of each parameter that its layer steps in place of the optimizer."""
        self._optimizer = optimizer_factory(config)(
            [group for group in groups if "rule" not in group], config
        )
        self._rates = self._scheduled_rates()
        self.states: Any = self._optimizer.state
        """State that the optimizer keeps of each stepped tensor, by the tensor."""

    def _stepped_parameters(self) -> Sequence[nn.Parameter]:
        return [
            *(parameter for group in self._optimizer.param_groups for parameter in group["params"]),
            *self._rules,
        ]

    @torch.no_grad()
    def _apply_update(self) -> None:
        self._optimizer.step()
        for parameter, rule in self._rules.items():
            if parameter.grad is not None:
                rule(parameter, parameter.grad)

    def state_tensors(self, stepped: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer's tensors for a parameter, by slot (such as "exp_avg")."""
        return {
            slot: value
            for slot, value in self.states.get(stepped, {}).items()
            if isinstance(value, Tensor)
        }

    def _state_bytes(self) -> int:
        return sum(
            value.nbytes
            for stepped in self._stepped_parameters()
            for value in self.state_tensors(stepped).values()
        )

    def _set_rates(self, iteration: int) -> None:
        for group, rate in self._rates:
            group["lr"] = rate * rate_factor(self._config, iteration)

    def _scheduled_rates(self) -> list[tuple[dict[str, Any], float]]:
        """Return each parameter group with its rate before the schedule; none if it is constant."""
        if not is_scheduled(self._config):
            return []
        groups = self._optimizer.param_groups
        # A user's optimizer may have no such option.
        if not all("lr" in group for group in groups):
            raise ConfigError(
                f"training.optimizer is {self._config.optimizer!r}, whose groups have no 'lr' for "
                "training.learning_rate_schedule to set"
            )
        return [(group, group["lr"]) for group in groups]

    def _slot_device(self, slot: str, parameter: nn.Parameter) -> torch.device:
        # Step counters of unfused kernels are on the CPU.
        options = self._optimizer.defaults
        with_parameter = slot != "step" or options.get("fused") or options.get("capturable")
        return parameter.device if with_parameter else torch.device("cpu")


class UndoableSteps(OptimizerSteps):
    """Optimizer whose last step can be undone bit for bit.

    An iteration's step is *open* from `step` until it is committed or undone. Stepping an iteration
    commits the step before, because no worker steps an iteration until all have stepped the one
    before it. So if c is the last committed iteration of the run, each survivor has, after
    `return_to(c)`, bit for bit the state after iteration c.
    """

    def __init__(self, groups: OptimizerGroups, config: TrainingConfig) -> None:
        super().__init__(groups, config)
        self._saved: list[tuple[Tensor, Tensor]] = []
        """Live tensors, each with its copy from before the last step that was not skipped."""
        self._slots: dict[nn.Parameter, dict[str, Any] | None] = {}
        """State of each parameter before the last step; None: it had none. Empty: step skipped."""
        self.open_iteration: int | None = None
        """Iteration whose step can be undone; None if no step is open."""
        self.version = Version(-1)

    def step(self, iteration: int, factor: float | None = 1.0) -> None:
        """Make an iteration's step, with gradients times `factor`; it can be undone from now on.

        Afterwards `.grad` holds the scaled gradients; those of step rules are not scaled. If
        `factor` is None, parameters stay as they are, and the iteration counts as stepped. Raises
        VersionError unless the parameters are those after the iteration before.
        """
        self.version.require(iteration - 1, "what is to be stepped")
        # If this fails midway, nothing may use the mixture of two states.
        self.open_iteration, self.version = iteration, Version(iteration, whole=False)
        self._slots = {}
        if factor is not None:
            self._set_rates(iteration)
            self._make_step(factor)
        self.version = Version(iteration)

    def _make_step(self, factor: float) -> None:
        self._save_copies(self._stepped_parameters())
        if factor != 1.0:
            for parameter in self._stepped_parameters():
                if parameter.grad is not None and parameter not in self._rules:
                    parameter.grad.mul_(factor)
        self._apply_update()

    def undo(self) -> None:
        """Undo the open step bit for bit; gradients stay as they are, perhaps scaled."""
        assert self.open_iteration is not None, "no step is open"
        after = self.open_iteration - 1
        self.version = Version(after, whole=False)
        if self._slots:
            lives, copies = zip(*self._saved, strict=True)
            with torch.no_grad():
                copy_tensors(copies, lives)
        # Slots that the step created go: the optimizer creates them again at its next step.
        for parameter, before in self._slots.items():
            if before is not None:
                self.states[parameter] = dict(before)
            elif parameter in self.states:
                del self.states[parameter]
        self.open_iteration, self.version = None, Version(after)

    def return_to(self, committed: int) -> None:
        """Return to the state after iteration `committed`: undo a later step, keep any other.

        A step that is kept can no longer be undone. Raises VersionError if the state is then still
        another iteration's.
        """
        if self.open_iteration is not None and self.open_iteration > committed:
            self.undo()
        self.commit()
        # A worker without parameters has no state of any version.
        if self._optimizer.param_groups and self._stepped_parameters():
            self.version.require(committed, "what this worker keeps")

    def commit(self) -> None:
        """Make the last step permanent. The memory of the copies is kept for the next step."""
        self.open_iteration = None

    def undo_bytes(self) -> int:
        """Return the bytes of the copies by which the last step can be undone."""
        return sum(copy.nbytes for _, copy in self._saved)

    def _save_copies(self, stepped: Sequence[nn.Parameter]) -> None:
        # The memory of the last step's copies serves again.
        copy_of, self._saved = {id(live): copy for live, copy in self._saved}, []
        lives: list[Tensor] = [*stepped]
        # The first step creates state, which its undo must remove again.
        for parameter in stepped:
            slots = self.states.get(parameter)
            self._slots[parameter] = None if slots is None else dict(slots)
            lives += [value for value in (slots or {}).values() if isinstance(value, Tensor)]
        copies = list[Tensor]()
        for live in lives:
            copy = copy_of.get(id(live))
            copies.append(torch.empty_like(live) if copy is None else copy)
        with torch.no_grad():
            copy_tensors(lives, copies)
        self._saved = list(zip(lives, copies, strict=True))
