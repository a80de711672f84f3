"""A worker that comes back late in a run.

Every worker reads the data in order from their beginning.
"""

import threading
from types import SimpleNamespace

import torch

from slipstream.runtime.data.data import (
    _IterationAdapter,
    get_data_state,
    load_data,
    move_data_to,
    use_saved_states,
)
from slipstream.runtime.moving.layer_receiver import FetchRequest
from slipstream.runtime.protocol.to_coordinator import FetchUpToDate
from slipstream.runtime.worker.context import _FetchReporter
from slipstream.schedules.schedule import Worker
from tests import patience
from tests.runtime.running import tiny

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
    # Else its first op would read them, with all others waiting, until it is given up as hung.
    stream, is_told, sent = Stream(), threading.Event(), []

    def send(message):
        sent.append(message)
        is_told.set()

    reporter = _FetchReporter(
        WORKER,
        SimpleNamespace(send=send),
        SimpleNamespace(fail_if_due=lambda *_: None),
        lambda iteration: move_data_to(_IterationAdapter(stream, [2, 2]), iteration),
    )
    fetch = FetchRequest(7, 1, {}, follow=True)
    for _ in range(3):
        reporter.on_part_loaded(90)
    reporter.on_up_to_date(fetch)
    assert not sent and stream.next == 0
    stream.may_read.set()
    assert (
        is_told.wait(patience.SECONDS) and sent == [FetchUpToDate(WORKER, 7)] and stream.next == 91
    )
    reporter.on_part_loaded(95)
    reporter.on_up_to_date(fetch)
    assert len(sent) == 2, "the next fetch has nothing to read"


def adapted(saved):
    """A stream, and the iterations that it has read.

    States are saved before these iterations.
    """

    class Positioned(Stream):
        def state_dict(self, iteration):
            return {"next": iteration, "kept": [1.5, None]} if iteration <= self.next else None

        def load_state_dict(self, iteration, state):
            assert state == {"next": iteration}
            self.loaded = iteration

    stream = Positioned()
    stream.may_read.set()
    stream.loaded = None
    data = _IterationAdapter(stream, [2, 2])
    use_saved_states(
        data,
        lambda iteration: max(
            ((number, {"next": number}) for number in saved if number <= iteration),
            default=None,
            key=lambda found: found[0],
        ),
    )
    return stream, data


def test_it_reads_on_from_the_last_saved_state():
    stream, data = adapted([40, 80])
    move_data_to(data, 90)
    assert stream.loaded == 80
    stream.loaded = None
    # In order, again, and what is recent: the data themselves go there.
    for iteration in (91, 92, 90, 95, 93):
        move_data_to(data, iteration)
        assert stream.loaded is None
    move_data_to(data, 50)  # all have returned to a checkpoint
    assert stream.loaded == 40
    stream.loaded = None
    move_data_to(data, 60)
    assert stream.loaded is None, "what it has read is nearer"
    move_data_to(data, 20)
    assert stream.loaded is None, "no state was saved so early"


def test_a_state_is_saved_if_json_gives_it_back(capfd):
    stream, data = adapted([])
    move_data_to(data, 3)
    assert (
        get_data_state(data, 4) == {"next": 4, "kept": [1.5, None]}
        and get_data_state(data, 9) is None
    )
    for state in ({1: 2}, {"a": (1, 2)}, {"a": torch.zeros(1)}, [1], {"a": b"bytes"}):
        stream.state_dict = lambda _, state=state: state
        assert get_data_state(data, 4) is None
    stream.state_dict = lambda _: 1 / 0
    assert get_data_state(data, 4) is None and "ZeroDivisionError" in capfd.readouterr().err
    assert get_data_state(data, 4) is None and not capfd.readouterr().err, "it is told once"
    assert get_data_state(load_data(tiny()), 4) is None
