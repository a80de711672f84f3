"""What a worker holds while layers move, and after the order has ended in the middle of that."""

from types import SimpleNamespace

import pytest

from slipstream.runtime.protocol.to_worker import Acknowledged, LayerMove, Train
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.layer_store import LayerStore
from slipstream.runtime.worker.layers_of_order import _move
from slipstream.runtime.worker.reports import Reports
from slipstream.schedules.schedule import Worker
from tests.runtime.running import tiny
from tests.runtime.worker.team import build

ONE, OTHER = Worker(0, 0), Worker(1, 0)


def gone():
    """A member has died before all had their layers."""
    raise CommunicationError("closed")


def part_of(store, order, wait_for_all=lambda: None):
    fetched = {layer: build(tiny().training, [layer]) for layer in (2,)}
    nothing = SimpleNamespace(begins=lambda _: None, doing=None)
    context = SimpleNamespace(
        layer_store=store, ranks=range(1), layer_sender=SimpleNamespace(give=lambda *_: None), worker=ONE,
        layer_receiver=SimpleNamespace(begin=lambda _: None, take=lambda *_: fetched),
        injector=SimpleNamespace(at=lambda *_: None))
    return SimpleNamespace(order=order, context=context, activity=nothing, worker=ONE,
                           session=SimpleNamespace(require=lambda: None, wait_for_all=wait_for_all))


def test_no_layer_is_dropped_before_all_have_theirs():
    """The one that was to get it may not have taken it, and nobody else has it."""
    store = LayerStore(lambda layers, filled: build(tiny().training, layers), lambda *_: {})
    store.holding.change((0, 1), [build(tiny().training, [0, 1])])
    order = Train(number=2, first_iteration=1, moves=(LayerMove(OTHER, ONE, 0), LayerMove(ONE, OTHER, 2)), fetch=0,
                  addresses=((OTHER, (("127.0.0.1", 1),)),), schedule=b"{}")
    with pytest.raises(CommunicationError):
        _move(part_of(store, order, gone), frozenset({1, 2}))
    assert store.holding.modules.keys() == {0, 1, 2}
    _move(part_of(store, order), frozenset({1, 2}))
    assert store.holding.modules.keys() == {1, 2}


def test_what_node_0_has_asked_to_save_is_forgotten_with_the_order():
    """Who has come in meanwhile knows nothing of it, and nobody would gather the parts of its layers."""
    order = Train(number=2, first_iteration=4, moves=(), fetch=0, addresses=(), schedule=b"{}")
    reports = Reports(part_of(None, order))
    reports._open = 4
    reports.acknowledged(Acknowledged(2, 4, save=True))
    reports.require_acknowledged()
    assert reports.save_before == 5
    assert Reports(part_of(None, order)).save_before is None
