"""Which workers are found slow, and when, in generated times.

Noise has heavy tails, and causes come one at a time.
"""

import math
import random
import statistics
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runtime.coordinator.decisions import slow_detector
from slipstream.runtime.coordinator.decisions.slow_detector import CellTime, SlowDetector
from slipstream.schedules.schedule import OpKind, Worker

SLOW = Worker(1, 2)
KINDS = {OpKind.F: 0.02, OpKind.I: 0.02, OpKind.W: 0.025}


class Cluster:
    """Times of a grid of workers.

    There is noise of single ops, ops that are held up, and noise of whole iterations.
    """

    def __init__(
        self,
        seed: int = 0,
        pipelines: int = 4,
        stages: int = 4,
        microbatches: int = 4,
        spread: float = 0.1,
        held_up: float = 0.02,
        of_iterations: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.workers = [
            Worker(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)
        ]
        self.microbatches, self.spread = microbatches, spread
        self.held_up, self.of_iterations = held_up, of_iterations
        self.detector, self.iteration = SlowDetector(), 0

    def run(
        self,
        iterations: int,
        factors: Mapping[Worker, float] = {},
        *,
        everybody: float = 1.0,
        seconds=1.0,
    ):
        """What is found."""
        found = []
        for _ in range(iterations):
            found += self.detector.add_iteration(
                self.iteration,
                seconds,
                {
                    worker: self._cells(worker, everybody * factors.get(worker, 1.0))
                    for worker in self.workers
                },
            )
            self.iteration += 1
        return found

    def _cells(self, worker, factor):
        factor *= math.exp(self.random.gauss(0, self.of_iterations))
        times = []
        for kind, usual in KINDS.items():
            seconds = [self._op(kind, worker, factor) for _ in range(self.microbatches)]
            layers = (worker.column, worker.column + 1)
            times.append(
                CellTime(kind, layers, self.microbatches, statistics.median(seconds), usual)
            )
        return times

    def _op(self, kind, worker, factor):
        # The job file has the times of the later stages wrong.
        usual = KINDS[kind] * (1 + worker.column)
        took = usual * factor * math.exp(self.random.gauss(0, self.spread))
        return took + (
            usual * self.random.paretovariate(1.1) if self.random.random() < self.held_up else 0.0
        )


def test_spreads_are_found_for_all_workers_at_once(monkeypatch):
    # Those of each by itself held up node 0 for two seconds when 4,096 had been observed five
    # times.

    def calls(pipelines):
        count = 0

        def counted(rows):
            nonlocal count
            count += 1
            return spreads(rows)

        monkeypatch.setattr(slow_detector, "_estimate_spreads", counted)
        Cluster(pipelines=pipelines, spread=0.0, held_up=0.0).run(10)
        return count

    spreads = slow_detector._estimate_spreads
    assert calls(4) == calls(16) > 0


@pytest.mark.parametrize("factor", [1.5, 2.0, 5.0, 50.0])
@pytest.mark.parametrize("seed", range(3))
def test_one_slow_worker_is_found_within_five_iterations(seed, factor):
    cluster = Cluster(seed)
    assert cluster.run(20) == []
    (change,) = cluster.run(5, {SLOW: factor})
    assert change.worker == SLOW and change.since in (19, 20, 21) and change.before == 1.0
    assert change.factor == pytest.approx(factor, rel=0.15)


def test_one_that_is_slow_from_the_start_is_found():
    (change,) = Cluster().run(5, {SLOW: 2.0})
    assert (
        change.worker == SLOW and change.since == 0 and change.factor == pytest.approx(2.0, rel=0.1)
    )


@pytest.mark.parametrize("pipelines", [2, 3])
def test_few_peers_are_enough(pipelines):
    cluster = Cluster(pipelines=pipelines)
    assert cluster.run(20) == []
    assert [change.worker for change in cluster.run(8, {SLOW: 2.0})] == [SLOW]


def test_two_slow_peers_of_four_are_both_found():
    cluster = Cluster()
    cluster.run(20)
    other = Worker(3, 2)
    cluster.run(40, {SLOW: 2.0, other: 2.0})
    assert cluster.detector.believed_factor(SLOW) == pytest.approx(2.0, rel=0.15)
    assert cluster.detector.believed_factor(other) == pytest.approx(2.0, rel=0.15)
    assert sum(cluster.detector.believed_factor(worker) != 1.0 for worker in cluster.workers) == 2


def test_iterations_in_which_everybody_is_slow_tell_nothing():
    cluster = Cluster()
    for everybody in (1.0, 4.0, 1.0, 0.5) * 10:
        assert cluster.run(5, everybody=everybody) == []


def test_a_stage_that_is_slow_as_a_whole_has_no_slow_worker():
    cluster = Cluster()
    assert cluster.run(20) == []
    assert cluster.run(100, {Worker(pipeline, 1): 3.0 for pipeline in range(4)}) == []


def test_one_iteration_of_one_worker_tells_nothing():
    cluster = Cluster()
    cluster.run(20)
    for _ in range(20):
        assert cluster.run(2, {SLOW: 10.0}) == [] and cluster.run(10) == []


def test_one_that_has_recovered_is_found_out_and_one_that_is_still_slow_is_not():
    cluster = Cluster()
    cluster.run(20)
    cluster.run(5, {SLOW: 2.0})
    assert cluster.run(50, {SLOW: 2.0}) == [] or cluster.detector.believed_factor(
        SLOW
    ) == pytest.approx(2.0, rel=0.1)
    (change,) = cluster.run(8)
    assert change.worker == SLOW and change.factor == 1.0


@pytest.mark.parametrize("seed", [0, 1, 6, 8, 9, 27, 28])
def test_one_that_has_recovered_on_a_noisy_machine_is_found_out_at_last(seed):
    """A few observations are enough for an alarm.

    The factor that these give is off, by less than is noticed later.
    """
    cluster, slow = noisy(seed), Worker(1, 0)
    cluster.run(20)
    cluster.run(20, {slow: 3.0})
    assert cluster.detector.believed_factor(slow) > 2
    cluster.run(250)
    assert all(cluster.detector.believed_factor(worker) == 1.0 for worker in cluster.workers)


@pytest.mark.parametrize("factor", [1.4, 2.0, 3.0])
def test_one_that_is_slow_on_a_noisy_machine_is_not_taken_for_one_that_has_recovered(factor):
    for seed in range(4):
        cluster, slow = noisy(seed), Worker(1, 0)
        cluster.detector.set_factor(slow, factor)
        assert not [change for change in cluster.run(250, {slow: factor}) if change.factor == 1.0]


def noisy(seed):
    return Cluster(seed, 3, 1, spread=0.3, held_up=0.1, of_iterations=0.2)


@pytest.mark.parametrize("seed", range(6))
def test_of_two_compared_with_each_other_the_slow_one_recovers_and_the_other_stays_well(
    seed,
):
    """By the ratio it could be either."""
    cluster, slow = Cluster(seed, 2, 1), Worker(1, 0)
    cluster.run(20)
    cluster.run(20, {slow: 3.0})
    assert [(change.worker, change.factor) for change in cluster.run(30)] == [(slow, 1.0)]
    assert [change.worker for change in cluster.run(10, {Worker(0, 0): 3.0})] == [Worker(0, 0)]


def test_one_that_becomes_slower_still_is_found_again():
    cluster = Cluster()
    cluster.run(20)
    cluster.run(10, {SLOW: 2.0})
    cluster.run(10, {SLOW: 4.0})
    assert cluster.detector.believed_factor(SLOW) == pytest.approx(4.0, rel=0.15)


def test_one_that_flaps_keeps_its_lighter_load():
    # It has to show more and more that it has recovered: 40 times slow and back are a dozen
    # changes.
    cluster = Cluster()
    cluster.run(20)
    changes = [change for _ in range(40) for change in cluster.run(8, {SLOW: 2.0}) + cluster.run(8)]
    assert {change.worker for change in changes} == {SLOW} and len(changes) <= 12
    assert cluster.detector.believed_factor(SLOW) > 1.5


def test_short_iterations_are_put_together():
    """20 of 5 ms in which one was held up are a moment."""
    cluster = Cluster()
    cluster.run(3000, seconds=0.005)
    assert cluster.run(20, {SLOW: 5.0}, seconds=0.005) == [] == cluster.run(1000, seconds=0.005)
    (change,) = cluster.run(1200, {SLOW: 5.0}, seconds=0.005)
    assert change.worker == SLOW


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "held_up", "of_iterations", "microbatches"),
    [(0.1, 0.02, 0.0, 4), (0.2, 0.05, 0.1, 2), (0.3, 0.1, 0.2, 1), (0.02, 0.2, 0.05, 1)],
)
def test_false_alarms_are_rarer_than_one_in_a_thousand_iterations(
    spread, held_up, of_iterations, microbatches
):
    alarms = [
        change
        for seed in range(2)
        for change in Cluster(
            seed,
            microbatches=microbatches,
            spread=spread,
            held_up=held_up,
            of_iterations=of_iterations,
        ).run(1500)
    ]
    assert len(alarms) < 3


