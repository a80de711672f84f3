"""The published figures, made again: one module each; `FIGURES` names them."""

from collections.abc import Callable, Mapping

from planner.fleet.figures import ablation, failures, scaling, trace_run, worked_example
from planner.fleet.figures.figure import Figure, Tell

__all__ = ["FIGURES", "Figure"]

FIGURES: Mapping[str, Callable[[Tell], Figure]] = {
    "worked-example": worked_example.reproduce,
    "failures": failures.reproduce,
    "trace": trace_run.reproduce,
    "ablation": ablation.reproduce,
    "scaling": scaling.reproduce,
}
