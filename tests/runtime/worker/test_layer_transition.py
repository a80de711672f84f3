"""What a worker holds while layers move.

The order may have ended in the middle of that.
"""

from types import SimpleNamespace

import pytest

from slipstream.runtime.protocol.to_coordinator import IterationReport
from slipstream.runtime.protocol.to_worker import Acknowledged, LayerMove, Train
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.generation import take_layers
from slipstream.runtime.worker.iteration_reports import IterationReports
from slipstream.schedules.schedule import Worker
from tests.runtime.moving.team import empty_store, hold, whole
from tests.runtime.running import tiny

ONE = Worker(0, 0)
OTHER = Worker(1, 0)


def gone():
    """A member has died before all had their layers."""
    raise CommunicationError("closed")


def part_of(store, order, wait_for_all=lambda: None, fetched=()):
    context = SimpleNamespace(
        layer_store=store,
        rank=0,
        layer_sender=SimpleNamespace(send_to_waiting=lambda *_: None),
        worker=ONE,
        layer_receiver=SimpleNamespace(
            start_fetch=lambda _: None, take_parts=lambda *_: [*fetched]
        ),
        config=tiny(),
        injector=SimpleNamespace(fail_if_due=lambda *_: None),
        setup=SimpleNamespace(first_iteration=0, common=SimpleNamespace(failure_domains=())),
        placement=SimpleNamespace(reductions_of=lambda *_: {(1, 3): [ONE]}),
        reporter=SimpleNamespace(gathered=False),
    )
    return SimpleNamespace(
        order=order,
        context=context,
        worker=ONE,
        program=None,
        activity=SimpleNamespace(set_activity=lambda *_: None, doing=None),
        session=SimpleNamespace(raise_if_ended=lambda: None, wait_for_all=wait_for_all),
    )


def test_no_layer_is_dropped_before_all_have_theirs():
    # The one that was to get it may not have taken it, and nobody else has it.
    store, other = (
        hold(empty_store(tiny().training), layers=layers) for layers in ((0, 2), (2, 3))
    )
    for holder in (store, other):
        holder.holding.optimizer.set_version(0)
        holder.holding.optimizer.mark_gathered(0)
    moves = LayerMove(OTHER, ONE, 0, 0, whole(0).stop), LayerMove(ONE, OTHER, 2, 0, whole(2).stop)
    order = Train(
        order=2,
        first_iteration=1,
        moves=moves,
        fetch=0,
        schedule=b"{}",
        addresses=((OTHER, (("127.0.0.1", 1),)),),
    )
    fetched = other.holding.optimizer.own_states(2)
    with pytest.raises(CommunicationError):
        take_layers(part_of(store, order, gone, fetched))
    assert (
        store.holding.modules.keys() == {0, 1}
        and store.list_held_state().layers == ((0, 3),)
        and store.has_part(whole(2))
    )
    take_layers(part_of(store, order, fetched=fetched))
    assert store.holding.modules.keys() == {1, 2} and store.list_held_state().layers == ((1, 3),)


def test_what_node_0_has_asked_to_save_is_forgotten_with_the_order():
    # Who has come in meanwhile knows nothing of it, and nobody would gather the parts of its
    # layers.
    order = Train(order=2, first_iteration=4, moves=(), fetch=0, addresses=(), schedule=b"{}")
    reports = IterationReports(part_of(None, order))
    reports._open = IterationReport(ONE, 2, 4, 1.0, 0.1)
    reports.handle_acknowledgement(Acknowledged(2, 4, save=True))
    reports.wait_until_acknowledged()
    assert reports.save_before == 5
    assert IterationReports(part_of(None, order)).save_before is None
