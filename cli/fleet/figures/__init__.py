"""Figures of documents, most of them published ones again: one module for each, by name in `FIGURES`."""

from collections.abc import Callable, Mapping
from functools import partial

from slipstream.cli.fleet.figures import (
    ablation,
    failure_cost,
    failures,
    replicas,
    scaling,
    trace_average,
    worked_example,
)
from slipstream.cli.fleet.figures.figure import Figure
from slipstream.planner.budget import CountCallback

__all__ = ["FIGURES", "Figure"]

FIGURES: Mapping[str, Callable[[CountCallback], Figure]] = {
    "worked-example": worked_example.reproduce,
    "failures": failures.reproduce,
    "trace": trace_average.reproduce,
    "ablation": ablation.reproduce,
    "scaling": scaling.reproduce,
    "replicas": replicas.reproduce,
    "failure-cost": failure_cost.reproduce,
    "failure-cost-overlapped": partial(failure_cost.reproduce, overlap=True),
}
