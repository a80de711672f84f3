"""Compute the cost of failures over days and weeks.

Traces of a fleet, policies that respond to failures, and their comparison:

    availability_trace    which machines are alive, over time
    trace_file            reads traces
    public_traces         reads traces that others have published
    failure_models        published rates, causes and durations of failures
    synthetic_trace       draws traces from a failure model
    policy                the interface of a policy: it answers each change with phases
    policies/             one module for each policy
    costs                 published times to restart, reconfigure and load, in seconds
    loads                 compute time of workers, and the stages where failures cost least
    settled               plans for failures with layers moved
    throughput            samples per second of the schedules that policies run
    policy_runs           runs policies over a trace, and adds up the time lost
    entry                 other systems: as tables, and as policies by entry point

Commands import from this module only, and nothing else in `planner` imports it (contracts in
`pyproject.toml`).
"""

from slipstream.planner.simulation.availability_trace import AvailabilityTrace as AvailabilityTrace
from slipstream.planner.simulation.availability_trace import build_death_trace as build_death_trace
from slipstream.planner.simulation.availability_trace import find_node_places as find_node_places
from slipstream.planner.simulation.availability_trace import fit_to_job as fit_to_job
from slipstream.planner.simulation.availability_trace import group_gpus as group_gpus
from slipstream.planner.simulation.availability_trace import (
    with_node_failures as with_node_failures,
)
from slipstream.planner.simulation.costs import Costs as Costs
from slipstream.planner.simulation.costs import costs_for as costs_for
from slipstream.planner.simulation.entry import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
from slipstream.planner.simulation.entry import Entry as Entry
from slipstream.planner.simulation.entry import EntryError as EntryError
from slipstream.planner.simulation.entry import EntryTable as EntryTable
from slipstream.planner.simulation.entry import load_installed_policy as load_installed_policy
from slipstream.planner.simulation.entry import read_entry as read_entry
from slipstream.planner.simulation.failure_models import FAILURE_MODELS as FAILURE_MODELS
from slipstream.planner.simulation.failure_models import SLOW_MODELS as SLOW_MODELS
from slipstream.planner.simulation.failure_models import FailureModel as FailureModel
from slipstream.planner.simulation.failure_models import (
    make_single_gpu_model as make_single_gpu_model,
)
from slipstream.planner.simulation.policies import POLICIES as POLICIES
from slipstream.planner.simulation.policy import Cause as Cause
from slipstream.planner.simulation.policy import Policy as Policy
from slipstream.planner.simulation.policy_runs import Comparison as Comparison
from slipstream.planner.simulation.policy_runs import Floats as Floats
from slipstream.planner.simulation.policy_runs import PolicyRun as PolicyRun
from slipstream.planner.simulation.policy_runs import TraceSimulator as TraceSimulator
from slipstream.planner.simulation.policy_runs import compare_policies as compare_policies
from slipstream.planner.simulation.policy_runs import gather_throughputs as gather_throughputs
from slipstream.planner.simulation.policy_runs import simulate_traces as simulate_traces
from slipstream.planner.simulation.settled import SETTLE_SECONDS as SETTLE_SECONDS
from slipstream.planner.simulation.synthetic_trace import draw_slow_times as draw_slow_times
from slipstream.planner.simulation.synthetic_trace import draw_trace as draw_trace
from slipstream.planner.simulation.throughput import PLAN_SECONDS as PLAN_SECONDS
from slipstream.planner.simulation.throughput import Throughputs as Throughputs
from slipstream.planner.simulation.trace_file import TraceFileError as TraceFileError
from slipstream.planner.simulation.trace_file import (
    read_availability_trace as read_availability_trace,
)
