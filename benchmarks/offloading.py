"""Bound what offloading of activations to host memory could gain.

    python -m benchmarks.offloading [--steps N] [--bandwidth BYTES] [--json]

The host link of a worker carries a share of its activations, out and back, while it computes. If
this share were away from F to I, without taking any time to leave and return, a worker would have
room for that much more. Such a plan is at least as short as one with offloading. Placements that
need less memory (`plan --placement any`) are bounded in the same way. GPT presets have room for as
many micro-batches as a pipeline has workers (1F1B), for half and for twice as many; the Llama
presets have the memory that their weights leave.
"""

import argparse
import json
import tomllib
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from slipstream.planner import Job, parse_job
from slipstream.planner.job.arrangement import MovableLayers
from slipstream.planner.job.presets import preset_text
from slipstream.planner.job.toml import job_text
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.placement import find_placement
from slipstream.planner.plan import plan_only

GPTS = ("gpt-1.5b", "gpt-6.2b", "gpt-14.6b")
LLAMAS = ("llama-3-8b", "llama-3-70b")
ROOMS = (0.5, 1.0, 2.0)
LINK = 25e9
"""Bandwidth each way, in bytes per second: a measured PCIe 4.0 x16 link.

The measurement is of work on offloading (arXiv 2503.01328).
"""


class Row(NamedTuple):
    """Job with a memory limit. Periods are in seconds; None means that there is no plan."""

    job: str
    room: float | None
    """Micro-batches that fit on a worker, as a multiple of the workers of a pipeline."""
    period: float | None
    placed: float | None
    """Period of the best placement with the same memory."""
    away: float
    """Share of the activations that the link carries."""
    offloaded: float | None
    """Period with the additional room."""
    placed_offloaded: float | None
    """Period of the best placement with the additional room."""

    @property
    def gain(self) -> float | None:
        """Approximate upper limit of what offloading gains."""
        return (
            None
            if self.period is None or self.offloaded is None
            else self.period / self.offloaded - 1
        )

    @property
    def gain_over_placed(self) -> float | None:
        """Approximate upper limit of what offloading gains over the best placement."""
        return (
            None
            if self.placed is None or self.placed_offloaded is None
            else self.placed / min(self.placed, self.placed_offloaded) - 1
        )


def one_pipeline(name: str, room: float | None) -> str:
    """Return the job file of a preset's healthy pipeline, with the room of `Row`."""
    layers = MovableLayers(preset_text(name))
    job = layers.job
    text = layers.arranged_job_text(layers.own_arrangement)
    tables = tomllib.loads(text)
    tables |= {"pipelines": 1, "microbatches": max(job.microbatches)}
    for key in ("topology", "network", "training", "model"):
        tables.pop(key, None)
    if room is not None:
        assert job.memory is not None
        microbatch_sizes = [
            max(activation, stash)
            for activation, stash in zip(
                job.memory.activation, job.memory.weight_stash, strict=True
            )
        ]
        tables["memory"]["capacity"] = [room * job.stages * max(microbatch_sizes)] * job.stages
    return job_text(tables, {})


def measured(name: str, room: float | None, options: PlanOptions, bandwidth: float) -> Row:
    """Make all plans of one row."""
    text = one_pipeline(name, room)
    job = parse_job(text)
    assert job.memory is not None
    work = [
        sum(parts)
        for parts in zip(
            job.time.forward, job.time.backward_input, job.time.backward_weight, strict=True
        )
    ]
    away = 1 / max(
        1.0,
        *(
            size * job.memory.unit_bytes / job.ranks / bandwidth / seconds
            for size, seconds in zip(job.memory.activation, work, strict=True)
        ),
    )
    tables = tomllib.loads(text)
    kept = max(1e-3, 1 - away)
    for key in ("activation", "weight_stash"):
        tables["memory"][key] = [value * kept for value in tables["memory"][key]]
    roomier = job_text(tables, {})
    return Row(
        name,
        room,
        _period(job, options),
        _period_of_any(text, options),
        away,
        _period(parse_job(roomier), options),
        _period_of_any(roomier, options),
    )


def _period(job: Job, options: PlanOptions) -> float | None:
    try:
        return plan_only(options, job, ()).period
    except NoPlanError:
        return None


def _period_of_any(text: str, options: PlanOptions) -> float | None:
    try:
        return find_placement(text, options).plan.period
    except NoPlanError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--bandwidth", type=float, default=LINK)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = PlanOptions(steps=given.steps, method="greedy")
    cases: list[tuple[str, float | None]] = [(name, room) for name in GPTS for room in ROOMS]
    cases += [(name, None) for name in LLAMAS]
    rows = [measured(name, room, options, given.bandwidth) for name, room in cases]
    if given.json:
        print(
            json.dumps(
                [
                    {**row._asdict(), "gain": row.gain, "gain_over_placed": row.gain_over_placed}
                    for row in rows
                ]
            )
        )
        return
    table = Table(
        "job",
        "room",
        "link carries",
        "as placed",
        "offloaded",
        "gain at most",
        "any placement",
        "offloaded",
        "gain at most",
    )
    for row in rows:
        table.add_row(
            row.job,
            "its own" if row.room is None else f"{row.room:g} x workers",
            f"{row.away:.0%}",
            _seconds(row.period),
            _seconds(row.offloaded),
            _share(row.gain),
            _seconds(row.placed),
            _seconds(row.placed_offloaded),
            _share(row.gain_over_placed),
        )
    Console(width=120).print(table)


def _seconds(period: float | None) -> str:
    return "-" if period is None else f"{period:.4g} s"


def _share(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.1%}"


if __name__ == "__main__":
    main()
