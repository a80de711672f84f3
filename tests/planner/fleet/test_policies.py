"""Policies against small cases worked out by hand, and against the figures that their authors published."""

import math

import msgspec
import pytest

from planner.fleet.availability_trace import Change
from planner.fleet.costs import BAMBOO_SECONDS, costs_for, interpolated
from planner.fleet.policies import POLICIES
from planner.fleet.policies.oobleck import stacked_sizes
from planner.fleet.policies.oobleck_templates import Template, fastest_split, layers_of, template
from planner.fleet.policies.uneven_pipelines import cut_by_speed
from planner.fleet.policy import Cause, Checkpoints, Phase
from planner.fleet.simulation import Comparison, compare, simulate
from planner.fleet.synthetic_trace import FailureRates, draw_slow_workers, draw_trace, published_fail_slow
from tests.planner.fleet.small import COSTS, gain, job, lose, scenario, trace

WHOLE = 18 / 22
"""Samples a second of 1F1B, 3 pipelines x 2 stages x 6 micro-batches of three slots: (6 + 1) x 3 + 1 = 22 seconds."""


class InPlace(POLICIES["slipstream"]):
    """Slipstream before layers have moved, for numbers that can be checked by hand."""

    name = "slipstream"
    moves_layers = False


def run(name, *changes, **how):
    kind = InPlace if name == "in-place" else POLICIES[name]
    policy = kind(scenario(**how.pop("scenario", {})))
    return simulate(policy, trace(*changes, **how))


def spans(result):
    """[(cause, seconds)] of a run."""
    return [(list(Cause)[number].name, pytest.approx(float(seconds)))
            for number, seconds in zip(result.cause, result.seconds[1:] - result.seconds[:-1], strict=True)]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_what_it_assumes_and_runs_whole_at_its_rate(name):
    kind = POLICIES[name]
    result = run(name)
    assert kind.name == name and kind.title and kind.assumptions
    pause = COSTS.checkpoint_seconds
    interval = math.sqrt(2 * pause * 1000)
    share = interval / (interval + pause) if kind.pauses else 1.0
    assert result.throughput == pytest.approx(result.fault_free_rate * share)


@pytest.mark.parametrize(("name", "rate"), [
    ("slipstream", 18 / 19), ("slipstream-fixed", 18 / 19), ("recycle", WHOLE), ("oobleck", WHOLE),
    ("bamboo", WHOLE * 13.41 / 20.55), ("torchft", WHOLE), ("checkpoint-restart", WHOLE),
    ("elaswave", WHOLE), ("malleus", WHOLE), ("resihp", WHOLE), ("trainmover", 18 / 31),
    ("hot-spares", 18 / 31),  # two pipelines of nine micro-batches: (9 + 1) x 3 + 1
    ("fault-scaled", WHOLE), ("work-conserving", 18 / 19)])
def test_rates_with_all_workers_alive(name, rate):
    assert run(name).fault_free_rate == pytest.approx(rate)


def test_slipstream_loses_half_an_iteration_and_a_switch():
    result = run("in-place", lose(100.0, 0), gain(300.0, 0))
    after = 18 / 28  # two workers of stage 0 run nine micro-batches each: 27 + 1
    # The newcomer loads its stage for three seconds while the others train on.
    assert spans(result) == [("RUN", 100.0), ("SWITCH", 2.0), ("LOST", 9 / after), ("RUN", 200 - 2 - 9 / after),
                             ("RUN", 3.0), ("SWITCH", 2.0), ("RUN", 695.0)]
    useful = 100 * 18 / 19 + (203 - 2 - 14) * after + 695 * 18 / 19
    assert result.throughput == pytest.approx(useful / 1000) and result.switches == 2


def test_recycle_waits_for_those_who_load():
    result = run("recycle", lose(100.0, 0), gain(300.0, 0))
    assert spans(result)[-3:] == [("SWITCH", 2.0), ("LOAD", 3.0), ("RUN", 695.0)]


