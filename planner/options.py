"""How to plan: what the command line and callers of the library choose."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from slipstream.planner.budget import STEP_SECONDS, Clock, StepClock
from slipstream.planner.job.file import Job
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Problem
from slipstream.planner.params import DEFAULTS, SearchParams
from slipstream.planner.search.engine import Method as Method
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import BackwardMode, OptimizerMode, Worker

Layers = Literal["fixed", "move"]
LAYERS: tuple[Layers, ...] = get_args(Layers)


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Passed down whole: to normalisation, to a plan, to the problem. The search gets a method and a budget of it."""

    backward: BackwardMode | None = None
    """None: split; fused for 1f1b, which is defined so."""
    optimizer: OptimizerMode | None = None
    """None: staggered; synchronous for 1f1b."""
    method: Method = "cp-sat"
    time_limit: float = 10.0
    """Seconds. How far a search gets in them depends on the machine and on what else runs there."""
    steps: int | None = None
    """Counted steps in place of seconds: then one seed gives one plan, on any machine (`planner.budget`), and no wider
    question is answered worse than a narrower one, which may have as many again."""
    seed: int = 0
    layers: Layers = "fixed"
    """fixed: parameters stay with the workers that hold them; move: layers may change hands."""
    params: SearchParams = DEFAULTS
    """What steers the search."""
    slices: bool = True
    """Whether a micro-batch may be cut within a stage."""
    from_checkpoint: bool = False
    """With layers that move: those that no live worker holds are taken from a checkpoint."""
    holds: tuple[tuple[Worker, tuple[LayerRange, ...]], ...] = ()
    """The layers that live workers hold now, where those are not the ones of their stages."""

    def __post_init__(self) -> None:
        """Raises ValueError, in one line, for a value that is none of those above."""
        for name, known in (("backward", (None, *get_args(BackwardMode))), ("method", get_args(Method)),
                            ("optimizer", (None, *get_args(OptimizerMode))), ("layers", LAYERS)):
            if getattr(self, name) not in known:
                choices = ", ".join(repr(one) for one in known)
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {choices}")
        if not isinstance(self.time_limit, int | float) or not math.isfinite(self.time_limit) or self.time_limit < 0:
            raise ValueError(f"time_limit is {self.time_limit!r}; expected a finite number of seconds, 0 or more")
        for name in ("steps", "seed"):
            value = getattr(self, name)
            if value is None and name == "steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; expected a whole number, 0 or more")

    def problem(self, job: Job, failed: Sequence[Worker] = ()) -> Problem:
        """The problem to solve. Raises NoPlanError."""
        usual = self.method == "1f1b"
        return build_problem(job, failed, backward=self.backward or ("fused" if usual else "split"),
                             optimizer=self.optimizer or ("synchronous" if usual else "staggered"),
                             sliced=self.slices and self.method not in BASELINES)

    def shared_problem(self, job: Job, failed: Sequence[Worker] = ()) -> Problem:
        """The same where any live holder of a stage may run any micro-batch, whole or cut. Raises NoPlanError."""
        own = self.problem(job, failed)
        return build_problem(job, failed, backward=own.backward, optimizer=own.optimizer, sharing=True, sliced=True)

    @property
    def comparing(self) -> "PlanOptions":
        """The same by a method that is fast enough to compare candidates."""
        return msgspec.structs.replace(self, method="greedy") if self.method == "cp-sat" else self

    @property
    def seconds(self) -> float:
        """The limit by the clock: its own seconds, or those that the steps stand for."""
        return self.time_limit if self.steps is None else self.steps * STEP_SECONDS

    def clock(self) -> Clock:
        """The clock of a plan: that of the machine, or one that counts steps."""
        return Clock() if self.steps is None else StepClock()

    def within(self, seconds: float) -> "PlanOptions":
        """The same with another limit, in seconds of its clock."""
        return msgspec.structs.replace(self, time_limit=seconds) if self.steps is None else \
            msgspec.structs.replace(self, steps=max(0, round(seconds / STEP_SECONDS)))