def test_layers_that_nobody_else_runs_are_judged_by_what_was_measured_before():
    # Their times in the job file are wrong by the same factor as when others ran them, too.
    cluster = Cluster(spread=0.01, held_up=0.0)
    cluster.run(20)
    alone = [cluster.workers[0], SLOW]

    def ratios(factors):
        return cluster.detector.compute_ratios(
            {worker: cluster._cells(worker, factors.get(worker, 1.0)) for worker in alone}
        )

    assert ratios({}) == {worker: pytest.approx(1.0, abs=0.05) for worker in alone}
    assert ratios({SLOW: 2.0})[SLOW] == pytest.approx(2.0, abs=0.1)
    unknown = CellTime(OpKind.F, (9, 10), 1, 1.0, 0.01)
    assert cluster.detector.compute_ratios({SLOW: [unknown]}) == {}


@given(
    st.dictionaries(
        st.sampled_from([Worker(d, s) for d in range(3) for s in range(2)]),
        st.lists(
            st.tuples(
                st.sampled_from(list(KINDS)),
                st.integers(0, 2),
                st.integers(1, 4),
                st.floats(0, 1e9),
                st.floats(0, 1e3),
            ),
            max_size=4,
        ),
    ),
    st.integers(1, 30),
    st.floats(0, 10),
)
def test_whatever_is_measured_nothing_breaks(cells, times, seconds):
    detector = SlowDetector({Worker(0, 0): 2.0})
    measured = {}
    for worker, mine in cells.items():
        measured[worker] = [
            CellTime(kind, (first, first + 1), number, took, planned)
            for kind, first, number, took, planned in mine
        ]
    for iteration in range(times):
        for change in detector.add_iteration(iteration, seconds, measured):
            assert change.factor >= 1.0 and math.isfinite(change.factor)
            assert 0 <= change.since <= iteration and change.iterations >= 1
    assert all(
        math.isfinite(ratio) and ratio > 0 for ratio in detector.compute_ratios(measured).values()
    )


@given(st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_the_unit_of_time_is_of_no_matter(unit, seed):
    cluster, other = Cluster(seed, 2, 2), Cluster(seed, 2, 2)
    cells = {worker: cluster._cells(worker, 1.0) for worker in cluster.workers}
    scaled = {}
    for worker, mine in cells.items():
        scaled[worker] = [cell._replace(seconds=cell.seconds * unit) for cell in mine]
    assert other.detector.compute_ratios(scaled) == pytest.approx(
        cluster.detector.compute_ratios(cells)
    )