def test_what_is_not_redone_when_a_newcomer_is_ready_is_redone_faster():
    result = run("in-place", lose(100.0, 0), gain(104.0, 0))
    before, after = 18 / 28, 18 / 19
    redone = 5 * before  # from 102 to 107
    assert spans(result) == [("RUN", 100.0), ("SWITCH", 2.0), ("LOST", 2.0), ("LOST", 3.0), ("SWITCH", 2.0),
                             ("LOST", (9 - redone) / after), ("RUN", 1000 - 109 - (9 - redone) / after)]


def test_slipstream_moves_a_worker_where_that_pays_and_slipstream_fixed_does_not():
    both = [lose(100.0, 0), lose(200.0, 2)]  # two of stage 0
    moves = run("in-place", *both)
    assert ("LOAD", 3.0) in spans(moves), "all wait: another switch would take longer than what three seconds train"
    slow = msgspec.structs.replace(COSTS, load_seconds=100.0)
    trains = spans(run("in-place", *both, scenario={"costs": slow}))
    assert [name for name, _ in trains].count("SWITCH") == 3 and "LOAD" not in dict(trains)
    stays = run("slipstream-fixed", *both)
    assert [name for name, _ in spans(stays)].count("SWITCH") == 2
    assert stays.rate[-1] == pytest.approx(18 / (18 * 3 + 1))
    assert moves.rate[-1] == pytest.approx(18 / 28)  # one of each stage down


def test_a_stage_without_workers_goes_back_to_the_checkpoint():
    result = run("in-place", lose(100.0, 0, 2, 4))
    rate = result.rate[-1]
    # Checkpoints every sqrt(2 x 10 x 1000) = 141 s, in the background: nothing is kept of the first 100 s.
    assert spans(result)[:3] == [("RUN", 100.0), ("RESTART", 50.0), ("LOST", 100 * 18 / 19 / rate)]
    waits = run("in-place", lose(100.0, 0, 1, 2, 3, 4), gain(400.0, 0, 1))
    assert ("WAIT", 300.0) in spans(waits) and ("RESTART", 50.0) in spans(waits)


def test_a_failure_during_a_restart_starts_it_anew():
    result = run("in-place", lose(100.0, 0, 2, 4), lose(120.0, 1))
    assert spans(result)[1:3] == [("RESTART", 20.0), ("RESTART", 50.0)]


def test_who_comes_during_a_restart_joins_after_it():
    result = run("in-place", lose(100.0, 0, 2, 4), gain(120.0, 0), gain(130.0, 2))
    assert [span for span in spans(result) if span[0] == "RESTART"] == [
        ("RESTART", 20.0), ("RESTART", 10.0), ("RESTART", 20.0)], "50 seconds in all"
    assert result.rate[-1] == pytest.approx(18 / 28), "five workers"


def test_a_machine_that_is_still_loading_does_not_save_its_stage():
    """Stage 0 is left to one that loads it: with its source gone, nobody has the parameters."""
    result = run("in-place", lose(100.0, 0, 2), lose(101.0, 4), seconds=1000.0)
    assert "RESTART" in [name for name, _ in spans(result)]


@pytest.mark.parametrize("failures", range(5))
def test_slipstream_is_never_slower_than_recycle(failures):
    ours, recycle = (POLICIES[name](scenario()).steady_rate(failures) for name in ("slipstream", "recycle"))
    assert ours >= recycle * (1 - 1e-9)


def test_recycle_absorbs_one_failure_as_published():
    """The worked example: 3 x 4 workers, 6 micro-batches, optimizer 3 slots: 30 slots with and without the failure."""
    policy = POLICIES["recycle"](scenario(stages=4, optimizer=3))
    assert policy.fault_free_rate == pytest.approx(18 / 30) == policy.steady_rate(1)
    assert POLICIES["slipstream"](scenario(stages=4, optimizer=3)).fault_free_rate == pytest.approx(18 / 22)


