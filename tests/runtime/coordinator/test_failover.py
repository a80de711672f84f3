"""What a new coordinator makes of what the workers know."""

import pytest
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.failover import (
    FIRST_WORKER_SECONDS,
    NEXT_START_SECONDS,
    NEXT_WORKER_SECONDS,
    RejoiningPhase,
)
from slipstream.runtime.errors import NoLiveWorkerError
from slipstream.runtime.protocol.to_coordinator import RecoveryReport
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.holding import holding

ONE = Worker(0, 0)
OTHER = Worker(0, 1)
THIRD = Worker(1, 0)
ALL = (ONE, OTHER, THIRD)


def known(
    iteration,
    *,
    order=3,
    layers=((0, 2),),
    validated=None,
    pending=False,
    begun=-1,
    losses=None,
):
    return RecoveryReport(
        order, (), iteration, holding(*layers), validated, pending, begun, losses or {}
    )


def taking(last, *workers, gone=(), first=0):
    losses = None if last is None else (1.0,) * (last + 1 - first)
    phase = RejoiningPhase(
        losses=losses,
        first=first,
        gone=frozenset(gone),
        expected=frozenset(ALL),
        grid=frozenset(ALL),
        began=0.0,
    )
    for worker, state in zip(ALL, workers, strict=False):
        phase = phase.with_worker(worker, state, 0.0)
    return phase


def test_what_was_written_is_committed_whether_or_not_it_was_acknowledged():
    for last in (6, 7):
        found = taking(last, known(7), known(7), known(7)).build_result()
        assert (found.order, found.committed, found.missing) == (3, last, ()) and set(
            found.kept
        ) == set(ALL)
        assert found.kept[ONE] == holding((0, 2))


def test_without_the_losses_all_go_back_by_the_step_that_may_not_be_committed():
    assert taking(None, known(7), known(6)).build_result().committed == 6
    assert taking(None, known(-1), known(-1)).build_result().committed == -1


def test_a_step_whose_factor_nobody_knows_is_undone():
    found = taking(
        7, known(7, pending=True, validated=StepFactor(6, 1.0)), known(7, pending=True)
    ).build_result()
    assert found.committed == 6 and found.factor == StepFactor(6, 1.0)
    found = taking(7, known(7, validated=StepFactor(7, 0.5)), known(7, pending=True)).build_result()
    assert found.committed == 7 and found.factor == StepFactor(7, 0.5)


def test_a_commit_that_was_not_written_is_one_once_any_has_stepped_further():
    """With clipping: node 0 had not heard of the factor. Any of them has the loss."""
    found = taking(
        5,
        known(7, validated=StepFactor(6, 1.0), losses={5: 2.75, 6: 2.5}),
        known(6, validated=StepFactor(5, 1.0), pending=True),
    ).build_result()
    assert (found.committed, found.factor) == (6, StepFactor(6, 1.0))
    assert found.losses == (*(1.0,) * 6, 2.5) and len(found.kept) == 2


def test_who_follows_the_last_order_has_its_factor_for_those_who_have_not_heard_of_it():
    found = taking(
        6,
        known(6, order=4, begun=6, validated=StepFactor(6, 0.5)),
        known(6, order=3, begun=2, pending=True),
    ).build_result()
    assert (
        found.committed == 6
        and found.factor == StepFactor(6, 0.5)
        and all(state.layers for state in found.kept.values())
    )


def test_what_cannot_be_brought_to_the_last_commit_does_not_count():
    # The others had gone back to a checkpoint, say, and it had not heard of that.
    found = taking(3, known(3, order=4, begun=3), known(9, order=3)).build_result()
    assert found.order == 4 and found.committed == 3
    assert found.kept == {ONE: holding((0, 2)), OTHER: holding()}


def test_who_has_begun_an_order_cannot_go_back_beyond_its_beginning():
    """Also where the losses are not known, and another has not heard of the order."""
    found = taking(None, known(6, order=4, begun=6), known(7, order=3, begun=2)).build_result()
    assert found.committed == 6 and all(state.layers for state in found.kept.values())


@pytest.mark.parametrize("last", [None, 6, 7])
def test_who_has_begun_the_next_step_cannot_undo_the_one_before(last):
    # It has stepped 8, and not reported it: so all have reported 7, whatever node 0 has written of
    # that.
    found = taking(last, known(7, begun=7), known(7, begun=2), known(7, begun=2)).build_result()
    assert found.committed == 7 and all(state.layers for state in found.kept.values())


