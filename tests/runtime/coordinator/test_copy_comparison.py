"""Copies are compared, and samples: who is wrong. What follows is in `transcripts`."""

import pytest

from slipstream.runtime.coordinator.connections.rank_reports import RankReports
from slipstream.runtime.coordinator.decisions.comparisons import (
    find_difference,
    find_sample_difference,
)
from slipstream.runtime.protocol.to_coordinator import Checksum, IterationReport, SampleDigest
from slipstream.schedules.schedule import Worker

A, B, C = (Worker(pipeline, 0) for pipeline in range(3))
ROWS = A, B, C
PARAMETERS = False
"""In a checksum's key: it is that of a layer's parameters."""
STATE = True
"""In a checksum's key: it is that of a layer's state."""


def ran(worker, sums):
    """`sums` by layer and whether it is the optimizer's state."""
    return IterationReport(
        worker,
        1,
        4,
        0.0,
        1.0,
        checksums=tuple(
            Checksum(layer, 0, 8, state, (value,)) for (layer, state), value in sums.items()
        ),
    )


def found(*sums):
    return find_difference(4, [ran(worker, mine) for worker, mine in zip(ROWS, sums, strict=False)])


def test_equal_copies_of_whatever_each_holds():
    assert found({(0, STATE): 1, (1, STATE): 2}, {(1, STATE): 2}, {}) is None
    assert find_difference(4, []) is None


@pytest.mark.parametrize(
    ("mine", "wrong", "spread"),
    [
        (
            [{(0, STATE): 1, (0, PARAMETERS): 2}] * 2 + [{(0, STATE): 9, (0, PARAMETERS): 2}],
            (C,),
            False,
        ),
        (
            [{(0, STATE): 9, (0, PARAMETERS): 9}] + [{(0, STATE): 1, (0, PARAMETERS): 2}] * 2,
            (A,),
            True,
        ),
        ([{(0, STATE): 1}, {(0, STATE): 2}], (), True),
        ([{(0, STATE): 1}, {(0, STATE): 2}, {(0, STATE): 3}], (), True),
        (
            [{(0, STATE): 1, (1, STATE): 1}, {(0, STATE): 1, (1, STATE): 1}, {(0, STATE): 2}],
            (C,),
            False,
        ),
        (
            [{(0, STATE): 1, (1, STATE): 1}, {(0, STATE): 1, (1, STATE): 3}, {(0, STATE): 2}],
            (C,),
            True,
        ),
    ],
    ids=[
        "state-that-was-not-stepped-by",
        "parameters",
        "two",
        "three-ways",
        "one-of-two-layers",
        "another-one-of-two",
    ],
)
def test_who_is_wrong_where_most_have_the_same(mine, wrong, spread):
    difference = found(*mine)
    assert (difference.wrong, difference.spread) == (wrong, spread)


def test_each_rank_counts():
    reports = RankReports(2, lambda *_: None)
    for rank, value in enumerate((5, 6)):
        whole = reports.add_message(A, rank, ran(A, {(0, STATE): value, (1, PARAMETERS): 7}))
    assert [(checksum.layer, checksum.sums) for checksum in whole.checksums] == [
        (0, (5, 6)),
        (1, (7, 7)),
    ]


def test_ranks_that_read_different_samples_make_their_worker_wrong():
    reports = []
    for worker, digests in ((A, "a"), (B, "ab")):
        samples = tuple(SampleDigest(0, 0, digest) for digest in digests)
        reports.append(IterationReport(worker, 1, 4, 0.0, 1.0, samples=samples))
    assert find_sample_difference(4, reports).wrong == (B,)
    assert find_sample_difference(4, reports[:1]) is None
