"""How to plan: what the command line and callers of the library choose."""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from planner.job.file import Job
from planner.model.from_job import build_problem
from planner.model.problem import Problem
from planner.search.baselines import BASELINES
from planner.search.solve import Method
from schedules.layers import LayerRange
from schedules.schedule import BackwardMode, OptimizerMode, Worker

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
    """Seconds."""
    seed: int = 0
    layers: Layers = "fixed"
    """fixed: parameters stay with the workers that hold them; move: layers may change hands."""
    slices: bool = True
    """Whether a micro-batch may be cut within a stage."""
    from_checkpoint: bool = False
    """With layers that move: those that no live worker holds are taken from a checkpoint."""
    holds: tuple[tuple[Worker, tuple[LayerRange, ...]], ...] = ()
    """The layers that live workers hold now, where those are not the ones of their stages."""

    def problem(self, job: Job, failed: Sequence[Worker] = ()) -> Problem:
        """The problem to solve. Raises NoPlanError."""
        usual = self.method == "1f1b"
        return build_problem(job, failed, backward=self.backward or ("fused" if usual else "split"),
                             optimizer=self.optimizer or ("synchronous" if usual else "staggered"),
                             sliced=self.slices and self.method not in BASELINES)

    @property
    def comparing(self) -> "PlanOptions":
        """The same by a method that is fast enough to compare candidates."""
        return msgspec.structs.replace(self, method="greedy") if self.method == "cp-sat" else self

    def within(self, seconds: float) -> "PlanOptions":
        """The same with another time limit."""
        return msgspec.structs.replace(self, time_limit=seconds)