def test_layers_move_while_the_job_trains_and_then_it_is_settled():
    policy = POLICIES["slipstream"](scenario())
    settled, stages = policy.throughputs.settled(1)
    assert 18 / 28 < settled <= 18 / (18 * 6 / 5 + 1) and stages > 0
    result = simulate(policy, trace(lose(100.0, 0), gain(600.0, 0)))
    move = 3.0 * stages  # three seconds a stage
    assert spans(result)[:4] == [("RUN", 100.0), ("SWITCH", 2.0), ("LOST", move), ("SWITCH", 2.0)]
    left = (9 - move * 18 / 28) / settled
    assert spans(result)[4:6] == [("LOST", left), ("RUN", 500 - 4 - move - left)]
    # The newcomer loads its stage while all train on as settled, and then all are there.
    assert spans(result)[6:] == [("RUN", 3.0), ("SWITCH", 2.0), ("RUN", 395.0)]
    assert result.rate[5:].tolist() == pytest.approx([settled, settled, 0.0, 18 / 19])
    assert policy.steady_rate(1) == settled


def test_layers_stay_where_the_next_failure_comes_too_soon():
    often = run("slipstream", lose(100.0, 0), scenario={"between": 4.0})
    assert often.rate[-1] == pytest.approx(18 / 28)
    assert spans(often) == spans(run("in-place", lose(100.0, 0), scenario={"between": 4.0}))


def test_the_next_failure_is_answered_as_if_layers_had_not_moved():
    result = run("slipstream", lose(100.0, 0), lose(500.0, 3))
    at_once = result.rate[result.seconds[:-1] > 500.0].tolist()
    assert next(rate for rate in at_once if rate) >= 18 / 28 * (1 - 1e-9)
    assert "RESTART" not in [name for name, _ in spans(result)]


# --- Oobleck ----------------------------------------------------------------------------------------------------------


def formula(times, microbatches):
    """T1 + T2 + T3 as peers state it, for stage times."""
    slowest = max(range(len(times)), key=lambda index: times[index])
    return sum(times) + (microbatches - len(times) + slowest - 1) * times[slowest] + sum(times[slowest:])


def splits(layers, stages):
    if stages == 1:
        yield (sum(layers),)
        return
    for first in range(1, len(layers) - stages + 2):
        for rest in splits(layers[first:], stages - 1):
            yield (sum(layers[:first]), *rest)


@pytest.mark.parametrize("layers", [(1.0,) * 7, (3.0, 1.0, 1.0, 2.0, 2.0, 1.0), (1.0, 5.0, 1.0, 1.0, 1.0)])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_oobleck_templates_are_the_best_split(layers, nodes):
    best = min(formula(times, 4 * nodes) for times in splits(layers, nodes))
    assert template(layers, nodes).seconds(4 * nodes) == pytest.approx(best)


def test_a_bidirectional_model_has_its_layers_once():
    assert layers_of(job(order="bidirectional")) == layers_of(job())


def test_oobleck_of_equal_stages_is_1f1b():
    made = template((1.0,) * 8, 4)
    assert made.seconds(10) == pytest.approx((10 + 3) * 2.0) and layers_of(job()) == (3 / 8,) * 16


def test_oobleck_splits_the_batch_for_the_shortest_iteration():
    policy = POLICIES["oobleck"](scenario())
    # 2 + 2 + 1 nodes: n, n and m micro-batches of 3 and 6 seconds; 3 (n + 1) = 24 with n = 7, and 6 m = 24 with m = 4.
    assert policy.rate([2, 2, 1]) == pytest.approx(18 / (24 + 1))
    assert policy.rate([]) == 0.0 and stacked_sizes(3, 2, 1) == [3, 2] and sum(stacked_sizes(3, 2, 3)) == 3


