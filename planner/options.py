"""Options of a plan, which the command line and callers of the library choose."""

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
    """Options of a plan that its caller chooses: its freedom, its search and its limit."""

    backward: BackwardMode | None = None
    """Mode of the backward: "split" into I and W, or "fused" into B.

    None: split, except for method 1f1b.
    """
    optimizer: OptimizerMode | None = None
    """Mode of the optimizer steps, "staggered" or "synchronous".

    None: staggered, except for method 1f1b.
    """
    method: Method = "cp-sat"
    time_limit: float = 10.0
    """Seconds that the search may take. How far it gets depends on the machine and its load."""
    steps: int | None = None
    """Number of search steps instead of `time_limit`.

    One seed then gives one plan on any machine (`planner.budget`). If more is allowed, such as
    moving layers, the plan is never longer than with less allowed; that plan may be searched, too,
    with as many steps again.
    """
    seed: int = 0
    layers: Layers = "fixed"
    """Mode of the layers: "fixed" on their workers, or free to "move" to others."""
    params: SearchParams = DEFAULTS
    """Parameters of the search."""
    slices: bool = True
    """True if a micro-batch may be cut within a stage."""
    from_checkpoint: bool = False
    """True if moving layers that no live worker holds are loaded from a checkpoint."""
    holds: tuple[tuple[Worker, tuple[LayerRange, ...]], ...] = ()
    """Held layers of each worker that has not those of its stage at present."""

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError that names option, value and expectation."""
        for name, known in (("backward", (None, *get_args(BackwardMode))), ("method", get_args(Method)),
                            ("optimizer", (None, *get_args(OptimizerMode))), ("layers", LAYERS)):
            if getattr(self, name) not in known:
                choices = ", ".join(repr(choice) for choice in known)
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {choices}")
        if not isinstance(self.time_limit, int | float) or not math.isfinite(self.time_limit) or self.time_limit < 0:
            raise ValueError(f"time_limit is {self.time_limit!r}; expected a finite number of seconds, 0 or more")
        for name in ("steps", "seed"):
            value = getattr(self, name)
            if value is None and name == "steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; expected a whole number, 0 or more")

    def make_problem(self, job: Job, failed: Sequence[Worker] = (), *, down: bool = False) -> Problem:
        """Return the problem of a job whose workers `failed` are down, with layers in place.

        Costs are rounded up, or rounded down if `down`, for bounds. Raises NoPlanError if no
        schedule can exist.
        """
        usual = self.method == "1f1b"
        return build_problem(job, failed, backward=self.backward or ("fused" if usual else "split"),
                             optimizer=self.optimizer or ("synchronous" if usual else "staggered"),
                             sliced=self.slices and self.method not in BASELINES, down=down)

    def make_shared_problem(self, job: Job, failed: Sequence[Worker] = (), *, down: bool = False) -> Problem:
        """Return the problem in which any live holder of a stage may run any micro-batch.

        It may be whole or cut. Raises NoPlanError if no schedule can exist.
        """
        own = self.make_problem(job, failed)
        return build_problem(job, failed, backward=own.backward, optimizer=own.optimizer, sharing=True, sliced=True,
                             down=down)

    @property
    def for_comparison(self) -> "PlanOptions":
        """Copy of the options with list schedules instead of the whole search, to compare many."""
        return msgspec.structs.replace(self, method="greedy") if self.method == "cp-sat" else self

    @property
    def limit_seconds(self) -> float:
        """Seconds of the search on its clock: `time_limit`, or those that `steps` represent."""
        return self.time_limit if self.steps is None else self.steps * STEP_SECONDS

    def make_clock(self) -> Clock:
        """Return a new clock for a search: wall time or, with `steps`, counted steps."""
        return Clock() if self.steps is None else StepClock()

    def with_limit(self, seconds: float) -> "PlanOptions":
        """Return a copy limited to these seconds, or to the steps that represent them."""
        return msgspec.structs.replace(self, time_limit=seconds) if self.steps is None else \
            msgspec.structs.replace(self, steps=max(0, round(seconds / STEP_SECONDS)))
