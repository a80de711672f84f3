"""What failures cost over days and weeks: traces of a fleet, policies that live with them, and their comparison.

    availability_trace    which machines are alive, over time
    trace_file            reads traces
    public_traces         reads those that others have published
    failure_models        how often what fails, and for how long, as published
    synthetic_trace       draws traces from a failure model
    policy                what a policy is: it answers each change with phases
    policies/             one module for each policy
    costs                 seconds to restart, reconfigure and load, as published
    loads                 what workers have to compute, and where failures cost least
    settled               plans for failures with layers that move
    throughput            samples per second of the schedules that policies run
    simulation            takes policies through a trace, and adds up the time lost
    figures/              the published figures, computed again
    entry                 systems of others: tables, and policies by entry point
    benchmark             a versioned set of cases, seeds side by side, sensitivity, distance to published figures

This module is the one door: commands import from here, and no other package imports it (contracts in `pyproject.toml`).
"""

from slipstream.cli.fleet.availability_trace import (
    AvailabilityTrace,
    died,
    fail_together,
    fit_to_job,
    group_gpus,
    places_of_nodes,
)
from slipstream.cli.fleet.benchmark import (
    CASES,
    DOLLARS_PER_GPU_HOUR,
    VERSION,
    Case,
    CaseResult,
    Fidelity,
    Measures,
    PolicyResult,
    Report,
    Returned,
    Sensitivity,
    Spread,
    causes,
    read_report,
    run_case,
)
from slipstream.cli.fleet.costs import Costs, costs_for
from slipstream.cli.fleet.entry import GROUP, Entry, EntryError, Table, installed_policy, read_entry
from slipstream.cli.fleet.failure_models import FAILURE_MODELS, SLOW_MODELS, FailureModel, Kind, SlowKind, single
from slipstream.cli.fleet.figures import FIGURES, Figure
from slipstream.cli.fleet.figures.figure import Series
from slipstream.cli.fleet.policies import POLICIES
from slipstream.cli.fleet.policy import Cause, Policy
from slipstream.cli.fleet.settled import SETTLE_SECONDS
from slipstream.cli.fleet.simulation import Comparison, Floats, PolicyRun, compare, throughputs_over_traces
from slipstream.cli.fleet.synthetic_trace import draw_slow, draw_trace
from slipstream.cli.fleet.throughput import PLAN_SECONDS, Throughputs
from slipstream.cli.fleet.trace_file import TraceFileError, read_availability_trace

__all__ = [
    "CASES",
    "DOLLARS_PER_GPU_HOUR",
    "FAILURE_MODELS",
    "FIGURES",
    "GROUP",
    "PLAN_SECONDS",
    "POLICIES",
    "SETTLE_SECONDS",
    "SLOW_MODELS",
    "VERSION",
    "AvailabilityTrace",
    "Case",
    "CaseResult",
    "Cause",
    "Comparison",
    "Costs",
    "Entry",
    "EntryError",
    "FailureModel",
    "Fidelity",
    "Figure",
    "Floats",
    "Kind",
    "Measures",
    "Policy",
    "PolicyResult",
    "PolicyRun",
    "Report",
    "Returned",
    "Sensitivity",
    "Series",
    "SlowKind",
    "Spread",
    "Table",
    "Throughputs",
    "TraceFileError",
    "causes",
    "compare",
    "costs_for",
    "died",
    "draw_slow",
    "draw_trace",
    "fail_together",
    "fit_to_job",
    "group_gpus",
    "installed_policy",
    "places_of_nodes",
    "read_availability_trace",
    "read_entry",
    "read_report",
    "run_case",
    "single",
    "throughputs_over_traces",
]