def test_oobleck_takes_newcomers_at_the_next_failure():
    result = run("oobleck", lose(100.0, 0), gain(300.0, 0), lose(600.0, 5))
    shorter = 18 / 25
    assert spans(result)[:3] == [("RUN", 100.0), ("SWITCH", 7.0), ("LOST", 9 / shorter)]
    assert result.switches == 2 and result.rate[-1] == pytest.approx(shorter)  # 0 fills in as 5 leaves


@pytest.mark.parametrize(("parameters", "seconds"), [(3.5e8, 3.0), (2.7e9, 6.0), (6.7e9, 10.0), (1e12, 10.0)])
def test_published_reconfiguration_times(parameters, seconds):
    assert costs_for(parameters).oobleck_seconds == seconds


def test_costs_between_published_sizes_grow_with_the_logarithm():
    middle = math.sqrt(340e6 * 6.7e9)
    assert interpolated(BAMBOO_SECONDS, middle) == pytest.approx((76 + 450) / 2)
    assert costs_for(6.7e9).restart_seconds == 701.0 and costs_for(6.7e9, 4).load_seconds == pytest.approx(2.345)
    with pytest.raises(ValueError, match="expected more than 0"):
        costs_for(0.0)


# --- Bamboo -----------------------------------------------------------------------------------------------------------


def test_bamboo_runs_at_two_thirds_while_a_worker_carries_two_stages():
    """40 workers: one that carries is 2.5 %, so pipelines stay; three are 7.5 %, and new ones are formed."""
    shape = {"pipelines": 10, "stages": 4}
    policy = POLICIES["bamboo"](scenario(**shape))
    result = simulate(policy, trace(lose(100.0, 5), lose(200.0, 30), lose(300.0, 17), workers=40))
    whole = policy.fault_free_rate
    assert result.rate[result.cause == 0][:3] == pytest.approx([whole, whole / 1.5, whole / 1.5])
    assert ("SWITCH", 20.0) in spans(result)
    assert result.rate[-1] == pytest.approx(COSTS.bamboo_fault_free_share * policy.throughputs.one_f_one_b(9))


def test_bamboo_neighbours_that_die_together_cost_a_rendezvous_more():
    result = run("bamboo", lose(100.0, 0, 1))
    assert ("SWITCH", 50.0) in spans(result)


def test_bamboo_fills_up_from_spares():
    policy = POLICIES["bamboo"](scenario(pipelines=2, stages=2))
    result = simulate(policy, trace(lose(100.0, 0), lose(400.0, 2), workers=4))
    # Three left: one pipeline and a spare. The spare takes the place of the next that dies.
    assert result.rate[-1] == pytest.approx(COSTS.bamboo_fault_free_share * policy.throughputs.one_f_one_b(1))


# --- torchft, restarts, spares ----------------------------------------------------------------------------------------


