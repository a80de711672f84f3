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
"""Values of `PlanOptions.layers`."""


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a plan that its caller chooses: its freedom, its search and its limit."""

    backward: BackwardMode | None = None
    """Mode of the backward: "split" into I and W, or "fused" into B.

    None: split, but fused for method 1f1b.
    """
    optimizer: OptimizerMode | None = None
    """Mode of the optimizer steps, "staggered" or "synchronous".

    None: staggered, but synchronous for method 1f1b.
    """
    method: Method = "cp-sat"
    """Method: "cp-sat", the whole search; "greedy", list schedules alone; "1f1b"; "recycle"."""
    time_limit: float = 10.0
    """Seconds that the search may take. How far it gets depends on the machine and its load."""
    steps: int | None = None
    """Number of search steps instead of `time_limit`; None: the time is limited.

    With steps, one seed gives one plan on any machine (`planner.budget`). A plan that may change
    more, such as by moving layers, is never longer than one that may change less. To ensure this,
    the plan that may change less is searched, too, with as many steps again, where it could be
    shorter.
    """
    seed: int = 0
    layers: Layers = "fixed"
    """Mode of the layers: "fixed" to their workers, or free to "move" to others."""
    params: SearchParams = DEFAULTS
    """Parameters of the search."""
    slices: bool = True
    """True if a micro-batch may be cut within a stage."""
    from_checkpoint: bool = False
    """True if layers that no live worker holds may be loaded from a checkpoint."""
    holds: tuple[tuple[Worker, tuple[LayerRange, ...]], ...] = ()
    """Held layers of each worker that at present holds others than those of its stage."""

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError that names option, value and expectation."""
        for name, choices in (
            ("backward", (None, *get_args(BackwardMode))),
            ("method", get_args(Method)),
            ("optimizer", (None, *get_args(OptimizerMode))),
            ("layers", LAYERS),
        ):
            if getattr(self, name) not in choices:
                text = ", ".join(map(repr, choices))
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {text}")
        # msgspec checks types only when it reads files, not here.
        if (
            not isinstance(self.time_limit, int | float)
            or not math.isfinite(self.time_limit)
            or self.time_limit < 0
        ):
            raise ValueError(
                f"time_limit is {self.time_limit!r}; expected a finite number of seconds, 0 or more"
            )
        # True and False count as numbers in Python.
        for name in ("steps", "seed"):
            value = getattr(self, name)
            if value is None and name == "steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; expected a whole number, 0 or more")

    def make_problem(
        self, job: Job, failed: Sequence[Worker] = (), *, down: bool = False
    ) -> Problem:
        """Return the problem of a job whose workers `failed` are down, with layers in place.

        Costs are rounded up, or rounded down if `down`, for bounds. Raises NoPlanError if no
        schedule can exist.
        """
        # The usual 1F1B neither splits the backward nor staggers the optimizer.
        usual = self.method == "1f1b"
        return build_problem(
            job,
            failed,
            backward=self.backward or ("fused" if usual else "split"),
            optimizer=self.optimizer or ("synchronous" if usual else "staggered"),
            sliced=self.slices and self.method not in BASELINES,
            down=down,
        )

    def make_shared_problem(
        self, job: Job, failed: Sequence[Worker] = (), *, down: bool = False
    ) -> Problem:
        """Return the problem in which any live holder of a stage may run any micro-batch.

        Micro-batches may be whole or cut. Costs are rounded up, or down if `down`, for bounds.
        Raises NoPlanError if no schedule can exist.
        """
        # The modes of the options; everything else is allowed, whatever the options say.
        problem = self.make_problem(job, failed)
        return build_problem(
            job,
            failed,
            backward=problem.backward,
            optimizer=problem.optimizer,
            sharing=True,
            sliced=True,
            down=down,
        )

    @property
    def for_comparison(self) -> "PlanOptions":
        """Return a copy with list schedules instead of the whole search, to compare many plans."""
        return msgspec.structs.replace(self, method="greedy") if self.method == "cp-sat" else self

    @property
    def limit_seconds(self) -> float:
        """Seconds of the search on its clock: `time_limit`, or those that `steps` stand for."""
        return self.time_limit if self.steps is None else self.steps * STEP_SECONDS

    def make_clock(self) -> Clock:
        """Return a new clock for a search: wall time or, with `steps`, counted steps."""
        return Clock() if self.steps is None else StepClock()

    def with_limit(self, seconds: float) -> "PlanOptions":
        """Return a copy limited to these seconds, or to the steps that stand for them."""
        if self.steps is None:
            return msgspec.structs.replace(self, time_limit=seconds)
        return msgspec.structs.replace(self, steps=max(0, round(seconds / STEP_SECONDS)))
