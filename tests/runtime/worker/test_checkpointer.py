"""A worker's checkpoints where the disk does not answer."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slipstream.runtime.checkpoints import checkpoint
from slipstream.runtime.models.sharing import Sharing
from slipstream.runtime.protocol.setup import WorkerResilience
from slipstream.runtime.protocol.to_coordinator import CheckpointSaved
from slipstream.runtime.replay.microbatch import NOTHING_READ
from slipstream.runtime.worker.checkpointer import Checkpointer
from slipstream.schedules.schedule import Worker
from tests.runtime.running import tiny


class OrderOverError(Exception):
    """The order is over."""


def setup_from(iteration: int) -> SimpleNamespace:
    """What a worker is told of a run that saves every two iterations.

    It begins with the iteration.
    """
    common = SimpleNamespace(resilience=WorkerResilience(checkpoint_every=2), microbatches=(1,))
    return SimpleNamespace(common=common, first_iteration=iteration, read=NOTHING_READ)


def test_an_ended_order_ends_the_wait_for_a_disk_and_the_next_one_saves(
    tmp_path, monkeypatch
) -> None:
    answers, real, messages = threading.Event(), checkpoint._write_layers, list[Any]()

    def write(*arguments: Any) -> None:
        assert answers.wait(60)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "_write_layers", write)
    setup, settings = setup_from(0), SimpleNamespace(out=str(tmp_path), resume=None, config=tiny())
    checkpointer = Checkpointer(
        cast(Any, setup), cast(Any, settings), 1, Worker(0, 0), messages.append, Sharing()
    )
    copied = list[int]()

    def save(iteration: int, *, over: bool = False) -> None:
        def require() -> None:
            if over:
                raise OrderOverError

        checkpointer.save(
            iteration,
            lambda: copied.append(iteration) or {0: {"model.weight": torch.ones(3)}},
            require,
        )

    save(2)
    with pytest.raises(OrderOverError):
        save(4, over=True)
    assert copied == [2] and not messages
    answers.set()
    save(4)
    checkpointer.begin_order(2, 5)
    checkpointer.save_last(
        cast(Any, SimpleNamespace(first_iteration=5)), lambda: {0: {"model.weight": torch.ones(3)}}
    )
    assert checkpointer.list_iterations()[-1] == 4, "that of 5 is a draft"
    checkpointer.publish_last(5)
    assert {message.iteration for message in messages if isinstance(message, CheckpointSaved)} == {
        2,
        4,
        5,
    }
    assert [
        message.iteration
        for message in messages
        if isinstance(message, CheckpointSaved) and message.complete
    ][-1] == 5
    assert checkpointer.list_iterations()[-2:] == (4, 5)


def test_a_draft_waits_for_the_commit_of_its_iteration_and_goes_with_an_order_that_runs_it_again(
    tmp_path,
) -> None:
    setup, settings = setup_from(0), SimpleNamespace(out=str(tmp_path), resume=None, config=tiny())
    checkpointer = Checkpointer(
        cast(Any, setup), cast(Any, settings), 1, Worker(0, 0), lambda _: None, Sharing()
    )

    def save(iteration: int) -> None:
        checkpointer.save(
            iteration, lambda: {0: {"model.weight": torch.full((3,), float(iteration))}}
        )
        checkpointer._saving.wait()

    checkpointer.begin_order(1, 0)
    save(2)
    checkpointer.allow_committed(1)
    assert checkpointer.list_iterations() == (0,)
    checkpointer.allow_committed(2)
    checkpointer._saving.wait()
    assert checkpointer.list_iterations() == (0, 2)
    save(4)
    checkpointer.begin_order(2, 4)
    checkpointer._saving.wait()  # until the draft is removed
    assert checkpointer.list_iterations() == (0, 2) and not list(
        (tmp_path / "checkpoints").glob(".saving*")
    )
    save(4)
    checkpointer.begin_order(3, 5)
    checkpointer._saving.wait()
    assert checkpointer.list_iterations() == (0, 2, 4)


def test_checkpoints_hold_the_state_of_data_that_are_read_in_order(tmp_path) -> None:
    """Only some of the writers read data, and have it."""
    setup, settings = setup_from(2), SimpleNamespace(out=str(tmp_path), resume=None, config=tiny())
    reader, other = (
        Checkpointer(
            cast(Any, setup),
            cast(Any, settings),
            2,
            Worker(0, column),
            lambda _: None,
            Sharing(),
            None,
            state,
        )
        for column, state in enumerate((lambda iteration: {"read": iteration}, lambda _: None))
    )
    assert other.find_data_state(9) is None
    for iteration in (4, 6):
        for layer, checkpointer in ((1, reader), (0, other)):
            checkpointer.save(
                iteration, lambda layer=layer: {layer: {"model.weight": torch.zeros(3)}}
            )
            checkpointer.allow_committed(iteration)
            checkpointer._saving.wait()
    for checkpointer in (reader, other):
        assert [checkpointer.find_data_state(iteration) for iteration in (9, 6, 5, 3)] == [
            (6, {"read": 6}),
            (6, {"read": 6}),
            (4, {"read": 4}),
            None,
        ]
