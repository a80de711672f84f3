"""Recompute published figures: a table, JSON and a picture.

    python -m benchmarks.figures NAME [--out DIR] [--no-picture] [--json]

`slipstream reproduce` does so for failure-cost.
"""

import typer

from benchmarks.figures import (
    ablation,
    failures,
    repairs,
    replicas,
    scaling,
    trace_average,
    worked_example,
)
from slipstream.cli import reproduce

FIGURES = {
    "worked-example": worked_example.reproduce,
    "failures": failures.reproduce,
    "trace": trace_average.reproduce,
    "ablation": ablation.reproduce,
    "scaling": scaling.reproduce,
    "replicas": replicas.reproduce,
    "repairs": repairs.reproduce,
}

if __name__ == "__main__":
    reproduce.FIGURES = FIGURES
    typer.run(reproduce.reproduce)
