"""Small jobs and traces with numbers that can be checked by hand."""

from planner.fleet.availability_trace import AvailabilityTrace, Change
from planner.fleet.costs import Costs
from planner.fleet.policy import Scenario
from planner.fleet.throughput import Throughputs
from planner.job.file import parse_job

COSTS = Costs(parameters=1e9, switch_seconds=2.0, load_seconds=3.0, restart_seconds=50.0, checkpoint_seconds=10.0,
              oobleck_seconds=7.0, bamboo_seconds=20.0)


def job(pipelines=3, stages=2, microbatches=6, optimizer=1, order="linear"):
    return parse_job(f"name = \"small\"\npipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
                     f"[time]\nforward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = {optimizer}\n"
                     f"[placement]\norder = \"{order}\"\n")


def scenario(between=1000.0, costs=COSTS, **shape):
    return Scenario(Throughputs(job(**shape)), costs, between)


def trace(*changes, workers=6, seconds=1000.0, live=None):
    return AvailabilityTrace(name="made", places=workers, live=tuple(range(workers)) if live is None else live,
                             changes=tuple(changes), length_seconds=seconds)


def lose(seconds, *machines):
    return Change(seconds, removed=machines)


def gain(seconds, *machines):
    return Change(seconds, added=machines)
