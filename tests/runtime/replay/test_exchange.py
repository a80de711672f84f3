"""What a worker keeps of what it has sent."""

import weakref
from typing import NamedTuple

import pytest
import torch

from slipstream.runtime.replay.exchange import Exchange
from slipstream.schedules.program import RECEIVES, TransferKind, build_program
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

FORM = ((1,), torch.float64)


class Sent:
    """What is kept of it is what is held."""

    def __init__(self, target):
        self.target = target

    def wait(self) -> None:
        """It has gone."""


class Came(NamedTuple):
    def wait_for_tensor(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.float64)


class Alone:
    """All that is asked for comes at once."""

    ordered = False
    device = torch.device("cpu")

    def __init__(self, worker: Worker) -> None:
        self.worker, self._sent = worker, weakref.WeakSet()

    def held(self):
        return len(self._sent)

    def send(self, payload, target, tag):
        sent = Sent(target)
        self._sent.add(sent)
        return sent

    def receive(self, shape, dtype, source, tag):
        return Came()


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_was_sent_is_freed_once_it_has_been_taken(stage, backward):
    # It is an activation when its gradient comes; a gradient when the next thing comes from where
    # it went.
    from slipstream.runtime.replay.layer_values import TensorForm

    microbatches = 12
    program = build_program(
        schedule_for(grid(1, 3, microbatches), backward=backward), Worker(0, stage)
    )
    transport = Alone(Worker(0, stage))
    exchange = Exchange(program, transport, [TensorForm((1,), torch.float64)] * 4, range(3))
    peak, sent = 0, 0
    for iteration in range(3):
        transfers = 0
        for instruction in program.instructions:
            if instruction.kind in RECEIVES:
                exchange.start_receive(iteration, transfers)
            elif isinstance(instruction.kind, TransferKind):
                exchange.start_send(iteration, transfers)
                sent += 1
            else:
                pass_on(exchange, program, instruction)
            transfers += isinstance(instruction.kind, TransferKind)
            peak = max(peak, transport.held())
        exchange.end_iteration()
    assert sent == 3 * microbatches * (1 if stage in (0, 2) else 2)
    assert peak <= 5
    exchange.flush()
    assert transport.held() == 0


def pass_on(exchange, program, op):
    """What an op takes, and what it makes."""
    if takes := program.input_of(op):
        exchange.take_input(takes)
    if makes := program.output_of(op):
        exchange.put_output(makes, torch.zeros(1, dtype=torch.float64))


def test_who_is_left_behind_keeps_nothing_that_is_under_way():
    from slipstream.runtime.replay.layer_values import TensorForm

    class Keeping(Alone):
        def send(self, payload, target, tag):
            return payload

    program = build_program(schedule_for(grid(1, 2, 2)), Worker(0, 0))
    exchange = Exchange(
        program, Keeping(Worker(0, 0)), [TensorForm((1,), torch.float64)] * 3, range(1)
    )
    sent = torch.zeros(1, dtype=torch.float64)
    kept = weakref.ref(sent)
    exchange.put_output(program.output_of(program.ops[0]), sent)
    exchange.start_send(0, 0)
    del sent
    assert kept() is not None
    exchange.free_microbatches()
    assert kept() is None