def test_torchft_drops_the_group_that_lost_a_worker():
    result = run("torchft", lose(100.0, 0))
    assert result.rate[-1] == pytest.approx(WHOLE * 2 / 3)
    assert spans(result)[:3] == [("RUN", 100.0), ("SWITCH", 2.0), ("LOST", 9 / (WHOLE * 2 / 3))]
    for failures in range(4):
        assert POLICIES["torchft"](scenario()).steady_rate(failures) == pytest.approx(WHOLE * ((6 - failures) // 2) / 3)


def test_torchft_restarts_a_whole_group_while_others_train():
    result = run("torchft", lose(100.0, 0), gain(300.0, 0))
    assert spans(result)[3:] == [("RUN", 200 - 2 - 9 / (WHOLE * 2 / 3)), ("RUN", 50.0), ("SWITCH", 2.0), ("LOAD", 3.0),
                                 ("RUN", 645.0)]
    assert result.rate[-1] == pytest.approx(WHOLE)


def test_restart_loses_the_work_since_the_last_checkpoint():
    result = run("checkpoint-restart", lose(400.0, 0), scenario={"between": 500.0})
    # Every sqrt(2 x 10 x 500) = 100 s of training and 10 s of writing: at 400 s the last was 70 s ago.
    after = 18 / 31
    assert spans(result)[:3] == [("RUN", 400.0), ("RESTART", 50.0), ("LOST", 70 * WHOLE / after)]
    assert result.rate[0] == pytest.approx(WHOLE * 100 / 110)
    lost = result.lost(WHOLE)
    assert sum(lost.values()) == pytest.approx(1000 * (1 - result.throughput / WHOLE))
    assert lost[Cause.RESTART] == 50.0 and lost[Cause.CHECKPOINT] > 0


def test_restart_takes_newcomers_in_after_a_checkpoint():
    result = run("checkpoint-restart", lose(100.0, 0), gain(400.0, 0), scenario={"between": 500.0})
    assert [name for name, _ in spans(result)].count("RESTART") == 2
    assert result.rate[-1] == pytest.approx(WHOLE * 100 / 110)


def test_hot_spares_take_the_place_of_the_dead():
    result = run("hot-spares", lose(100.0, 0), lose(500.0, 1), lose(800.0, 2))
    assert spans(result)[:4] == [("RUN", 100.0), ("SWITCH", 180.0), ("LOAD", 3.0), ("LOST", 9 / (18 / 31))]
    assert result.rate[-1] in (0.0, pytest.approx(18 / 58))  # three left: one pipeline of 18 micro-batches


def test_reference_lines():
    half = run("fault-scaled", lose(500.0, 0, 1, 2))
    assert half.throughput == pytest.approx(WHOLE * 0.75)
    limit = run("work-conserving", lose(500.0, 0, 1, 2))
    assert limit.rate[-1] == pytest.approx(18 / (18 * 6 / 3 + 1))
    both_ways = scenario(order="bidirectional").throughputs
    assert both_ways.work_conserving(3) == pytest.approx(18 / (18 * 6 / 3 + 1)), "the same work"


# --- Layers by speed, standby machines --------------------------------------------------------------------------------


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.5, 1.0), (3.0,)])
def test_layers_are_cut_by_the_speed_of_each_node(factors):
    layers = (1.0, 2.0, 1.0, 1.0, 3.0, 1.0)
    best = min(max(time * factor for time, factor in zip(times, factors, strict=True))
               for times in splits(layers, len(factors)))
    assert cut_by_speed(layers, factors).step == pytest.approx(best)


def test_a_node_that_is_far_too_slow_gets_no_layer():
    assert cut_by_speed((1.0,) * 4, (1.0, 50.0)).step == pytest.approx(4.0)
    with pytest.raises(ValueError, match="no nodes"):
        cut_by_speed((1.0,), ())


def test_the_batch_is_divided_by_the_speed_of_pipelines():
    one, half = Template(1.0, 0.0), Template(2.0, 0.0)
    assert fastest_split({one: 1, half: 1}, 9) == pytest.approx(6.0)
    assert fastest_split({one: 2}, 9) == pytest.approx(5.0)


def test_elaswave_gives_a_stage_with_fewer_replicas_fewer_layers():
    """3 x 2 workers, 8 layers of 3/8 s a stage: two of three replicas take 6 layers of 9/16 s, three take 10."""
    policy = POLICIES["elaswave"](scenario())
    now = 6 * 9 / 16 + 10 * 3 / 8 + 5 * 10 * 3 / 8
    assert policy.rate((1, 0)) == pytest.approx(WHOLE * (21 + 1) / (now + 1))
    result = simulate(policy, trace(lose(100.0, 0)))
    old = 18 / (21 * 1.5 + 1)
    assert result.rate[-1] == pytest.approx(policy.rate((1, 0)))
    assert spans(result)[1:5] == [("SWITCH", 2.0), ("LOST", 3.0),
                                  ("SWITCH", 2.0), ("LOST", (9 - 3 * old) / result.rate[-1])]


