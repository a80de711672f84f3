"""Failure models against what was published, and what slow workers and links cost."""

import math
from collections import Counter

import numpy as np
import pytest

from slipstream.planner.simulation.availability_trace import AvailabilityTrace, Change, group_gpus
from slipstream.planner.simulation.failure_models import (
    FAILURE_MODELS,
    FT_HSDP_GPUS,
    GREYHOUND_DELAY,
    LLAMA_3_GPUS,
    RSC_1,
    RSC_2,
    RSC_MTTF,
    SLOW_MODELS,
    SlowKind,
)
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Cause
from slipstream.planner.simulation.policy_runs import simulate_policy
from slipstream.planner.simulation.synthetic_trace import draw_slow_times, draw_trace
from tests.planner.simulation.small import failing, lose, run, scenario, trace

PUBLISHED = [
    *(("meta-rsc", gpus, hours) for gpus, hours in RSC_MTTF),
    ("meta-rsc-1", 1_024, 24_000 / RSC_1 / 128),
    ("meta-rsc-1", 16_384, 24_000 / RSC_1 / 2_048),
    ("meta-rsc-1", 131_072, 24_000 / RSC_1 / 16_384),
    ("meta-rsc-1", 16_384, 1.8),
    ("meta-rsc-1", 131_072, 0.23),
    ("meta-rsc-2", 16_384, 24_000 / RSC_2 / 2_048),
    ("llama-3", LLAMA_3_GPUS, 54 * 24 / 419),
    ("ft-hsdp", FT_HSDP_GPUS, 0.3),
]


@pytest.mark.parametrize(("name", "gpus", "hours"), PUBLISHED)
def test_drawn_failures_are_as_far_apart_as_published(name, gpus, hours):
    """Within 10 %, at every size: counted in what is drawn.

    1,500 failures are within 2.6 %, mostly.
    """
    days = 1500 * hours / 24
    drawn = draw_trace(FAILURE_MODELS[name], gpus, days, seed=3)
    assert drawn.seconds_between_failures / 3600 == pytest.approx(hours, rel=0.1)
    assert FAILURE_MODELS[name].mean_hours_to_failure(gpus) == pytest.approx(hours, rel=0.03)


def test_the_curve_is_straight_between_its_points_and_one_rate_beyond():
    model = FAILURE_MODELS["meta-rsc"]
    assert model.mean_hours_to_failure(8) == pytest.approx(7.9 * 128)
    assert model.mean_hours_to_failure(262_144) == pytest.approx(0.115)
    assert model.mean_hours_to_failure(4_096) == pytest.approx(math.sqrt(7.9 * 1.8), rel=1e-6), (
        "half-way, in logarithms"
    )


def test_llama_3_by_cause_and_domain():
    kinds = FAILURE_MODELS["llama-3"].kinds
    expected = {kind.cause: LLAMA_3_GPUS / kind.gpus * 54 * 24 / kind.mtbf_hours for kind in kinds}
    assert sum(expected.values()) == pytest.approx(419) and expected["faulty GPU"] == pytest.approx(
        148
    )
    drawn = draw_trace(FAILURE_MODELS["llama-3"], LLAMA_3_GPUS, 10 * 54, seed=1)
    sizes = Counter(len(change.removed) for change in drawn.changes if change.removed)
    assert sizes[16] == pytest.approx(350, rel=0.15), "switches"
    assert sizes[8] == pytest.approx(10 * (32 + 3 + 3 + 2 + 2 + 2 + 2), rel=0.15), "servers"