def test_lines_that_were_given_up_and_not_removed_yet_count_for_nothing():
    # All have gone back to 3; the file goes on to 50. What they were told of is taken from them.
    found = taking(50, known(6, order=4, begun=3), known(5, order=4, begun=3)).build_result()
    assert found.committed == 5 and all(state.layers for state in found.kept.values())
    found = taking(
        2, known(6, losses={3: 3.0, 4: 4.0}), known(6, losses={4: 4.0, 5: 5.0})
    ).build_result()
    assert found.committed == 5 and found.losses == (1.0, 1.0, 1.0, 3.0, 4.0, 5.0)


def test_one_that_knows_that_copies_differ_is_enough_where_it_has_followed_the_last_order():
    """Who has got a later order is on its way back already."""
    doubting = replace(known(7), doubted=True)
    assert taking(6, known(7), doubting, known(7)).build_result().doubted
    assert not taking(6, known(7), known(7), known(7)).build_result().doubted
    assert (
        not taking(6, known(3, order=4, begun=3), doubting, known(3, order=4, begun=3))
        .build_result()
        .doubted
    )


def test_what_was_held_before_the_run_went_back_does_not_count():
    # They differed in order 3. One has heard of order 4, and dropped its layers; of the others, one
    # does not even know that they differed.
    ahead = replace(known(2, order=4, layers=(), begun=2), trusted_from=4)
    doubting = replace(known(6, losses={5: 9.0}, validated=StepFactor(5, 9.0)), doubted=True)
    unknowing = known(6, losses={5: 9.0}, validated=StepFactor(5, 9.0))
    found = taking(4, ahead, doubting, unknowing).build_result()
    assert found.order == found.trusted_from == 4 and not found.doubted and found.factor is None
    assert set(found.kept) == set(ALL) and not any(kept.layers for kept in found.kept.values())
    found = taking(
        6, replace(known(6, order=5, begun=5), trusted_from=4), doubting, unknowing
    ).build_result()
    assert [worker for worker, kept in found.kept.items() if kept.layers] == [
        ONE
    ] and found.committed == 6


def test_who_doubts_and_was_away_during_an_order_does_not_count():
    """The others, who did not know it, have trained on."""
    found = taking(
        6, replace(known(7), doubted=True), known(7, order=4), known(7, order=4)
    ).build_result()
    assert not found.doubted and [worker for worker, kept in found.kept.items() if kept.layers] == [
        OTHER,
        THIRD,
    ]


def test_all_members_are_waited_for_but_for_those_that_died_with_the_last_coordinator():
    assert not taking(7).is_complete(0.0)
    assert not taking(7, known(7), known(7)).is_complete(0.0)
    assert taking(7, known(7), known(7), gone=(THIRD,)).is_complete(0.0)
    assert taking(7, known(7), known(7), gone=(THIRD,)).build_result().missing == (THIRD,)
    assert taking(7, known(7), known(7), known(7)).is_complete(0.0)


def test_who_was_only_about_to_take_part_is_no_member():
    nothing = RecoveryReport(0, (), -1, holding(), None, pending=False)
    found = taking(7, known(7), nothing).build_result()
    assert set(found.kept) == {ONE}
    assert not taking(-1, nothing, nothing).is_complete(0.0)
    assert set(taking(-1, nothing, nothing, nothing).build_result().kept) == set(ALL)


def test_where_nobody_comes_nobody_is_left():
    with pytest.raises(
        NoLiveWorkerError, match="no worker of the run that node 0 led here before has reconnected"
    ):
        taking(7).is_complete(FIRST_WORKER_SECONDS + 1)
    assert not taking(7, known(7)).is_complete(FIRST_WORKER_SECONDS - 1)


def test_where_no_order_was_given_those_that_start_are_waited_for_longer():
    # Node 0 was killed at once: its workers have just begun to import what they need.
    nothing = RecoveryReport(0, (), -1, holding(), None, pending=False)
    began, running = taking(-1, nothing, nothing), taking(7, known(7), known(7))
    assert running.is_complete(NEXT_WORKER_SECONDS + 1) and not began.is_complete(
        NEXT_WORKER_SECONDS + 1
    )
    assert began.is_complete(NEXT_WORKER_SECONDS + 1 + NEXT_START_SECONDS)


def test_as_long_as_workers_come_the_others_are_waited_for():
    # Thousands take longer to come than one takes to hold still; who comes and goes again holds up
    # nobody.
    phase = taking(7, known(7)).with_worker(OTHER, known(7), 0.8 * NEXT_WORKER_SECONDS)
    assert not phase.is_complete(1.6 * NEXT_WORKER_SECONDS)
    phase = phase.without_workers([OTHER]).with_worker(OTHER, known(7), 1.6 * NEXT_WORKER_SECONDS)
    assert phase.is_complete(1.9 * NEXT_WORKER_SECONDS) and phase.build_result().missing == (THIRD,)
