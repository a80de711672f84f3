"""The cost of failures over days and weeks: traces of a fleet, policies that respond to failures, and their comparison.

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
    simulation            runs policies over a trace, and adds up the time lost
    failure_cost          the cost of a failure: the table of the README
    figure                such a table, and the data of its drawing
    entry                 other systems: as tables, and as policies by entry point

Commands import from this module only, and no other package imports it (contracts in `pyproject.toml`).
"""

from slipstream.cli.fleet.availability_trace import AvailabilityTrace as AvailabilityTrace
from slipstream.cli.fleet.availability_trace import build_death_trace as build_death_trace
from slipstream.cli.fleet.availability_trace import find_node_places as find_node_places
from slipstream.cli.fleet.availability_trace import fit_to_job as fit_to_job
from slipstream.cli.fleet.availability_trace import group_gpus as group_gpus
from slipstream.cli.fleet.availability_trace import with_node_failures as with_node_failures
from slipstream.cli.fleet.costs import Costs as Costs
from slipstream.cli.fleet.costs import costs_for as costs_for
from slipstream.cli.fleet.entry import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
from slipstream.cli.fleet.entry import Entry as Entry
from slipstream.cli.fleet.entry import EntryError as EntryError
from slipstream.cli.fleet.entry import EntryTable as EntryTable
from slipstream.cli.fleet.entry import load_installed_policy as load_installed_policy
from slipstream.cli.fleet.entry import read_entry as read_entry
from slipstream.cli.fleet.failure_cost import reproduce_failure_cost as reproduce_failure_cost
from slipstream.cli.fleet.failure_models import FAILURE_MODELS as FAILURE_MODELS
from slipstream.cli.fleet.failure_models import SLOW_MODELS as SLOW_MODELS
from slipstream.cli.fleet.failure_models import FailureModel as FailureModel
from slipstream.cli.fleet.failure_models import make_single_gpu_model as make_single_gpu_model
from slipstream.cli.fleet.figure import Figure as Figure
from slipstream.cli.fleet.figure import Series as Series
from slipstream.cli.fleet.policies import POLICIES as POLICIES
from slipstream.cli.fleet.policy import Cause as Cause
from slipstream.cli.fleet.policy import Policy as Policy
from slipstream.cli.fleet.settled import SETTLE_SECONDS as SETTLE_SECONDS
from slipstream.cli.fleet.simulation import Comparison as Comparison
from slipstream.cli.fleet.simulation import Floats as Floats
from slipstream.cli.fleet.simulation import PolicyRun as PolicyRun
from slipstream.cli.fleet.simulation import TraceSimulator as TraceSimulator
from slipstream.cli.fleet.simulation import compare_policies as compare_policies
from slipstream.cli.fleet.simulation import gather_throughputs as gather_throughputs
from slipstream.cli.fleet.simulation import simulate_traces as simulate_traces
from slipstream.cli.fleet.synthetic_trace import draw_slow_times as draw_slow_times
from slipstream.cli.fleet.synthetic_trace import draw_trace as draw_trace
from slipstream.cli.fleet.throughput import PLAN_SECONDS as PLAN_SECONDS
from slipstream.cli.fleet.throughput import Throughputs as Throughputs
from slipstream.cli.fleet.trace_file import TraceFileError as TraceFileError
from slipstream.cli.fleet.trace_file import read_availability_trace as read_availability_trace