def test_servers_are_away_for_days_and_few_of_them_have_most_failures_as_published():
    """Drawn faults of servers are those of InfiniteHBD-Trace.

    It has 4.18 faults per 1,000 node-days, 9.3 of 400 servers down, 133 h in the mean, 33 % within
    4 h; a tenth of the servers have 41 % of the faults, and 169 of 400 none. The numbers of 30 days
    have 14.9 times the variance that they would have at one rate.
    """
    days, hours, losses, months = 40 * 349, list[float](), Counter[int](), Counter[int]()
    drawn = group_gpus(draw_trace(FAILURE_MODELS["infinite-hbd"], 8 * 400, days, seed=1), 8)
    since = dict[int, float]()
    for change in drawn.changes:
        since |= dict.fromkeys(change.removed, change.seconds)
        losses.update(change.removed if change.seconds < 349 * 86_400 else ())
        months[int(change.seconds / 86_400 // 30)] += len(change.removed)
        hours += [(change.seconds - since.pop(place)) / 3600 for place in change.added]
    assert len(hours) / (400 * days / 1000) == pytest.approx(4.18, rel=0.15), (
        "a server that is down cannot fail again"
    )
    assert 400 - drawn.mean_live_machines == pytest.approx(9.3, rel=0.15)
    assert np.mean(hours) == pytest.approx(133, rel=0.1) and 10 < np.median(hours) < 25
    assert np.mean(np.array(hours) <= 4) == pytest.approx(0.33, abs=0.04)
    assert np.var(list(months.values())) / np.mean(list(months.values())) == pytest.approx(
        14.9, rel=0.2
    )
    counts = sorted((losses[place] for place in range(400)), reverse=True)
    assert (
        sum(counts[:40]) / sum(counts) == pytest.approx(0.41, abs=0.08)
        and 130 < counts.count(0) < 210
    )


@pytest.mark.parametrize("name", FAILURE_MODELS)
def test_every_kind_says_where_it_is_from(name):
    model = FAILURE_MODELS[name]
    assert model.source and all(kind.source and kind.cause for kind in model.kinds)
    assert all(
        "arXiv" in kind.source or "assumed" in kind.source or "section" in kind.source
        for kind in model.kinds
    )


def test_repairs_wait_for_their_turn():
    """Half of ten machines are there if all repairs go on at once.

    They fail once a day and are repaired in a day; one repair at a time leaves a tenth.
    """
    at_once = draw_trace(failing(24, repair_hours=24, transient_share=0), 10, 400, 1)
    queue = failing(24, repair_hours=24, transient_share=0)
    queue = draw_trace(type(queue)(name="q", kinds=queue.kinds, repairs_at_once=1), 10, 400, 1)
    assert at_once.mean_live_machines == pytest.approx(5, rel=0.1)
    assert queue.mean_live_machines < 2


def factors(trace_, seconds):
    """How many times as long a job takes that waits for all.

    It is a mean over time.
    """
    slow, links, clock, taken = {}, 1.0, 0.0, 0.0
    for change in (*trace_.changes, Change(seconds)):
        taken += (change.seconds - clock) * max([1.0, *slow.values()]) * links
        clock, links = change.seconds, change.links or links
        slow |= dict(change.slowed)
    return taken / seconds


def test_greyhound_delays_those_who_wait_and_links_more_than_computation():
    whole = AvailabilityTrace(
        name="whole", places=64, live=tuple(range(64)), changes=(), length_seconds=3.6e7
    )
    trace_ = draw_slow_times(whole, SLOW_MODELS["greyhound"], seed=1)
    assert factors(trace_, whole.length_seconds) == pytest.approx(GREYHOUND_DELAY, abs=0.02)
    assert draw_slow_times(whole, SLOW_MODELS["greyhound"], seed=1) == trace_
    compute, links = SLOW_MODELS["greyhound"]
    assert (compute.share, links.share) == (0.02, 0.40) and not compute.links and links.links
    assert (compute.hours, links.hours) == pytest.approx((10 / 60, 24 / 60))
    slowed = [change for change in trace_.changes if change.slowed and change.slowed[0][1] > 1]
    linked = [change for change in trace_.changes if change.links > 1]
    for kind, slow in ((compute, slowed), (links, linked)):
        assert len(slow) == pytest.approx(10_000 / (kind.hours_between(1) + kind.hours), rel=0.1)


def test_more_slow_times_than_can_be_drawn_are_refused():
    with pytest.raises(ValueError, match="shorten it to at most 5 million"):
        draw_slow_times(
            trace(seconds=1e6), [SlowKind(cause="slow", share=0.1, hours=1e-9, factor=2.0)]
        )


def links(seconds, factor):
    return Change(seconds, links=factor)


@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if not kind.is_reference])
def test_nobody_trains_past_slow_links_and_the_time_is_told(name):
    whole, slow = run(name), run(name, links(500.0, 2.0))
    assert slow.throughput == pytest.approx(0.75 * whole.throughput)
    lost = slow.seconds_lost(slow.fault_free_rate)
    assert lost[Cause.LINKS] == pytest.approx(
        250 * whole.throughput / whole.fault_free_rate
        if not POLICIES[name].pauses
        else lost[Cause.LINKS]
    )
    assert sum(lost.values()) == pytest.approx(1000 * (1 - slow.throughput / slow.fault_free_rate))


def test_waiting_for_slow_workers_is_a_cause_of_its_own():
    result = run("recycle", Change(500.0, slowed=((1, 2.0),)), links(750.0, 2.0))
    lost = result.seconds_lost(result.fault_free_rate)
    assert lost[Cause.SLOW] == pytest.approx(250 / 2 + 250 / 2) and lost[
        Cause.LINKS
    ] == pytest.approx(250 / 4)
    assert lost[Cause.RUN] == pytest.approx(0.0)


def test_phases_still_to_come_are_not_slowed_twice():
    """Each phase is as long as it would be at one speed.

    A worker joins, and is loaded for 3 s, while changes of speed come.
    """
    policy = POLICIES["recycle"](scenario())
    result = simulate_policy(
        policy, trace(links(50.0, 2.0), lose(100.0, 0), links(101.0, 2.0), links(101.5, 2.0))
    )
    redone = sum(np.diff(result.seconds)[[phase.redone > 0 for phase in result.phases]])
    assert redone == pytest.approx(2 * 9 / (18 / 28))