def test_malleus_and_resihp_cut_the_broken_pipeline():
    for name in ("malleus", "resihp"):
        policy = POLICIES[name](scenario())
        # 2 + 2 + 1 nodes: 7, 7 and 4 micro-batches of 3, 3 and 6 seconds.
        assert policy.steady_rate(1) == pytest.approx(18 / 25)
        result = simulate(policy, trace(lose(100.0, 0)))
        assert result.rate[-1] == pytest.approx(18 / 25) and ("LOAD", 3.0) in spans(result)
        assert 18 / 31 < run(name, Change(100.0, slowed=((0, 2.0),))).rate[-1] < WHOLE


def test_resihp_goes_on_with_the_gpus_that_are_left_and_malleus_with_a_power_of_two():
    left = {name: [POLICIES[name].alive_gpus(alive, 8) for alive in range(9)] for name in ("malleus", "resihp")}
    assert left == {"malleus": [0, 1, 2, 2, 4, 4, 4, 4, 8], "resihp": list(range(9))}


def test_trainmover_replaces_in_seconds():
    result = run("trainmover", lose(100.0, 0))
    assert spans(result)[1:3] == [("SWITCH", 17.0), ("LOAD", 3.0)], "20 seconds in all"


def test_spares_cannot_replace_the_last_holder_of_a_stage():
    result = run("hot-spares", lose(100.0, 0, 2))  # two pipelines run: both workers of stage 0
    assert "RESTART" in [name for name, _ in spans(result)]


# --- Slow workers, and workers that lost GPUs -------------------------------------------------------------------------


def slow(seconds, machine, factor):
    return Change(seconds, slowed=((machine, factor),))


def test_who_does_not_balance_waits_for_the_slowest():
    for name in ("recycle", "oobleck", "torchft", "hot-spares", "bamboo", "elaswave"):
        result = run(name, slow(500.0, 1, 2.0))
        assert result.throughput == pytest.approx(0.75 * result.fault_free_rate), name
    both = run("recycle", slow(100.0, 1, 2.0), slow(200.0, 3, 1.5), slow(300.0, 1, 1.0), slow(400.0, 3, 1.0))
    assert both.rate / both.fault_free_rate == pytest.approx([1.0, 1 / 2, 1 / 2, 1 / 1.5, 1.0])


def test_lost_work_is_redone_as_slowly():
    result = run("recycle", slow(50.0, 1, 2.0), lose(100.0, 0))
    assert ("LOST", pytest.approx(2 * 9 / (18 / 28))) in spans(result)


def test_a_slow_worker_that_leaves_slows_nobody():
    result = run("recycle", slow(50.0, 0, 2.0), lose(100.0, 0), gain(500.0, 0))
    assert result.rate[-1] == pytest.approx(WHOLE)


def test_slipstream_leaves_out_who_is_too_slow():
    """Five workers make 18 / 28 samples a second; six of which one takes 1.2 times as long, 18 / 19 / 1.2."""
    waits = run("in-place", slow(500.0, 0, 1.2))
    assert waits.rate[-1] == pytest.approx(18 / 19 / 1.2) and waits.switches == 0
    without = run("in-place", slow(500.0, 0, 3.0), slow(700.0, 0, 1.0))
    assert spans(without) == [("RUN", 500.0), ("SWITCH", 2.0), ("RUN", 198.0), ("SWITCH", 2.0), ("RUN", 298.0)]
    assert without.rate == pytest.approx([18 / 19, 0, 18 / 28, 0, 18 / 19])
    dead = run("in-place", slow(500.0, 0, 3.0), lose(600.0, 0))
    assert dead.rate[-1] == pytest.approx(18 / 28)


def test_slipstream_is_ahead_of_who_waits_where_workers_are_slow():
    one = scenario(pipelines=4, stages=3)
    whole = draw_trace(FailureRates(machine_mtbf_hours=30, repair_hours=1), 12, 2, 5)
    made = draw_slow_workers(whole, published_fail_slow(12), 3)
    result = compare([POLICIES[name] for name in ("slipstream", "recycle", "work-conserving")], one.throughputs, COSTS,
                     made)
    ours, recycle, limit = (run.throughput for run in result.runs.values())
    assert recycle < ours <= limit


