"""Reductions beside compute: plans of jobs with `[network] overlap`."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.cli.drawing.svg_timeline import LINK_HEIGHT, draw_schedule
from slipstream.cli.exporters.perfetto import perfetto_trace
from slipstream.cli.shared.summaries import busy_shares
from slipstream.cli.timeline_page import ShownSchedule, timeline_data
from slipstream.planner import overlapped
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import JobError, parse_job
from slipstream.planner.job.network import Network
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import has_overlapping_reductions, without_reductions
from slipstream.planner.periods import Periods
from slipstream.planner.plan import plan_job, plan_only
from slipstream.schedules.check import check
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.dealing import Dealer
from slipstream.schedules.schedule import OpKind, Worker
from slipstream.schedules.timing import Noise, replay_with_noise
from tests.jobs import any_jobs, jobs

JOB = """
name = "overlap"
pipelines = 2
stages = 2
microbatches = 4
[placement]
layers = [4, 4]
[time]
forward = 4
backward_input = 4
backward_weight = 4
optimizer = 1
all_reduce = 4
[network]
overlap = true
"""


def planned(job, failed=(), **options):
    return plan_job(job, failed, **{"method": "greedy", "steps": 200, **options}).schedule


@given(jobs() | any_jobs(), st.data())
def test_any_job_has_a_plan_that_is_no_shorter_than_without_reductions(job, data):
    """The checker has passed it. It is replayed as planned, dealt to, read and written."""
    job = replace(
        job, network=Network(overlap=True, latency=data.draw(st.sampled_from([0.0, 0.0, 0.1])))
    )
    failed = data.draw(
        st.sampled_from([(), (Worker(0, 0),), (Worker(job.pipelines - 1, job.stages - 1),)])
    )
    how = data.draw(
        st.sampled_from(
            [{}, {"optimizer": "synchronous"}, {"backward": "fused"}, {"layers": "move"}]
        )
    )
    options = PlanOptions(**{"method": "greedy", "steps": 200, **how})
    try:
        schedule = plan_only(options, job, failed).schedule
        none = plan_only(options, without_reductions(job), failed).schedule
    except (NoPlanError, JobError):
        return
    assert check(schedule) == []
    assert schedule.has_overlap == any(job.time.all_reduce)
    assert schedule.seconds(schedule.period_ticks) >= none.seconds(none.lower_bound_ticks) * (
        1 - 1e-6
    )
    assert decode(encode(schedule)) == schedule
    assert proven_bound(schedule).ticks <= schedule.period_ticks
    if schedule.optimizer == "staggered":
        period = schedule.seconds(schedule.period_ticks)
        assert replay_with_noise(schedule, Noise(), replays=1)[0] <= period * (1 + 1e-9)
        samples = schedule.grid.total_microbatches
        dealer = Dealer(schedule)
        even = dealer.iteration_seconds([np.ones((samples, 3))] * 3, [np.arange(samples)] * 3)
        assert max(even[1:]) <= period * (1 + 1e-6)


@given(jobs() | any_jobs())
def test_jobs_that_do_not_overlap_are_planned_as_before(job):
    job = replace(job, network=Network())
    try:
        assert planned(job) == planned(
            replace(job, network=Network(overlap=not any(job.time.all_reduce)))
        )
    except NoPlanError:
        return


def test_layers_in_finer_ticks_than_a_schedule_are_told_in_few_digits():
    """A tick of 1/120 is no float; the file holds whole numbers below 2^53."""
    job = parse_job("""
        pipelines = 3
        stages = 1
        microbatches = 1
        [placement]
        layers = [2]
        [time]
        forward = 1.0
        backward_input = 0.1
        backward_weight = 0.1
        all_reduce = 1.0
        slow = {"0.0" = 0.5}
        [layers]
        forward = [1.0, 2.0]
        [network]
        overlap = true""")
    schedule = plan_only(
        PlanOptions(method="greedy", steps=200, optimizer="synchronous"), job, ()
    ).schedule
    assert decode(encode(schedule)) == schedule


def test_layers_are_reduced_while_others_compute():
    """The reduction of one layer remains after the last W.

    It is 1 of 4 ticks a stage, proven to be the least.
    """
    schedule = planned(parse_job(JOB))
    none = planned(without_reductions(parse_job(JOB)))
    assert schedule.seconds(schedule.period_ticks) == none.seconds(none.period_ticks) + 1
    assert proven_bound(schedule).ticks == schedule.lower_bound_ticks
    assert schedule.status == "optimal" and schedule.lower_bound_ticks == schedule.period_ticks
    weight_gradients = [op for op in schedule.all_ops() if op.kind is OpKind.W]
    beside = []
    for op in schedule.all_ops():
        if op.kind is OpKind.A and any(
            other.worker == op.worker
            and other.start_ticks < op.end_ticks
            and op.start_ticks < other.end_ticks
            for other in weight_gradients
        ):
            beside.append(op)
    assert len(beside) == 4 * 3


@pytest.mark.parametrize(
    "memory",
    ["", "[memory]\ncapacity = 8\nactivation = 1\nweight_stash = 1\n"],
    ids=["unlimited", "memory"],
)
def test_single_layers_are_reduced_also_where_all_times_are_round(memory):
    # A tick that holds what stages take is as long as the op of a whole stage here.
    job = parse_job(JOB.replace("optimizer = 1", "optimizer = 4") + memory)
    schedule, none = planned(job), planned(without_reductions(job))
    assert schedule.seconds(schedule.period_ticks) == none.seconds(none.period_ticks) + 1
    assert (
        schedule.status == "optimal" and proven_bound(schedule).ticks == schedule.lower_bound_ticks
    )


def test_what_remains_is_proven_where_a_tick_is_no_float():
    # A layer is reduced in a 600th of a second: one tick, which as a float is longer.
    text = (
        JOB.replace(" = 4\n", " = 0.005\n")
        .replace("[4, 4]", "[3, 3]")
        .replace("optimizer = 1", "optimizer = 0.005")
    )
    schedule = planned(parse_job(text.replace("microbatches = 0.005", "microbatches = 4")))
    assert proven_bound(schedule).ticks >= schedule.lower_bound_ticks > 0


def test_without_layers_a_stage_is_reduced_as_a_whole():
    text = JOB.replace("[placement]\nlayers = [4, 4]\n", "")
    none = planned(without_reductions(parse_job(text)))
    schedule = planned(parse_job(text))
    assert schedule.seconds(schedule.period_ticks) == none.seconds(none.period_ticks) + 4


def moved(schedule, wanted, ticks):
    """The schedule with the first op of its first worker so many ticks later.

    The op is the first that is wanted.
    """
    seat = schedule.seats[0]
    program = list(schedule.programs[seat.program])
    index = next(index for index, op in enumerate(program) if wanted(op))
    program[index] = replace(program[index], start_ticks=program[index].start_ticks + ticks)
    program.sort(key=lambda op: (op.kind is OpKind.O, op.start_ticks))
    programs = (*schedule.programs, tuple(program))
    return replace(
        schedule,
        programs=programs,
        seats=(replace(seat, program=len(programs) - 1), *schedule.seats[1:]),
    )


@pytest.mark.parametrize(
    ("kind", "ticks", "says"),
    [(OpKind.A, -1, "all-reduce"), (OpKind.A, 1, "all-reduce"), (OpKind.O, -1, "one-at-a-time")],
)
def test_the_checker_refuses_reductions_at_other_times(kind, ticks, says):
    wrong = moved(planned(parse_job(JOB)), lambda op: op.kind is kind, ticks)
    assert says in {violation.rule for violation in check(wrong)}


def test_a_plan_with_reductions_at_wrong_times_does_not_leave_the_planner(monkeypatch):
    place = overlapped._place_reductions

    def place_apart(*given):
        # The first worker reduces a tick after its peers.
        placed = place(*given)
        worker, ops = next(iter(placed.items()))
        late = [
            replace(op, start_ticks=op.start_ticks + 1, end_ticks=op.end_ticks + 1) for op in ops
        ]
        return {**placed, worker: late}

    monkeypatch.setattr(overlapped, "_place_reductions", place_apart)
    with pytest.raises(AssertionError, match=r"breaks a rule: .*reduce together"):
        planned(parse_job(JOB))


def test_one_reduction_at_a_time_on_a_link():
    """Two reductions at the same time on a link are refused.

    Neither is where they do not overlap compute.
    """
    schedule = planned(parse_job(JOB))
    reductions = [op for op in schedule.ops(Worker(0, 0)) if op.kind is OpKind.A]
    assert all(before.end_ticks <= op.start_ticks for before, op in itertools.pairwise(reductions))
    longer = replace(
        schedule,
        times=replace(
            schedule.times, all_reduce=tuple(9 * ticks for ticks in schedule.times.all_reduce)
        ),
    )
    assert any(
        "before it in the program" in violation.message and "A(" in violation.message
        for violation in check(longer)
    )
    blocking = replace(schedule, times=replace(schedule.times, overlap=False))
    assert any(violation.rule == "one-at-a-time" for violation in check(blocking))


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ("overlap = 1", "network.overlap is 1; expected true or false"),
        ("speed = 3", "speed"),
        ("slowdown = 1", "network.slowdown is 1; expected a share, less than 1"),
        ("bandwidth = 0", "network.bandwidth is 0; expected bytes a second, more than 0"),
        ("latency = -1", "latency"),
        (
            "bandwidth = 1e-300\nactivation = 5e9",
            "what a transfer takes by network.activation and .* is inf; expected",
        ),
        ("activation = 5", "network.activation is given without network.bandwidth"),
        (
            "bandwidth = 5\ngradients = 5",
            "network.gradients and time.all_reduce are both given; expected one of them",
        ),
    ],
)
def test_what_is_no_network_is_refused(network, says):
    with pytest.raises(JobError, match=says):
        parse_job(JOB.replace("overlap = true", network))


def test_a_file_says_that_reductions_overlap_only_where_they_do():
    assert b"overlap" in encode(planned(parse_job(JOB))).replace(b'"overlap",', b"")
    assert b'"overlap":' not in encode(
        planned(parse_job(JOB.replace("overlap = true", "overlap = false")))
    )


def test_times_follow_from_bytes_bandwidth_and_latency():
    """A ring of two workers: twice the latency, and each sends all bytes once."""
    text = JOB.replace("all_reduce = 4\n", "").replace(
        "overlap = true", "bandwidth = 100\nlatency = 0.25\ngradients = [200, 400]\nactivation = 10"
    )
    job = parse_job(text)
    assert job.time.all_reduce == (2.5, 4.5) and job.time.transfer == 0.35
    assert not has_overlapping_reductions(job) and has_overlapping_reductions(
        parse_job(text + "\noverlap = true")
    )


def test_what_reductions_take_from_compute_is_counted():
    """Half of the 4 ticks in which a stage is reduced."""
    free, slowed = (planned(parse_job(JOB + more)) for more in ("", "slowdown = 0.5\n"))
    assert slowed.seconds(slowed.period_ticks) == free.seconds(free.period_ticks) + 2
    assert slowed.status == "optimal"


def test_few_reductions_where_each_takes_long():
    """Two reductions take the place of four where each takes long.

    Each of a stage takes 3.2 s of its 4 s however little it reduces.
    """

    def ranges(latency):
        schedule = planned(
            parse_job(JOB.replace("overlap = true", f"overlap = true\nlatency = {latency}"))
        )
        return len({op.slice for op in schedule.all_ops() if op.kind is OpKind.A})

    assert ranges(0) == 8 and ranges(1.6) < 8


def test_a_reduction_that_is_nothing_but_latency_takes_that_in_each_piece():
    # More than was measured.
    job = parse_job(JOB.replace("overlap = true", "overlap = true\nlatency = 100"))
    schedule = planned(job)
    whole = min(job.time.all_reduce)
    reductions = [op for op in schedule.all_ops() if op.kind is OpKind.A]
    assert reductions and all(
        schedule.seconds(op.end_ticks - op.start_ticks) >= whole for op in reductions
    )


def test_pictures_show_reductions_beside_other_ops():
    schedule = planned(parse_job(JOB))
    events = json.loads(perfetto_trace(schedule))["traceEvents"]
    links = {(event["pid"], event["tid"]) for event in events if event["name"].startswith("A")}
    assert (
        links
        == {
            (event["pid"], event["tid"])
            for event in events
            if event["name"] == "thread_name" and event["args"]["name"].startswith("links of ")
        }
        and len(links) == 4
    )
    reductions = sum(op.kind is OpKind.A for op in schedule.all_ops())
    assert draw_schedule(schedule).decode().count(f'height="{LINK_HEIGHT}"') == reductions
    tracks = timeline_data([ShownSchedule("plan", schedule)])["panels"][0]["tracks"]
    assert all(len(track["links"]) == 4 and "A" not in track["kinds"] for track in tracks)
    assert all(share <= 1 for share in busy_shares(schedule).values())


def test_periods_that_simulations_ask_for_count_what_remains():
    options = PlanOptions(method="greedy", steps=0, slices=False).with_limit(0.1)
    overlapped, blocking = (
        Periods(parse_job(text), options) for text in (JOB, JOB.replace("true", "false"))
    )
    schedule = planned(parse_job(JOB))
    assert overlapped.planned_period((0, 0))[0] == schedule.seconds(schedule.period_ticks)
    assert blocking.planned_period((0, 0))[0] == schedule.seconds(schedule.period_ticks) + 3
    assert overlapped.one_f_one_b_period(4) < blocking.one_f_one_b_period(4)


@pytest.mark.parametrize("seed", range(5))
def test_what_dealing_finds_is_what_a_replay_finds(seed):
    """Reductions wait for W of any pipeline; also where a swap before was dropped."""
    dealer = Dealer(planned(parse_job(JOB.replace("pipelines = 2", "pipelines = 4"))))
    costs = np.random.default_rng(seed).lognormal(0, 1, (dealer.samples, 3))
    dealt = dealer.deal(costs, seed=seed, swaps=300)
    assert (
        dealer.deal(costs[dealt.sample], seed=0, swaps=0).before_ticks
        == dealt.after_ticks
        < dealt.before_ticks
    )
