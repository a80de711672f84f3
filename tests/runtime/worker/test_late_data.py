"""A worker that comes back late in a run, with data that every worker reads in order from their
beginning."""

import threading
from types import SimpleNamespace

import torch

from slipstream.runtime.model.data.data import _IterationAdapter, move_data_to
from slipstream.runtime.protocol.to_coordinator import FetchUpToDate
from slipstream.runtime.worker.context_builder import _FetchReporter
from slipstream.runtime.worker.layer_receiver import FetchRequest
from slipstream.schedules.schedule import Worker
from tests import patience

WORKER = Worker(1, 0)


class Stream:
    """Gives one iteration after the other, and nothing before it may."""

    digest = "stream"

    def __init__(self) -> None:
        self.next, self.may_read = 0, threading.Event()

    def samples(self, iteration, count):
        assert self.may_read.wait(patience.SECONDS)
        self.next = max(self.next, iteration + 1)
        return [(torch.tensor([iteration]), torch.tensor([iteration]))] * count


def test_it_is_up_to_date_only_when_it_has_read_its_data_that_far():
    """Else its first op would read them, with all others waiting, until it is given up as hung."""
    stream, told, sent = Stream(), threading.Event(), []

    def send(message):
        sent.append(message)
        told.set()

    reporter = _FetchReporter(WORKER, SimpleNamespace(send=send), SimpleNamespace(fail_if_due=lambda *_: None),
                              lambda iteration: move_data_to(_IterationAdapter(stream, [2, 2]), iteration))
    fetch = FetchRequest(7, 1, {}, follow=True)
    for _ in range(3):
        reporter.on_part_loaded(90)
    reporter.on_up_to_date(fetch)
    assert not sent and stream.next == 0
    stream.may_read.set()
    assert told.wait(patience.SECONDS) and sent == [FetchUpToDate(WORKER, 7)] and stream.next == 91
    reporter.on_part_loaded(95)
    reporter.on_up_to_date(fetch)
    assert len(sent) == 2, "the next fetch has nothing to read"