def test_a_worker_that_lost_a_gpu_goes_on_or_is_down():
    def of_four(name):
        policy = POLICIES[name](scenario())
        changes = (Change(500.0, gpus=((0, 3),)), Change(800.0, gpus=((0, 4),)))
        return simulate(policy, msgspec.structs.replace(trace(*changes), gpus_per_worker=4))

    # Six of which one takes a third longer are faster than five.
    result = simulate(InPlace(scenario()), msgspec.structs.replace(
        trace(Change(500.0, gpus=((0, 3),)), Change(800.0, gpus=((0, 4),))), gpus_per_worker=4))
    assert result.rate.tolist() == pytest.approx([18 / 19, 18 / 19 * 3 / 4, 18 / 19])
    assert of_four("work-conserving").rate[1] == pytest.approx(18 / (18 * 6 / 5.75 + 1))
    recycle = of_four("recycle")
    assert recycle.rate[-1] == pytest.approx(WHOLE) and recycle.switches == 2
    assert 18 / 28 in [pytest.approx(rate) for rate in recycle.rate]


def test_what_is_reported_of_a_run():
    result = run("in-place", lose(100.0, 0), lose(500.0, 3))
    stalls = [2 + 9 / rate for rate in (18 / 28, 18 / 28)]
    assert result.seconds_to_recover == pytest.approx(sum(stalls) / 2)
    assert result.ettr == pytest.approx(1 - sum(stalls) / 1000)
    assert run("in-place").seconds_to_recover == 0.0 and run("in-place").ettr == 1.0
    pauses = run("checkpoint-restart")
    assert pauses.ettr == pytest.approx(pauses.throughput / pauses.fault_free_rate)
    runs = {"checkpoint-restart": pauses, "fault-scaled": run("fault-scaled")}
    compared = Comparison(trace=trace(), runs=runs, best_rate=18 / 19)
    assert compared.goodput("checkpoint-restart") == pytest.approx(pauses.throughput / (18 / 19))
    assert compared.goodput("fault-scaled") is None


# --- All --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "order"), [(0, "linear"), (1, "linear"), (2, "linear"), (0, "bidirectional")])
def test_no_policy_beats_the_work_conserving_limit_and_time_adds_up(seed, order):
    one = scenario(pipelines=4, order=order)
    made = draw_trace(FailureRates(machine_mtbf_hours=6, repair_hours=2, node_size=2, node_mtbf_hours=30), 8, 2, seed)
    result = compare(list(POLICIES.values()), one.throughputs, COSTS, made)
    limit = result.runs["work-conserving"].throughput
    for run in result.runs.values():
        assert 0 <= run.throughput <= limit * (1 + 1e-9) and run.seconds[-1] == made.length_seconds
        assert all(run.seconds[1:] > run.seconds[:-1])
        if not POLICIES[run.policy].is_reference:
            lost = run.lost(result.best_rate)
            assert min(lost.values()) > -1e-6
            assert sum(lost.values()) == pytest.approx(run.length_seconds * (1 - run.throughput / result.best_rate))


def test_checkpoints_count_what_is_beyond_the_last():
    kept = Checkpoints(100.0, 10.0)
    assert kept.go_back() == 0.0 and kept.next(30.0) == 110.0 and kept.next(110.0) == 220.0
    kept.train(0.0, 30.0, 2.0)
    kept.train(40.0, 105.0, 1.0)
    kept.discard(20.0)
    assert kept.go_back() == pytest.approx(60 + 60 - 20) and kept.go_back() == 0.0
    kept.train(200.0, 230.0, 3.0)  # one is complete at 220
    assert kept.go_back() == pytest.approx(30.0)
    kept.train(300.0, 1000.0, 3.0)  # and at 990
    assert kept.go_back() == pytest.approx(30.0)


def test_phases_have_a_cause():
    assert Phase(Cause.WAIT).seconds == math.inf
